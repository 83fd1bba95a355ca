// A device whose copies end late, on a thread of its own, in the order in which they began. A destination is
// garbage until its copy has landed, and a source is read only then.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/futex.h"
#include "device/device.h"

namespace photinus::test {

// What goes wrong with which copy, counted from 1 on; 0: with none.
struct CopyFaults {
  uint64_t fails = 0, lasts_3_s = 0;
};

class SlowDevice final : public Device {
 public:
  // `futex`: of the process whose copies these are.
  SlowDevice(Futex& futex, uint64_t seed, CopyFaults faults = {})
      : futex_(futex), random_(seed), faults_(faults) {
    const double longest_s[] = {0, 20e-6, 500e-6};
    longest_s_ = longest_s[random_() % std::size(longest_s)];
    thread_ = std::thread([this] { run(); });
  }
  ~SlowDevice() override {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  uint64_t start_copy(void* to, const void* from, size_t bytes, bool) override {
    if (bytes == 0 || to == from) return 0;
    std::memset(to, 0xee, bytes);
    std::lock_guard lock(mutex_);
    begun_ += 1;
    const double delay_s =
        begun_ == faults_.lasts_3_s ? 3 : longest_s_ * std::uniform_real_distribution()(random_);
    queue_.push_back({to, from, bytes, now_s() + delay_s});
    changed_.notify_all();
    return begun_;
  }

  bool poll(uint64_t ticket) override {
    std::lock_guard lock(mutex_);
    if (ticket > landed_) return false;
    if (ticket == faults_.fails) throw Error(ErrorKind::system, "the slow device has failed");
    return true;
  }

 private:
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
    double due_s;
  };

  void run() {
    std::unique_lock lock(mutex_);
    while (!ending_ || !queue_.empty()) {
      if (queue_.empty()) {
        changed_.wait(lock);
        continue;
      }
      const Copy copy = queue_.front();
      if (const double left_s = copy.due_s - now_s(); left_s > 0) {
        changed_.wait_for(lock, std::chrono::duration<double>(left_s));
        continue;
      }
      std::memcpy(copy.to, copy.from, copy.bytes);
      queue_.pop_front();
      landed_ += 1;
      lock.unlock();
      if (futex_.asleep.load(std::memory_order_seq_cst)) wake(futex_);
      lock.lock();
    }
  }

  Futex& futex_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::mt19937_64 random_;
  double longest_s_;
  const CopyFaults faults_;
  std::deque<Copy> queue_;
  uint64_t begun_ = 0, landed_ = 0;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace photinus::test
