#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <filesystem>
#include <list>

#include "base/interrupt.h"
#include "fake_peers.h"
#include "processes.h"
#include "slow_device.h"

using namespace photinus;
using namespace photinus::test;

namespace {

Call sum_of(uint64_t elems) {
  return {Operation::all_reduce, Dtype::float32, Reduction::sum, 0, elems};
}

}  // namespace

TEST_ANY_HOSTS(a_killed_peer_is_named_with_its_signal_by_every_survivor) {
  for (uint32_t world : {2u, 4u}) {
    auto reports = run_processes(world, [](Communicator& communicator) -> std::string {
      std::vector<float> data(1 << 20, 1.0f);
      return error_text([&] {
        for (int i = 0; i < 6; ++i) {
          if (i == 3 && communicator.rank() == 1) kill(getpid(), SIGKILL);
          communicator.submit(sum_of(data.size()), data.data(), data.data())->wait();
        }
      });
    });
    CHECK(WIFSIGNALED(reports[1].status));
    for (uint32_t rank = 0; rank < world; ++rank) {
      if (rank == 1) continue;
      CHECK(WIFEXITED(reports[rank].status));
      CHECK_CONTAINS(reports[rank].text, text("kind %d after ", static_cast<int>(ErrorKind::peer_lost)));
      CHECK_CONTAINS(reports[rank].text, " waited 0.");  // in this call, whatever those before it took
      CHECK_CONTAINS(reports[rank].text, "rank 1 (pid");
      CHECK_CONTAINS(reports[rank].text, as_seen(1, world, "was killed by SIGKILL"));
      // What it sent in its last call may still have been in its kernel, and is lost with it.
      const bool in_the_last = layout() && reports[rank].text.find("all_reduce #3 ") != std::string::npos;
      CHECK_CONTAINS(reports[rank].text,
                     text("all_reduce #%d of float32[1048576] (sum) in group world", in_the_last ? 3 : 4));
    }
  }
}

TEST_ANY_HOSTS(a_peer_killed_while_all_sleep_in_a_long_wait_is_noticed) {
  auto reports = run_processes(3, [](Communicator& communicator) -> std::string {
    float x = 1;
    if (communicator.rank() == 2) {
      usleep(400000);
      kill(getpid(), SIGKILL);
    }
    return error_text([&] { communicator.submit(sum_of(1), &x, &x)->wait(); });
  });
  for (uint32_t rank : {0u, 1u}) {
    CHECK_CONTAINS(reports[rank].text, "rank 2 (pid");
    CHECK_CONTAINS(reports[rank].text, as_seen(2, 3, "was killed by SIGKILL"));
    CHECK_CONTAINS(reports[rank].text, "after 0.");
  }
}

TEST_ANY_HOSTS(an_exit_code_and_the_reason_left_behind_are_quoted) {
  auto reports = run_processes(2, [](Communicator& communicator) -> std::string {
    float x = 1;
    communicator.submit(sum_of(1), &x, &x)->wait();
    if (communicator.rank() == 0) {
      communicator.set_reason("ValueError: learning rate must be positive");
      _exit(3);
    }
    return error_text([&] { communicator.submit(sum_of(1), &x, &x)->wait(); });
  });
  CHECK_CONTAINS(reports[1].text,
                 as_seen(0, 2, "exited with code 3") + " after: ValueError: learning rate must be positive");
}

TEST_ANY_HOSTS(the_root_cause_is_named_and_not_the_rank_that_gave_up_because_of_it) {
  auto reports = run_processes(3, [](Communicator& communicator) -> std::string {
    float x = 1;
    communicator.submit(sum_of(1), &x, &x)->wait();
    if (communicator.rank() == 1) kill(getpid(), SIGKILL);
    if (communicator.rank() == 2) usleep(300000);  // comes late: rank 0 has given up by then
    return error_text([&] { communicator.submit(sum_of(1), &x, &x)->wait(); });
  });
  CHECK_CONTAINS(reports[0].text, "rank 1 (pid");
  CHECK_CONTAINS(reports[2].text, "rank 1 (pid");
  CHECK_CONTAINS(reports[2].text, as_seen(1, 3, "was killed by SIGKILL"));
}

