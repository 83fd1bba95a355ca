#include "net/link.h"

#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <list>
#include <random>

#include "check.h"
#include "link_ends.h"

using namespace photinus;
using namespace photinus::test;

namespace {

struct Frame {
  uint32_t channel;
  uint64_t sequence;
  std::vector<std::byte> out, in;
  std::vector<iovec> pieces;
  Transfer sent, received;
  bool posted = false, started = false;
};

// Frames of many channels in both directions at once, with control frames between them; places are posted
// before, after, and while the frames come.
void exchange(Carrier carrier, uint64_t seed, size_t frames, size_t largest) {
  std::mt19937_64 random(seed);
  const size_t streams = 1 + random() % 4;
  const auto channels = static_cast<uint32_t>(1 + random() % 8);
  TcpOptions tcp;
  if (random() % 2) tcp.send_buffer_bytes = tcp.receive_buffer_bytes = 8192;
  Ends ends(carrier, seed, streams, tcp);
  std::list<Frame> all[2];  // by sender
  std::vector<Control> said[2];
  uint64_t bytes = 0;
  for (int side : {0, 1}) {
    for (size_t i = 0; i < frames; ++i) {
      Frame& frame = all[side].emplace_back();
      frame.channel = static_cast<uint32_t>(random() % channels);
      frame.sequence = i;
      const double log = std::uniform_real_distribution<double>(0, std::log2(double(largest)))(random);
      const size_t size = random() % 10 == 0 ? 0 : static_cast<size_t>(std::exp2(log));
      frame.out = content(seed * 1000003 + i * 2 + side, size);
      frame.in.resize(size);
      bytes += size;
      for (size_t at = 0; at < size;) {
        const size_t piece = 1 + random() % (random() % 8 ? size - at : std::min<size_t>(size - at, 100));
        frame.pieces.push_back({frame.out.data() + at, piece});
        at += piece;
      }
    }
  }
  auto start = [&](int side, Frame& frame) {
    frame.started = true;
    const uint32_t stream = random() % 2 ? Link::kAnyStream : static_cast<uint32_t>(random() % streams);
    ends.links[side]->send(frame.channel, frame.sequence, frame.pieces, frame.sent, stream,
                           random() % 3 == 0);
    if (random() % 2) {
      const std::string words(random() % (kControlBytes + 1),
                              static_cast<char>('a' + said[side].size() % 26));
      said[side].push_back({frame.channel, frame.sequence, words});
      ends.links[side]->send_control(frame.channel, frame.sequence, words.data(), words.size());
    }
  };
  auto post = [&](int side, Frame& frame) {  // `side`: of the sender
    frame.posted = true;
    ends.links[1 - side]->expect(frame.channel, frame.sequence, frame.in.data(), frame.in.size(),
                                 frame.received);
  };
  std::list<Frame>::iterator next_start[2] = {all[0].begin(), all[1].begin()};
  std::vector<Frame*> unposted[2];
  for (int side : {0, 1})
    for (Frame& frame : all[side]) unposted[side].push_back(&frame);
  Deadline deadline = Deadline::in(20);
  auto is_done = [&] {
    for (int side : {0, 1}) {
      if (ends.heard[1 - side].size() < said[side].size()) return false;
      for (Frame& frame : all[side])
        if (!frame.started || !frame.sent.is_done() || !frame.posted || !frame.received.is_done())
          return false;
    }
    return true;
  };
  for (uint64_t turn = 0; turn % 16 || !is_done(); ++turn) {
    CHECK(!deadline.passed());
    for (int side : {0, 1}) {
      ends.links[side]->check();
      if (random() % 2 && next_start[side] != all[side].end()) start(side, *next_start[side]++);
      if (random() % 2 && !unposted[side].empty()) {  // out of order, within a window
        const size_t which = random() % std::min<size_t>(unposted[side].size(), 8);
        post(side, *unposted[side][which]);
        unposted[side].erase(unposted[side].begin() + static_cast<ptrdiff_t>(which));
      }
    }
    ends.poll();
  }
  for (int side : {0, 1}) {
    CHECK(ends.heard[1 - side] == said[side]);
    for (Frame& frame : all[side]) {
      CHECK(frame.in == frame.out);
      CHECK(frame.received.bytes() == frame.out.size());
    }
    const LinkCounts counts = ends.links[side]->counts();
    CHECK(counts.sent_frames == frames + said[side].size());
    CHECK(counts.received_frames == frames + said[1 - side].size());
  }
  const LinkCounts one = ends.links[0]->counts(), other = ends.links[1]->counts();
  CHECK(one.sent_bytes == other.received_bytes && other.sent_bytes == one.received_bytes);
  CHECK(one.sent_bytes + other.sent_bytes >= bytes);
}

}  // namespace

