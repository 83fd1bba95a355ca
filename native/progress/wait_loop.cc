#include "progress/wait_loop.h"

#include <sched.h>

#include "base/cores.h"

namespace photinus {

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void yield_cpu() {
  sched_yield();
}

SpinTimes SpinTimes::for_ranks(uint32_t ranks_on_host) {
  SpinTimes times;
  if (ranks_on_host > static_cast<uint32_t>(usable_cores())) times.pause_s = 1e-6;
  return times;
}

}  // namespace photinus
