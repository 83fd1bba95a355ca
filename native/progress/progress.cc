#include "progress/progress.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/process.h"
#include "base/thread.h"

namespace photinus {
namespace {

// So long after somebody began to wait, a thread that has called nothing is suspected of never doing so.
constexpr double kFirstCall_s = 10;
// From when a wait may be for ever. Before, it would cost more than it tells to ask the interpreter, and to
// show peers what this one waits for.
constexpr double kStuck_s = kSleepSlice_s;

// Whether the process has threads beside this one and the engine's own.
bool has_unknown_threads() {
  const std::string own = std::to_string(syscall(SYS_gettid));  // gettid(): since glibc 2.30
  std::error_code none;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", none)) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    if (task.path().filename() != own && !name.starts_with("photinus-")) return true;
  }
  return bool(none);
}

std::atomic<bool (*)()> has_other_threads{has_unknown_threads};
std::mutex acts_mutex;  // of all works: few have any

// Announces a thread that is about to sleep, to its own process; and to the peers of groups, so that they
// ring.
class SleepNotice {
 public:
  explicit SleepNotice(Futex& own) : own_(own) { own_.asleep.fetch_add(1, std::memory_order_seq_cst); }
  ~SleepNotice() {
    withdraw();
    own_.asleep.fetch_sub(1, std::memory_order_seq_cst);
  }
  SleepNotice(const SleepNotice&) = delete;
  SleepNotice& operator=(const SleepNotice&) = delete;

  void announce_to(const std::shared_ptr<Peers>& group) {
    group->announce_sleep();
    groups_.push_back(group);
  }
  void withdraw() {
    for (const auto& group : groups_) group->end_sleep();
    groups_.clear();
  }
  bool is_withdrawn() const { return groups_.empty(); }

 private:
  Futex& own_;
  std::vector<std::shared_ptr<Peers>> groups_;
};

// Shows a polling function that its thread is about to sleep, while it lives.
struct SleepScope {
  SleepNotice asleep;
  SleepNotice*& shown;
  SleepScope(Futex& own, SleepNotice*& to) : asleep(own), shown(to) { shown = &asleep; }
  ~SleepScope() { shown = nullptr; }
};

}  // namespace

// --- works

void Work::wait(double timeout_s, bool sees) {
  if (!is_completed()) progress_->wait(*this, timeout_s, Progress::Interrupts::end_the_work);
  if (!failure_) return;
  if (sees) see();
  throw Error(failure_->error);
}

const Error* Work::error() const {
  return is_completed() && failure_ ? &failure_->error : nullptr;
}

void Work::when_ended(std::function<void()> act) {
  {
    std::lock_guard lock(acts_mutex);
    acts_.push_back(std::move(act));
  }
  has_acts_.store(true, std::memory_order_seq_cst);  // one of the two threads sees what the other has set
  if (done_.load(std::memory_order_seq_cst)) act_on_end();
}

void Work::act_on_end() {
  std::vector<std::function<void()>> acts;
  {
    std::lock_guard lock(acts_mutex);
    acts.swap(acts_);
  }
  for (const auto& act : acts) act();
}

bool Work::see() {
  const bool before = seen_.exchange(true);
  if (error()) failure_->seen.store(true);
  return before;
}

double Work::duration_s() const {
  return is_completed() ? ended_s_ - begun_s_ : 0;
}

// --- lanes

std::shared_ptr<Work> Lane::head() {
  std::lock_guard lock(mutex_);
  return queue_.empty() ? nullptr : queue_.front();
}

void Lane::push(const std::shared_ptr<Work>& work, std::atomic<size_t>& in_flight) {
  std::lock_guard lock(mutex_);
  queue_.push_back(work);
  in_flight.fetch_add(1);
  if (queue_.size() == 1) first_.store(work.get(), std::memory_order_seq_cst);
}

std::shared_ptr<Work> Lane::pop() {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Work> work = std::move(queue_.front());
  queue_.pop_front();
  first_.store(queue_.empty() ? nullptr : queue_.front().get(), std::memory_order_seq_cst);
  return work;
}

// A thread that began to wait may have found the lane locked by the progress thread, which will pass over the
// lane from now on: the waiter must look again. (A waiter that rang here would wake itself for ever.
// model/lane.pml)
void Progress::hand_over(Lane& lane) {
  if (lane.waiters_.load(std::memory_order_seq_cst)) wake_own_threads();
}

