// What tests of device/cuda share: the driver that is none (fake_cuda/), and a GPU's copy engines over it.
// What they show holds for our side of the driver's interface, as its manual has it, and says nothing of a
// real GPU.
#pragma once

#include <unistd.h>

#include <algorithm>

#include "check.h"
#include "device/cuda/copy_engines.h"
#include "fake_cuda/fake_cuda.h"

namespace photinus::test {

inline constexpr size_t kBytes = 64 << 10;

inline FakeCuda& fake() {
  static FakeCuda& driver = fake_cuda(PHOTINUS_FAKE_CUDA);
  return driver;
}

inline std::shared_ptr<const cuda::Driver> driver() {
  return cuda::Driver::open({PHOTINUS_FAKE_CUDA, "/nonexistent"});
}

// A rank's share: a GPU, its copy engines, a ring in host memory, a tensor, and the stream of whoever calls.
struct Rig {
  explicit Rig(const std::string& words = "") {
    fake().configure(words);
    engines = std::make_shared<cuda::CopyEngines>(std::make_shared<const cuda::Gpu>(driver(), 0));
    engines->add_memory(ring, kBytes);
    tensor = static_cast<std::byte*>(fake().allocate(kBytes));
    caller = fake().make_stream(true);
  }
  void await(uint64_t ticket) const {
    const Deadline deadline = Deadline::in(10);
    while (ticket != 0 && !engines->poll(ticket)) {
      CHECK(!deadline.passed());
      usleep(20);
    }
  }
  std::shared_ptr<std::byte> ring = cuda::shared_pages(kBytes);
  std::shared_ptr<cuda::CopyEngines> engines;
  std::byte* tensor = nullptr;
  cuda::CUstream caller = nullptr;
};

// All copies wait for what is in the caller's stream, and this for all copies.
inline void wait_for(cuda::CopyEngines& engines, cuda::CUstream caller) {
  const cuda::Event event = engines.record(caller);
  for (const cuda::Way way : {cuda::Way::to_host, cuda::Way::to_gpu}) engines.wait_for(event, way);
}
inline void make_wait(cuda::CopyEngines& engines, cuda::CUstream caller) {
  for (const cuda::Way way : {cuda::Way::to_host, cuda::Way::to_gpu})
    engines.make_wait(caller, engines.record(way));
}

inline void fill(std::byte* at, int value, size_t bytes = kBytes) {
  std::memset(at, value, bytes);
}

inline bool all_are(const std::byte* at, int value, size_t bytes = kBytes) {
  return std::all_of(at, at + bytes, [&](std::byte b) { return b == static_cast<std::byte>(value); });
}

}  // namespace photinus::test
