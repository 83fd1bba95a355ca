#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "base/interrupt.h"
#include "base/log.h"
#include "processes.h"
#include "shm/unix_socket.h"

using namespace photinus;
using namespace photinus::test;

namespace {

std::shared_ptr<Communicator> join(uint32_t rank, uint32_t world_size, const std::string& address,
                                   double timeout_s) {
  Communicator::Options options;
  options.rank = rank;
  options.world_size = world_size;
  options.address = address;
  options.name = "club";
  options.limits.timeout_s = timeout_s;
  options.limits.waiting_s = 0.3;
  options.progress = std::make_shared<Progress>(std::make_shared<Arena>(size_t{1} << 20));
  return Communicator::create(options);
}

std::string socket_name(const std::string& address) {
  const size_t first = address.find(':'), last = address.rfind(':');
  return "photinus-" + address.substr(first + 1, last - first - 1);
}

size_t open_files() {
  size_t count = 0;
  for (int file = 0; file < 1024; ++file)
    if (fcntl(file, F_GETFD) != -1) ++count;
  return count;
}

}  // namespace

TEST(missing_ranks_are_named_when_the_deadline_passes) {
  auto [kind, message] = error_of([] { join(0, 3, new_address(), 0.3); });
  CHECK(kind == ErrorKind::timeout);
  CHECK_CONTAINS(message, "ranks [1, 2] of 3 did not join within 0.3 s");
}

TEST(a_missing_rank_0_is_named) {
  auto [kind, message] = error_of([] { join(1, 2, new_address(), 0.3); });
  CHECK(kind == ErrorKind::timeout);
  CHECK_CONTAINS(message, "could not reach rank 0");
}

TEST(those_who_came_are_told_who_did_not) {
  const std::string address = new_address();
  std::thread host([&] { CHECK(error_of([&] { join(0, 3, address, 0.5); }).first == ErrorKind::timeout); });
  auto [kind, message] = error_of([&] { join(1, 3, address, 5); });
  CHECK_CONTAINS(message, "ranks [2] of 3 did not join");
  host.join();
}

TEST(a_rank_that_ends_while_others_are_missing_ends_it_for_all_at_once) {
  const std::string address = new_address();
  const double start = now_s();
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(1);  // ends it while it waits
    join(2, 4, address, 20);
    _exit(0);
  }
  std::thread host([&] {
    auto [kind, message] = error_of([&] { join(0, 4, address, 20); });
    CHECK(kind == ErrorKind::peer_lost);
    CHECK_CONTAINS(message, text("rank 2 (pid %d on ", pid));
    CHECK_CONTAINS(message, "was killed by SIGALRM while group club was formed");
  });
  auto [kind, message] = error_of([&] { join(1, 4, address, 20); });
  CHECK(kind == ErrorKind::peer_lost);
  CHECK_CONTAINS(message, text("rank 2 (pid %d on ", pid));
  host.join();
  CHECK(now_s() - start < 10);
  CHECK(waitpid(pid, nullptr, 0) == pid);
}

TEST(who_waits_for_others_to_join_says_for_whom) {
  std::mutex mutex;
  std::string said;
  set_listener([&](const std::string& line) {
    std::lock_guard lock(mutex);
    said += line + "\n";
  });
  const std::string address = new_address();
  std::thread host([&] { CHECK(error_of([&] { join(0, 3, address, 1); }).first == ErrorKind::timeout); });
  CHECK(error_of([&] { join(1, 3, address, 5); }).first == ErrorKind::timeout);
  host.join();
  CHECK(error_of([&] { join(1, 2, new_address(), 0.6); }).first == ErrorKind::timeout);
  set_listener({});
  CHECK_CONTAINS(said, text("for ranks [2] to join group club; came: rank 1 (pid %d on ", getpid()));
  CHECK_CONTAINS(
      said, "rank 1 of 3 has been waiting for 0 s for rank 0, which waits for others, to join group club");
  CHECK_CONTAINS(
      said, "rank 1 of 2 has been waiting for 0 s for rank 0, which does not listen yet, to join group club");
}

namespace {

std::atomic<bool> is_wanted_back{false};

}  // namespace

