#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <list>

#include "check.h"
#include "connected.h"
#include "net/connections.h"

using namespace photinus;
using namespace photinus::test;

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
      {member(1), 0, 1, {9, 'l'}, "speaks version 2, little endian"},
      {member(1), 0, 1, {kLinkVersion, 'b'}, "this process version 2, big endian"},
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

TEST(a_listener_that_cannot_prove_itself_is_not_believed) {
  const Squatter rogue(true);
  std::thread thread([&] {
    while (true) {
      const FileDescriptor met(accept4(rogue.file.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!met.valid()) return;  // shut down
      const Challenge challenge = make_challenge();
      Claim claim;
      if (send(met.get(), challenge.data(), challenge.size(), MSG_NOSIGNAL) < 0 ||
          recv(met.get(), claim.data(), claim.size(), MSG_WAITALL) != static_cast<ssize_t>(claim.size()))
        continue;
      const Membership guesses = member(0, "guessed");
      const Verdict verdict = make_verdict({Answer::accepted, "", true}, &guesses, claim, challenge);
      if (send(met.get(), verdict.data(), verdict.size(), MSG_NOSIGNAL) < 0) continue;
    }
  });
  Connections::Options given = options();
  given.stranger_s = 0.2;
  Connections b(given);
  b.join(member(1));
  auto at_b = b.dial("job", "world", 0, {rogue.address}, soon(), kDeaf);
  CHECK_CONTAINS(failure(at_b, {&b}).second,
                 "it accepts this process and cannot prove that it is of the group");
  shutdown(rogue.file.get(), SHUT_RDWR);
  thread.join();
}

TEST(streams_of_two_claimants_are_never_joined) {
  Lines lines;
  Connections a(options());
  a.join(member(0));
  auto at_a = a.await("job", "world", 1, soon(), kDeaf);
  auto claim_of = [&](int pid, uint8_t stream, uint8_t token) {
    auto socket = std::make_unique<Socket>(a.addresses().front());
    Membership own = member(1);
    own.pid = pid;
    Challenge challenge{};
    Verdict verdict{};
    size_t heard = 0;
    auto hear = [&](auto& message) {
      heard = 0;
      run({&a}, [&] {
        const ssize_t got =
            recv(socket->file.get(), message.data() + heard, message.size() - heard, MSG_DONTWAIT);
        if (got > 0) heard += static_cast<size_t>(got);
        return heard == message.size();
      });
    };
    hear(challenge);
    const Claim claim = make_claim(challenge, own, 0, stream, 1, Token{token});
    CHECK(socket->say(claim.data(), claim.size()));
    hear(verdict);
    return std::pair{read(verdict, claim, challenge, own), std::move(socket)};
  };
  auto first = claim_of(71, 0, 1);
  CHECK(first.first.is_proved && first.first.answer == Answer::accepted);
  auto second = claim_of(72, 1, 2);
  CHECK(second.first.is_proved && second.first.answer == Answer::refused);
  CHECK_CONTAINS(second.first.reason,
                 "a second one says that it is rank 1: rank 1 (pid 72 on host-1), and there is "
                 "a link with rank 1 (pid 71 on host-1)");
  CHECK(!at_a->link());
  auto again = claim_of(71, 1, 3);  // the first has begun anew: what came before counts no more
  CHECK(again.first.answer == Answer::accepted);
  CHECK(!at_a->link());
  auto rest = claim_of(71, 0, 3);
  run({&a}, [&] { return at_a->link() != nullptr; });
}

// Not strangers: ranks of the group, whose words are damaged all the same.
TEST(words_about_ranks_that_there_are_not_are_passed_over) {
  Listeners made;
  for (const std::string host : {"here", "there"}) {
    made.networks.push_back(std::make_shared<Network>(std::vector{numeric_address("127.0.0.1", 0)}));
    made.places.push_back({host, host, getpid(), made.networks.back()->connections().addresses()});
  }
  const std::string address = new_address();
  std::unique_ptr<NetPeers> peers[2];
  std::vector<std::thread> threads;
  for (uint32_t rank : {0u, 1u})
    threads.emplace_back([&, rank] {
      const ShmPeers::Options ranks{
          rank, 2, address, "world", 4096, 0, 10, 10, std::make_shared<Arena>(size_t{1} << 20)};
      peers[rank] = std::make_unique<NetPeers>(
          NetPeers::Options{ranks, made.places, {1 - rank}, "", 0, made.networks[rank], nullptr});
    });
  for (std::thread& thread : threads) thread.join();
  Link& link = *peers[1]->link(0, LinkUse::collective);
  auto say = [&](const auto& words, Channel channel) { link.send_control(channel, 0, &words, sizeof words); };
  say(Ended{7, kOwnFault, Presence::failed}, kEnded);
  say(Ended{1, 7, Presence::failed}, kEnded);
  say(Beat{5, 3}, kBeat);
  say(Waits{.process = 1, .rank = 7}, kWaits);
  say(OfferShown{kOffers, 1}, kOffer);
  say("heard", kReason);
  for (const Deadline deadline = Deadline::in(10); peers[0]->reason(1) != "heard";) {
    CHECK(!deadline.passed());
    peers[0]->poll();
  }
  CHECK(peers[0]->presence(1) == Presence::active && !peers[0]->is_lost(1));
  say(Ended{1, 0, Presence::failed}, kEnded);
  for (const Deadline deadline = Deadline::in(10); peers[0]->presence(1) != Presence::failed;) {
    CHECK(!deadline.passed());
    peers[0]->poll();
  }
}

TEST(of_too_many_strangers_the_oldest_is_closed) {
  Lines lines;
  Connections::Options given = options();
  given.incoming.pending = 10;
  Connections a(given);
  std::list<Socket> strangers;
  auto are_closed = [&] {
    int closed = 0;
    for (Socket& one : strangers) {
      Challenge challenge;
      const ssize_t got = recv(one.file.get(), challenge.data(), challenge.size(), MSG_DONTWAIT);
      closed += got == 0 || (got < 0 && errno != EAGAIN);
    }
    return closed;
  };
  for (int i = 0; i < 30; ++i) {
    strangers.emplace_back(a.addresses().front());
    a.poll();
  }
  run({&a}, [&] { return are_closed() >= 20; }, 1);
  for (int i = 0; i < 20; ++i) strangers.pop_front();
  CHECK(are_closed() == 0);  // the youngest are heard on
  CHECK_CONTAINS(lines.text(), "too many connections were in their handshake, and this was the oldest");
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
