// One operation in flight: a state machine that whoever has time drives (progress.h), and the handle by which
// its caller waits for it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "progress/wait_loop.h"

namespace photinus {

class Lane;
class Progress;

// Whether a thread that waits is all that could move its process: all calls come from it, and nothing else is
// in flight. `perhaps`: there are threads that may make a first call yet.
enum class Alone : uint8_t { no, perhaps, yes };

// An operation's error. Its group keeps it until somebody has seen it, or it has been raised elsewhere.
struct Failure {
  explicit Failure(const Error& error_) : error(error_) {}
  const Error error;
  std::atomic<bool> seen{false};
};

class Work {
 public:
  virtual ~Work() = default;

  // Waits until it is done; 0 means until its own deadline has decided. Throws its error, or Error(timeout)
  // when `timeout_s` passes first: the operation then goes on. When the thread is interrupted
  // (base/interrupt.h) it ends the operation and aborts its group, for the ranks are no longer in step.
  // `sees`: who waits is the one for whom its error is.
  void wait(double timeout_s = 0, bool sees = true);
  bool is_completed() const { return done_.load(std::memory_order_acquire); }
  const Error* error() const;  // null while it runs and when it went well
  // Its error, which it may yet get, has been shown to its caller; whether it had been before.
  bool see();
  // From start to end, without the time in the queue; 0 of a brief one that never had to wait.
  double duration_s() const;
  virtual std::string description() const = 0;
  // Calls `act` once it has ended: here and now, or on the thread that ends it. It must neither block nor
  // throw.
  void when_ended(std::function<void()> act);
  // The rank from which a message from any rank came; -1 for all else.
  virtual int source_rank() const { return -1; }

  // Of tensors in a GPU's memory, where it is done when its copies there are queued. What is put into the
  // stream (a CUstream) from now on runs after them; called when it is done.
  virtual void order(void*) {}
  // Whether all its copies have ended, so that the tensors' memory may go.
  virtual bool has_landed() { return is_completed(); }

 protected:
  // Owns what the work reads and writes: held from before it is queued until it has landed.
  std::shared_ptr<void> owner_;
  double begun_s() const { return begun_s_; }
  // Done at once unless it has to wait: no clock is read for it before, as that takes longer than its work.
  bool is_brief_ = false;
  friend class Progress;

  // Does what can be done now. Throws when it failed.
  virtual Poll advance() = 0;
  // Called before a thread sleeps while the work is blocked; throws to end it, and returns for how many
  // seconds it need not be called again. `caller`: the thread that waits.
  virtual double look(Alone caller) = 0;
  // It ended with an error, the exception being handled, which other operations of its group may have to
  // know.
  virtual void fail() = 0;
  // Its group keeps the error for a caller who may never ask.
  virtual void keep(const std::shared_ptr<Failure>& failure) = 0;
  // The caller gives up waiting for good.
  virtual void abandon(const std::string& reason) = 0;
  // A caller has stopped waiting in vain (what look() told others about it no longer holds).
  virtual void end_wait() {}

 private:
  void act_on_end();

  Progress* progress_ = nullptr;  // set from submission on; the work's group keeps it
  std::shared_ptr<Lane> lane_;
  std::shared_ptr<Failure> failure_;
  std::atomic<bool> seen_{false};
  std::vector<std::function<void()>> acts_;  // when_ended
  std::atomic<bool> has_acts_{false};
  std::shared_ptr<Work> next_landing_;  // Progress::landing_
  bool begun_ = false;
  double begun_s_ = 0, ended_s_ = 0;
  std::atomic<bool> done_{false};
};

}  // namespace photinus
