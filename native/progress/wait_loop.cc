#include "progress/wait_loop.h"

#include "base/cores.h"

namespace photinus {

SpinTimes SpinTimes::for_ranks(uint32_t ranks_on_host) {
  SpinTimes times;
  if (ranks_on_host > static_cast<uint32_t>(usable_cores())) times.pause_s = 1e-6;
  return times;
}

}  // namespace photinus
