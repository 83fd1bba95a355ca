// Calls in flight own what they read and write: whatever interrupts their callers, or fails in them, nothing
// that was freed is touched, and nothing is kept that has landed. Run under the sanitizers, which see the
// former.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <new>
#include <random>

#include "base/clock.h"
#include "base/interrupt.h"
#include "check.h"
#include "data.h"

namespace {

// Of this thread: how many allocations succeed before one fails, or how many looks pass before it is
// interrupted.
thread_local int allocations_left = -1, looks_left = -1;

}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  if (void* const memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

using namespace photinus;
using namespace photinus::test;

namespace {

constexpr size_t kElems = 5000, kCalls = 4;
const Call kSum{Operation::all_reduce, Dtype::float32, Reduction::sum, 0, kElems};

enum class Harm { none, interrupted, no_thread, no_memory };

// Until it is destroyed no thread can be started: none has room for so large a stack.
struct NoThreads {
  pthread_attr_t before;
  NoThreads() {
    CHECK(pthread_getattr_default_np(&before) == 0);
    pthread_attr_t huge;
    CHECK(pthread_attr_init(&huge) == 0 && pthread_attr_setstacksize(&huge, size_t{1} << 46) == 0);
    CHECK(pthread_setattr_default_np(&huge) == 0);
    pthread_attr_destroy(&huge);
  }
  ~NoThreads() { CHECK(pthread_setattr_default_np(&before) == 0); }
};

bool masks_are_equal() {
  sigset_t now;
  CHECK(pthread_sigmask(SIG_BLOCK, nullptr, &now) == 0);
  for (int signal = 1; signal < 32; ++signal)
    if (sigismember(&now, signal) == 1) return false;
  return true;
}

struct Caller {
  Communicator& communicator;
  std::mt19937 random;
  std::vector<std::shared_ptr<Work>> works;
  std::vector<std::weak_ptr<std::vector<float>>> owned;
  std::shared_ptr<std::atomic<int>> ended = std::make_shared<std::atomic<int>>(0);

  // The memory is the call's alone as soon as this returns, or throws.
  void begin(size_t number, bool asynchronous) {
    auto memory = std::make_shared<std::vector<float>>(kElems, 1.0f);
    owned.push_back(memory);
    if (number % 2 == 0) {
      Submission given;
      given.call = kSum;
      given.send = given.recv = memory->data();
      given.asynchronous = asynchronous;
      given.owner = std::move(memory);
      works.push_back(communicator.submit(std::move(given)));
    } else {
      MessageCall call;
      call.operation = communicator.rank() == 0 ? Operation::send : Operation::recv;
      call.peer = 1 - communicator.rank();
      call.elems = kElems;
      call.buffer = memory->data();
      call.asynchronous = asynchronous;
      call.owner = std::move(memory);
      works.push_back(communicator.submit(call));
    }
    allocations_left = -1;
    works.back()->when_ended([counted = ended] { ++*counted; });
  }

  void begin_harmed(size_t number, Harm harm) {
    if (harm == Harm::no_memory) {
      works.reserve(works.size() + 1);
      owned.reserve(owned.size() + 2);
      const size_t before = owned.size();
      allocations_left = static_cast<int>(random() % 16);
      try {
        return begin(number, true);
      } catch (const std::bad_alloc&) {
        allocations_left = -1;
      }
      CHECK(owned.size() == before || owned.back().expired());
    } else if (harm == Harm::no_thread && works.empty()) {
      const NoThreads none;
      CHECK(error_of([&] { begin(number, true); }).first == ErrorKind::system);
      CHECK(owned.back().expired());
    }
    begin(number, true);
  }
};

void run_round(uint64_t seed) {
  set_interrupt_check([] { return looks_left >= 0 && looks_left-- == 0; });
  run_ranks(2, [&](Communicator& communicator) {
    Caller caller{communicator, std::mt19937(seed), {}, {}};
    // The other one's threads have started; this one has no thread of its own yet.
    communicator.submit({Operation::barrier}, nullptr, nullptr, 0, false)->wait();
    const bool is_harmed = communicator.rank() == 0;
    bool is_over = false;
    for (size_t number = 0; number < kCalls && !is_over; ++number) {
      const auto harm = static_cast<Harm>(caller.random() % 4);
      usleep(static_cast<useconds_t>(caller.random() % 300));
      try {
        if (is_harmed)
          caller.begin_harmed(number, harm);
        else
          caller.begin(number, false);
        if (harm == Harm::interrupted && is_harmed) looks_left = static_cast<int>(caller.random() % 2);
        if (!is_harmed || harm == Harm::interrupted) caller.works.back()->wait();
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::interrupted || error.kind() == ErrorKind::aborted ||
              error.kind() == ErrorKind::peer_lost);
        is_over = true;
      }
      looks_left = -1;
      CHECK(masks_are_equal());
    }
    if (is_over) communicator.abort("the other one was interrupted");
    for (const auto& work : caller.works) {
      try {
        work->wait();
      } catch (const Error&) {  // NOLINT: how it ended is not what is looked at
        CHECK(is_over);
      }
    }
    const Deadline patience = Deadline::in(10);  // a work is done a moment before it lets go
    auto all_gone = [&] {
      return std::all_of(caller.owned.begin(), caller.owned.end(),
                         [](const auto& each) { return each.expired(); });
    };
    while (!all_gone() && !patience.passed()) usleep(100);
    CHECK(all_gone());
    while (*caller.ended < static_cast<int>(caller.works.size()) && !patience.passed()) usleep(100);
    CHECK(*caller.ended == static_cast<int>(caller.works.size()));
  });
  set_interrupt_check(nullptr);
}

}  // namespace

TEST(calls_own_their_memory_whatever_interrupts_or_fails_in_their_callers) {
  const uint64_t rounds = (whole() ? 1000 : 60) / kCalls;
  for (uint64_t seed = 1; seed <= rounds; ++seed) run_round(seed);
}
