// What an operation on tensors in a GPU's memory works on instead: copies of them in the host's, which are
// brought before it begins and returned after it, through the device's blocks of locked memory. Nothing here
// blocks: each call does what can be done now.
//
// A GPU's stream waits for events only that are recorded already, so it never waits for this process or
// another rank. The caller's stream is recorded when the operation is submitted, and copies wait for that
// when it begins: while it stands in its lane it holds up nobody's copies.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "device/cuda/cuda_device.h"
#include "shm/arena.h"

namespace photinus {

class HostTensors {
 public:
  // The copies begin after all that is in the caller's stream now. Throws as CopyEngines::record does.
  HostTensors(std::shared_ptr<cuda::CudaDevice> device, cuda::CUstream stream, std::shared_ptr<Arena> arena);
  ~HostTensors() { free(); }
  HostTensors(const HostTensors&) = delete;
  HostTensors& operator=(const HostTensors&) = delete;

  // The copy of a tensor: `read`: its contents are brought; `written`: what is there in the end is returned.
  std::byte* copy_of(const void* tensor, uint64_t bytes, bool read, bool written);
  // Whether everything is there. `moved`: whether something came.
  bool bring(bool& moved);
  // Whether the last copy to the GPU is queued; the host's copies are gone then.
  bool give_back(bool& moved);
  double nap_s() const;

  // Of an operation that has failed: waits for its copies, for so long at most. Peers may be at work on what
  // they know of the host's copies for ever: these are not used again if the group `is_over`.
  void give_up(double limit_s, bool is_over);
  // Whether no copy of this operation is under way.
  bool has_landed();
  // What is put into the stream from now on runs after the copies to the GPU.
  void order(cuda::CUstream stream);

 private:
  struct Tensor {
    std::byte* there;
    std::byte* here;
    uint64_t bytes;
    bool read, written;
  };
  struct Flight {
    std::byte* block;
    uint64_t ticket;
    std::byte* to;
    size_t bytes;
  };
  // The next piece to copy, of at most a block; null at the end.
  const Tensor* next_piece(bool Tensor::* wanted, size_t& bytes);
  uint64_t start(cuda::Way way, std::byte* block, const Tensor& tensor, size_t bytes);
  void free();

  const std::shared_ptr<cuda::CudaDevice> device_;
  const std::shared_ptr<Arena> arena_;
  cuda::Event begin_, end_;  // begin_: until a copy waits for it
  std::vector<Tensor> tensors_;
  size_t next_ = 0;  // tensor
  uint64_t at_ = 0;  // bytes of it
  std::deque<Flight> flights_;
  uint64_t newest_[2] = {0, 0};  // tickets, by way
};

}  // namespace photinus
