#include "net/connections.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <list>

#include "check.h"
#include "connected.h"
#include "hosts/meeting.h"

using namespace photinus;
using namespace photinus::test;

TEST(addresses_are_read_and_shown) {
  CHECK(numeric_address("10.1.2.3", 4000).text() == "10.1.2.3:4000");
  CHECK(numeric_address("fd00::1", 4000).text() == "[fd00::1]:4000");
  for (const char* wrong : {"", "localhost", "10.0.0.256", "10.0.0.1:80", "[::1]"})
    CHECK(error_of([&] { numeric_address(wrong, 1); }).first == ErrorKind::invalid_argument);
  auto [kind, message] = error_of([] { addresses_of("no-such-host.invalid", 1); });
  CHECK(kind == ErrorKind::invalid_argument);
  CHECK_CONTAINS(message, "the host name 'no-such-host.invalid' has no address on ");
  CHECK(!addresses_of("127.0.0.1", 80).empty());
}

TEST(links_are_made_over_both_protocols_and_carry_frames) {
  for (const char* address : {"127.0.0.1", "::1"}) {
    for (uint8_t streams : {1, 3}) {
      Connections::Options given = options(address);
      given.streams = streams;
      Pair pair(given);
      CHECK(pair.link_a->data_streams() == streams);
      CHECK_CONTAINS(pair.link_a->own(), "rank 0 (pid ");
      CHECK_CONTAINS(pair.link_a->peer(), " on host-1)");
      for (uint64_t i = 0; i < 10; ++i)
        exchange(i % 2 ? *pair.link_a : *pair.link_b, i % 2 ? *pair.link_b : *pair.link_a, i, 100000 * i,
                 [&] { poll_all({&pair.a, &pair.b}); });
      pair.link_b->send_control(1, 1, "hello", 5);
      run({&pair.a, &pair.b}, [&] { return pair.heard == "hello"; });
      pair.link_a->leave();
      pair.link_b->leave();
      run({&pair.a, &pair.b}, [&] { return pair.link_a->is_finished() && pair.link_b->is_finished(); });
    }
  }
}

TEST(names_of_jobs_and_groups_may_have_any_characters) {
  Connections a(options()), b(options());
  Membership one = member(0), other = member(1);
  one.job = other.job =
      "gr\xc3\xb6\xc3\x9f"
      "e",
  one.group = other.group = "\xff\x01";
  a.join(one);
  b.join(other);
  auto at_a = a.await(one.job, one.group, 1, soon(), kDeaf);
  auto at_b = b.dial(one.job, one.group, 0, a.addresses(), soon(), kDeaf);
  run({&a, &b}, [&] { return at_a->link() && at_b->link(); });
  CHECK_CONTAINS(error_of([&] { a.join(one); }).second, "joined group ?? of job gr????e already");
}

TEST(an_address_of_another_network_does_not_hide_that_the_peer_is_about_to_come) {
  Connections::Options given = options();
  given.stranger_s = 0.1;
  Connections a(given), b(given);
  b.join(member(1));
  auto addresses = a.addresses();
  addresses.push_back(numeric_address("2001:db8::1", 1));  // for examples: no host has a route to it
  auto at_b = b.dial("job", "world", 0, addresses, soon(), kDeaf);
  for (Deadline deadline = Deadline::in(0.5); !deadline.passed();) poll_all({&a, &b});
  CHECK(!at_b->link());
  a.join(member(0));
  auto at_a = a.await("job", "world", 1, soon(), kDeaf);
  run({&a, &b}, [&] { return at_a->link() && at_b->link(); });
}

TEST(threads_that_sleep_on_their_connections_are_woken) {
  Pair pair;
  std::atomic<bool> over{false};
  auto sleeper = [&](Connections& own) {
    while (!over.load()) own.poll(30);
  };
  std::thread one([&] { sleeper(pair.a); }), other([&] { sleeper(pair.b); });
  const double start = now_s();
  for (uint64_t i = 0; i < 50; ++i)
    exchange(i % 2 ? *pair.link_a : *pair.link_b, i % 2 ? *pair.link_b : *pair.link_a, i, i % 5 * 200000,
             [&] {
               pair.a.ring();
               pair.b.ring();
               usleep(50);
             });
  CHECK(now_s() - start < 25);  // one that is not woken sleeps for longer
  over.store(true);
  pair.a.ring();
  pair.b.ring();
  one.join();
  other.join();
}

TEST(a_process_that_comes_late_is_waited_for) {
  Connections a(options()), b(options());
  b.join(member(1));
  auto at_b = b.dial("job", "world", 0, a.addresses(), soon(), kDeaf);
  for (Deadline deadline = Deadline::in(0.1); !deadline.passed();) poll_all({&a, &b});
  CHECK(!at_b->link());
  a.join(member(0));
  for (Deadline deadline = Deadline::in(0.1); !deadline.passed();) poll_all({&a, &b});
  CHECK(!at_b->link());
  auto at_a = a.await("job", "world", 1, soon(), kDeaf);
  run({&a, &b}, [&] { return at_a->link() && at_b->link(); });
}

