// Ranks that do not come although nobody has failed: late, stopped, or waiting for each other.
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/log.h"
#include "engine/watchdog.h"
#include "fake_peers.h"
#include "processes.h"

using namespace photinus;
using namespace photinus::test;

namespace {

Call sum_of(uint64_t elems) {
  return {Operation::all_reduce, Dtype::float32, Reduction::sum, 0, elems};
}

// What was said while it lives.
class Listener {
 public:
  Listener() {
    set_listener([this](const std::string& line) {
      std::lock_guard lock(mutex_);
      said_ += line + "\n";
    });
  }
  ~Listener() { set_listener({}); }
  std::string said() {
    std::lock_guard lock(mutex_);
    return said_;
  }

 private:
  std::mutex mutex_;
  std::string said_;
};

// A second group of the same ranks.
std::shared_ptr<Communicator> second_group(const std::string& address, const std::string& name) {
  Communicator::Options options = own_options();
  options.address = address;
  options.name = name;
  return Communicator::create(options);
}

}  // namespace

TEST_ANY_HOSTS(a_long_wait_says_for_whom_and_in_what_once) {
  Listener listener;
  static const CallSite site = CallSite::of("train.py:41");
  Limits limits;
  limits.waiting_s = 0.3;
  run_ranks(
      3,
      [](Communicator& communicator) {
        float x = 1;
        if (communicator.rank() == 2) usleep(1000000);
        Submission given;
        given.call = sum_of(1);
        given.send = given.recv = &x;
        given.site = &site;
        communicator.submit(given)->wait();
        CHECK(x == 3);
      },
      30, {}, limits);
  const std::string said = listener.said();
  CHECK_CONTAINS(said,
                 "rank 0 of 3 has been waiting for 0 s for ranks [2] in all_reduce #1 of float32[1] (sum) in "
                 "group world, called at train.py:41");
  CHECK_CONTAINS(said, "rank 1 of 3 has been waiting");
  CHECK(std::count(said.begin(), said.end(), '\n') == 2);
}

TEST_ANY_HOSTS(a_stopped_rank_is_suspected_and_the_run_goes_on_when_it_is_continued) {
  auto reports = run_processes(
      2,
      [](Communicator& communicator) -> std::string {
        Listener listener;
        float sum = 0;
        for (int i = 0; i < 4000; ++i) {
          float x = static_cast<float>(i);
          communicator.submit(sum_of(1), &x, &x)->wait();
          sum += x;
          usleep(500);
        }
        return text("%.0f ", static_cast<double>(sum)) + listener.said();
      },
      {},
      [](const std::vector<pid_t>& pids) {
        usleep(500000);
        CHECK(kill(pids[1], SIGSTOP) == 0);
        usleep(3000000);
        CHECK(kill(pids[1], SIGCONT) == 0);
      });
  CHECK_CONTAINS(reports[0].text, "15996000 rank 0 suspects that a rank hangs: rank 1 (pid");
  CHECK_CONTAINS(reports[0].text, "has shown no sign of life for 2.");
  if (hosts_of(2)[0] == hosts_of(2)[1])
    CHECK_CONTAINS(reports[0].text, "(it is stopped (SIGSTOP, SIGTSTP or a debugger))");
  CHECK_CONTAINS(reports[1].text, "15996000 ");
}

TEST_ANY_HOSTS(a_rank_that_stays_stopped_is_given_up_after_the_grace) {
  Limits limits;
  limits.suspect_s = 0.6;
  limits.grace_s = 1.5;
  auto reports = run_processes(
      2,
      [](Communicator& communicator) -> std::string {
        float x = 1;
        communicator.submit(sum_of(1), &x, &x)->wait();
        if (communicator.rank() == 1) raise(SIGSTOP);
        Listener listener;
        return error_text([&] { communicator.submit(sum_of(1), &x, &x)->wait(); });
      },
      limits,
      [](const std::vector<pid_t>& pids) {
        usleep(3000000);
        kill(pids[1], SIGKILL);
        kill(pids[1], SIGCONT);
      });
  CHECK_CONTAINS(reports[0].text, text("kind %d after 1.", static_cast<int>(ErrorKind::peer_lost)));
  CHECK_CONTAINS(reports[0].text, "rank 1 (pid");
  CHECK_CONTAINS(reports[0].text, "longer than the grace of 1.5 s");
}

