// Strangers who connect to the ranks of a group, before it is formed, while it forms and works, and when it
// is closed: no rank fails or grows, and results stay right. A tenth of them are slow: they stay, and say a
// byte now and then.
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "base/file_descriptor.h"
#include "connected.h"
#include "data.h"
#include "resident.h"

using namespace photinus;
using namespace photinus::test;

namespace {

constexpr uint32_t kRanks = 4;
constexpr uint64_t kConnections = 10000;
constexpr int kWarmUp = 20;  // calls after which memory has its size
#if defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kGrowthLimit = 256 << 20;  // its own memory, which what is freed does not leave at once
#else
constexpr uint64_t kGrowthLimit = 16 << 20;
#endif

// As NetPeers calls the group of those whom lower ranks dial.
Membership member_of(const std::string& address, uint32_t rank) {
  uint32_t hash = 0x811c9dc5;
  for (const char c : address) hash = (hash ^ static_cast<unsigned char>(c)) * 0x01000193;
  Membership made = member(rank);
  made.job = "photinus";
  made.group = text("world-%08x#up", hash);
  made.attempt = 0;
  made.ranks = kRanks;
  made.key = key_of(address, made.job);
  return made;
}

// --- the strangers

struct Attack {
  const std::vector<HostPlace>& places;
  const Membership claimed;  // with the true key, for what is heard on the wire; strangers do not have it
  std::mt19937_64 random{1};
  std::vector<std::unique_ptr<Socket>> slow = {};
  uint64_t connections = 0, accepted = 0, refused = 0;
  bool was_group_found = false;

  void connect(int kind) {
    ++connections;
    // Rank 0 dials the others: theirs are the listeners that expect somebody.
    Socket one(places[1 + random() % (kRanks - 1)].addresses.front());
    Challenge challenge;
    Membership who = claimed;
    Claim claim;
    fill_random(claim.data(), claim.size());
    who.key = key_of("guessed", who.job);
    switch (kind) {
      case 0:  // random bytes, more than a claim
        for (int k = 0; k < 4; ++k) one.say(claim.data(), claim.size());
        return;
      case 1:  // closes its side at once
        shutdown(one.file.get(), SHUT_WR);
        return;
      case 2: {  // frames without a handshake, of 2^62 bytes
        FrameHeader header;
        header.channel = 1;
        header.bytes = uint64_t{1} << 62;
        header.checksum = header.expected_checksum();
        for (int k = 0; k < 32; ++k) one.say(&header, sizeof header);
        return;
      }
      case 3:  // a torn claim
        if (!one.hear(challenge)) return;
        claim = make_claim(challenge, claimed, 1, 0, kLinkStreams, Token{});
        one.say(claim.data(), random() % claim.size());
        return;
      case 4:  // slow
        one.say(claim.data(), 1);
        slow.push_back(std::make_unique<Socket>(std::move(one)));
        slow[random() % slow.size()]->say("x", 1);
        return;
      case 5:  // the wrong secret
        break;
      case 6:  // another job's
        who.job = "other";
        break;
      default:  // what was heard on the wire, changed or not
        who = claimed;
    }
    if (!one.hear(challenge)) return;
    if (kind > 6) challenge = make_challenge();  // of another connection, the one that was listened to
    claim = make_claim(challenge, who, 1, 0, kLinkStreams, Token{});
    if (kind > 7) claim[random() % claim.size()] ^= 1;
    one.say(claim.data(), claim.size());
    Verdict verdict;
    if (!one.hear(verdict)) return;
    const Heard heard = read(verdict, claim, challenge, who);
    if (heard.answer == Answer::accepted || heard.is_proved) ++accepted;
    if (heard.answer == Answer::refused) ++refused;
    was_group_found |= heard.reason.find("does not know the secret of group world-") != std::string::npos;
  }

  void run(uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) connect(i % 10 == 4 ? 4 : static_cast<int>(random() % 9));
  }
};

// --- the ranks

// Whether the parent has said so.
bool is_told(int pipe) {
  pollfd one{pipe, POLLIN, 0};
  return ::poll(&one, 1, 0) > 0;
}
void hear(int pipe) {
  char word;
  if (read(pipe, &word, 1) != 1) _exit(1);
}
void say(int pipe) {
  CHECK(write(pipe, "x", 1) == 1);
}

