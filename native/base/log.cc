#include "base/log.h"

#include <poll.h>
#include <unistd.h>

#include <deque>
#include <mutex>

#include "base/process.h"
#include "base/thread.h"

namespace photinus {
namespace {

std::mutex mutex;
std::function<void(const std::string&)>& listener() {
  static auto* function =
      new std::function<void(const std::string&)>;  // leaked: threads may speak while the process ends
  return *function;
}

constexpr size_t kQueued = 1000;
std::deque<std::string>& queue() {
  static auto* lines = new std::deque<std::string>;
  return *lines;
}
pid_t writer_of = 0;  // the process in which a thread writes the queue

void write_all(const std::string& line) {
  [[maybe_unused]] ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

bool is_stderr_full() {
  pollfd wanted{STDERR_FILENO, POLLOUT, 0};
  return poll(&wanted, 1, 0) == 0;
}

void write_queue() {
  while (true) {
    std::string line;
    {
      std::lock_guard lock(mutex);
      if (queue().empty()) {
        writer_of = 0;
        return;
      }
      line = std::move(queue().front());
      queue().pop_front();
    }
    write_all(line);
  }
}

}  // namespace

// Threads that keep a group alive speak here. Where nobody reads standard error (a pager that is scrolled
// back), a thread made for it waits in their place.
void say(const std::string& line) {
  std::lock_guard lock(mutex);
  if (listener()) return listener()(line);
  std::string whole = "photinus: " + line + "\n";
  const bool has_writer = writer_of == own_pid();
  if (!has_writer && !is_stderr_full()) return write_all(whole);
  if (!has_writer) queue().clear();  // a forked child's are its parent's to write
  if (queue().size() < kQueued) queue().push_back(std::move(whole));
  if (has_writer) return;
  try {
    start_thread("photinus-log", write_queue).detach();
    writer_of = own_pid();
  } catch (const std::exception&) {  // NOLINT: no memory for a thread, nor for a line
    queue().clear();
  }
}

void set_listener(std::function<void(const std::string& line)> given) {
  std::lock_guard lock(mutex);
  listener() = std::move(given);
}

}  // namespace photinus