TEST_ANY_HOSTS(ranks_that_wait_for_each_other_in_different_groups_are_told_at_once) {
  for (uint32_t world : {2u, 3u, 4u}) {
    const std::string other = new_address();
    auto reports = run_processes(world, [&](Communicator& first) -> std::string {
      auto second = second_group(other, "second");
      float x = 1;
      first.submit(sum_of(1), &x, &x)->wait();
      if (first.rank() == 1) usleep(200000);
      return error_text([&] {
        Communicator& mine = first.rank() == 1 ? *second : first;
        mine.submit(sum_of(1), &x, &x)->wait();
      });
    });
    for (uint32_t rank = 0; rank < world; ++rank) {
      const std::string& text = reports[rank].text;
      CHECK_CONTAINS(text, "after 0.");
      // Those outside of the cycle that is found first are told by those in it.
      CHECK_CONTAINS(text, "deadlock: ranks wait for each other and can never go on");
      CHECK_CONTAINS(text, "in all_reduce #1 of float32[1] (sum) in group second");
      CHECK_CONTAINS(text, "in all_reduce #2 of float32[1] (sum) in group world");
    }
  }
}

namespace {

// Groups of two neighbours each, as in a ring; gives this rank's with the next and with the previous rank.
struct Pairs {
  std::shared_ptr<Communicator> next, previous;
};
Pairs pairs_of(Communicator& world, const std::vector<std::string>& addresses) {
  Pairs pairs;
  const uint32_t ranks = world.world_size();
  for (uint32_t g = 0; g < ranks; ++g) {
    const uint32_t other = (g + 1) % ranks;
    if (world.rank() != g && world.rank() != other) continue;
    Communicator::Options options = own_options();
    options.rank = world.rank() == g ? 0 : 1;
    options.world_size = 2;
    options.address = addresses[g];
    options.name = text("pair %u", g);
    if (layout()) options.places = {own_options().places[g], own_options().places[other]};
    (world.rank() == g ? pairs.next : pairs.previous) = Communicator::create(options);
  }
  return pairs;
}

std::vector<std::string> new_addresses(uint32_t count) {
  std::vector<std::string> addresses(count);
  for (std::string& address : addresses) address = new_address();
  return addresses;
}

}  // namespace

TEST_ANY_HOSTS(a_cycle_over_groups_that_share_no_rank_is_told_to_every_rank_of_it) {
  for (uint32_t world : {3u, 4u}) {
    const auto addresses = new_addresses(world);
    auto reports = run_processes(world, [&](Communicator& all) -> std::string {
      Pairs pairs = pairs_of(all, addresses);
      float x = 1;
      all.submit(sum_of(1), &x, &x)->wait();
      // Each waits for the next, which waits for the one after it.
      return error_text([&] { pairs.next->submit(sum_of(1), &x, &x)->wait(); });
    });
    for (uint32_t rank = 0; rank < world; ++rank) {
      const std::string& text = reports[rank].text;
      CHECK_CONTAINS(text, photinus::text("kind %d after ", static_cast<int>(ErrorKind::mismatch)));
      CHECK_CONTAINS(text, "deadlock: ranks wait for each other");
      for (uint32_t each = 0; each < world; ++each) {
        // Named as in the first group in which the two have met: over hosts, in which they have a link.
        if (!layout()) CHECK_CONTAINS(text, photinus::text("rank %u (pid ", each));
        CHECK_CONTAINS(text, photinus::text("in all_reduce #1 of float32[1] (sum) in group pair %u", each));
      }
    }
  }
}

