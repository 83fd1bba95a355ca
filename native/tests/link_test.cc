#include "net/link.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <list>
#include <map>
#include <random>

#include "base/clock.h"
#include "check.h"
#include "fake_streams.h"
#include "net/tcp_stream.h"

using namespace photinus;
using namespace photinus::test;

namespace {

using Streams = std::vector<std::unique_ptr<Stream>>;
enum class Carrier { tcp, fake };

PrivateDescriptor made(int number) {
  CHECK(number >= 0);
  CHECK(fcntl(number, F_SETFL, O_NONBLOCK) == 0);
  return PrivateDescriptor::make([&] { return number; });
}

// Two connected TCP sockets of this host.
std::pair<PrivateDescriptor, PrivateDescriptor> tcp_pair(const TcpOptions& options = {}) {
  FileDescriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  set_options(listener.get(), options);
  CHECK(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  CHECK(listen(listener.get(), 1) == 0);
  CHECK(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  const int one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  set_options(one, options);
  CHECK(connect(one, reinterpret_cast<sockaddr*>(&address), length) == 0);
  const int other = accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC);
  return {made(one), made(other)};
}

struct Control {
  uint32_t channel;
  uint64_t sequence;
  std::string text;
  bool operator==(const Control&) const = default;
};

// Two links with each other, in one process.
struct Ends {
  std::unique_ptr<Link> links[2];
  std::vector<Control> heard[2];
  std::vector<FakeStream*> fakes[2];
  std::vector<TcpStream*> tcps;

  explicit Ends(Carrier carrier, uint64_t seed = 0, size_t data_streams = 1, LinkOptions options = {},
                const TcpOptions& tcp = {}) {
    Streams streams[2];
    for (size_t i = 0; i <= data_streams; ++i) {
      if (carrier == Carrier::fake) {
        auto pair = FakeStream::pair(seed * 100 + i);
        fakes[0].push_back(pair.first.get());
        fakes[1].push_back(pair.second.get());
        streams[0].push_back(std::move(pair.first));
        streams[1].push_back(std::move(pair.second));
      } else {
        auto pair = tcp_pair(tcp);
        for (auto* socket : {&pair.first, &pair.second}) {
          auto stream = std::make_unique<TcpStream>(std::move(*socket));
          tcps.push_back(stream.get());
          streams[socket == &pair.second].push_back(std::move(stream));
        }
      }
    }
    for (int side : {0, 1})
      links[side] = std::make_unique<Link>(
          std::move(streams[side]), side ? "rank 1" : "rank 0", side ? "rank 0" : "rank 1",
          [this, side](uint32_t channel, uint64_t sequence, const std::byte* payload, size_t bytes) {
            heard[side].push_back({channel, sequence, {reinterpret_cast<const char*>(payload), bytes}});
          },
          options);
  }
  ~Ends() {
    for (auto& link : links)
      if (link) link->close();
  }

  bool poll(int side) {
    if (links[side] && !links[side]->has_failed())
      for (size_t i = static_cast<size_t>(side); i < tcps.size(); i += 2)
        tcps[i]->readiness()->set(true, true, false);
    return links[side] && links[side]->poll();
  }
  bool poll() { return poll(0) | poll(1); }
  // Until something holds; not for ever.
  void run(const std::function<bool()>& done, double limit_s = 20) {
    for (Deadline deadline = Deadline::in(limit_s); !done();) {
      CHECK(!deadline.passed());
      poll();
    }
  }
  std::string error(int side) {
    run([&] { return links[side]->has_failed(); });
    return error_of([&] { links[side]->check(); }).second;
  }
};

// Every test holds over both.
void for_both(const std::function<void(Carrier)>& body) {
  for (Carrier carrier : {Carrier::tcp, Carrier::fake}) body(carrier);
}

std::vector<std::byte> content(uint64_t seed, size_t bytes) {
  std::vector<std::byte> made(bytes);
  uint64_t value = seed * 0x9e3779b97f4a7c15;
  for (size_t i = 0; i < bytes; ++i) {
    if (i % 8 == 0) value = value * 6364136223846793005 + 1442695040888963407;
    made[i] = static_cast<std::byte>(value >> (i % 8 * 8));
  }
  return made;
}

iovec all_of(std::vector<std::byte>& bytes) {
  return {bytes.data(), bytes.size()};
}

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
  Ends ends(carrier, seed, streams, {}, tcp);
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
  for (uint64_t seed = 0; seed < 8; ++seed) {
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

TEST(data_beside_control_land_in_a_place_that_stands_open_and_may_be_shorter) {
  for_both([](Carrier carrier) {
    Ends ends(carrier);
    std::vector<std::byte> slot(32768);
    Transfer sent, received;
    ends.links[1]->expect(3, 5, slot.data(), 0, slot.size(), received);
    auto out = content(3, 4096);
    const iovec piece = all_of(out);
    ends.links[0]->send_control(3, 5, "post", 4, true);
    ends.links[0]->send(3, 5, {&piece, 1}, sent, Link::kWithControl);
    ends.run([&] { return received.is_done(); });
    CHECK(received.bytes() == 4096);
    CHECK(std::equal(out.begin(), out.end(), slot.begin()));
    CHECK(ends.heard[1].size() == 1);
    ends.links[0]->send(3, 6, {&piece, 1}, sent, Link::kWithControl);
    CHECK_CONTAINS(ends.error(1), "rank 0 sent 4096 bytes for channel 3, sequence 6 among control frames");
  });
}

TEST(another_length_than_the_posted_one_fails_the_link_on_both_sides) {
  for_both([](Carrier carrier) {
    for (size_t posted : {100u, 300u}) {
      Ends ends(carrier);
      auto out = content(1, 200);
      std::vector<std::byte> in(posted, std::byte{9});
      Transfer sent, received;
      const iovec piece = all_of(out);
      ends.links[1]->expect(4, 17, in.data(), in.size(), received);
      ends.links[0]->send(4, 17, {&piece, 1}, sent);
      const std::string expected =
          text("rank 0 sent 200 bytes for channel 4, sequence 17, where %zu were expected", posted);
      CHECK_CONTAINS(ends.error(1), "the link of rank 1 to rank 0: " + expected);
      CHECK_CONTAINS(ends.error(0), "rank 1 gave it up: the link of rank 1 to rank 0: " + expected);
      for (std::byte byte : in) CHECK(byte == std::byte{9});
      CHECK(!received.is_done());
    }
  });
}

TEST(wrong_uses_are_refused) {
  Ends ends(Carrier::fake);
  Transfer one, two;
  char byte = 0;
  ends.links[0]->expect(1, 1, &byte, 1, one);
  CHECK(error_of([&] { ends.links[0]->expect(1, 1, &byte, 1, two); }).first == ErrorKind::invalid_argument);
  CHECK(error_of([&] { ends.links[0]->send(1, 1, {}, two, 5); }).first == ErrorKind::invalid_argument);
  std::vector<std::byte> large(Link::kBesideControlBytes + 1);
  const iovec piece = all_of(large);
  CHECK(error_of([&] { ends.links[0]->send(1, 1, {&piece, 1}, two, Link::kWithControl); }).first ==
        ErrorKind::invalid_argument);
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

TEST(both_ends_leave_in_order_and_nothing_is_lost) {
  for_both([](Carrier carrier) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      Ends ends(carrier, seed, 2);
      auto out = content(seed, carrier == Carrier::fake ? 30000 : 300000);
      std::vector<std::byte> in(out.size());
      Transfer sent, received;
      const iovec piece = all_of(out);
      ends.links[0]->send(1, 1, {&piece, 1}, sent);
      ends.links[0]->send_control(1, 2, "last", 4);
      ends.links[0]->leave();
      CHECK(error_of([&] { ends.links[0]->send_control(1, 3, "late", 4); }).first == ErrorKind::aborted);
      for (int i = 0; i < 20; ++i) ends.poll();
      ends.links[1]->expect(1, 1, in.data(), in.size(), received);
      ends.run([&] { return ends.links[1]->has_peer_left(); });
      CHECK(received.is_done() && in == out && ends.heard[1].size() == 1);
      CHECK(!ends.links[0]->is_finished() && !ends.links[1]->has_failed());
      ends.links[1]->send_control(1, 4, "still here", 10);
      ends.links[1]->leave();
      ends.run([&] { return ends.links[0]->is_finished() && ends.links[1]->is_finished(); });
      CHECK(ends.heard[0].size() == 1);
      ends.links[0]->check();
      ends.links[0]->close();
      CHECK_CONTAINS(error_of([&] { ends.links[0]->check(); }).second, "was closed here");
    }
  });
}

TEST(a_peer_that_goes_at_any_byte_is_noticed) {
  for_both([](Carrier carrier) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      Ends ends(carrier, seed);
      auto out = content(1, 1 << 20);
      std::vector<std::byte> in(out.size());
      Transfer sent, received;
      const iovec piece = all_of(out);
      ends.links[1]->expect(2, 3, in.data(), in.size(), received);
      ends.links[0]->send(2, 3, {&piece, 1}, sent);
      for (uint64_t turn = 0; turn < seed * seed; ++turn) ends.poll();
      const bool was_there = received.is_done();
      ends.links[0].reset();
      const std::string error = ends.error(1);
      CHECK_CONTAINS(error, "the link of rank 1 to rank 0: the connection was ");
      if (received.is_done()) CHECK(in == out);
      if (was_there) CHECK_CONTAINS(error, "without a goodbye");
      CHECK(error_of([&] { ends.links[1]->send(2, 4, {&piece, 1}, sent); }).first == ErrorKind::peer_lost);
    }
  });
}

