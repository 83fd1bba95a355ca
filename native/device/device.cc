#include "device/device.h"

#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"

namespace photinus {

bool CopyInFlight::settle(double limit_s) {
  const Deadline deadline = Deadline::in(limit_s);
  try {
    while (ticket_ != 0 && !device_.poll(ticket_)) {
      if (deadline.passed()) return false;
      usleep(200);
    }
  } catch (const Error&) {  // NOLINT: the operation has an error already
  }
  ticket_ = 0;
  return true;
}

}  // namespace photinus
