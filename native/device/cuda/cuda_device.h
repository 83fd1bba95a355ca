// A GPU as all groups of this process use it: its copy engines, and blocks of locked memory through which
// copies go that neither begin nor end in locked memory.
#pragma once

#include <array>
#include <mutex>

#include "device/cuda/copy_engines.h"

namespace photinus::cuda {

class CudaDevice {
 public:
  // A block is large enough for a link to reach its rate, and all of them are a few copies' worth ahead.
  static constexpr size_t kBlockBytes = 1 << 20, kBlocks = 15;

  // That of this process, opened by the first call that succeeds; `index` as CUDA_VISIBLE_DEVICES counts.
  static std::shared_ptr<CudaDevice> of_this_process(int index);
  CudaDevice(std::shared_ptr<const Driver> driver, int gpu);

  const int index;
  CopyEngines engines;

  // A block, or null: all are in use. Whoever takes one gives it back without waiting for other ranks first.
  std::byte* take_block();
  // It is taken again when the copy has ended.
  void give_block(std::byte* block, uint64_t ticket);

 private:
  struct Block {
    bool taken = false;
    uint64_t ticket = 0;
  };
  std::mutex mutex_;  // guards what follows
  std::byte* first_ = nullptr;
  std::array<Block, kBlocks> blocks_{};
};

}  // namespace photinus::cuda