TEST(a_reset_is_an_error_on_both_ends) {
  Ends ends(Carrier::fake, 1);
  for (auto* fake : ends.fakes[0]) fake->in().reset(), fake->out().reset();
  for (int side : {0, 1}) CHECK_CONTAINS(ends.error(side), "the made-up connection was reset");
}

TEST(a_cut_in_one_or_both_directions_ends_at_the_limit_and_a_flap_does_no_harm) {
  for (int cut : {1, 2, 3}) {
    for (bool heals : {false, true}) {
      Ends ends(Carrier::fake, 7, 1, LinkOptions{heals ? 20.0 : 0.1});
      auto out = content(1, 2 << 20);
      std::vector<std::byte> in[2] = {std::vector<std::byte>(out.size()), std::vector<std::byte>(out.size())};
      Transfer sent[2], received[2];
      const iovec piece = all_of(out);
      for (int side : {0, 1}) {
        ends.links[side]->expect(1, 1, in[side].data(), in[side].size(), received[side]);
        ends.links[side]->send(1, 1, {&piece, 1}, sent[side]);
      }
      for (int i = 0; i < 5; ++i) ends.poll();
      auto set = [&](bool now) {
        for (auto* fake : ends.fakes[0]) {
          if (cut & 1) fake->out().cut(now);
          if (cut & 2) fake->in().cut(now);
        }
      };
      set(true);
      if (heals) {
        Deadline deadline = Deadline::in(0.15);
        while (!deadline.passed()) ends.poll();
        CHECK(!received[0].is_done() || !received[1].is_done());
        set(false);
        ends.run([&] { return received[0].is_done() && received[1].is_done(); });
        CHECK(in[0] == out && in[1] == out);
      } else {
        const int side = cut & 1 ? 0 : 1;  // of one that cannot send, or hears nothing more
        const double start = now_s();
        ends.run([&] { return ends.links[side]->has_failed() || ends.links[1 - side]->has_failed(); });
        CHECK(now_s() - start < 2);
        const int seen = ends.links[side]->has_failed() ? side : 1 - side;
        auto [kind, message] = error_of([&] { ends.links[seen]->check(); });
        if (kind != ErrorKind::timeout) CHECK_CONTAINS(message, "gave it up: ");  // the other one was first
        CHECK_CONTAINS(message, text("the link of rank %d to rank %d", seen, 1 - seen));
      }
    }
  }
}