TEST(the_root_cause_is_named_even_if_the_news_of_it_comes_after_a_rank_that_gave_up_because_of_it) {
  for (const bool says_why : {false, true}) {
    std::vector<std::shared_ptr<Arena>> arenas(3);
    for (auto& arena : arenas) arena = std::make_shared<Arena>(size_t{1} << 20);
    const uint64_t one_view = 2;
    auto network = std::make_shared<FakeNetwork>(arenas, 4096, one_view);
    GroupOptions options;
    options.rank = 1;
    options.world_size = 3;
    options.peers = std::make_shared<FakePeers>(network, 1);
    options.progress = std::make_shared<Progress>(arenas[1]);
    const Group group(options);
    FakePeers neighbour(network, 0), first(network, 2);
    neighbour.set_reason("rank 2 gave up: a reason");
    neighbour.end(Presence::failed, 2, false);
    std::thread news([&] {
      usleep(20000);
      if (says_why) first.end(Presence::failed, kOwnFault, false);
      network->lost(1, 2).store(true);
    });
    const PeerLost error = group.given_up_by(0, "a call");
    news.join();
    CHECK(error.rank == (says_why ? 0 : 2));
    CHECK_CONTAINS(error.what(), says_why ? "in the middle of a call: rank 2 gave up: a reason"
                                          : "was killed by SIGKILL, and so rank 0 (pid");
  }
}

TEST_ANY_PEERS(a_closed_peer_is_said_to_have_left) {
  run_ranks(2, [](Communicator& communicator) {
    float x = 1;
    if (communicator.rank() == 1) return;
    auto [kind, message] = error_of([&] { communicator.submit(sum_of(1), &x, &x)->wait(); });
    CHECK(kind == ErrorKind::peer_lost);
    CHECK_CONTAINS(message, "rank 1");
    CHECK_CONTAINS(message, "has left the group");
  });
}

TEST_ANY_PEERS(a_rank_that_does_not_come_is_named_at_the_deadline) {
  run_ranks(3, [](Communicator& communicator) {
    float x = 1;
    if (communicator.rank() == 2) {
      usleep(1500000);
      return;
    }
    double start = now_s();
    auto [kind, message] = error_of([&] { communicator.submit(sum_of(1), &x, &x, 0.5)->wait(); });
    CHECK(now_s() - start < 1.2);
    if (kind == ErrorKind::timeout)
      CHECK_CONTAINS(message, "for rank 2, which is alive but has not come: rank 2 (pid");
    else  // the other one's deadline passed first, and it said why it gave up
      CHECK_CONTAINS(message, "gave up");
  });
}

TEST_ANY_PEERS(a_wait_with_a_shorter_deadline_leaves_the_collective_running) {
  run_ranks(2, [](Communicator& communicator) {
    float x = 1;
    if (communicator.rank() == 1) usleep(300000);
    auto work = communicator.submit(sum_of(1), &x, &x);
    if (communicator.rank() == 0) {
      auto [kind, message] = error_of([&] { work->wait(0.05); });
      CHECK(kind == ErrorKind::timeout);
      CHECK_CONTAINS(message, "is not ended by this");
    }
    work->wait();
    CHECK(x == 2.0f);
  });
}

TEST_ANY_PEERS(different_calls_are_refused_on_every_rank_and_the_group_stays_usable) {
  run_ranks(3, [](Communicator& communicator) {
    const bool odd = communicator.rank() == 1;
    std::vector<float> data(40000, 1.0f);
    auto refused = [&](const Call& call) {
      auto [kind, message] = error_of([&] { communicator.submit(call, data.data(), data.data())->wait(); });
      CHECK(kind == ErrorKind::mismatch);
      CHECK_CONTAINS(message, "ranks 0, 2 called ");
      CHECK_CONTAINS(message, "rank 1 called ");
      for (float value : data) CHECK(value == 1.0f);
      return message;
    };
    for (int times = 0; times < 100; ++times)  // who waits and who drives let go of the error in any order
      refused(sum_of(odd ? 40000 : 39999));
    refused(sum_of(odd ? 10 : 30000));  // small and large take different paths
    refused({Operation::all_reduce, odd ? Dtype::int32 : Dtype::float32, Reduction::sum, 0, 100});
    refused({Operation::all_reduce, Dtype::float32, odd ? Reduction::max : Reduction::sum, 0, 100});
    refused({Operation::broadcast, Dtype::float32, Reduction::sum, odd ? 1u : 0u, 100});
    Call call = sum_of(30000);
    if (odd) call.wire = Dtype::bfloat16;
    CHECK_CONTAINS(refused(call),
                   "rank 1 called all_reduce of float32[30000] (sum) as bfloat16 between hosts");
    std::string message = refused({odd ? Operation::barrier : Operation::all_reduce, Dtype::float32,
                                   Reduction::sum, 0, odd ? 0u : 100u});
    CHECK_CONTAINS(message, "all_reduce of float32[100] (sum)");
    communicator.submit(sum_of(100), data.data(), data.data())->wait();
    CHECK(data[99] == 3.0f);
  });
}

