#include "link_ends.h"

#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "net/link.h"

using namespace photinus;
using namespace photinus::test;

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
      for (int side : {0, 1}) CHECK_CONTAINS(ends.links[side]->fault(), expected);
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
      CHECK(ends.links[1]->fault().empty());  // of itself it can tell nothing
      CHECK(error_of([&] { ends.links[1]->send(2, 4, {&piece, 1}, sent); }).first == ErrorKind::peer_lost);
    }
  });
}

TEST(a_reset_is_an_error_on_both_ends) {
  Ends ends(Carrier::fake, 1);
  for (auto* fake : ends.fakes[0]) fake->in().reset(), fake->out().reset();
  for (int side : {0, 1}) CHECK_CONTAINS(ends.error(side), "the made-up connection was reset");
}

TEST(a_cut_in_one_or_both_directions_that_heals_does_no_harm) {
  for (int cut : {1, 2, 3}) {
    Ends ends(Carrier::fake, 7);
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
    Deadline deadline = Deadline::in(0.15);
    while (!deadline.passed()) ends.poll();
    CHECK(!received[0].is_done() || !received[1].is_done());
    set(false);
    ends.run([&] { return received[0].is_done() && received[1].is_done(); });
    CHECK(in[0] == out && in[1] == out);
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
  CHECK_CONTAINS(heard(0, header(FrameKind::control, uint64_t{1} << 62)), "(at most 6144)");
  CHECK_CONTAINS(heard(0, header(FrameKind::fault, UINT64_MAX)), "(at most 6144)");
  CHECK_CONTAINS(heard(1, header(FrameKind::control, uint64_t{1} << 62)), "(at most 6144)");
  CHECK_CONTAINS(heard(1, header(FrameKind::goodbye, 0)), "of kind 3 on a stream for data");
  CHECK_CONTAINS(heard(1, header(FrameKind::fault, 4)), "of kind 4 on a stream for data");
  CHECK_CONTAINS(heard(0, header(FrameKind::data, 8)), "of kind 1 on a stream for control");
  CHECK_CONTAINS(heard(1, header(FrameKind{77}, 4)), "of unknown kind 77");
  CHECK_CONTAINS(heard(1, header(FrameKind::data, 8, 3)), "with number 3 where 0 comes");
  FrameHeader damaged = header(FrameKind::data, 8);
  damaged.bytes ^= 1u << 20;
  CHECK_CONTAINS(heard(1, damaged), "whose checksum is");
}

TEST(a_frame_that_is_torn_by_the_end_is_an_error_even_after_a_goodbye) {
  for (bool is_torn : {false, true}) {
    std::pair<std::unique_ptr<FakeStream>, std::unique_ptr<FakeStream>> pairs[] = {FakeStream::pair(4),
                                                                                   FakeStream::pair(6)};
    std::vector<std::unique_ptr<Stream>> streams;
    for (auto& pair : pairs) streams.push_back(std::move(pair.second));
    Link link(std::move(streams), "rank 1", "rank 0", [](auto...) {});
    FrameHeader goodbye, data;
    goodbye.kind = FrameKind::goodbye;
    data.bytes = 8;
    for (FrameHeader* header : {&goodbye, &data}) header->checksum = header->expected_checksum();
    auto say = [](FakeStream& stream, const FrameHeader& header, size_t bytes) {
      for (size_t at = 0; at < bytes;) {
        const iovec piece{const_cast<char*>(reinterpret_cast<const char*>(&header)) + at, bytes - at};
        at += stream.write(&piece, 1).bytes;
      }
      stream.finish_writing();
    };
    say(*pairs[0].first, goodbye, sizeof goodbye);
    say(*pairs[1].first, data, is_torn ? 20 : 0);
    for (Deadline deadline = Deadline::in(5); !link.has_failed() && !link.has_peer_left();) {
      CHECK(!deadline.passed());
      link.poll();
    }
    CHECK(link.has_failed() == is_torn);
    if (is_torn)
      CHECK_CONTAINS(error_of([&] { link.check(); }).second,
                     "the connection was closed in the middle of a frame");
  }
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
  CHECK(!ends.links[1]->is_behind());
  auto [kind, message] = error_of([&] {
    for (int i = 0; i < 2000; ++i)
      ends.links[1]->send_control(1, static_cast<uint64_t>(i), words.data(), words.size());
  });
  CHECK(kind == ErrorKind::peer_lost);
  CHECK_CONTAINS(message, "it has not taken");
  CHECK_CONTAINS(ends.links[1]->fault(), "it has not taken");
  CHECK(ends.links[1]->is_behind());
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
    [[maybe_unused]] const ssize_t got = read(release[0], &byte, 1);
    ends.links[0].reset();  // does nothing
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