TEST(what_is_no_frame_fails_the_link_and_allocates_nothing) {
  auto header = [](FrameKind kind, uint64_t bytes, uint32_t number = 0) {
    FrameHeader made;
    made.kind = kind;
    made.channel = 1;
    made.sequence = 1;
    made.bytes = bytes;
    made.number = number;
    made.checksum = made.expected_checksum();
    return made;
  };
  auto heard = [](size_t stream, const FrameHeader& sent) {
    std::pair<std::unique_ptr<FakeStream>, std::unique_ptr<FakeStream>> pairs[] = {FakeStream::pair(4),
                                                                                   FakeStream::pair(6)};
    Streams streams;
    for (auto& pair : pairs) streams.push_back(std::move(pair.second));
    Link link(std::move(streams), "rank 1", "rank 0", [](auto...) {});
    char place[8] = {};
    Transfer received;
    link.expect(1, 1, place, sizeof place, received);
    const auto* from = reinterpret_cast<const char*>(&sent);
    for (size_t at = 0; at < sizeof sent;) {
      const iovec piece{const_cast<char*>(from) + at, sizeof sent - at};
      at += pairs[stream].first->write(&piece, 1).bytes;
      link.poll();
    }
    for (Deadline deadline = Deadline::in(5); !link.has_failed() && !deadline.passed();) link.poll();
    for (char byte : place) CHECK(byte == 0);
    return error_of([&] { link.check(); }).second;
  };
  for (uint64_t bytes : {uint64_t{1} << 62, UINT64_MAX, uint64_t{9}, uint64_t{0}})
    CHECK_CONTAINS(heard(1, header(FrameKind::data, bytes)), "where 8 were expected");
  CHECK_CONTAINS(heard(0, header(FrameKind::control, uint64_t{1} << 62)), "(at most 2048)");
  CHECK_CONTAINS(heard(0, header(FrameKind::fault, UINT64_MAX)), "(at most 2048)");
  CHECK_CONTAINS(heard(1, header(FrameKind::control, 4)), "of control on a stream for data");
  CHECK_CONTAINS(heard(1, header(FrameKind{77}, 4)), "of unknown kind 77");
  CHECK_CONTAINS(heard(1, header(FrameKind::data, 8, 3)), "with number 3 where 0 comes");
  FrameHeader damaged = header(FrameKind::data, 8);
  damaged.bytes ^= 1u << 20;
  CHECK_CONTAINS(heard(1, damaged), "whose checksum is");
}

