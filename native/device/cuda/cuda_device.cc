#include "device/cuda/cuda_device.h"

#include <map>

#include "base/error.h"

namespace photinus::cuda {

CudaDevice::CudaDevice(std::shared_ptr<const Driver> driver, int gpu)
    : index(gpu), engines(std::make_shared<const Gpu>(std::move(driver), gpu)) {}

std::shared_ptr<CudaDevice> CudaDevice::of_this_process(int index) {
  static std::mutex mutex;
  static auto* devices = new std::map<int, std::shared_ptr<CudaDevice>>;  // leaked: the driver ends by itself
  const std::shared_ptr<const Driver> driver = Driver::of_this_process();
  std::lock_guard lock(mutex);
  std::shared_ptr<CudaDevice>& device = (*devices)[index];
  if (!device) device = std::make_shared<CudaDevice>(driver, index);
  return device;
}

std::byte* CudaDevice::take_block() {
  std::lock_guard lock(mutex_);
  if (!first_) {
    const auto memory = shared_pages(kBlocks * kBlockBytes);
    engines.add_memory(memory, kBlocks * kBlockBytes);
    first_ = memory.get();
  }
  for (size_t i = 0; i < kBlocks; ++i) {
    Block& block = blocks_[i];
    if (block.taken || (block.ticket != 0 && !engines.has_ended(block.ticket))) continue;
    block = {true, 0};
    return first_ + i * kBlockBytes;
  }
  return nullptr;
}

void CudaDevice::give_block(std::byte* block, uint64_t ticket) {
  std::lock_guard lock(mutex_);
  blocks_[static_cast<size_t>(block - first_) / kBlockBytes] = {false, ticket};
}

}  // namespace photinus::cuda
