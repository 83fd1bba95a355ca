// Time for deadlines: the monotonic clock only, so that a jump of the wall clock changes nothing.
#pragma once

#include <cstdint>

namespace photinus {

// Seconds on the monotonic clock; only differences mean anything.
double now_s();

// A point in monotonic time by which something must have happened.
class Deadline {
 public:
  static Deadline in(double seconds) { return from(now_s(), seconds); }
  static Deadline from(double start_s, double seconds) { return Deadline(start_s, seconds); }

  bool passed() const { return now_s() >= start_s_ + limit_s_; }
  double left_s() const;     // never negative
  double elapsed_s() const;  // since the deadline was set
  double limit_s() const { return limit_s_; }
  // Time that does not count (the process itself was stopped).
  void extend(double seconds) { start_s_ += seconds; }

 private:
  Deadline(double start_s, double limit_s) : start_s_(start_s), limit_s_(limit_s) {}
  double start_s_;
  double limit_s_;
};

}  // namespace photinus
