// Threads that help to reduce. One thread reads some 10 GB/s, and the link of a GPU brings more, so where
// chunks come from GPUs a rank whose share of the cores has some to spare divides a piece among several.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/reduce.h"

namespace photinus {

class ReduceThreads {
 public:
  // How many a rank may have beside the thread that calls and the one that runs the program, where so many
  // ranks share the cores of this host; at most kMost, from where memory is what limits.
  static uint32_t spare(uint32_t cores, uint32_t ranks);
  static constexpr uint32_t kMost = 3;
  // So many bytes of all sources at least are worth waking a thread.
  static constexpr uint64_t kWorthBytes = 256 << 10;

  // They start with the first large reduction. Between two they spin for a while, then sleep: they have cores
  // of their own.
  explicit ReduceThreads(uint32_t helpers) : helpers_(helpers) {}
  ~ReduceThreads();
  ReduceThreads(const ReduceThreads&) = delete;
  ReduceThreads& operator=(const ReduceThreads&) = delete;

  // As reduce_between, with the same bits: each element is reduced by one thread. Two callers at a time do
  // not help each other: the second one is on its own.
  void reduce(Dtype from, Dtype to, Reduction reduction, InstructionSet set, const ReduceCall& call);

 private:
  struct Job;
  void start();
  void help();

  std::mutex turn_;  // of the caller whom they help; guards
  uint32_t helpers_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable called_, done_;
  Job* job_ = nullptr;  // whoever finds it may join
  // Changed with the lock held, and looked at without.
  std::atomic<uint64_t> jobs_ = 0;
  std::atomic<uint32_t> busy_ = 0;
  std::atomic<bool> ending_ = false;
};

}  // namespace photinus
