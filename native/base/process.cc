#include "base/process.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "base/clock.h"
#include "base/error.h"

#pragma weak sigabbrev_np  // since glibc 2.32; wheels run with 2.28, too

namespace photinus {
namespace {

// Linux 6.13 gives facts about a process through its handle, 6.15 adds how it ended. Older headers know
// neither, so the layout stands here (include/uapi/linux/pidfd.h).
struct ProcessInfo {
  uint64_t mask, cgroup_id;
  uint32_t pid, thread_group, parent, ids[8];
  int32_t exit_code;
  uint32_t coredump_mask, coredump_signal;
};
constexpr uint64_t kInfoExit = 1u << 3;
constexpr unsigned long kGetInfo = _IOWR(0xFF, 11, ProcessInfo);

std::string describe(int status) {
  if (WIFSIGNALED(status)) {
    int number = WTERMSIG(status);
    const char* short_name = sigabbrev_np ? sigabbrev_np(number) : nullptr;
    return short_name ? text("was killed by SIG%s", short_name) : text("was killed by signal %d", number);
  }
  return text("exited with code %d", WEXITSTATUS(status));
}

// What /proc/PID/stat says from the process's state on; empty when there is no such process.
std::string stat_of(pid_t pid) {
  FILE* file = std::fopen(text("/proc/%d/stat", pid).c_str(), "re");
  if (!file) return "";
  char line[2048];
  size_t length = std::fread(line, 1, sizeof line - 1, file);
  std::fclose(file);
  line[length] = '\0';
  const char* after_name = std::strrchr(line, ')');
  return after_name && std::strlen(after_name) >= 3 ? after_name + 2 : "";
}

// The status of a process that has ended but was not reaped: the last field of its stat, readable by its
// user.
std::optional<int> unreaped_status(pid_t pid) {
  const std::string stat = stat_of(pid);
  if (stat.empty() || stat[0] != 'Z') return std::nullopt;
  const size_t last = stat.rfind(' ');
  return last == std::string::npos ? std::nullopt : std::optional<int>(std::atoi(stat.c_str() + last + 1));
}

std::optional<int> reaped_status(const FileDescriptor& process) {
  ProcessInfo info{};
  info.mask = kInfoExit;
  if (!process.valid() || ioctl(process.get(), kGetInfo, &info) != 0 || !(info.mask & kInfoExit))
    return std::nullopt;
  return info.exit_code;
}

}  // namespace

FileDescriptor open_process(pid_t pid) {
  return FileDescriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

bool has_ended(const FileDescriptor& process, double timeout_s) {
  if (!process.valid()) return false;
  pollfd entry{process.get(), POLLIN, 0};
  int ready;
  do {
    ready = poll(&entry, 1, static_cast<int>(timeout_s * 1000));
  } while (ready < 0 && errno == EINTR);
  return ready > 0;
}

std::string how_it_ended(const FileDescriptor& process, pid_t pid, double patience_s) {
  Deadline deadline = Deadline::in(patience_s);
  while (true) {
    if (auto status = unreaped_status(pid)) return describe(*status);
    if (auto status = reaped_status(process)) return describe(*status);
    if (deadline.passed()) return "ended (how is not known here; its launcher knows)";
    usleep(2000);
  }
}

std::string what_holds(pid_t pid) {
  const std::string stat = pid > 0 ? stat_of(pid) : "";
  if (stat.empty()) return "";
  if (stat[0] == 'T' || stat[0] == 't') return "it is stopped (SIGSTOP, SIGTSTP or a debugger)";
  if (stat[0] == 'D') return "it waits for a disk or a network file system";
  return "";
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

pid_t own_pid() {
  static std::atomic<pid_t> pid{0};
  static const bool forks_are_seen = [] {
    pid.store(getpid());
    pthread_atfork(nullptr, nullptr, [] { pid.store(getpid()); });
    return true;
  }();
  return forks_are_seen ? pid.load(std::memory_order_relaxed) : getpid();
}

}  // namespace photinus
