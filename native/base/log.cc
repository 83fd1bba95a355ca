#include "base/log.h"

#include <unistd.h>

#include <mutex>

namespace photinus {
namespace {

std::mutex mutex;
std::function<void(const std::string&)>& listener() {
  static auto* function =
      new std::function<void(const std::string&)>;  // leaked: threads may speak while the process ends
  return *function;
}

}  // namespace

void say(const std::string& line) {
  std::lock_guard lock(mutex);
  if (listener()) return listener()(line);
  const std::string whole = "photinus: " + line + "\n";
  [[maybe_unused]] ssize_t written = write(STDERR_FILENO, whole.data(), whole.size());
}

void set_listener(std::function<void(const std::string& line)> given) {
  std::lock_guard lock(mutex);
  listener() = std::move(given);
}

}  // namespace photinus
