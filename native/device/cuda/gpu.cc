#include "device/cuda/gpu.h"

#include <unistd.h>

#include "base/log.h"
#include "base/process.h"

namespace photinus::cuda {

Gpu::Gpu(std::shared_ptr<const Driver> driver, int index)
    : driver_(std::move(driver)), owner_(getpid()), name_(text("GPU %d", index)) {
  if (index < 0 || index >= driver_->devices())
    throw Error(ErrorKind::invalid_argument,
                text("GPU %d: there are %d, counted from 0 on, as CUDA_VISIBLE_DEVICES leaves them", index,
                     driver_->devices()));
  char product[100] = "", bus[32] = "";
  call(driver_->cuDeviceGet, &device_, index);
  call(driver_->cuDeviceGetName, product, static_cast<int>(sizeof product), device_);
  call(driver_->cuDeviceGetPCIBusId, bus, static_cast<int>(sizeof bus), device_);
  name_ += text(" (%s, %s)", product, bus);
  int mode = 0;
  call(driver_->cuDeviceGetAttribute, &mode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device_);
  try {
    relaxed([&](auto&& attempt) {
      attempt([&] { call(driver_->cuDevicePrimaryCtxRetain, &context_, device_); });
    });
  } catch (const Error& error) {
    if (context_) give_back(driver_->cuDevicePrimaryCtxRelease, device_);
    if (mode != CU_COMPUTEMODE_PROHIBITED && mode != CU_COMPUTEMODE_EXCLUSIVE_PROCESS) throw;
    throw Error(error.kind(),
                text("%s Its compute mode is %s: `nvidia-smi -c DEFAULT` lets several processes use "
                     "it; ranks that share it in exclusive mode need NVIDIA's MPS.",
                     error.what(), mode == CU_COMPUTEMODE_PROHIBITED ? "PROHIBITED" : "EXCLUSIVE_PROCESS"));
  }
}

Gpu::~Gpu() {
  insist([&](bool& ran) {  // not within(): what is given back may not be current
    relaxed([&](auto&&) {
      ran = true;
      give_back(driver_->cuDevicePrimaryCtxRelease, device_);
    });
  });
}

bool Gpu::is_forked() const {
  return owner_ != own_pid();
}

void Gpu::check_owner() const {
  if (is_forked())
    throw Error(
        ErrorKind::system,
        text("%s was used in process %d before it forked this one, where CUDA does not work: start processes "
             "that use CUDA with spawn.",
             name_.c_str(), owner_));
}

Error Gpu::error(const EntryPoint& entry, CUresult result, const std::string& more) const {
  if (is_sticky(result) || result == CUDA_ERROR_DEINITIALIZED) dead_.store(true);
  return driver_->error(entry.name, result, name_ + more);
}

void Gpu::complain(const Error& error) const noexcept {
  if (!is_dead()) say(error.what());
}

}  // namespace photinus::cuda