// Drives the head, and those behind it, as far as they go.
Progress::Drive Progress::drive(Lane& lane, bool as_progress_thread) {
  std::unique_lock driving(lane.driving_, std::try_to_lock);
  if (!driving) return Drive::locked;
  Drive result = Drive::blocked;
  while (true) {
    Work* const work = lane.first_.load(std::memory_order_seq_cst);  // lives: only who drives ends it
    if (!work) {
      if (result == Drive::blocked) result = Drive::empty;
      break;
    }
    if (!work->begun_) {
      work->begun_ = true;
      if (!work->is_brief_) work->begun_s_ = now_s();
    }
    Poll now = Poll::done;
    std::optional<Error> error;
    try {
      now = work->advance();
    } catch (...) {
      error = fail(*work);
    }
    if (now != Poll::blocked) result = Drive::moved;
    if (now != Poll::done) {
      if (work->begun_s_ == 0) work->begun_s_ = now_s();
      break;
    }
    end(lane, *work, std::move(error));
  }
  driving.unlock();
  if (as_progress_thread) hand_over(lane);
  return result;
}

// While an exception is handled: tells the work, and returns what is to be kept.
Error Progress::fail(Work& work) {
  work.fail();
  try {
    throw;
  } catch (const Error& error) {
    return Error(error);
  } catch (const std::exception& other) {  // memory ran out
    return Error(ErrorKind::system, work.description() + ": " + other.what());
  }
}

void Progress::end(Lane& lane, Work& work, std::optional<Error> error) {
  if (error) work.keep(work.failure_ = std::make_shared<Failure>(*error));
  if (work.begun_s_ > 0) work.ended_s_ = now_s();
  const std::shared_ptr<Work> kept = lane.pop();
  in_flight_.fetch_sub(1);
  work.done_.store(true, std::memory_order_seq_cst);
  if (error && work.seen_.load()) work.see();
  wake_own_threads();
  if (work.has_acts_.load(std::memory_order_seq_cst)) work.act_on_end();
  if (work.owner_) release(kept);
}

// A list through the works themselves: what ends works may not fail for lack of memory.
void Progress::release(std::shared_ptr<Work> ended) {
  if (ended && ended->has_landed()) return ended->owner_.reset();
  if (!ended && !has_landing_.load()) return;
  std::lock_guard lock(landing_mutex_);
  if (ended) {
    ended->next_landing_ = std::move(landing_);
    landing_ = std::move(ended);
  }
  for (std::shared_ptr<Work>* at = &landing_; *at;) {
    if (!(*at)->has_landed()) {
      at = &(*at)->next_landing_;
      continue;
    }
    const std::shared_ptr<Work> landed = std::move(*at);
    landed->owner_.reset();
    *at = std::move(landed->next_landing_);
  }
  has_landing_.store(landing_ != nullptr);
}

void Progress::wake_own_threads() {
  Futex& futex = arena_->page().futex;
  if (futex.asleep.load(std::memory_order_seq_cst)) wake(futex);
}

// Lets the blocked head decide whether to wait on.
double Progress::look_at(Lane& lane, Alone caller) {
  std::unique_lock driving(lane.driving_, std::try_to_lock);
  if (!driving) return kSleepSlice_s;
  Work* const work = lane.first_.load(std::memory_order_seq_cst);
  if (!work || !work->begun_) return kSleepSlice_s;
  std::optional<Error> error;
  try {
    return work->look(caller);
  } catch (...) {
    error = fail(*work);
  }
  end(lane, *work, std::move(error));
  return 0;
}

// For a caller that is called away and gets its tensors back: nothing may touch them any more.
void Progress::give_up(Lane& lane, Work& work) {
  work.abandon("interrupted by a signal while waiting for " + work.description());
  while (!work.is_completed()) {
    if (drive(lane, false) == Drive::locked) usleep(100);
    if (!work.is_completed()) look_at(lane, Alone::no);
  }
}

// Whether this thread, waiting for a lane, is all that could move the process: all calls come from it, and
// nothing is in flight but this lane.
Alone Progress::is_stuck(Lane& lane, double waited_s) const {
  const Alone caller = is_only_caller(waited_s);
  std::lock_guard lock(lane.mutex_);
  return in_flight_.load() == lane.queue_.size() ? caller : Alone::no;
}

Alone Progress::is_idle_but_for_this_thread(double waited_s) {
  note_caller();
  return in_flight_.load() == 0 ? is_only_caller(waited_s) : Alone::no;
}

Alone Progress::is_only_caller(double waited_s) const {
  if (several_callers_.load(std::memory_order_relaxed) || caller_.load() != std::this_thread::get_id())
    return Alone::no;
  if (!has_other_threads.load()()) return Alone::yes;
  return waited_s > kFirstCall_s ? Alone::perhaps : Alone::no;
}

