// What of this process's memory is in use.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <fstream>

namespace photinus::test {

inline uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace photinus::test
