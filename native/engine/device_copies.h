// The copies of one operation between a GPU's memory and locked memory of the host.
//
// A GPU's stream waits for events only that are recorded already, so it never waits for this process or
// another rank. The caller's stream is recorded when the operation is submitted, and its copies wait for that
// when the first of them begins: while it stands in its lane it holds up nobody's.
#pragma once

#include <deque>
#include <memory>

#include "device/cuda/cuda_device.h"

namespace photinus {

// How long an operation that has failed waits for its own copies, which a device may have forgotten.
inline constexpr double kSettle_s = 0.5;

class DeviceCopies {
 public:
  // They begin after all that is in the caller's stream now. Throws as CopyEngines::record does.
  DeviceCopies(std::shared_ptr<cuda::CudaDevice> device, cuda::CUstream stream);

  const std::shared_ptr<cuda::CudaDevice>& device() const { return device_; }
  // Begins one; returns its ticket.
  uint64_t start(cuda::Way way, void* to, const void* from, size_t bytes, bool within_gpu = false);
  // Whether the first `count` to the host have landed.
  bool have_come(uint64_t count);
  // The ticket of the last one of that way; 0: there was none.
  uint64_t newest(cuda::Way way) const { return newest_[static_cast<size_t>(way)]; }
  // No more come: others may be ordered behind them.
  void end();

  // For whoever waits for the next one to land.
  double nap_s() const;
  // Whether none is under way.
  bool has_landed();
  // Of an operation that has failed: waits, for so long at most; whether none is under way.
  bool settle(double limit_s);
  // What is put into the stream from now on runs after the copies to the GPU.
  void order(cuda::CUstream stream);

 private:
  const std::shared_ptr<cuda::CudaDevice> device_;
  cuda::Event begin_, end_;       // begin_: until a copy waits for it
  uint64_t newest_[2] = {0, 0};   // tickets, by way
  std::deque<uint64_t> to_host_;  // of those that were not seen to have landed
  uint64_t came_ = 0;
};

}  // namespace photinus
