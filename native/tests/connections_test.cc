#include "net/connections.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <list>
#include <random>

#include "base/log.h"
#include "check.h"

using namespace photinus;
using namespace photinus::test;

namespace {

Membership member(uint32_t rank, const std::string& secret = "secret", uint32_t attempt = 1) {
  Membership made;
  made.job = "job";
  made.group = "world";
  made.attempt = attempt;
  made.rank = rank;
  made.ranks = 4;
  made.host = text("host-%u", rank);
  made.key = key_of(secret, "job");
  return made;
}

Connections::Options options(const std::string& address = "127.0.0.1") {
  Connections::Options made;
  made.listen = {numeric_address(address, 0)};
  return made;
}

// Lines that were said, instead of standard error.
struct Lines {
  std::mutex mutex;
  std::string all;
  Lines() {
    set_listener([this](const std::string& line) {
      std::lock_guard lock(mutex);
      all += line + "\n";
    });
  }
  ~Lines() { set_listener({}); }
  std::string text() {
    std::lock_guard lock(mutex);
    return all;
  }
};

void poll_all(std::initializer_list<Connections*> all) {
  for (Connections* one : all) one->poll();
}

template <class Done>
void run(std::initializer_list<Connections*> all, Done&& done, double limit_s = 10) {
  for (Deadline deadline = Deadline::in(limit_s); !done();) {
    CHECK(!deadline.passed());
    poll_all(all);
  }
}

// The error of an opening; with how long it took.
std::pair<ErrorKind, std::string> failure(const std::shared_ptr<Opening>& opening,
                                          std::initializer_list<Connections*> all, double within_s = 3) {
  std::pair<ErrorKind, std::string> error;
  const double start = now_s();
  run(all, [&] {
    try {
      CHECK(!opening->link());
      return false;
    } catch (const Error& met) {
      error = {met.kind(), met.what()};
      return true;
    }
  });
  CHECK(now_s() - start < within_s);
  return error;
}

struct Socket {
  FileDescriptor file;
  explicit Socket(const SocketAddress& to) : file(socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const linger gone{1, 0};  // leaves no TIME_WAIT behind
    setsockopt(file.get(), SOL_SOCKET, SO_LINGER, &gone, sizeof gone);
    CHECK(connect(file.get(), to.get(), to.bytes()) == 0);
  }
  bool say(const void* data, size_t bytes) {
    return send(file.get(), data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
  }
  template <class Message>
  bool hear(Message& message) {
    return recv(file.get(), message.data(), message.size(), MSG_WAITALL) ==
           static_cast<ssize_t>(message.size());
  }
};

// A port on which nobody listens, or somebody who is no peer.
struct Squatter {
  FileDescriptor file{socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  SocketAddress address;
  explicit Squatter(bool listens) {
    const SocketAddress any = numeric_address("127.0.0.1", 0);
    CHECK(bind(file.get(), any.get(), any.bytes()) == 0);
    if (listens) CHECK(listen(file.get(), 100) == 0);
    sockaddr_storage bound;
    socklen_t bytes = sizeof bound;
    CHECK(getsockname(file.get(), reinterpret_cast<sockaddr*>(&bound), &bytes) == 0);
    address = SocketAddress(reinterpret_cast<sockaddr*>(&bound), bytes);
  }
};

const Link::Handler kDeaf = [](auto...) {};
Deadline soon(double seconds = 10) {
  return Deadline::in(seconds);
}

// Two processes in one, with a link.
struct Pair {
  Connections a, b;
  std::shared_ptr<Opening> at_a, at_b;
  std::shared_ptr<Link> link_a, link_b;
  std::string heard;