TEST(a_port_that_opens_later_is_found_and_the_next_address_tried) {
  Connections b(options());
  b.join(member(1));
  const Squatter nobody(false);
  const SocketAddress free = [] { return Connections(options()).addresses().front(); }();
  auto at_b = b.dial("job", "world", 0, {nobody.address, free}, soon(), kDeaf);
  for (Deadline deadline = Deadline::in(0.1); !deadline.passed();) b.poll();
  Connections::Options given;
  given.listen = {free};
  Connections a(given);
  a.join(member(0));
  auto at_a = a.await("job", "world", 1, soon(), kDeaf);
  run({&a, &b}, [&] { return at_a->link() && at_b->link(); });
}

// As where packets are lost: connections that stand and bring nothing, until one does.
TEST(silence_within_the_handshake_is_outlived_and_spoken_of) {
  Lines lines;
  Connections::Options impatient = options();
  impatient.incoming.handshake_s = 0.2;
  impatient.stranger_s = impatient.say_why_s = 0.1;
  Connections a(options()), b(impatient);
  a.join(member(0));
  b.join(member(1));
  auto at_a = a.await("job", "world", 1, soon(), kDeaf);
  const Squatter silent(true), closes(false);
  auto at_b = b.dial("job", "world", 0,
                     {silent.address, silent.address, closes.address, a.addresses().front()}, soon(), kDeaf);
  run({&a, &b}, [&] { return at_a->link() && at_b->link(); });
  CHECK_CONTAINS(lines.text(),
                 "has no link with rank 0 of group world of job job yet: " + silent.address.text() +
                     ": it accepts the connection and says nothing for 0.2 s; it goes on trying for ");
}

