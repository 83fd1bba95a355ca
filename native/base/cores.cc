#include "base/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>

#include "base/control_group.h"

namespace photinus {

int usable_cores() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  int cores = sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : 1;
  if (auto limit = cpu_limit_cores()) cores = std::min(cores, static_cast<int>(std::ceil(*limit)));
  return std::max(cores, 1);
}

}  // namespace photinus