  explicit Pair(const Connections::Options& given = options()) : a(given), b(given) {
    a.join(member(0));
    b.join(member(1));
    at_a =
        a.await("job", "world", 1, soon(), [this](uint32_t, uint64_t, const std::byte* data, size_t bytes) {
          heard.append(reinterpret_cast<const char*>(data), bytes);
        });
    at_b = b.dial("job", "world", 0, a.addresses(), soon(), kDeaf);
    run({&a, &b}, [&] { return at_a->link() && at_b->link(); });
    link_a = at_a->link();
    link_b = at_b->link();
  }
};

void exchange(Link& from, Link& to, uint64_t sequence, size_t bytes, const std::function<void()>& poll) {
  std::vector<std::byte> out(bytes), in(bytes);
  for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(i * 31 + sequence);
  Transfer sent, received;
  const iovec piece{out.data(), out.size()};
  to.expect(1, sequence, in.data(), in.size(), received);
  from.send(1, sequence, {&piece, 1}, sent);
  for (Deadline deadline = soon(); !received.is_done() || !sent.is_done(); poll()) {
    CHECK(!deadline.passed());
    from.check();
    to.check();
  }
  CHECK(in == out);
}

size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  size_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

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

TEST(threads_that_sleep_on_their_connections_are_woken) {
  Pair pair;
  std::atomic<bool> over{false};
  auto sleeper = [&](Connections& own) {
    while (!over.load()) own.poll(5);
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
  CHECK(now_s() - start < 4);
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

TEST(who_does_not_belong_is_refused_and_both_sides_are_named) {
  struct Case {
    Membership caller;
    uint32_t to = 0;
    uint8_t streams = 1;
    Dialect dialect;
    const char* reason;
  } cases[] = {
      {member(1, "secret", 7), 0, 1, {}, "it is of attempt 7, and here is attempt 1 of the job"},
      {member(1), 2, 1, {}, "it wants rank 2, and here is rank 0"},
      {member(1), 0, 2, {}, "it makes links of 2 streams for data, and here they have 1"},
      {member(1, "wrong"), 0, 1, {}, "it does not know the secret of group world of job job, attempt 1"},
      {member(1), 0, 1, {9, 'l'}, "speaks version 1, little endian"},
      {member(1), 0, 1, {kLinkVersion, 'b'}, "this process version 1, big endian"},
  };
  std::vector<std::unique_ptr<Connections>> callers;
  std::vector<std::shared_ptr<Opening>> openings;
  Connections a(options());
  a.join(member(0));
  auto at_a = a.await("job", "world", 1, soon(30), kDeaf);
  for (Case& each : cases) {
    Connections::Options given = options();
    given.streams = each.streams;
    given.dialect = each.dialect;
    given.stranger_s = 0.3;
    callers.push_back(std::make_unique<Connections>(given));
    callers.back()->join(each.caller);
    openings.push_back(callers.back()->dial("job", "world", each.to, a.addresses(), soon(30), kDeaf));
  }
  const double start = now_s();
  for (size_t i = 0; i < callers.size(); ++i) {
    Lines lines;
    std::string error;
    run({&a}, [&] {
      for (auto& caller : callers) caller->poll();
      try {
        CHECK(!openings[i]->link());
        return false;
      } catch (const Error& met) {
        CHECK(met.kind() == ErrorKind::invalid_argument);
        error = met.what();
        return true;
      }
    });
    CHECK_CONTAINS(error,
                   text("rank 1 (pid %d on host-1) cannot make a link with rank %u of group world of job job",
                        getpid(), cases[i].to));
    CHECK_CONTAINS(error, cases[i].reason);
    CHECK_CONTAINS(error, a.addresses().front().text());
  }
  CHECK(now_s() - start < 3);
  CHECK(!at_a->link());
}

TEST(the_listener_says_whom_it_turned_away) {
  Lines lines;
  Connections a(options()), b(options());
  a.join(member(0));
  b.join(member(1, "secret", 7));
  auto at_b = b.dial("job", "world", 0, a.addresses(), soon(), kDeaf);
  failure(at_b, {&a, &b});
  CHECK_CONTAINS(lines.text(), "a connection from 127.0.0.1:");
  CHECK_CONTAINS(lines.text(),
                 text("was turned away: it is rank 1 (pid %d on host-1); it is of attempt 7, and here "
                      "is attempt 1 of the job (rank 0 (pid %d on host-0))",
                      getpid(), getpid()));
}

TEST(a_second_claimant_of_a_rank_is_refused_and_the_link_goes_on) {
  Pair pair;
  Connections c(options());
  Lines lines;
  Membership second = member(1);
  second.pid = 4711;
  second.host = "host-x";
  c.join(second);
  auto at_c = c.dial("job", "world", 0, pair.a.addresses(), soon(), kDeaf);
  auto [kind, message] = failure(at_c, {&pair.a, &pair.b, &c});
  CHECK(kind == ErrorKind::invalid_argument);
  CHECK_CONTAINS(message,
                 "a second one says that it is rank 1: rank 1 (pid 4711 on host-x), and there is a link "
                 "with rank 1 (pid ");
  exchange(*pair.link_a, *pair.link_b, 1, 100000, [&] { poll_all({&pair.a, &pair.b}); });
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
  auto refused = attempt(nobody.address, 0.3, 1), says_nothing = attempt(silent.address, 30, 2),
       says_else = attempt(talkative.address, 30, 3), closes = attempt(closing.address, 30, 4);
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
  CHECK_CONTAINS(failure(closes, {&b}).second, "it closed the connection within the handshake");
  CHECK_CONTAINS(failure(says_nothing, {&b}).second, "it accepts the connection and says nothing for 0.5 s");
  over.store(true);
  thread.join();
  auto missing = [&] {
    Connections a(options());
    a.join(member(0));
    auto at_a = a.await("job", "world", 1, soon(0.1), kDeaf);
    return failure(at_a, {&a});
  }();
  CHECK(missing.first == ErrorKind::timeout);
  CHECK_CONTAINS(missing.second, "has no link with rank 1 of group world of job job after 0.");
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

TEST(hostile_connections_cost_little_and_change_nothing) {
  Lines lines;
  Connections::Options given = options();
  given.incoming.pending = 1000;
  Pair pair(given);
  const SocketAddress at = pair.a.addresses().front();
  std::atomic<bool> over{false};
  std::atomic<int> accepted{0}, rounds{0};
  const size_t before = resident_bytes();
  std::thread attacker([&] {
    std::mt19937_64 random(1);
    std::vector<std::unique_ptr<Socket>> slow;
    for (int i = 0; i < 1000; ++i) slow.push_back(std::make_unique<Socket>(at));
    const Token token{};
    Claim recorded;
    {
      Socket first(at);  // as if it had been heard on the wire
      Challenge challenge;
      CHECK(first.hear(challenge));
      recorded = make_claim(challenge, member(2), 0, 0, 1, token);
    }
    for (int i = 0; i < 1000; ++i) {
      Socket one(at);
      Challenge challenge;
      Claim claim;
      fill_random(claim.data(), claim.size());
      switch (i % 8) {
        case 0:  // random bytes, more than a claim
          for (int k = 0; k < 4; ++k) one.say(claim.data(), claim.size());
          break;
        case 1:  // a torn claim
          CHECK(one.hear(challenge));
          claim = make_claim(challenge, member(2), 0, 0, 1, token);
          one.say(claim.data(), random() % claim.size());
          break;
        case 2:  // the wrong secret
          CHECK(one.hear(challenge));
          claim = make_claim(challenge, member(2, "guessed"), 0, 0, 1, token);
          one.say(claim.data(), claim.size());
          break;
        case 3:  // a replay
          CHECK(one.hear(challenge));
          one.say(recorded.data(), recorded.size());
          break;
        case 4: {  // another job's
          Membership other = member(2);
          other.job = "other";
          CHECK(one.hear(challenge));
          claim = make_claim(challenge, other, 0, 0, 1, token);
          one.say(claim.data(), claim.size());
          break;
        }
        case 5:  // closes its side at once
          shutdown(one.file.get(), SHUT_WR);
          break;
        case 6: {  // frames without a handshake, of 2^62 bytes
          FrameHeader header;
          header.channel = 1;
          header.bytes = uint64_t{1} << 62;
          header.checksum = header.expected_checksum();
          for (int k = 0; k < 32; ++k) one.say(&header, sizeof header);
          break;
        }
        default:  // a claim that is begun, and one byte now and then
          one.say(claim.data(), 1);
          slow[random() % slow.size()]->say("x", 1);
      }
      Verdict verdict;
      if (i % 8 >= 2 && i % 8 <= 4 && one.hear(verdict)) {
        const Heard heard = read(verdict, claim, challenge, member(2));
        if (heard.answer == Answer::accepted || heard.is_proved) accepted.fetch_add(1);
      }
      rounds.fetch_add(1);
    }
    over.store(true);
  });
  // Meanwhile the link works, and another process gets in.
  uint64_t sequence = 0;
  Connections c(options());
  c.join(member(3));
  std::shared_ptr<Opening> at_a, at_c;
  while (!over.load()) {
    exchange(*pair.link_a, *pair.link_b, sequence, 30000 + sequence % 7,
             [&] { poll_all({&pair.a, &pair.b, &c}); });
    if (++sequence == 20) {
      at_a = pair.a.await("job", "world", 3, soon(), kDeaf);
      at_c = c.dial("job", "world", 0, pair.a.addresses(), soon(), kDeaf);
    }
  }
  attacker.join();
  run({&pair.a, &c}, [&] { return at_a && at_a->link() && at_c->link(); });
  exchange(*at_c->link(), *at_a->link(), 1, 50000, [&] { poll_all({&pair.a, &c}); });
  CHECK(accepted.load() == 0 && rounds.load() == 1000);
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  const size_t allowed = size_t{256} << 20;  // their own memory, which what is freed does not leave at once
#else
  const size_t allowed = size_t{16} << 20;
#endif
  CHECK(resident_bytes() < before + allowed);
  const std::string said = lines.text();
  CHECK_CONTAINS(said, "was turned away");
  CHECK(std::count(said.begin(), said.end(), '\n') <= 4);  // one every five seconds
}

TEST(a_silent_connection_is_given_up_in_time) {
  Lines lines;
  Connections::Options given = options();
  given.incoming.handshake_s = 0.1;
  Connections a(given);
  Socket silent(a.addresses().front());
  Challenge challenge;
  char more;
  const double start = now_s();
  std::thread thread([&] {  // sleeps on the connections' descriptor only
    while (recv(silent.file.get(), &more, 1, MSG_PEEK | MSG_DONTWAIT) != 0 && now_s() - start < 5) a.poll(1);
  });
  CHECK(silent.hear(challenge));
  CHECK(recv(silent.file.get(), &more, 1, 0) <= 0);
  CHECK(now_s() - start < 1);
  thread.join();
  CHECK_CONTAINS(lines.text(), "did not finish the handshake in time");
}