TEST(an_address_without_a_peer_is_explained) {
  Connections::Options impatient = options();
  impatient.incoming.handshake_s = 0.5;
  impatient.stranger_s = 0.3;
  Connections b(impatient);
  auto attempt = [&](const SocketAddress& to, double limit_s, uint32_t attempt_number) {
    Membership own = member(1);
    own.group = text("group %u", attempt_number);
    b.join(own);
    return b.dial("job", own.group, 0, {to}, soon(limit_s), kDeaf);
  };
  const Squatter nobody(false), silent(true), talkative(true), closing(true);
  auto refused = attempt(nobody.address, 0.3, 1), says_nothing = attempt(silent.address, 1, 2),
       says_else = attempt(talkative.address, 30, 3), closes = attempt(closing.address, 1, 4);
  std::atomic<bool> over{false};
  for (const Squatter* one : {&talkative, &closing}) CHECK(fcntl(one->file.get(), F_SETFL, O_NONBLOCK) == 0);
  std::thread thread([&] {
    std::list<FileDescriptor> kept;
    while (!over.load()) {
      for (const Squatter* one : {&talkative, &closing}) {
        FileDescriptor met(accept4(one->file.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!met.valid()) continue;
        const std::string answer = "HTTP/1.1 400 Bad Request\r\n" + std::string(100, ' ');
        if (one == &talkative && send(met.get(), answer.data(), answer.size(), MSG_NOSIGNAL) > 0)
          kept.push_back(std::move(met));
      }
      usleep(1000);
    }
  });
  auto [kind, message] = failure(refused, {&b});
  CHECK(kind == ErrorKind::timeout);
  CHECK_CONTAINS(message, "has no link with rank 0 of group group 1 of job job after 0.");
  CHECK_CONTAINS(message, " s: " + nobody.address.text() + ": nobody listens there (connection refused)");
  CHECK_CONTAINS(failure(says_else, {&b}).second, "it answers 'HTTP/1.1 400 Bad', which is not Photinus");
  for (const auto& [opening, why] :
       {std::pair(closes, "it closed the connection within the handshake"),
        std::pair(says_nothing, "it accepts the connection and says nothing for 0.5 s")}) {
    auto [its_kind, text] = failure(opening, {&b});  // may be the network's fault
    CHECK(its_kind == ErrorKind::timeout);
    CHECK_CONTAINS(text, why);
  }
  over.store(true);
  thread.join();
  impatient.gone_s = 0.2;
  Connections c(impatient);
  c.join(member(1));
  auto gone = failure(c.dial("job", "world", 0, {nobody.address}, soon(), kDeaf), {&c});
  CHECK(gone.first == ErrorKind::peer_lost);
  CHECK_CONTAINS(
      gone.second,
      "nobody listens there (connection refused); it has ended, or another machine has its address");
  auto missing = [&] {
    Connections a(options());
    a.join(member(0));
    auto at_a = a.await("job", "world", 1, soon(0.1), kDeaf);
    return failure(at_a, {&a});
  }();
  CHECK(missing.first == ErrorKind::timeout);
  CHECK_CONTAINS(missing.second, "has no link with rank 1 of group world of job job after 0.");
}

TEST(who_does_not_reach_rank_0_at_its_address_is_told_what_is_there) {
  Network network({numeric_address("127.0.0.1", 0)});
  Meeting meeting;
  meeting.rank = 1;
  meeting.ranks = 2;
  meeting.address = new_address();
  meeting.at = {numeric_address("127.0.0.1", 1)};
  meeting.timeout_s = 0.2;
  auto [kind, message] = error_of([&] { exchange_texts(network, meeting, "here"); });
  CHECK(kind == ErrorKind::timeout);
  CHECK_CONTAINS(message, "127.0.0.1:1: nobody listens there (connection refused)");
}

TEST(an_address_that_cannot_be_listened_on_is_explained) {
  const Squatter taken(true);
  Connections::Options given;
  given.listen = {taken.address};
  auto [kind, message] = error_of([&] { Connections connections(given); });
  CHECK(kind == ErrorKind::system);
  CHECK_CONTAINS(message, text("port %u of 127.0.0.1 is taken by another program", taken.address.port()));
  given.listen = {numeric_address("192.0.2.77", 0)};
  std::tie(kind, message) = error_of([&] { Connections connections(given); });
  CHECK(kind == ErrorKind::invalid_argument);
  CHECK_CONTAINS(message, "192.0.2.77 is no address of this host");
  CHECK_CONTAINS(message, "127.0.0.1");
}

TEST(too_few_descriptors_are_an_error_that_says_so) {
  for (rlim_t limit : {140, 20}) {
    const pid_t child = fork();
    if (child == 0) {
      const rlimit low{limit, limit};
      CHECK(setrlimit(RLIMIT_NOFILE, &low) == 0);
      if (limit == 20) {
        auto [kind, message] = error_of([&] { Connections none(options()); });
        CHECK_CONTAINS(message, "listening for other hosts needs 128 file descriptors; this process has ");
        CHECK_CONTAINS(message, "may have 20: are there enough file descriptors, ulimit -n?");
      } else {
        Connections few(options());
        std::list<Socket> strangers;  // more than there are descriptors, once they are accepted
        for (int i = 0; i < 90; ++i) strangers.emplace_back(few.addresses().front());
        Challenge challenge;
        auto last_hears = [&] {
          return recv(strangers.back().file.get(), challenge.data(), 1, MSG_PEEK | MSG_DONTWAIT) == 1;
        };
        Lines lines;
        run({&few}, last_hears);
      }
      _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  Connections small(options());
  auto [kind, message] = error_of([&] { small.reserve(1'000'000'000); });
  CHECK(kind == ErrorKind::system);
  CHECK_CONTAINS(message, "a process with 1000000000 links of 2 connections each needs 2000000000");
  CHECK_CONTAINS(message, "ulimit -n");
  small.reserve(100);
}

TEST(streams_spread_over_the_addresses_of_a_peer) {
  Connections::Options given = options();
  given.streams = 4;
  given.listen.push_back(numeric_address("127.0.0.2", 0));
  Pair pair(given);
  int connected[2] = {0, 0};
  std::ifstream table("/proc/self/net/tcp");
  for (std::string line; std::getline(table, line);)
    for (size_t i : {0, 1}) {
      const auto bytes = reinterpret_cast<const sockaddr_in*>(pair.a.addresses()[i].get())->sin_addr.s_addr;
      const std::string at = text(" %08X:%04X ", bytes, pair.a.addresses()[i].port());
      const size_t found = line.find(at);
      if (found != std::string::npos && found < 10 && line.find(" 01 ") != std::string::npos) ++connected[i];
    }
  CHECK(connected[0] == 3 && connected[1] == 2);  // control and two for data; two for data
}

TEST(wrong_uses_are_refused) {
  Connections a(options());
  a.join(member(0));
  CHECK(error_of([&] { a.join(member(0)); }).first == ErrorKind::invalid_argument);
  Membership longer = member(0);
  longer.group = std::string(64, 'x');
  CHECK(error_of([&] { a.join(longer); }).first == ErrorKind::invalid_argument);
  CHECK(error_of([&] { a.await("job", "other", 1, soon(), kDeaf); }).first == ErrorKind::invalid_argument);
  CHECK(error_of([&] { a.await("job", "world", 0, soon(), kDeaf); }).first == ErrorKind::invalid_argument);
  CHECK(error_of([&] { a.dial("job", "world", 1, {}, soon(), kDeaf); }).first == ErrorKind::invalid_argument);
  auto at_a = a.await("job", "world", 1, soon(), kDeaf);
  CHECK(error_of([&] { a.await("job", "world", 1, soon(), kDeaf); }).first == ErrorKind::invalid_argument);
  a.leave("job", "world");
  CHECK(error_of([&] { at_a->link(); }).first == ErrorKind::aborted);
}
