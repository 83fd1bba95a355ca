// What moves bytes between a caller's tensors and memory that ranks share: the host's processor (host.h), or
// something that takes its time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace photinus {

class Device {
 public:
  virtual ~Device() = default;

  // Begins to copy; the ranges are the same or do not overlap. Until the copy has landed the source must not
  // change, and the destination is anything. Returns 0 when it has landed already, else a ticket for poll().
  // `past_caches`: nobody reads the destination soon.
  virtual uint64_t start_copy(void* to, const void* from, size_t bytes, bool past_caches) = 0;
  // Whether a copy has landed; asked until it has. Throws when it failed.
  virtual bool poll(uint64_t ticket) = 0;
  // For how many seconds a thread may sleep before it asks again. A device that wakes the futex of its
  // process when a copy lands sets no bound.
  virtual double nap_s(uint64_t) const { return std::numeric_limits<double>::infinity(); }
};

// The copy that an operation has under way, of which there is at most one.
class CopyInFlight {
 public:
  explicit CopyInFlight(Device& device) : device_(device) {}
  CopyInFlight(const CopyInFlight&) = delete;
  CopyInFlight& operator=(const CopyInFlight&) = delete;

  // Begins the copy, or looks after the one that was begun; true once it has landed.
  bool run(void* to, const void* from, size_t bytes, bool past_caches = false) {
    if (ticket_ == 0) ticket_ = device_.start_copy(to, from, bytes, past_caches);
    if (ticket_ != 0 && !device_.poll(ticket_)) return false;
    ticket_ = 0;
    return true;
  }
  bool is_running() const { return ticket_ != 0; }
  double nap_s() const { return device_.nap_s(ticket_); }
  // Waits for the copy of an operation that has failed; false when it has not landed after `limit_s`. A
  // copy that failed counts as landed.
  bool settle(double limit_s);

 private:
  Device& device_;
  uint64_t ticket_ = 0;
};

}  // namespace photinus