TEST_ANY_HOSTS(a_thread_that_makes_its_first_call_later_may_open_a_cycle) {
  const std::string address = new_address();
  auto reports = run_processes(2, [&](Communicator& first) -> std::string {
    const auto second = second_group(address, "second");
    Progress::set_thread_check(nullptr);
    float x = 1, y = 1;
    if (first.rank() == 1) {
      second->submit(sum_of(1), &y, &y)->wait();
      first.submit(sum_of(1), &x, &x)->wait();
      return "";
    }
    std::thread other([&] {
      usleep(1000000);
      second->submit(sum_of(1), &y, &y)->wait();
    });
    first.submit(sum_of(1), &x, &x)->wait();
    other.join();
    return "";
  });
  for (const Report& report : reports) CHECK(report.text.empty());
}

TEST_ANY_HOSTS(a_cycle_that_another_thread_or_an_asynchronous_operation_opens_is_no_deadlock) {
  const auto addresses = new_addresses(4);
  auto reports = run_processes(4, [&](Communicator& all) -> std::string {
    Pairs pairs = pairs_of(all, addresses);
    float x = 1, y = 1, z = 1;
    std::shared_ptr<Work> answer;
    std::thread other;
    if (all.rank() == 2) {
      // It waits for rank 3 like the rest, but its other thread will answer rank 1.
      all.submit(sum_of(1), &x, &x)->wait();
      other = std::thread([&] {
        all.submit(sum_of(1), &z, &z)->wait();
        usleep(300000);
        pairs.previous->submit(sum_of(1), &y, &y)->wait();
      });
    } else {
      for (int i = 0; i < 2; ++i) all.submit(sum_of(1), &x, &x)->wait();
      // Rank 3 will have answered rank 2 already: in order, but not in the order in which it waits.
      if (all.rank() == 3) answer = pairs.previous->submit(sum_of(1), &y, &y);
    }
    if (all.rank() == 2) usleep(50000);
    auto mine = pairs.next->submit(sum_of(1), &x, &x);
    mine->wait();
    if (all.rank() == 2)
      other.join();
    else
      (answer ? answer : pairs.previous->submit(sum_of(1), &y, &y))->wait();
    return "fine";
  });
  for (const Report& report : reports) CHECK(report.text == "fine");
}

TEST_ANY_HOSTS(a_receive_that_nobody_answers_is_told_when_the_other_waits_in_a_collective) {
  auto reports = run_processes(2, [&](Communicator& communicator) -> std::string {
    float x = 1;
    if (communicator.rank() == 0) return error_text([&] { communicator.submit(sum_of(1), &x, &x)->wait(); });
    MessageCall receive;
    receive.operation = Operation::recv;
    receive.elems = 1;
    receive.buffer = &x;
    receive.peer = 0;
    receive.asynchronous = false;
    return error_text([&] { communicator.submit(receive)->wait(); });
  });
  for (const Report& report : reports) {
    CHECK_CONTAINS(report.text, text("kind %d after 0.", static_cast<int>(ErrorKind::mismatch)));
    CHECK_CONTAINS(report.text, "in recv of float32[1] from rank 0");
    CHECK_CONTAINS(report.text, "in all_reduce #1 of float32[1]");
  }
}

TEST_ANY_HOSTS(a_rank_that_is_merely_slow_is_in_no_cycle) {
  const std::string other = new_address();
  auto reports = run_processes(2, [&](Communicator& first) -> std::string {
    auto second = second_group(other, "second");
    float x = 1, y = 1;
    for (int round = 0; round < 20; ++round) {
      // Rank 0 is stuck in one group while rank 1 has asynchronous work in it, and sleeps, and waits in the
      // other.
      auto work = first.submit(sum_of(1), &x, &x);
      if (first.rank() == 1) usleep(30000);
      auto slower = second->submit(sum_of(1), &y, &y);
      if (first.rank() == 0)
        work->wait(), slower->wait();
      else
        slower->wait(), work->wait();
    }
    return "fine";
  });
  for (const Report& report : reports) CHECK(report.text == "fine");
}