TEST(an_interrupt_ends_the_wait_for_others_to_join) {
  set_interrupt_check([] { return is_wanted_back.load(); });
  const std::string address = new_address();
  // Rank 0 waits for guests, rank 1 for what rank 0 says, and another group's rank 1 for its rank 0.
  const std::vector<std::function<void()>> joins{[&] { join(0, 3, address, 60); },
                                                 [&] { join(1, 3, address, 60); },
                                                 [] { join(1, 2, new_address(), 60); }};
  std::vector<std::thread> threads;
  for (const auto& join_one : joins)
    threads.emplace_back([&] {
      const double start = now_s();
      const ErrorKind kind = error_of(join_one).first;
      CHECK(kind == ErrorKind::interrupted ||
            kind == ErrorKind::peer_lost);  // if rank 0 was the first to end
      CHECK(now_s() - start < 30);
    });
  usleep(500000);
  is_wanted_back = true;
  for (std::thread& thread : threads) thread.join();
  set_interrupt_check(nullptr);
}

TEST(more_ranks_than_a_user_may_have_descriptors_under_way_meet_all_the_same) {
  constexpr uint32_t kRanks = 24;
  constexpr uid_t kNobody = 65534;
  auto reports = run_processes(
      kRanks, [](Communicator& communicator) { return text("%u met", communicator.world_size()); }, {}, {},
      [](Communicator::Options&) {
        const rlimit files{160, 160};
        CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
        if (geteuid() == 0) CHECK(setuid(kNobody) == 0);  // for the superuser no limit holds
      });
  for (const Report& report : reports) CHECK_CONTAINS(report.text, "24 met");
}

TEST(a_second_claimant_of_a_rank_is_refused_and_the_job_goes_on) {
  const std::string address = new_address();
  std::shared_ptr<Communicator> zero, one;
  std::thread host([&] { zero = join(0, 3, address, 10); });
  std::thread first([&] { one = join(1, 3, address, 10); });
  usleep(200000);
  auto [kind, message] = error_of([&] { join(1, 3, address, 10); });
  CHECK(kind == ErrorKind::invalid_argument);
  CHECK_CONTAINS(message, "came second: rank 1 is pid");
  auto two = join(2, 3, address, 10);
  host.join();
  first.join();
}

TEST(another_world_size_is_refused_with_both_numbers) {
  const std::string address = new_address();
  std::shared_ptr<Communicator> zero;
  std::thread host([&] { zero = join(0, 2, address, 10); });
  auto [kind, message] = error_of([&] { join(1, 3, address, 10); });
  CHECK_CONTAINS(message, "believes in a world of 3 ranks, rank 0 in one of 2");
  auto one = join(1, 2, address, 10);
  host.join();
}

TEST(strangers_are_dropped_without_harm) {
  const std::string address = new_address();
  std::shared_ptr<Communicator> zero;
  std::thread host([&] { zero = join(0, 2, address, 20); });
  std::vector<FileDescriptor> silent;
  for (int i = 0; i < 20; ++i) {
    auto connection = connect_to(socket_name(address), Deadline::in(5));
    CHECK(connection.has_value());
    std::vector<char> garbage(static_cast<size_t>(i * 37 + 1), 'x');
    if (i % 2) send_message(*connection, garbage.data(), garbage.size());
    silent.push_back(std::move(*connection));
  }
  std::string wrong_secret = address;
  wrong_secret.back() = wrong_secret.back() == '0' ? '1' : '0';
  auto [kind, message] = error_of([&] { join(1, 2, wrong_secret, 1); });
  CHECK_CONTAINS(message, "got no answer from rank 0");
  auto one = join(1, 2, address, 20);
  host.join();
}

TEST(a_malformed_address_is_refused) {
  CHECK(error_of([] { join(1, 2, "somewhere", 1); }).first == ErrorKind::invalid_argument);
}

TEST(closing_gives_every_file_descriptor_back) {
  run_ranks(2, [](Communicator&) {});
  const size_t before = open_files();
  for (int i = 0; i < 5; ++i) run_ranks(4, [](Communicator& c) { c.submit({}, nullptr, nullptr)->wait(); });
  CHECK(open_files() == before);
}
