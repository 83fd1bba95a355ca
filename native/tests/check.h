// The little that a test program needs: named tests, checks that say where and what, ranks as threads.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "engine/communicator.h"
#include "layouts.h"
#include "progress/progress.h"
#include "shm/arena.h"
#include "shm/local_group.h"

namespace photinus::test {

// Besides ranks that share memory, what a test holds for.
enum : unsigned { kLateWords = 1, kSeveralHosts = 2 };

struct Test {
  const char* name;
  void (*body)();
  unsigned also;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registered {
  Registered(const char* name, void (*body)(), unsigned also) { tests().push_back({name, body, also}); }
};

// With a schedule, run_ranks() takes ranks whose words to each other are late in ways that follow from it.
inline std::optional<uint64_t>& schedule() {
  static std::optional<uint64_t> now;
  return now;
}

// Whether to try every case, where a test takes a few of many.
inline bool& whole() {
  static bool now = false;
  return now;
}

// Of a process in which ranks are threads (Progress::set_thread_check); what tests begin with.
inline bool has_no_other_threads() {
  return false;
}

[[noreturn]] void fail_check(const char* file, int line, const std::string& what);

// A test reads as a sentence: TEST(all_ranks_get_the_same_bits) { ... }
#define TEST(name) PHOTINUS_TEST(name, 0)
// One that holds with ranks on several hosts, too; one that is run in any number of schedules; and one that
// holds whatever carries what the ranks tell each other.
#define TEST_ANY_HOSTS(name) PHOTINUS_TEST(name, ::photinus::test::kSeveralHosts)
#define TEST_LATE_WORDS(name) PHOTINUS_TEST(name, ::photinus::test::kLateWords)
#define TEST_ANY_PEERS(name) \
  PHOTINUS_TEST(name, ::photinus::test::kSeveralHosts | ::photinus::test::kLateWords)
#define PHOTINUS_TEST(name, also)                                                  \
  static void test_##name();                                                       \
  static ::photinus::test::Registered registered_##name{#name, test_##name, also}; \
  static void test_##name()

#define CHECK(condition)                                                                       \
  do {                                                                                         \
    if (!(condition)) ::photinus::test::fail_check(__FILE__, __LINE__, "not so: " #condition); \
  } while (false)

#define CHECK_CONTAINS(text, part)                                                                   \
  do {                                                                                               \
    if (std::string(text).find(part) == std::string::npos)                                           \
      ::photinus::test::fail_check(__FILE__, __LINE__,                                               \
                                   "'" + std::string(text) + "' does not contain '" + (part) + "'"); \
  } while (false)

// The error that a body throws; fails when it throws none.
std::pair<ErrorKind, std::string> error_of(const std::function<void()>& body);

// In a schedule: peers of this rank believe from now on that its process was killed.
void die();

// What this rank's communicator was made with; other groups of the same ranks, or of some, are made with much
// of it.
inline Communicator::Options& own_options() {
  static thread_local Communicator::Options own;
  return own;
}

// Runs a body for each rank, each rank a thread with an arena and a progress engine of its own.
void run_ranks(uint32_t world_size, const std::function<void(Communicator&)>& body, double timeout_s = 60,
               SlotSizes sizes = {}, Limits limits = {},
               const std::function<void(Communicator::Options&)>& configure = {});

}  // namespace photinus::test
