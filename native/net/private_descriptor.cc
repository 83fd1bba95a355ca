#include "net/private_descriptor.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <set>

namespace photinus {
namespace {

struct Registry {
  std::mutex mutex;  // held while the process forks
  std::set<int> numbers;
};

// Leaked: threads may close connections while the process ends.
Registry& registry() {
  static Registry* const all = [] {
    auto* made = new Registry;
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     Registry& here = registry();
                     const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
                     for (int number : here.numbers)
                       if (null < 0 || dup3(null, number, O_CLOEXEC) < 0) close(number);
                     if (null >= 0) close(null);
                     here.mutex.unlock();
                   });
    return made;
  }();
  return *all;
}

}  // namespace

void PrivateDescriptor::hold_forks() {
  registry().mutex.lock();
}

void PrivateDescriptor::release_forks() {
  registry().mutex.unlock();
}

void PrivateDescriptor::note(int number) {
  const int error = errno;
  if (number >= 0) registry().numbers.insert(number);
  errno = error;
}

void PrivateDescriptor::reset() {
  if (number_ < 0) return;
  std::lock_guard lock(registry().mutex);
  registry().numbers.erase(number_);
  close(std::exchange(number_, -1));
}

}  // namespace photinus
