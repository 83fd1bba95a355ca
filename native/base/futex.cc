#include "base/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cmath>

namespace photinus {

// Shared between processes, hence not FUTEX_PRIVATE_FLAG.
void sleep_on(Futex& futex, uint32_t word, double limit_s) {
  const timespec slice{static_cast<time_t>(limit_s),
                       static_cast<long>((limit_s - std::floor(limit_s)) * 1e9)};
  syscall(SYS_futex, &futex.word, FUTEX_WAIT, word, &slice, nullptr, 0);
}

void wake(Futex& futex) {
  futex.word.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &futex.word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace photinus
