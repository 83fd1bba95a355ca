#include "base/interrupt.h"

#include <atomic>

#include "base/clock.h"
#include "base/error.h"

namespace photinus {
namespace {

// Asking may take an interpreter's lock; waits for the network look around ten thousand times a second.
constexpr double kAskEvery_s = 0.05;

std::atomic<bool (*)()> interrupt_check{nullptr};

}  // namespace

void set_interrupt_check(bool (*check)()) {
  interrupt_check.store(check);
}

bool is_interrupted() {
  thread_local double asked_s = 0;
  bool (*const check)() = interrupt_check.load();
  if (!check || now_s() - asked_s < kAskEvery_s) return false;
  asked_s = now_s();
  return check();
}

void check_interrupt(const std::string& waiting_for) {
  if (is_interrupted()) throw Error(ErrorKind::interrupted, "interrupted while waiting for " + waiting_for);
}

}  // namespace photinus
