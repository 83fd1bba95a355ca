// What the control group (container, Slurm step, systemd slice) of this process allows: versions 1 and 2, and
// the case where only the container's own group is mounted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace photinus {

// Cores' worth of CPU time; nothing when there is no limit.
std::optional<double> cpu_limit_cores();

struct MemoryLimit {
  uint64_t bytes = 0;
  uint64_t used_bytes = 0;  // without file cache that the kernel would give up
  std::string file;         // where the limit stands
};
// The tightest limit of this group and those above it: the one that leaves least.
std::optional<MemoryLimit> memory_limit();

}  // namespace photinus
