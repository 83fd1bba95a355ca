// What an operation on tensors in a GPU's memory works on instead, where no plan of its own carries them
// (collectives/device_plans.h): copies of them in the host's memory, which are brought before it begins and
// returned after it, through the device's blocks of locked memory. Nothing here blocks: each call does what
// can be done now.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "engine/device_copies.h"
#include "shm/arena.h"

namespace photinus {

class HostTensors {
 public:
  HostTensors(DeviceCopies& copies, std::shared_ptr<Arena> arena)
      : copies_(copies), arena_(std::move(arena)) {}
  ~HostTensors() { free(); }
  HostTensors(const HostTensors&) = delete;
  HostTensors& operator=(const HostTensors&) = delete;

  // The copy of a tensor: `read`: its contents are brought; `written`: what is there in the end is returned.
  std::byte* copy_of(const void* tensor, uint64_t bytes, bool read, bool written);
  // Whether everything is there. `moved`: whether something came.
  bool bring(bool& moved);
  // Whether the last copy to the GPU is queued; the host's copies are gone then.
  bool give_back(bool& moved);
  // The operation has failed, and its copies are settled. Peers may be at work on what they know of the
  // host's for ever: these are not used again if the group `is_over`.
  void give_up(bool is_over);

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

  DeviceCopies& copies_;
  const std::shared_ptr<Arena> arena_;
  std::vector<Tensor> tensors_;
  size_t next_ = 0;    // tensor
  uint64_t at_ = 0;    // bytes of it
  uint64_t came_ = 0;  // pieces
  std::deque<Flight> flights_;
};

}  // namespace photinus
