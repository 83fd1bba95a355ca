#include "python_objects.h"

#include <unistd.h>

#include <chrono>
#include <utility>

namespace nb = nanobind;

namespace photinus {
namespace {

struct Owned {
  PyObject* object;
  Owned* next;
};
std::atomic<Owned*> dropped{nullptr};

int release_all(void*) {
  Owned* each = dropped.exchange(nullptr);
  while (each) {
    Py_DECREF(each->object);
    delete std::exchange(each, each->next);
  }
  return 0;
}

void drop(Owned* owned) {
  Owned* before = dropped.load();
  do owned->next = before;
  while (!dropped.compare_exchange_weak(before, owned));
  if (!before && !exiting.load())
    Py_AddPendingCall(release_all, nullptr);  // if its queue is full, the next call does it
}

}  // namespace

std::atomic<bool> exiting{false};

Unlocked::~Unlocked() {
  try {
    PyEval_RestoreThread(state_);
  } catch (...) {  // abi::__forced_unwind, which libc++ has no name for
    while (true) pause();
  }
}

std::shared_ptr<void> owner_of(nb::handle object) {
  if (object.is_none()) return nullptr;
  auto* const owned = new Owned{object.ptr(), nullptr};
  Py_INCREF(owned->object);
  return {owned, drop};  // drops it, too, if it throws
}

void release_dropped() {
  if (dropped.load(std::memory_order_relaxed)) release_all(nullptr);
}

void EndedWorks::put_when_ended(Work& work, nb::handle object) {
  auto one = std::make_shared<Owners>();
  one->push_back(owner_of(object));
  {
    std::lock_guard lock(mutex_);
    outstanding_ += 1;
  }
  try {
    work.when_ended([self = shared_from_this(), one] { self->put(*one); });
  } catch (...) {
    std::lock_guard lock(mutex_);
    outstanding_ -= 1;
    throw;
  }
}

void EndedWorks::put(Owners& one) {
  std::lock_guard lock(mutex_);
  ended_.splice(ended_.end(), one);
  changed_.notify_one();
}

nb::object EndedWorks::take(double idle_s) {
  Owners taken;
  {
    Unlocked unlocked;
    std::unique_lock lock(mutex_);
    const std::chrono::duration<double> idle(idle_s);
    while (ended_.empty()) {
      if (outstanding_ > 0)
        changed_.wait(lock);
      else if (closed_ || changed_.wait_for(lock, idle) == std::cv_status::timeout)
        break;
    }
    if (!ended_.empty()) {
      taken.splice(taken.end(), ended_, ended_.begin());
      outstanding_ -= 1;
    }
  }
  if (taken.empty()) return nb::none();
  nb::object object = nb::borrow(static_cast<Owned*>(taken.front().get())->object);
  taken.clear();
  release_dropped();
  return object;
}

bool EndedWorks::is_empty() {
  std::lock_guard lock(mutex_);
  return outstanding_ == 0;
}

void EndedWorks::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

}  // namespace photinus