// One call of a random size, whose result is looked at. Whether all go on.
bool work(Communicator& group, std::mt19937_64& random, bool wants_more) {
  const Call call{Operation::all_reduce, Dtype::float32, Reduction::sum, 0, 1 + random() % 20000};
  std::vector<Bytes> inputs;
  for (uint32_t rank = 0; rank < kRanks; ++rank)
    inputs.push_back(random_elements(call.dtype, call.elems, random));
  Bytes tensor = inputs[group.rank()];
  group.submit(call, tensor.data(), tensor.data(), 0, false)->wait();
  const Bytes expected = naive(call, inputs, {}, levels_of(hosts_of(kRanks)))[group.rank()];
  CHECK(same(call.dtype, tensor.data(), expected.data(), call.elems));
  float go = wants_more ? 1 : 0;
  group.submit({Operation::all_reduce, Dtype::float32, Reduction::min, 0, 1}, &go, &go, 0, false)->wait();
  return go > 0;
}

void run_rank(Communicator::Options options, int orders, int reports) {
  Lines lines;
  uint64_t grown = 0, before = resident_bytes();
  const double start_s = now_s();
  auto note_growth = [&] {
    if (const uint64_t now = resident_bytes(); now > before) grown += now - before;
    before = resident_bytes();
  };
  options.network = std::make_shared<Network>(options.places[options.rank].addresses);
  say(reports);
  hear(orders);
  note_growth();
  std::mt19937_64 random(2);
  auto group = Communicator::create(options);
  uint64_t calls = 0;
  for (bool more = true; more; ++calls) {
    if (calls == kWarmUp) before = resident_bytes();
    more = work(*group, random, calls <= kWarmUp || !is_told(orders));
    usleep(2000);  // it is the strangers who are to be busy
  }
  note_growth();
  hear(orders);
  group->close();
  group.reset();
  say(reports);
  hear(orders);
  note_growth();
  const std::string said = lines.text();
  uint64_t turned_away = 0;
  for (size_t at = 0; (at = said.find("was turned away", at)) != std::string::npos; ++at) ++turned_away;
  CHECK(turned_away > 0 || options.rank == 0);
  CHECK(turned_away <= 2 + (now_s() - start_s) / 5);  // one every five seconds
  std::printf("rank %u: %llu calls, %.1f MiB more\n", options.rank, static_cast<unsigned long long>(calls),
              static_cast<double>(grown) / (1 << 20));
  std::fflush(stdout);
  CHECK(grown <= kGrowthLimit);
}

}  // namespace

TEST(ten_thousand_strangers_change_nothing_before_during_and_after_a_run) {
  layout() = "pairs";
  Communicator::Options options;
  options.world_size = kRanks;
  options.address = new_address();
  options.places = listeners_of(kRanks).places;
  options.limits.timeout_s = 60;
  struct Child {
    pid_t pid;
    int orders, reports;
  };
  std::vector<Child> ranks;
  for (options.rank = 0; options.rank < kRanks; ++options.rank) {
    int orders[2], reports[2];
    CHECK(pipe(orders) == 0 && pipe(reports) == 0);
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(120);
      try {
        run_rank(options, orders[0], reports[1]);
      } catch (const std::exception& error) {
        fail_check(__FILE__, __LINE__, text("rank %u: %s", options.rank, error.what()));
      }
      _exit(0);
    }
    close(orders[0]);
    close(reports[1]);
    ranks.push_back({pid, orders[1], reports[0]});
  }
  auto order_all = [&] {
    for (const Child& rank : ranks) say(rank.orders);
  };
  auto await_all = [&] {
    char word;
    for (const Child& rank : ranks) CHECK(read(rank.reports, &word, 1) == 1);
  };
  need_descriptors(kConnections / 10 + 100, "strangers");
  Attack attack{options.places, member_of(options.address, 0)};
  await_all();
  attack.run(kConnections / 4);
  order_all();
  attack.run(kConnections / 2);
  order_all();
  await_all();
  attack.run(kConnections / 4);
  order_all();
  for (const Child& rank : ranks) {
    int status = 0;
    CHECK(waitpid(rank.pid, &status, 0) == rank.pid && status == 0);
  }
  CHECK(attack.connections == kConnections && attack.slow.size() >= kConnections / 10);
  CHECK(attack.accepted == 0);
  CHECK(attack.refused > 0 && attack.was_group_found);
}
