// Python objects in the hands of threads that do not hold the interpreter's lock: what works in flight read
// and write, and what is to be done when they have ended.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>

#include "progress/work.h"

namespace photinus {

// At the interpreter's end all groups are left, and no thread runs Python any more but that which ends it.
extern std::atomic<bool> exiting;

// Gives the interpreter lock back while it lives. A thread that wants the lock again while the interpreter
// ends is made to end by Python before 3.14; that would unwind through destructors and so terminate the
// process. Such a thread sleeps here instead until the process is gone.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// Owns a Python object; null for None. Any thread may drop it. The object itself goes when the main thread
// runs Python next, or when a thread calls `release_dropped`, which needs the interpreter's lock.
std::shared_ptr<void> owner_of(nanobind::handle object);
void release_dropped();

// Python objects that stand for works, in the order in which these end, for one thread to take.
class EndedWorks : public std::enable_shared_from_this<EndedWorks> {
 public:
  // Throws only if nothing was put.
  void put_when_ended(Work& work, nanobind::handle object);
  // The next object, as soon as there is one; None when no work was outstanding for `idle_s` seconds, or at
  // once after `close`.
  nanobind::object take(double idle_s);
  bool is_empty();  // whether no object is outstanding
  void close();

 private:
  using Owners = std::list<std::shared_ptr<void>>;
  void put(Owners& one);

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Owners ended_;
  size_t outstanding_ = 0;  // put and not taken
  bool closed_ = false;
};

}  // namespace photinus