TEST(lines_of_equal_calls_tell_swapped_ones_from_branches_that_ranks_take_for_themselves) {
  auto posted = [](std::vector<uint32_t> sites, Operation operation = Operation::all_reduce,
                   uint32_t root = 0) {
    std::vector<CallDescriptor> calls(sites.size());
    for (size_t rank = 0; rank < sites.size(); ++rank) {
      calls[rank].operation = operation;
      calls[rank].root = root;
      calls[rank].site = sites[rank];
    }
    return calls;
  };
  SiteHistory swapped;
  CHECK(!swapped.look_out_of_step(posted({1, 1, 2}), false));
  CHECK(!swapped.look_out_of_step(posted({2, 2, 1}), false));  // other places: two of 2, one of 1
  SiteHistory crossed;
  CHECK(!crossed.look_out_of_step(posted({1, 2}), false));
  CHECK(crossed.look_out_of_step(posted({2, 1}), false));
  CHECK(!crossed.look_out_of_step(posted({1, 2}), false));  // said once
  CHECK(crossed.look_out_of_step(posted({2, 1}), true));
  SiteHistory branch;
  for (int step = 0; step < 3; ++step) CHECK(!branch.look_out_of_step(posted({1, 2}), true));
  CHECK(!branch.look_out_of_step(posted({3, 3}), true));
  CHECK(!branch.look_out_of_step(posted({2, 1}), true));  // nothing says that the two belong together
  SiteHistory roots;                                      // each rank in turn has the line of the root
  CHECK(!roots.look_out_of_step(posted({1, 2}, Operation::broadcast, 0), true));
  CHECK(!roots.look_out_of_step(posted({2, 1}, Operation::broadcast, 1), true));
  SiteHistory skipped;
  CHECK(!skipped.look_out_of_step(posted({1, 1}), false));
  CHECK(!skipped.look_out_of_step(posted({2, 2}), false));
  CHECK(skipped.look_out_of_step(posted({1, 2}), false));
  CHECK(!skipped.look_out_of_step(posted({2, 1}), false));
  SiteHistory silent;  // calls without a vote come from wherever there was time
  CHECK(!silent.look_out_of_step(posted({1, 2}), true));
  CHECK(!silent.look_out_of_step(posted({0, 2}), true));
  CHECK(!silent.look_out_of_step(posted({2, 1}), true));
}

TEST_ANY_PEERS(abort_wakes_the_own_waiter_and_every_peer) {
  run_ranks(3, [](Communicator& communicator) {
    float x = 1;
    if (communicator.rank() == 0) {
      auto work = communicator.submit(sum_of(1), &x, &x);
      usleep(300000);
      communicator.abort("the user said so");
      auto [kind, message] = error_of([&] { work->wait(); });
      CHECK(kind == ErrorKind::aborted);
      CHECK_CONTAINS(message, "the user said so");
      CHECK(error_of([&] { communicator.submit(sum_of(1), &x, &x)->wait(); }).first == ErrorKind::aborted);
    } else if (communicator.rank() == 1) {
      double start = now_s();
      auto [kind, message] = error_of([&] {
        for (int i = 0; i < 2; ++i) communicator.submit(sum_of(1), &x, &x)->wait();
      });
      CHECK(now_s() - start < 5);
      CHECK(kind == ErrorKind::peer_lost);
      CHECK_CONTAINS(message, "the user said so");
    } else {
      usleep(600000);  // never comes; leaves in order
    }
  });
}

