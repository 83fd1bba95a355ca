#include "engine/device_copies.h"

#include <unistd.h>

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"

namespace photinus {

using cuda::Way;

DeviceCopies::DeviceCopies(std::shared_ptr<cuda::CudaDevice> device, cuda::CUstream stream)
    : device_(std::move(device)), begin_(device_->engines.record(stream)) {}

// One that fails to begin may be under way all the same. What is brought tells that the event was reached, so
// one way waits.
uint64_t DeviceCopies::start(Way way, void* to, const void* from, size_t bytes, bool within_gpu) {
  uint64_t& newest = newest_[static_cast<size_t>(way)];
  try {
    if (begin_) device_->engines.wait_for(begin_, way);
    begin_.reset();
    newest = within_gpu ? device_->engines.start_copy_within(to, from, bytes)
                        : device_->engines.start_copy(to, from, bytes, false);
  } catch (const Error&) {
    newest = device_->engines.newest(way);
    throw;
  }
  if (way == Way::to_host) to_host_.push_back(newest);
  return newest;
}

bool DeviceCopies::have_come(uint64_t count) {
  while (came_ < count && device_->engines.poll(to_host_.front())) {
    to_host_.pop_front();
    came_ += 1;
  }
  return came_ >= count;
}

void DeviceCopies::end() {
  if (newest(Way::to_gpu) != 0) end_ = device_->engines.record(Way::to_gpu);
}

double DeviceCopies::nap_s() const {
  return device_->engines.nap_s(to_host_.empty() ? device_->engines.newest(Way::to_gpu) : to_host_.front());
}

bool DeviceCopies::has_landed() {
  return std::all_of(std::begin(newest_), std::end(newest_),
                     [&](uint64_t ticket) { return ticket == 0 || device_->engines.has_ended(ticket); });
}

bool DeviceCopies::settle(double limit_s) {
  const Deadline deadline = Deadline::in(limit_s);
  while (!has_landed()) {
    if (deadline.passed()) return false;
    usleep(200);
  }
  return true;
}

void DeviceCopies::order(cuda::CUstream stream) {
  if (end_) device_->engines.make_wait(stream, end_);
}

}  // namespace photinus
