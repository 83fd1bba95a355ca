#include "base/clock.h"

#include <time.h>

namespace photinus {

double now_s() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double Deadline::left_s() const {
  double left = start_s_ + limit_s_ - now_s();
  return left > 0 ? left : 0;
}

double Deadline::elapsed_s() const {
  return now_s() - start_s_;
}

}  // namespace photinus
