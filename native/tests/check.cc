// The program of each test, and ranks as threads.
#include "check.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake_peers.h"
#include "slow_device.h"

#if defined(__SANITIZE_ADDRESS__)
// Undefined behaviour traps (native/CMakeLists.txt): it is told where. A quarter of the usual memory is kept
// from being used again, as most of the time of some tests went into touching it.
extern "C" const char* __asan_default_options() {
  return "handle_sigill=1:quarantine_size_mb=64";
}
#endif

namespace photinus::test {

[[noreturn]] void fail_check(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::fflush(nullptr);
  std::_Exit(1);  // ranks may be waiting on other threads
}

std::pair<ErrorKind, std::string> error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
  fail_check(__FILE__, __LINE__, "no error was thrown");
}

namespace {
FakePeers*& own_peers() {
  static thread_local FakePeers* own = nullptr;
  return own;
}
}  // namespace

void die() {
  own_peers()->die();
}

void run_ranks(uint32_t world_size, const std::function<void(Communicator&)>& body, double timeout_s,
               SlotSizes sizes, Limits limits, const std::function<void(Communicator::Options&)>& configure) {
  const std::string address = new_address();
  std::vector<std::shared_ptr<Arena>> arenas(world_size);
  for (auto& arena : arenas) arena = std::make_shared<Arena>(size_t{64} << 20);
  sizes.chunk_bytes = std::max<uint64_t>(sizes.chunk_bytes, world_size * kLineBytes);
  std::shared_ptr<FakeNetwork> network;
  if (schedule()) network = std::make_shared<FakeNetwork>(arenas, sizes.bytes(), *schedule());
  auto [networks, places] = listeners_of(world_size);
  for (HostPlace& place : places) place.pid = getpid();
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
        options.progress = std::make_shared<Progress>(arenas[rank]);
        options.sizes = sizes;
        options.places = places;
        if (layout()) options.network = networks[rank];
        if (network) {
          auto fake = std::make_shared<FakePeers>(network, rank);
          own_peers() = fake.get();
          options.peers = fake;
          if (*schedule() % 2)
            options.device = std::make_shared<SlowDevice>(arenas[rank]->page().futex, *schedule() + rank);
        }
        if (configure) configure(options);
        own_options() = options;
        auto communicator = Communicator::create(options);
        body(*communicator);
        communicator->close();
        own_options() = {};
      } catch (const std::exception& error) {
        fail_check(__FILE__, __LINE__, "rank " + std::to_string(rank) + ": " + error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace photinus::test

//   X_test                        every test, over shared memory
//   X_test --whole ...            with every case, where a test takes a few of many
//   X_test --only WORD ...        tests whose name contains the word
//   X_test --hosts LAYOUT         those that hold there, with ranks on several hosts
//   X_test --schedules N [FIRST]  N schedules from FIRST on, each of one of the tests that take any peers
int main(int argc, char** argv) {
  using namespace photinus::test;
  photinus::Progress::set_thread_check(has_no_other_threads);
  if (argc > 1 && std::strcmp(argv[1], "--whole") == 0) whole() = true, --argc, ++argv;
  if (argc > 2 && std::strcmp(argv[1], "--only") == 0) {
    std::erase_if(tests(), [&](const Test& test) { return !std::strstr(test.name, argv[2]); });
    argc -= 2, argv += 2;
  }
  if (argc > 2 && std::strcmp(argv[1], "--schedules") == 0) {
    std::vector<Test> chosen;
    for (const Test& test : tests())
      if (test.also & kLateWords) chosen.push_back(test);
    const uint64_t first = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0;
    const uint64_t count = std::strtoull(argv[2], nullptr, 10);
    for (uint64_t seed = first; seed < first + count; ++seed) {
      const Test& test = chosen.at(seed % chosen.size());
      schedule() = seed / chosen.size();
      if (argc > 3 || seed % 100 == 0)
        std::printf("%s, schedule %llu\n", test.name, (unsigned long long)seed);
      std::fflush(stdout);
      test.body();
    }
    std::printf("%llu schedules passed\n", (unsigned long long)count);
    return 0;
  }
  if (argc > 2 && std::strcmp(argv[1], "--hosts") == 0) {
    layout() = argv[2];
    std::erase_if(tests(), [](const Test& test) { return !(test.also & kSeveralHosts); });
  }
  CHECK(!tests().empty());
  for (const Test& test : tests()) {
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.body();
  }
  std::printf("%zu passed, 0 failed\n", tests().size());
  return 0;
}
