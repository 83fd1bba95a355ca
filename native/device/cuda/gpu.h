// One GPU as this process uses it: the primary context, which torch and everybody else in the process share.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "device/cuda/driver.h"

namespace photinus::cuda {

class Gpu {
 public:
  // `index` counts the GPUs that CUDA_VISIBLE_DEVICES leaves. Throws Error(system), also where the GPU may
  // only be used by another process.
  Gpu(std::shared_ptr<const Driver> driver, int index);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const std::string& name() const { return name_; }  // "GPU 0 (NVIDIA A10, 0000:17:00.0)"
  const Driver& driver() const { return *driver_; }
  // Whether this is a forked child's copy, which must leave the driver alone.
  bool is_forked() const;
  // Whether a call has told that the context is of no more use: a kernel has failed, or the process ends.
  bool is_dead() const { return dead_.load(); }

  template <class... Args>
  void call(const Entry<Args...>& entry, std::type_identity_t<Args>... args) const {
    if (const CUresult result = entry(args...); result != CUDA_SUCCESS) throw error(entry, result);
  }
  // The error of a call; `more` of what it was about.
  Error error(const EntryPoint& entry, CUresult result, const std::string& more = "") const;
  // Runs `body` with the context current, and as one that harms no capture of a graph elsewhere in the
  // process; afterwards the thread has the context and the mode that it had. Throws the first error; `body`
  // throws nothing but Error.
  template <class Body>
  void within(Body&& body) const {
    relaxed([&](auto&& attempt) {
      if (!attempt([&] { call(driver_->cuCtxPushCurrent, context_); })) return;
      attempt(body);
      CUcontext popped = nullptr;
      attempt([&] { call(driver_->cuCtxPopCurrent, &popped); });
    });
  }
  // The same for what gives things back, in destructors: an error is a line on standard error, but for a
  // context that is dead, as its users have been told by then; nothing can be given back to it.
  template <class Body>
  void tidy(Body&& body) const noexcept {
    insist([&](bool& ran) {
      within([&] {
        ran = true;
        body();
      });
    });
  }
  template <class... Args>
  void give_back(const Entry<Args...>& entry, std::type_identity_t<Args>... args) const noexcept {
    if (const CUresult result = entry(args...); result != CUDA_SUCCESS) complain(error(entry, result));
  }
  void complain(const Error& error) const noexcept;

 private:
  template <class Body>
  void relaxed(Body&& body) const {
    check_owner();
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    std::optional<Error> failure;
    auto attempt = [&](auto&& what) {
      try {
        what();
        return true;
      } catch (const Error& error) {
        if (!failure) failure.emplace(error);
        return false;
      }
    };
    auto exchange = [&] { call(driver_->cuThreadExchangeStreamCaptureMode, &mode); };
    const bool changed = attempt(exchange);
    if (changed) body(attempt);
    // A call that failed may have acted nevertheless: many of them tell of what failed earlier.
    if (changed || mode != CU_STREAM_CAPTURE_MODE_RELAXED) attempt(exchange);
    if (failure) throw Error(*failure);
  }
  // Tries again when it did not get as far as to run.
  template <class Attempt>
  void insist(Attempt&& attempt) const noexcept {
    bool ran = false;
    for (int tries = 0; tries < 2 && !ran && !is_forked(); ++tries) {
      try {
        attempt(ran);
      } catch (const Error& failure) {
        complain(failure);
      }
    }
  }
  void check_owner() const;

  const std::shared_ptr<const Driver> driver_;
  const pid_t owner_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  std::string name_;
  mutable std::atomic<bool> dead_{false};
};

}  // namespace photinus::cuda
