// The little that a test program needs: named tests, checks that say where and what, ranks as threads.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "engine/communicator.h"
#include "progress/progress.h"
#include "shm/arena.h"
#include "shm/local_group.h"

namespace photinus::test {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registered {
  Registered(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

[[noreturn]] inline void fail_check(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::fflush(nullptr);
  std::_Exit(1);  // ranks may be waiting on other threads
}

// A test reads as a sentence: TEST(all_ranks_get_the_same_bits) { ... }
#define TEST(name)                                                           \
  static void test_##name();                                                 \
  static ::photinus::test::Registered registered_##name{#name, test_##name}; \
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
inline std::pair<ErrorKind, std::string> error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
  fail_check(__FILE__, __LINE__, "no error was thrown");
}

// Runs a body for each rank, each rank a thread with an arena and a progress engine of its own.
inline void run_ranks(uint32_t world_size, const std::function<void(Communicator&)>& body,
                      double timeout_s = 60, SlotSizes sizes = {}, Limits limits = {}) {
  const std::string address = new_address();
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Communicator::Options options;
        options.rank = rank;
        options.world_size = world_size;
        options.address = address;
        options.limits = limits;
        options.limits.timeout_s = timeout_s;
        options.progress = std::make_shared<Progress>(std::make_shared<Arena>(size_t{64} << 20));
        options.sizes = sizes;
        auto communicator = Communicator::create(options);
        body(*communicator);
        communicator->close();
      } catch (const std::exception& error) {
        fail_check(__FILE__, __LINE__, "rank " + std::to_string(rank) + ": " + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace photinus::test

int main() {
  for (const auto& test : photinus::test::tests()) {
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.body();
  }
  std::printf("%zu passed, 0 failed\n", photinus::test::tests().size());
  return 0;
}