namespace {

std::atomic<bool> is_wanted_back{false};

// A thread that waits is wanted back, by a signal or by an exception that its handler raises, while it lives.
struct WantedBack {
  explicit WantedBack(bool by_exception) {
    if (by_exception)
      Progress::set_thread_check(
          []() -> bool { throw Error(ErrorKind::invalid_argument, "raised by a handler"); });
    else
      set_interrupt_check([] { return is_wanted_back.load(); });
    is_wanted_back = true;
  }
  ~WantedBack() {
    Progress::set_thread_check(has_no_other_threads);
    set_interrupt_check(nullptr);
  }
};

}  // namespace

TEST_ANY_HOSTS(who_waits_for_a_moment_does_not_ask_the_interpreter_whether_it_waits_for_ever) {
  run_processes(2, [](Communicator& communicator) -> std::string {
    static std::atomic<int> asked{0};
    Progress::set_thread_check([] {
      ++asked;
      return false;
    });
    float x = 1;
    const double start = now_s();
    for (int i = 0; i < 20; ++i) {
      if (communicator.rank() == 1) usleep(20000);
      communicator.submit(sum_of(1), &x, &x)->wait();
    }
    CHECK(asked <= (now_s() - start) / 0.05);
    Progress::set_thread_check(has_no_other_threads);
    return "";
  });
}

TEST_ANY_HOSTS(who_is_interrupted_gets_its_tensor_back_and_the_others_are_told) {
  for (const bool by_exception : {false, true}) {
    auto reports = run_processes(2, [&](Communicator& communicator) -> std::string {
      std::vector<float> x(1 << 18, 1.0f);
      communicator.submit(sum_of(x.size()), x.data(), x.data())->wait();
      if (communicator.rank() == 1) {
        usleep(300000);
        return error_text([&] { communicator.submit(sum_of(x.size()), x.data(), x.data())->wait(); });
      }
      const WantedBack wanted(by_exception);
      std::shared_ptr<Work> work;
      const std::string error = error_text([&] {
        work = communicator.submit(sum_of(x.size()), x.data(), x.data());
        work->wait();
      });
      CHECK(work->is_completed());
      return error;
    });
    CHECK_CONTAINS(reports[0].text,
                   by_exception ? "raised by a handler" : "interrupted while waiting for all_reduce #2");
    CHECK_CONTAINS(reports[1].text, text("kind %d after ", static_cast<int>(ErrorKind::peer_lost)));
    CHECK_CONTAINS(reports[1].text, "interrupted by a signal while waiting for all_reduce #2");
  }
}

TEST(what_was_read_of_a_tensor_whose_owner_left_in_the_middle_is_no_result) {
  for (const bool as_message : {false, true}) {
    constexpr size_t kElems = 1 << 20;
    std::atomic<bool> has_posted{false};
    run_ranks(
        2,
        [&](Communicator& communicator) {
          const std::shared_ptr<Arena>& arena = own_options().progress->arena();
          auto* x = reinterpret_cast<float*>(arena->allocate(kElems * sizeof(float)));
          const bool is_root = communicator.rank() == 0;
          std::fill_n(x, kElems, is_root ? 1.0f : 0.0f);
          MessageCall message;
          message.operation = is_root ? Operation::send : Operation::recv;
          message.elems = kElems;
          message.buffer = x;
          message.peer = 1 - communicator.rank();
          const Call call{Operation::broadcast, Dtype::float32, Reduction::sum, 0, kElems};
          auto begin = [&] {
            return as_message ? communicator.submit(message) : communicator.submit(call, x, x);
          };
          if (is_root) {
            const std::shared_ptr<Work> work = begin();
            has_posted = true;
            usleep(300000);        // the other one's copy is under way by then
            communicator.close();  // from here on its owner may overwrite the tensor
            return;
          }
          while (!has_posted) usleep(1000);
          auto [kind, message_text] = error_of([&] { begin()->wait(); });
          CHECK(kind == ErrorKind::peer_lost);
          CHECK_CONTAINS(message_text, "rank 0 (pid");
          CHECK_CONTAINS(message_text, "gave up in the middle of ");
        },
        60, {}, {},
        [](Communicator::Options& options) {
          options.progress = std::make_shared<Progress>(std::make_shared<Arena>(size_t{64} << 20));
          if (options.rank == 1)
            options.device =
                std::make_shared<SlowDevice>(options.progress->arena()->page().futex, 1, CopyFaults{0, 1});
        });
  }
}

