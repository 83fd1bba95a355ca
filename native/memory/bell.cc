#include "memory/bell.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cmath>

#include "base/cores.h"

namespace photinus {
// Shared between processes, hence not FUTEX_PRIVATE_FLAG.
void sleep_on(Bell& bell, uint32_t word, double limit_s) {
  const timespec slice{static_cast<time_t>(limit_s),
                       static_cast<long>((limit_s - std::floor(limit_s)) * 1e9)};
  syscall(SYS_futex, &bell.word, FUTEX_WAIT, word, &slice, nullptr, 0);
}

void ring(Bell& bell) {
  bell.word.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &bell.word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

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

Patience Patience::for_ranks(uint32_t ranks_on_host) {
  Patience patience;
  if (ranks_on_host > static_cast<uint32_t>(usable_cores())) patience.pause_s = 1e-6;
  return patience;
}

}  // namespace photinus
