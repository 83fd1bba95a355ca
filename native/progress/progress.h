// Drives the operations of one process. Operations stand in lanes: those of one lane run one after the other,
// lanes are independent, and only the head of a lane is driven. A head is a state machine that never blocks,
// so one thread drives any number of lanes, and groups that are used in different orders on different ranks
// cannot lock each other.
//
// A lane is driven by the thread that waits for it, if there is one; otherwise, for asynchronous operations,
// by the progress thread, which starts with the first of them and sleeps while callers drive everything
// themselves.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "peers/peers.h"
#include "peers/processes.h"
#include "progress/work.h"
#include "shm/arena.h"

namespace photinus {

class Lane {
 public:
  // `peers`: the ranks for which this lane's operations wait.
  Lane(std::shared_ptr<Peers> peers, const SpinTimes& times) : peers_(std::move(peers)), spin_(times) {}
  bool is_empty() const { return !first_.load(std::memory_order_seq_cst); }
  const SpinTimes& spin_times() const { return spin_; }
  // Whether it has works, and the progress thread drives them because nobody waits.
  bool runs_by_itself() const { return !is_empty() && listed_.load() && waiters_.load() == 0; }

 private:
  friend class Progress;
  std::shared_ptr<Work> head();
  void push(const std::shared_ptr<Work>& work, std::atomic<size_t>& in_flight);
  std::shared_ptr<Work> pop();

  const std::shared_ptr<Peers> peers_;
  const SpinTimes spin_;
  std::mutex mutex_;  // guards queue_
  std::deque<std::shared_ptr<Work>> queue_;
  std::atomic<Work*> first_{nullptr};  // of queue_
  std::mutex driving_;                 // held while the head is driven
  std::atomic<uint32_t> waiters_{0};
  std::atomic<bool> listed_{false};  // whether the progress thread knows the lane
};

class Progress {
 public:
  explicit Progress(std::shared_ptr<Arena> arena);
  ~Progress();
  // That of this process (in a forked child a new one), over the process's arena.
  static std::shared_ptr<Progress> of_this_process();

  const std::shared_ptr<Arena>& arena() const { return arena_; }
  // The peers of all groups whose operations it drives, and this process.
  Processes& processes() { return processes_; }

  // Puts a work at the end of a lane. With `asynchronous` it runs by itself, without it when somebody waits
  // for it.
  void submit(const std::shared_ptr<Lane>& lane, const std::shared_ptr<Work>& work, bool asynchronous);
  // Drives a lane until it is empty; its works must be about to end (the group was aborted).
  void drain(const std::shared_ptr<Lane>& lane);
  // Lets go of the tensors of works that have landed since they ended.
  void release_landed() { release(nullptr); }
  // Whether this thread, which waits for something else than an operation, is all that could move the
  // process.
  Alone is_idle_but_for_this_thread(double waited_s);
  // Asked before a thread is taken for the only one from which calls come: whether the process has others
  // that may make a first one yet. Null: any that is not the engine's may. For all that drive, to be set
  // before they do.
  static void set_thread_check(bool (*has_other_threads)());

 private:
  friend class Work;
  enum class Interrupts : uint8_t { end_the_work, are_ignored };
  void wait(Work& work, double timeout_s, Interrupts interrupts);
  void run();
  enum class Drive : uint8_t { locked, blocked, moved, empty };
  Drive drive(Lane& lane, bool as_progress_thread);
  double look_at(Lane& lane, Alone caller);
  void give_up(Lane& lane, Work& work);
  void note_caller();
  Alone is_only_caller(double waited_s) const;
  Alone is_stuck(Lane& lane, double waited_s) const;
  void end(Lane& lane, Work& work, std::optional<Error> error = std::nullopt);
  static Error fail(Work& work);
  void release(std::shared_ptr<Work> ended);
  void wake_own_threads();
  void hand_over(Lane& lane);
  void call_thread(const std::shared_ptr<Lane>& lane);
  void forget_empty_lanes();

  std::shared_ptr<Arena> arena_;
  Processes processes_;
  const pid_t owner_ = getpid();
  std::mutex mutex_;  // guards what follows; never held while a lane is driven
  std::condition_variable called_;
  std::vector<std::shared_ptr<Lane>> lanes_;  // with asynchronous works
  bool work_to_do_ = false;
  std::atomic<uint64_t> lanes_version_{0};  // changes with lanes_
  std::atomic<bool> ending_{false};
  std::atomic<std::thread::id> caller_{};  // the first thread that submitted something
  std::atomic<bool> several_callers_{false};
  std::atomic<size_t> in_flight_{0};  // works of all lanes
  std::mutex landing_mutex_;
  std::shared_ptr<Work> landing_;  // has ended, but a GPU's copies have not: a list
  std::atomic<bool> has_landing_{false};
  std::thread thread_;
};

}  // namespace photinus