TEST_ANY_HOSTS(a_forked_child_neither_hangs_nor_disturbs_its_parent) {
  auto reports = run_processes(2, [](Communicator& communicator) -> std::string {
    float x = 1;
    communicator.submit(sum_of(1), &x, &x)->wait();
    pid_t child = fork();
    if (child == 0) {
      auto [kind, message] = error_of([&] { communicator.submit(sum_of(1), &x, &x); });
      communicator.close();  // not the child's to close
      _exit(kind == ErrorKind::aborted ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    x = 1;
    communicator.submit(sum_of(1), &x, &x)->wait();
    return text("child %d, sum %.0f", status, static_cast<double>(x));
  });
  for (auto& report : reports) CHECK(report.text == "child 0, sum 2");
}

TEST_ANY_HOSTS(a_forked_child_that_outlives_its_rank_hides_nothing) {
  auto reports = run_processes(3, [](Communicator& communicator) -> std::string {
    float x = 1;
    communicator.submit(sum_of(1), &x, &x)->wait();
    if (communicator.rank() == 1) {
      if (fork() == 0) {
        for (int file = 0; file < 3; ++file)
          ::close(file);  // whoever reads what this test prints need not wait
        usleep(3000000);
        _exit(0);
      }
      usleep(100000);  // the others have what it sent
      kill(getpid(), SIGKILL);
    }
    return error_text([&] { communicator.submit(sum_of(1), &x, &x)->wait(); });
  });
  for (uint32_t rank : {0u, 2u}) {
    CHECK_CONTAINS(reports[rank].text, text("kind %d after 0.", static_cast<int>(ErrorKind::peer_lost)));
    CHECK_CONTAINS(reports[rank].text, "rank 1 (pid");
  }
}

TEST(a_rank_that_cannot_make_its_links_tells_those_who_have_theirs) {
  layout() = "apart";
  const std::string address = new_address();
  const Listeners made = listeners_of(3);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < 3; ++rank)
    threads.emplace_back([&, rank] {
      Communicator::Options options;
      options.rank = rank;
      options.world_size = 3;
      options.address = address;
      options.limits.timeout_s = rank == 1 ? 0.5 : 30;
      options.progress = std::make_shared<Progress>(std::make_shared<Arena>(size_t{64} << 20));
      options.network = made.networks[rank];
      options.places = made.places;
      if (rank == 1) options.places[2].addresses = {numeric_address("127.0.0.1", 1)};
      const double start = now_s();
      auto [kind, message] = error_of([&] { Communicator::create(options); });
      CHECK(now_s() - start < 10);
      CHECK(kind == (rank == 1 ? ErrorKind::timeout : ErrorKind::peer_lost));
      CHECK_CONTAINS(message, "on host-1) has no link with rank 2 of group");
      CHECK_CONTAINS(message, "127.0.0.1:1: nobody listens there (connection refused)");
      if (rank != 1) CHECK_CONTAINS(message, "on host-1) gave up");
    });
  for (std::thread& thread : threads) thread.join();
  layout().reset();
}

TEST_ANY_HOSTS(a_rank_that_leaves_early_ends_nothing_of_the_others) {
  run_ranks(3, [](Communicator& communicator) {
    float x = 1;
    communicator.submit(sum_of(1), &x, &x)->wait();
    if (communicator.rank() == 2) return;
    MessageCall call;
    call.elems = 1;
    call.buffer = &x;
    call.peer = 1 - communicator.rank();
    for (int i = 0; i < 20; ++i) {
      call.operation = (communicator.rank() == 0) == (i % 2 == 0) ? Operation::send : Operation::recv;
      communicator.submit(call)->wait();
      usleep(20000);
    }
    CHECK(x == 3.0f);
    auto [kind, message] = error_of([&] { communicator.submit(sum_of(1), &x, &x)->wait(); });
    CHECK(kind == ErrorKind::peer_lost);
    CHECK_CONTAINS(message, "rank 2 (pid");
    CHECK_CONTAINS(message, "has left the group");
  });
}

namespace {

size_t entries_of(const char* directory) {
  const std::filesystem::directory_iterator all(directory);
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

}  // namespace

TEST_ANY_HOSTS(groups_made_one_after_the_other_leave_nothing_behind_and_close_at_once) {
  std::vector<double> closing_s;
  size_t files = 0, threads = 0;
  std::barrier together(3);
  std::vector<std::string> addresses(50);
  for (std::string& address : addresses) address = new_address();
  run_ranks(3, [&](Communicator& communicator) {
    for (int round = 0; round < 50; ++round) {
      Communicator::Options options = own_options();
      options.address = addresses[static_cast<size_t>(round)];
      options.name = text("group %d", round);
      auto group = Communicator::create(options);
      float x = 1;
      group->submit(sum_of(1), &x, &x)->wait();
      CHECK(x == 3.0f);
      together.arrive_and_wait();
      const double start = now_s();
      group->close();
      if (communicator.rank() == 0) closing_s.push_back(now_s() - start);
      group.reset();
      together.arrive_and_wait();
      if (communicator.rank() != 0 || (round > 0 && round < 49)) continue;
      usleep(100000);  // the other ends of connections
      if (round == 0) files = entries_of("/proc/self/fd"), threads = entries_of("/proc/self/task");
      CHECK(entries_of("/proc/self/fd") <= files);
      CHECK(entries_of("/proc/self/task") <= threads);
    }
  });
  std::sort(closing_s.begin(), closing_s.end());
  CHECK(closing_s[25] < 0.05);
}

TEST_LATE_WORDS(a_rank_that_dies_between_two_calls_is_named_by_every_survivor_whatever_was_lost_on_the_way) {
  const std::optional<uint64_t> given = schedule();
  for (uint64_t seed = given.value_or(0); seed <= given.value_or(29); ++seed) {
    schedule() = seed;
    const uint32_t world = 2 + seed % 3, victim = seed / 3 % world;
    const int last = static_cast<int>(seed % 7);
    run_ranks(world, [&](Communicator& communicator) {
      for (int call = 0; call < 8; ++call) {
        if (communicator.rank() == victim && call == last) return die();
        std::vector<float> data(call % 3 ? 100 : 30000 * (seed % 4), 1.0f);
        try {
          communicator.submit(sum_of(data.size()), data.data(), data.data(), 0, call % 2)->wait();
        } catch (const Error& error) {
          CHECK(call == last || call == last - 1);  // what it said last may be lost
          CHECK(error.kind() == ErrorKind::peer_lost);
          CHECK_CONTAINS(error.what(), text("rank %u (pid ", victim));
          CHECK_CONTAINS(error.what(), "was killed by SIGKILL");
          return;
        }
        for (float value : data) CHECK(value == static_cast<float>(world));
      }
      CHECK(false);
    });
  }
  schedule() = given;
}

TEST(a_copy_that_fails_or_never_ends_ends_the_call_on_every_rank_with_the_reason) {
  for (const bool fails : {true, false}) {
    for (const uint64_t elems : {100, 200000}) {
      auto broken = [&](Communicator::Options& options) {
        if (options.rank != 1) return;
        CopyFaults faults;
        (fails ? faults.fails : faults.lasts_3_s) = 2;
        options.device = std::make_shared<SlowDevice>(options.progress->arena()->page().futex, 1, faults);
      };
      static auto* kept = new std::list<std::vector<std::vector<float>>>;  // a late copy still reads it
      auto& data = kept->emplace_back(2, std::vector<float>(elems, 1.0f));
      run_ranks(
          2,
          [&](Communicator& communicator) {
            auto& mine = data[communicator.rank()];
            auto [kind, message] = error_of([&] {
              for (int call = 0; call < 2; ++call)
                communicator.submit(sum_of(elems), mine.data(), mine.data(), 0.5)->wait();
            });
            const std::string reason = fails ? "the slow device has failed" : "for a copy of its own tensor";
            if (communicator.rank() == 0 && kind == ErrorKind::timeout)
              CHECK(!fails);  // both deadlines pass at about the same time
            else
              CHECK_CONTAINS(message, reason);
            if (communicator.rank() == 0) return;
            CHECK(kind == (fails ? ErrorKind::system : ErrorKind::timeout));
          },
          60, {}, {}, broken);
    }
  }
}