void Progress::set_thread_check(bool (*check)()) {
  has_other_threads.store(check ? check : has_unknown_threads);
}

void Progress::note_caller() {
  const std::thread::id me = std::this_thread::get_id();
  if (caller_.load(std::memory_order_relaxed) == me) return;
  std::thread::id nobody{};
  if (!caller_.compare_exchange_strong(nobody, me)) several_callers_.store(true, std::memory_order_relaxed);
}

// --- the process's

Progress::Progress(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

Progress::~Progress() {
  {
    std::lock_guard lock(mutex_);
    ending_.store(true);
    called_.notify_all();
  }
  wake(arena_->page().futex);
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Progress> Progress::of_this_process() {
  static std::mutex mutex;
  static pid_t owner = 0;
  static auto* progress = new std::shared_ptr<Progress>;  // leaked: its thread may outlive static destruction
  std::lock_guard lock(mutex);
  if (!*progress || owner != getpid()) {
    if (*progress)
      new std::shared_ptr<Progress>(*progress);  // the parent's thread is not the forked child's to join
    *progress = std::make_shared<Progress>(Arena::of_this_process());
    owner = getpid();
  }
  return *progress;
}

void Progress::submit(const std::shared_ptr<Lane>& lane, const std::shared_ptr<Work>& work,
                      bool asynchronous) {
  note_caller();
  release_landed();
  work->progress_ = this;
  work->lane_ = lane;
  std::unique_lock lock(mutex_, std::defer_lock);
  if (asynchronous) {
    // What can fail comes before the work is queued: after an exception the tensors are the caller's again.
    lock.lock();
    if (!thread_.joinable()) thread_ = start_thread("photinus-run", [this] { run(); });
    lanes_.reserve(lanes_.size() + 1);
  }
  lane->push(work, in_flight_);
  if (asynchronous) call_thread(lane);
}

// Has the progress thread drive a lane; mutex_ is held, the thread runs, and lanes_ has room.
void Progress::call_thread(const std::shared_ptr<Lane>& lane) {
  if (!lane->listed_.exchange(true)) {
    lanes_.push_back(lane);
    lanes_version_.fetch_add(1);
  }
  work_to_do_ = true;
  called_.notify_one();
  wake_own_threads();  // it may sleep on the futex for other lanes
}

// A submission lists its lane after it has queued its work, so none is forgotten.
void Progress::forget_empty_lanes() {
  std::lock_guard lock(mutex_);
  std::erase_if(lanes_, [](const std::shared_ptr<Lane>& lane) {
    if (!lane->is_empty()) return false;
    lane->listed_.store(false);
    return true;
  });
  lanes_version_.fetch_add(1);
}

void Progress::run() {
  Futex& futex = arena_->page().futex;
  std::vector<std::shared_ptr<Lane>> lanes;
  uint64_t seen = UINT64_MAX;
  SleepNotice* asleep = nullptr;
  auto poll = [&] {
    if (ending_.load()) return Poll::done;
    if (lanes_version_.load() != seen) {
      std::lock_guard lock(mutex_);
      seen = lanes_version_.load();
      lanes = lanes_;
    }
    bool moved = false, busy = false, empty = false;
    if (asleep) asleep->withdraw();
    for (const auto& lane : lanes) {
      if (lane->waiters_.load(std::memory_order_seq_cst)) continue;  // who waits for it drives it
      if (asleep) asleep->announce_to(lane->peers_);
      const Drive now = drive(*lane, true);
      moved |= now == Drive::moved;
      empty |= now == Drive::empty;
      busy |= now != Drive::empty;
    }
    if (empty) forget_empty_lanes();
    if (moved) return Poll::moved;
    return busy ? Poll::blocked : Poll::done;
  };
  auto look = [&] {
    double nap_s = kSleepSlice_s;
    for (const auto& lane : lanes) {
      if (lane->waiters_.load()) continue;
      nap_s = std::min(nap_s, look_at(*lane, Alone::no));
      hand_over(*lane);
    }
    return nap_s;
  };
  while (true) {
    SpinTimes times;  // where ranks exceed cores in one group, pauses are poison for all
    {
      std::unique_lock lock(mutex_);
      called_.wait(lock, [&] { return ending_.load() || work_to_do_; });
      if (ending_.load()) return;
      work_to_do_ = false;
      for (const auto& lane : lanes_) {
        times.pause_s = std::min(times.pause_s, lane->spin_.pause_s);
        times.yield_s = std::min(times.yield_s, lane->spin_.yield_s);
        times.in_vain_s = std::min(times.in_vain_s, lane->spin_.in_vain_s);
      }
    }
    wait_on(futex, times, poll, [&] { return SleepScope(futex, asleep); }, look);
    lanes.clear();
    seen = UINT64_MAX;
  }
}

void Progress::wait(Work& work, double timeout_s, Interrupts interrupts) {
  if (owner_ != own_pid())
    throw Error(ErrorKind::aborted, work.description() + " belongs to the process that forked this one");
  const std::shared_ptr<Lane>& lane = work.lane_;
  const double until_s = timeout_s > 0 ? now_s() + timeout_s : 0;
  struct Waiting {
    Progress& progress;
    const std::shared_ptr<Lane>& lane;
    Waiting(Progress& p, const std::shared_ptr<Lane>& l) : progress(p), lane(l) {
      lane->waiters_.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Waiting() {
      // What is left in the lane goes on without this thread.
      const bool last = lane->waiters_.fetch_sub(1, std::memory_order_seq_cst) == 1;
      if (last && lane->listed_.load() && !lane->is_empty()) {
        std::lock_guard lock(progress.mutex_);
        progress.call_thread(lane);
      } else if (!last) {
        progress.wake_own_threads();
      }
    }
  } waiting(*this, lane);
  SleepNotice* asleep = nullptr;
  double first_look_s = 0, blocked_since_s = 0;  // the latter: the first look since something moved, or 0
  auto poll = [&] {
    auto done = [&] { return work.done_.load(std::memory_order_seq_cst); };
    if (done()) return Poll::done;
    Drive now = drive(*lane, false);
    if (asleep) {
      // Peers ring for the thread that drives the lane, and no other: while another thread has it, that one
      // wakes this one when it lets go.
      if (now == Drive::locked) {
        asleep->withdraw();
      } else if (now == Drive::blocked && asleep->is_withdrawn()) {
        asleep->announce_to(lane->peers_);
        now = drive(*lane, false);
      }
    }
    if (done()) return Poll::done;
    if (now != Drive::moved) return Poll::blocked;
    if (blocked_since_s > 0) work.end_wait();
    blocked_since_s = 0;
    return Poll::moved;
  };
  auto look = [&] {
    const double now = now_s();
    if (first_look_s == 0) first_look_s = now;
    if (blocked_since_s == 0) blocked_since_s = now;
    const double rest_s = blocked_since_s + kStuck_s - now;
    Alone stuck = Alone::no;
    try {
      // Who waits with a limit goes on after it, and may then do what the others wait for.
      if (timeout_s == 0 && rest_s <= 0) stuck = is_stuck(*lane, now - first_look_s);
    } catch (...) {  // the thread check runs the interpreter, and so a signal's handler, which may raise
      give_up(*lane, work);
      throw;
    }
    double nap_s = look_at(*lane, stuck);
    if (work.is_completed()) return 0.0;
    if (timeout_s == 0 && rest_s > 0) nap_s = std::min(nap_s, rest_s);
    if (timeout_s > 0 && now_s() >= until_s)
      throw Error(ErrorKind::timeout,
                  text("%s is not done after waiting %.3g s for it; it is not ended by this",
                       work.description().c_str(), timeout_s));
    if (interrupts == Interrupts::end_the_work && is_interrupted()) {
      give_up(*lane, work);
      throw Error(ErrorKind::interrupted, "interrupted while waiting for " + work.description());
    }
    return timeout_s > 0 ? std::clamp(until_s - now_s(), 0.0, nap_s) : nap_s;
  };
  struct WaitEnd {
    Work& work;
    const double& blocked_since_s;
    ~WaitEnd() {
      if (blocked_since_s > 0) work.end_wait();
    }
  } wait_end{work, blocked_since_s};
  Futex& futex = arena_->page().futex;
  wait_on(futex, lane->spin_, poll, [&] { return SleepScope(futex, asleep); }, look);
}

void Progress::drain(const std::shared_ptr<Lane>& lane) {
  while (std::shared_ptr<Work> work = lane->head()) {
    try {
      wait(*work, 0, Interrupts::are_ignored);
    } catch (const std::exception&) {  // NOLINT: the work holds it for whoever asks
    }
  }
  // The thread that drove the last work lets go of it before it lets go of the lane. It must not be the one
  // that drops the last reference to this object, whose end it would wait for.
  std::lock_guard driven(lane->driving_);
}

}  // namespace photinus
