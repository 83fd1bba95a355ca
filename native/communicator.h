// The roof of the engine and the one class that bindings see: the collectives of a group of ranks on one
// host.
//
// Calls run in the order in which they are submitted, one at a time for each communicator; different
// communicators are independent. Whoever has time runs them: a progress thread, or a thread that waits
// anyway. All methods may be called from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "collectives/plan.h"
#include "memory/arena.h"

namespace photinus {

class Communicator;

// One collective in flight.
class Work {
 public:
  // Waits until it is done; 0 means until the collective's own deadline has decided. Throws the collective's
  // error, or Error(timeout) when `timeout_s` passes first: the collective then goes on. `interrupted` (may
  // be empty) is asked now and then; when it returns true the communicator is aborted, for its ranks are no
  // longer in step.
  void wait(double timeout_s = 0, const std::function<bool()>& interrupted = {});
  bool is_completed() const { return done_.load(std::memory_order_acquire); }
  std::exception_ptr error() const;  // null while it runs and when it went well
  double duration_s() const;         // from start to end, without the time in the queue
  const std::string& description() const { return description_; }

 private:
  friend class Communicator;
  Call call_;
  const void* send_ = nullptr;
  void* recv_ = nullptr;
  uint64_t sequence_ = 0;
  double timeout_s_ = 0;
  std::string description_;
  std::function<bool()> interrupted_;  // set while the thread that asked runs it itself
  std::exception_ptr error_;
  double begun_s_ = 0, ended_s_ = 0;
  std::atomic<bool> done_{false};
  std::weak_ptr<Communicator> owner_;
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  struct Options {
    uint32_t rank = 0, world_size = 1;
    std::string address;           // from new_address(); unused in a world of one
    std::string name = "world";    // for messages
    double timeout_s = 300;        // of the rendezvous, and of collectives that bring no other
    std::shared_ptr<Arena> arena;  // default: this process's
    SlotSizes sizes;
  };

  // Meets the other ranks. Throws Error(timeout) naming those that are missing.
  static std::shared_ptr<Communicator> create(const Options& options);
  ~Communicator();

  uint32_t rank() const;
  uint32_t world_size() const;
  const std::shared_ptr<Arena>& arena() const;

  // Starts a collective; the buffers must live until it is done. all_reduce and broadcast work in place when
  // send equals recv; reduce_scatter's recv may be the own slice of send, all_gather's send the own slice of
  // recv; no other overlap. Throws Error(invalid_argument) before anything is exchanged. timeout_s 0 means
  // the communicator's. With `asynchronous` a progress thread runs it; without, it runs when somebody waits
  // for it.
  std::shared_ptr<Work> submit(const Call& call, const void* send, void* recv, double timeout_s = 0,
                               bool asynchronous = true);

  // Ends everything here and, at once, at the peers that wait for this rank. Later calls raise.
  void abort(const std::string& reason);

  // What peers read as this rank's own reason if it goes away.
  void set_reason(const std::string& reason);

  // Leaves in order; calls that are still queued end with Error(aborted). Idempotent.
  void close();

  // Whether a failure has made the communicator unusable, and which.
  std::exception_ptr failure() const;

  // How a call like this would run if all tensors lay in arenas (or in ordinary memory): for people.
  std::string explain(const Call& call, bool in_arena) const;

 private:
  friend class Work;
  struct State;
  explicit Communicator(const Options& options);

  void progress();
  void help(Work& work, double timeout_s, const std::function<bool()>& interrupted);
  void run_next(std::unique_lock<std::mutex>& lock);
  void execute(Work& work);
  std::vector<CallDescriptor> meet(Work& work, const std::function<void(const std::vector<uint32_t>&)>& look);
  const Plan& plan(const Call& call, Algorithm algorithm);
  void refuse_mismatch(const Work& work, const std::vector<CallDescriptor>& descriptors) const;
  void look(const Work& work, const Deadline& deadline, const std::vector<uint32_t>& missing);
  std::string who(uint32_t rank) const;
  std::string what_became_of(uint32_t rank) const;
  void fail(const std::exception_ptr& error, const std::string& reason);

  std::unique_ptr<State> state_;
};

}  // namespace photinus