TEST(a_peer_that_takes_no_control_frames_costs_bounded_memory) {
  Ends ends(Carrier::fake, 3);
  ends.links[1].reset(new Link({[] {
                                 Streams streams;
                                 for (uint64_t i : {1, 2}) streams.push_back(FakeStream::pair(i).first);
                                 return streams;
                               }()},
                               "rank 1", "rank 2", [](auto...) {}));
  const std::string words(kControlBytes, 'x');
  auto [kind, message] = error_of([&] {
    for (int i = 0; i < 2000; ++i)
      ends.links[1]->send_control(1, static_cast<uint64_t>(i), words.data(), words.size());
  });
  CHECK(kind == ErrorKind::peer_lost);
  CHECK_CONTAINS(message, "it has not taken");
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

TEST(a_forked_child_holds_no_connection_open) {
  Ends ends(Carrier::tcp);
  int release[2];
  CHECK(pipe(release) == 0);
  const pid_t child = fork();
  if (child == 0) {  // a data loader
    char byte;
    ::close(release[1]);
    const bool refused =
        error_of([&] { ends.links[1]->send_control(1, 1, "x", 1); }).first == ErrorKind::aborted;
    ends.links[0].reset();  // does nothing
    [[maybe_unused]] const ssize_t got = read(release[0], &byte, 1);
    _exit(refused ? 0 : 1);
  }
  ::close(release[0]);
  usleep(50000);
  for (int i = 0; i < 50; ++i) ends.poll();
  CHECK(!ends.links[0]->has_failed() && !ends.links[1]->has_failed());
  ends.links[0].reset();  // the rank ends, its data loader lives on
  CHECK_CONTAINS(ends.error(1), "without a goodbye");
  ::close(release[1]);
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
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