TEST_ANY_HOSTS(a_rank_that_waits_with_a_limit_and_then_does_its_part_is_in_no_deadlock) {
  const std::string other = new_address();
  auto reports = run_processes(2, [&](Communicator& first) -> std::string {
    auto second = second_group(other, "second");
    float x = 1, y = 1;
    first.submit(sum_of(1), &x, &x)->wait();
    if (first.rank() == 1) {  // stuck until rank 0 comes to the second group
      second->submit(sum_of(1), &y, &y)->wait();
      first.submit(sum_of(1), &x, &x)->wait();
      return "fine";
    }
    auto work = first.submit(sum_of(1), &x, &x);
    CHECK(error_of([&] { work->wait(0.5); }).first == ErrorKind::timeout);
    second->submit(sum_of(1), &y, &y)->wait();
    work->wait();
    return "fine";
  });
  for (const Report& report : reports) CHECK_CONTAINS(report.text, "fine");
}

TEST(silence_counts_from_the_wait_in_which_it_is_heard) {
  std::vector<std::shared_ptr<Arena>> arenas(2);
  for (auto& arena : arenas) arena = std::make_shared<Arena>(size_t{1} << 20);
  auto network = std::make_shared<FakeNetwork>(arenas, 4096, 2);
  GroupOptions options;
  options.rank = 0;
  options.world_size = 2;
  options.limits.suspect_s = 0.2;
  options.limits.grace_s = 0.4;
  options.peers = std::make_shared<FakePeers>(network, 0);
  options.progress = std::make_shared<Progress>(arenas[0]);
  Group group(options);
  Watchdog watchdog(group);
  // Both processes are stopped from the first wait to the second, and rank 1 for longer: not known as dead.
  network->kill(1);
  usleep(100000);
  network->lost(0, 1).store(false);
  auto look = [&](WaitState& wait) {
    watchdog.look(wait, [] { return std::vector<uint32_t>{1}; }, [] { return "a call"; }, 1, Alone::no);
  };
  WaitState first(now_s(), 60);
  look(first);
  usleep(600000);
  WaitState second(now_s(), 60);
  look(second);
  const double start = now_s();
  auto [kind, message] = error_of([&] {
    while (now_s() - start < 10) {
      look(second);
      usleep(10000);
    }
  });
  CHECK(kind == ErrorKind::peer_lost);
  CHECK_CONTAINS(message, "has shown no sign of life for 0.4 s");
}

TEST_ANY_HOSTS(overlapping_groups_used_in_different_orders_do_not_lock) {
  const std::string other = new_address();
  run_ranks(3, [&](Communicator& first) {
    auto second = second_group(other, "second");
    for (int round = 0; round < 200; ++round) {
      std::vector<float> a(50, 1.0f), b(20000, 2.0f);
      std::vector<std::shared_ptr<Work>> works;
      auto use_first = [&] { works.push_back(first.submit(sum_of(a.size()), a.data(), a.data())); };
      auto use_second = [&] { works.push_back(second->submit(sum_of(b.size()), b.data(), b.data())); };
      if ((first.rank() + static_cast<uint32_t>(round)) % 2)
        use_first(), use_second();
      else
        use_second(), use_first();
      for (auto& work : works) work->wait();
      CHECK(a[49] == 3.0f && b[19999] == 6.0f);
    }
    second->close();
  });
}

TEST(a_line_that_nobody_reads_holds_up_nobody_and_is_written_once_somebody_reads) {
  int ends[2];
  CHECK(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0);
  const FileDescriptor reads(ends[0]), writes(ends[1]), before(dup(STDERR_FILENO));
  const std::vector<char> filling(4096, '.');
  while (write(writes.get(), filling.data(), filling.size()) > 0) {
  }
  fcntl(writes.get(), F_SETFL, 0);
  fcntl(reads.get(), F_SETFL, 0);
  dup2(writes.get(), STDERR_FILENO);
  const double begun_s = now_s();
  say("first");
  say("second");
  const double took_s = now_s() - begun_s;
  std::string seen;
  while (seen.find("second\n") == std::string::npos && now_s() - begun_s < 20) {
    char some[4096];
    const ssize_t got = read(reads.get(), some, sizeof some);
    if (got > 0) seen.append(some, static_cast<size_t>(got));
  }
  dup2(before.get(), STDERR_FILENO);
  CHECK(took_s < 2);
  CHECK_CONTAINS(seen, "photinus: first\nphotinus: second\n");
}