TEST(the_checksum_is_crc32c) {
  CHECK(crc32c("123456789", 9) == 0xe3069283);  // RFC 3720's polynomial, the usual check value
  const unsigned char zeros[32] = {};
  CHECK(crc32c(zeros, 32) == 0x8a9136aa);  // RFC 3720, B.4
}

TEST_ANY_PEERS(frames_of_many_channels_land_whole_in_their_places) {
  if (schedule()) {
    for (Carrier carrier : {Carrier::tcp, Carrier::fake}) exchange(carrier, 1000 + *schedule(), 40, 100'000);
    return;
  }
  for (uint64_t seed = 0; seed < 5; ++seed) {
    exchange(Carrier::tcp, seed, 60, 1'000'000);
    exchange(Carrier::fake, seed, 60, 1'000'000 >> (seed % 3 * 4));
  }
}

TEST_ANY_PEERS(small_frames_torn_at_any_byte_land_whole) {
  if (schedule()) return exchange(Carrier::fake, 2000 + *schedule(), 100, 300);
  for (uint64_t seed = 100; seed < 140; ++seed) exchange(Carrier::fake, seed, 40, 300);
}

TEST(a_frame_without_a_place_waits_in_the_connection_and_control_frames_pass_it) {
  for_both([](Carrier carrier) {
    Ends ends(carrier);
    auto out = content(1, carrier == Carrier::fake ? 2 << 20 : 32 << 20), small = content(2, 100);
    std::vector<std::byte> in(out.size()), small_in(100);
    Transfer sent, small_sent, received, small_received;
    const iovec piece = all_of(out), small_piece = all_of(small);
    ends.links[0]->send(7, 1, {&piece, 1}, sent);
    ends.links[0]->send(8, 1, {&small_piece, 1}, small_sent);
    ends.links[1]->expect(8, 1, small_in.data(), small_in.size(), small_received);
    for (int i = 0; i < 100; ++i) ends.links[0]->send_control(9, static_cast<uint64_t>(i), "post", 4);
    ends.run([&] { return ends.heard[1].size() == 100; });
    for (int i = 0; i < 200; ++i) ends.poll();
    CHECK(!sent.is_done() && !received.is_done() && !small_received.is_done());
    CHECK(ends.links[1]->counts().received_bytes < 20000);  // a buffer of fixed size, and the control frames
    usleep(20000);
    ends.links[1]->expect(7, 1, in.data(), in.size(), received);
    ends.run([&] { return received.is_done() && small_received.is_done() && small_sent.is_done(); });
    CHECK(in == out && small_in == small);
    CHECK(ends.links[1]->counts().waited_s >= 0.02);
    CHECK(ends.links[0]->counts().stalled_s > 0);
  });
}

TEST(control_ahead_of_data_is_heard_before_they_have_a_place) {
  for_both([](Carrier carrier) {
    for (const size_t bytes : {size_t{100}, size_t{4096}, size_t{70000}}) {
      Ends ends(carrier, 0, 2);
      std::vector<std::byte> slot(100000);
      Transfer sent[2], received[2];
      auto out = content(3, bytes);
      const iovec piece = all_of(out);
      for (uint64_t i = 0; i < 2; ++i) {
        const std::string words(i ? kControlBytes : 4, 'x');
        ends.links[0]->send_control(3, 5 + i, words.data(), words.size(), 1, true);
        ends.links[0]->send(3, 5 + i, {&piece, 1}, sent[i], 1);
        ends.run([&] { return ends.heard[1].size() == i + 1; });
        CHECK(!received[i].is_done());
        ends.links[1]->expect(3, 5 + i, slot.data(), bytes, received[i]);
        ends.run([&] { return received[i].is_done() && sent[i].is_done(); });
        CHECK(received[i].bytes() == bytes && std::equal(out.begin(), out.end(), slot.begin()));
      }
      CHECK(ends.links[0]->counts().sent_frames == 4 && ends.links[1]->counts().received_frames == 4);
    }
  });
}

TEST(control_that_waits_for_data_leaves_without_them_too) {
  Ends ends(Carrier::fake);
  ends.links[0]->send_control(3, 5, "post", 4, 0, true);
  ends.run([&] { return ends.heard[1].size() == 1; });
}

TEST(wrong_uses_are_refused) {
  Ends ends(Carrier::fake);
  Transfer one, two;
  char byte = 0;
  ends.links[0]->expect(1, 1, &byte, 1, one);
  CHECK(error_of([&] { ends.links[0]->expect(1, 1, &byte, 1, two); }).first == ErrorKind::invalid_argument);
  CHECK(error_of([&] { ends.links[0]->send(1, 1, {}, two, 5); }).first == ErrorKind::invalid_argument);
  CHECK(error_of([&] { ends.links[0]->send_control(1, 1, "", 0, 5); }).first == ErrorKind::invalid_argument);
  std::string longer(kControlBytes + 1, 'x');
  CHECK(error_of([&] { ends.links[0]->send_control(1, 1, longer.data(), longer.size()); }).first ==
        ErrorKind::invalid_argument);
}

TEST(a_forgotten_channel_leaves_the_others_alone) {
  for_both([](Carrier carrier) {
    for (uint64_t seed = 0; seed < 10; ++seed) {
      Ends ends(carrier, seed);
      const bool fake = carrier == Carrier::fake;  // whose wires are narrow and slow
      auto kept = content(1, fake ? 10000 : 100000), after = content(2, fake ? 5000 : 50000);
      std::vector<std::byte> in(after.size());
      Transfer sent_kept, sent_after, received, lost;
      {
        auto given_up = content(3, fake ? 20000 : 4 << 20);
        std::vector<std::byte> torn(given_up.size());
        Transfer sent, never_sent, landing;
        const iovec piece = all_of(given_up), more = all_of(kept);
        ends.links[1]->expect(5, 1, torn.data(), torn.size(), landing);
        ends.links[0]->send(5, 1, {&piece, 1}, sent);
        ends.links[0]->send(5, 2, {&piece, 1}, never_sent);
        ends.links[0]->send(5, 3, {&more, 1}, sent_kept);
        for (uint64_t turn = 0; turn < seed * 3; ++turn) ends.poll();
        if (seed % 2) ends.links[1]->forget(5);
        ends.links[0]->forget(5);
        ends.links[1]->forget(5);
      }  // its memory is gone
      const iovec piece = all_of(after);
      ends.links[0]->send(6, 1, {&piece, 1}, sent_after);
      ends.links[1]->expect(6, 1, in.data(), in.size(), received);
      ends.run([&] { return received.is_done(); });
      CHECK(in == after);
      char byte;
      CHECK(error_of([&] { ends.links[1]->expect(5, 9, &byte, 1, lost); }).first ==
            ErrorKind::invalid_argument);
    }
  });
}

TEST(a_long_frame_that_is_given_up_is_not_copied_and_its_peer_is_told) {
  Ends ends(Carrier::tcp);
  constexpr size_t kBytes = size_t{1} << 36;  // address space, of which a page is there
  void* const long_one = mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(long_one != MAP_FAILED);
  const iovec piece{long_one, kBytes};
  Transfer sent;
  ends.links[0]->send(5, 1, {&piece, 1}, sent);
  ends.links[0]->forget(5);
  CHECK(munmap(long_one, kBytes) == 0);
  ends.links[0]->send_control(9, 1, "over", 4);
  ends.links[1]->forget(5);
  ends.run([&] { return ends.heard[1].size() == 1; });
  CHECK_CONTAINS(ends.error(1), "the connection was closed with ");
}

TEST(threads_may_send_post_and_poll_at_the_same_time) {
  for_both([](Carrier carrier) {
    Ends ends(carrier, 11, 2);
    constexpr int kFrames = 30;
    std::atomic<int> done{0};
    auto user = [&](int side, uint32_t channel) {
      std::mt19937_64 random(channel + 10 * static_cast<uint32_t>(side));
      for (uint64_t i = 0; i < kFrames; ++i) {
        const size_t size = 1 + (channel * 7919 + i * 104729) % 40000;  // the same on both sides
        auto out = content(channel * 1000 + i, size);
        std::vector<std::byte> in(size);
        Transfer sent, received;
        const iovec piece = all_of(out);
        ends.links[side]->expect(channel, i, in.data(), in.size(), received);
        ends.links[side]->send(channel, i, {&piece, 1}, sent);
        if (random() % 4 == 0) ends.links[side]->send_control(channel, i, "word", 4);
        Deadline deadline = Deadline::in(20);
        while (!sent.is_done() || !received.is_done()) {
          CHECK(!deadline.passed());
          ends.links[side]->check();
          if (!ends.poll(side)) sched_yield();
        }
        CHECK(in == out);
      }
      ends.links[side]->forget(channel);
      ++done;
    };
    std::vector<std::thread> threads;
    for (int side : {0, 1})
      for (uint32_t channel : {1u, 2u}) threads.emplace_back(user, side, channel);
    for (std::thread& thread : threads) thread.join();
    CHECK(done == 4);
    CHECK(ends.links[0]->counts().sent_frames >= 2 * kFrames);
  });
}

TEST(a_link_at_rest_is_woken_by_no_less_than_the_frame_it_expects) {
  Ends ends(Carrier::fake, 0, 2);
  Link& link = *ends.links[1];
  auto woken_by = [&](size_t stream) { return ends.fakes[1][stream]->low_water(); };
  std::vector<std::byte> room(100'000);
  Transfer large, small, anywhere, next;
  link.expect(1, 1, room.data(), room.size(), large, 0);
  link.rest();
  CHECK(woken_by(1) == sizeof(FrameHeader) + room.size());
  CHECK(woken_by(0) == 1 && woken_by(2) == 1);  // control, and a stream of which nothing is known
  // What is posted later may come earlier.
  link.expect(1, 2, room.data(), 500, small, 0);
  CHECK(woken_by(1) == sizeof(FrameHeader) + 500);
  link.expect(2, 1, room.data(), 10, anywhere);
  CHECK(woken_by(1) == sizeof(FrameHeader) + 10);
  // Ahead of frames of which only the length is known there may be control frames.
  link.forget(1);
  CHECK(woken_by(1) == 1);
  link.rest();
  CHECK(woken_by(1) == 1 && woken_by(2) == 1);
  link.expect(3, 1, room.data(), room.size(), next, 0);
  link.rest();
  CHECK(woken_by(1) == sizeof(FrameHeader) + 10);
  auto out = content(1, room.size());
  const iovec piece = all_of(out);
  Transfer sent;
  ends.links[0]->send(3, 1, {&piece, 1}, sent, 0);
  ends.run([&] { return next.is_done(); });
  CHECK(room == out);
  CHECK(woken_by(1) == 1);
}

TEST(only_transfers_that_somebody_has_asked_about_are_completions) {
  Ends ends(Carrier::fake);
  auto out = content(1, 1000);
  std::vector<std::byte> in(out.size());
  const iovec piece = all_of(out);
  for (const bool asks : {false, true}) {
    Transfer sent, received;
    const uint64_t before = ends.links[1]->completions(), sequence = asks;
    ends.links[1]->expect(1, sequence, in.data(), in.size(), received);
    if (asks) CHECK(!received.is_done());
    ends.links[0]->send(1, sequence, {&piece, 1}, sent);
    ends.run([&] { return ends.links[1]->counts().received_frames == sequence + 1; });
    CHECK(received.is_done());
    CHECK(ends.links[1]->completions() == before + asks);
  }
}

TEST(options_of_tcp_are_set_and_wrong_ones_explained) {
  FileDescriptor one(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  TcpOptions options;
  options.congestion_control = "reno";
  options.send_buffer_bytes = 65536;
  set_options(one.get(), options);
  char name[16] = "";
  socklen_t length = sizeof name;
  CHECK(getsockopt(one.get(), IPPROTO_TCP, 13 /* TCP_CONGESTION */, name, &length) == 0);
  CHECK(std::string(name) == "reno");
  int bytes = 0;
  length = sizeof bytes;
  CHECK(getsockopt(one.get(), SOL_SOCKET, SO_SNDBUF, &bytes, &length) == 0);
  CHECK(bytes == 2 * 65536);  // the kernel doubles it for its own
  options.congestion_control = "pigeon";
  auto [kind, message] = error_of([&] { set_options(one.get(), options); });
  CHECK(kind == ErrorKind::invalid_argument);
  CHECK_CONTAINS(message, "'pigeon' was asked for");
  CHECK_CONTAINS(message, "reno");
  Ends ends(Carrier::tcp);
  ends.links[0]->send_control(1, 1, "x", 1);
  ends.run([&] { return ends.heard[1].size() == 1; });
  CHECK(ends.links[0]->counts().round_trip_s > 0);
}
