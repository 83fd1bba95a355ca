#include "base/control_group.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace photinus {
namespace {

std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> lines;
  if (FILE* file = std::fopen(path.c_str(), "re")) {
    char line[512];
    while (std::fgets(line, sizeof line, file)) {
      line[std::strcspn(line, "\n")] = '\0';
      lines.emplace_back(line);
    }
    std::fclose(file);
  }
  return lines;
}

std::string first_line(const std::string& path) {
  auto lines = lines_of(path);
  return lines.empty() ? "" : lines[0];
}

// Folders in which a controller's files may lie: the own group's and those above it, whose limits count too,
// up to the root of the mounted tree, which inside a container is the container's group. `controller` is a
// version 1 name; version 2 has one tree for all.
std::vector<std::string> folders_of(const std::string& controller) {
  std::vector<std::string> folders;
  auto add = [&](const std::string& root, std::string path) {
    while (path.size() > 1) {
      folders.push_back(root + path);
      path.resize(path.rfind('/'));
    }
    folders.push_back(root);
  };
  for (const std::string& line :
       lines_of("/proc/self/cgroup")) {  // "4:memory:/path", or "0::/path" in version 2
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = line.substr(first, second - first) + ":", path = line.substr(second + 1);
    if (names == "::") {
      for (const char* root : {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}) add(root, path);
      continue;
    }
    const size_t at = names.find(controller);  // a name of the list, and not a part of one ("cpu", "cpuset")
    if (at != std::string::npos && std::strchr(":,", names[at - 1]) &&
        std::strchr(":,", names[at + controller.size()]))
      add("/sys/fs/cgroup/" + controller, path);
  }
  return folders;
}

std::optional<uint64_t> number_in(const std::string& path) {
  const std::string line = first_line(path);
  char* end = nullptr;
  const uint64_t value = std::strtoull(line.c_str(), &end, 10);
  if (line.empty() || *end != '\0') return std::nullopt;  // "max" is no number
  return value;
}

uint64_t statistic(const std::string& path, const std::string& name) {
  for (const std::string& line : lines_of(path))
    if (line.rfind(name + " ", 0) == 0) return std::strtoull(line.c_str() + name.size() + 1, nullptr, 10);
  return 0;
}

constexpr uint64_t kNoLimit = uint64_t{1} << 60;  // version 1 writes "none" as nearly 2^63

}  // namespace

std::optional<double> cpu_limit_cores() {
  std::optional<double> least;
  auto take = [&](double cores) { least = least ? std::min(*least, cores) : cores; };
  for (const std::string& folder : folders_of("cpu")) {
    double quota = 0, period = 0;
    if (std::sscanf(first_line(folder + "/cpu.max").c_str(), "%lf %lf", &quota, &period) == 2 && period > 0)
      take(quota / period);
    if (std::sscanf(first_line(folder + "/cpu.cfs_quota_us").c_str(), "%lf", &quota) == 1 && quota > 0 &&
        std::sscanf(first_line(folder + "/cpu.cfs_period_us").c_str(), "%lf", &period) == 1 && period > 0)
      take(quota / period);
  }
  return least;
}

std::optional<MemoryLimit> memory_limit() {
  struct Names {
    const char *limit, *usage, *prefix;
  };
  constexpr Names versions[] = {{"memory.max", "memory.current", ""},
                                {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_"}};
  std::optional<MemoryLimit> tightest;
  auto left = [](const MemoryLimit& limit) { return limit.bytes - std::min(limit.bytes, limit.used_bytes); };
  for (const std::string& folder : folders_of("memory")) {
    for (const Names& names : versions) {
      const std::string file = folder + "/" + names.limit;
      const auto limit = number_in(file), usage = number_in(folder + "/" + names.usage);
      if (!limit || !usage || *limit >= kNoLimit) continue;
      uint64_t cache = 0;  // pages of files, which the kernel drops when somebody needs the memory
      for (const char* list : {"inactive_file", "active_file"})
        cache += statistic(folder + "/memory.stat", std::string(names.prefix) + list);
      const MemoryLimit found{*limit, *usage - std::min(cache, *usage), file};
      if (!tightest || left(found) < left(*tightest)) tightest = found;
    }
  }
  return tightest;
}

}  // namespace photinus
