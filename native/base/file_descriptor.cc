#include "base/file_descriptor.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>

#include "base/error.h"

namespace photinus {
namespace {

size_t open_descriptors() {
  size_t count = 0;
  if (DIR* folder = opendir("/proc/self/fd")) {
    while (readdir(folder)) ++count;  // with ".", ".." and the folder itself: no harm
    closedir(folder);
  }
  return count;
}

}  // namespace

void need_descriptors(size_t more, const std::string& purpose) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  const size_t open = open_descriptors(), needed = open + more;
  if (needed <= limit.rlim_cur) return;
  if (limit.rlim_max == RLIM_INFINITY || needed <= limit.rlim_max) {
    limit.rlim_cur = needed;
    if (setrlimit(RLIMIT_NOFILE, &limit) == 0) return;
  }
  throw Error(
      ErrorKind::system,
      text(
          "%s needs %zu file descriptors; this process has %zu open and may have %llu: are there enough file "
          "descriptors, ulimit -n?",
          purpose.c_str(), more, open, static_cast<unsigned long long>(limit.rlim_max)));
}

}  // namespace photinus
