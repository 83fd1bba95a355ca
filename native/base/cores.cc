#include "base/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

namespace photinus {
namespace {

std::string first_line(const std::string& path) {
  char line[512] = "";
  if (FILE* file = std::fopen(path.c_str(), "re")) {
    if (!std::fgets(line, sizeof line, file)) line[0] = '\0';
    std::fclose(file);
  }
  line[std::strcspn(line, "\n")] = '\0';
  return line;
}

// Cores that the quota of the control group allows; 0 means no limit. Inside a container the root of the
// mounted tree is the container's own group, so looking there and at our own path covers both cases.
double quota_cores() {
  double quota = 0, period = 0;
  std::string own = first_line("/proc/self/cgroup");  // "0::/path" with version 2 alone
  size_t colon = own.rfind(':');
  std::string path = colon == std::string::npos ? "" : own.substr(colon + 1);
  for (const std::string& folder : {std::string("/sys/fs/cgroup") + path, std::string("/sys/fs/cgroup")}) {
    if (std::sscanf(first_line(folder + "/cpu.max").c_str(), "%lf %lf", &quota, &period) == 2 && period > 0)
      return quota / period;
  }
  if (std::sscanf(first_line("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").c_str(), "%lf", &quota) == 1 &&
      quota > 0 &&
      std::sscanf(first_line("/sys/fs/cgroup/cpu/cpu.cfs_period_us").c_str(), "%lf", &period) == 1 &&
      period > 0)
    return quota / period;
  return 0;
}

}  // namespace

int usable_cores() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  int cores = sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : 1;
  double quota = quota_cores();
  if (quota > 0) cores = std::min(cores, static_cast<int>(std::ceil(quota)));
  return std::max(cores, 1);
}

}  // namespace photinus
