#include "kernels/reduce_threads.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>

#include "base/clock.h"
#include "base/thread.h"

namespace photinus {
namespace {

// Whole cache lines of each source and destination; small, since who comes late takes what is left.
constexpr uint64_t kPieceElems = 4096;
// Chunks come from a GPU 50 to 100 us apart, and to wake a thread takes as long as to add one. (Two ranks on
// an H200, with the helpers awake: 1 MiB in 125 us instead of 194, 46 x 4 MiB in 14.3 ms instead of 16.0, 64
// MiB as before, for twice the processor time.) Data loaders may want the cores, hence the yielding.
constexpr double kPause_s = 20e-6, kYield_s = 200e-6;

template <class Condition>
void wait_awake(Condition&& is_met) {
  const double start = now_s();
  for (double waited = 0; !is_met() && waited < kYield_s; waited = now_s() - start) {
    if (waited < kPause_s)
      for (int turn = 0; turn < 16 && !is_met(); ++turn) pause_cpu();
    else
      yield_cpu();
  }
}

}  // namespace

struct ReduceThreads::Job {
  const Dtype from, to;
  const Reduction reduction;
  const InstructionSet set;
  const ReduceCall& whole;
  std::atomic<uint64_t> next{0};  // element that nobody has begun

  void run() {
    std::vector<const void*> sources(whole.source_count);
    std::vector<void*> destinations(whole.destination_count);
    ReduceCall piece = whole;
    piece.sources = sources.data();
    piece.destinations = destinations.data();
    for (uint64_t at; (at = next.fetch_add(kPieceElems, std::memory_order_relaxed)) < whole.elems;) {
      piece.elems = std::min(kPieceElems, whole.elems - at);
      for (uint32_t i = 0; i < whole.source_count; ++i)
        sources[i] = static_cast<const std::byte*>(whole.sources[i]) + at * size_bytes(from);
      for (uint32_t i = 0; i < whole.destination_count; ++i)
        destinations[i] = static_cast<std::byte*>(whole.destinations[i]) + at * size_bytes(to);
      reduce_between(from, to, reduction, set, piece);
    }
  }
};

uint32_t ReduceThreads::spare(uint32_t cores, uint32_t ranks) {
  const uint32_t share = cores / std::max(ranks, 1u);
  return std::clamp(share, 2u, 2 + kMost) - 2;
}

ReduceThreads::~ReduceThreads() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  called_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

// Where there may be no more threads, those that there are do it.
void ReduceThreads::start() {
  try {
    while (threads_.size() < helpers_) threads_.push_back(start_thread("photinus-add", [this] { help(); }));
  } catch (const std::system_error&) {
    helpers_ = static_cast<uint32_t>(threads_.size());
  }
}

void ReduceThreads::reduce(Dtype from, Dtype to, Reduction reduction, InstructionSet set,
                           const ReduceCall& call) {
  std::unique_lock turn(turn_, std::defer_lock);
  const bool is_worth_it = call.elems * size_bytes(from) * call.source_count >= kWorthBytes;
  if (is_worth_it && turn.try_lock()) start();
  if (!turn || helpers_ == 0) return reduce_between(from, to, reduction, set, call);
  Job job{from, to, reduction, set, call};
  {
    std::lock_guard lock(mutex_);
    job_ = &job;
    ++jobs_;
  }
  called_.notify_all();  // those that spin come without
  job.run();
  {
    std::lock_guard lock(mutex_);
    job_ = nullptr;  // who comes now has nothing to do
  }
  wait_awake([this] { return busy_ == 0; });
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return busy_ == 0; });
}

void ReduceThreads::help() {
  for (uint64_t seen = 0;;) {
    wait_awake([&] { return ending_ || jobs_ != seen; });
    std::unique_lock lock(mutex_);
    called_.wait(lock, [&] { return ending_ || jobs_ != seen; });
    if (ending_) return;
    seen = jobs_;
    Job* const job = job_;
    if (!job) continue;  // the others were done first
    ++busy_;
    lock.unlock();
    job->run();
    lock.lock();
    if (--busy_ == 0) done_.notify_one();
  }
}

}  // namespace photinus
