// Ranks with tensors in the memory of a GPU, over the driver that is none.
#pragma once

#include <atomic>
#include <numeric>

#include "cuda_rig.h"
#include "data.h"
#include "device/cuda/cuda_device.h"

namespace photinus::test {

// Of one rank: a GPU that it opened for itself, and a stream. It ends before the driver is configured anew.
struct GpuRank {
  std::shared_ptr<cuda::CudaDevice> device = std::make_shared<cuda::CudaDevice>(driver(), 0);
  cuda::CUstream stream = fake().make_stream(false);

  // A tensor that a kernel of the stream, some time later, fills.
  std::byte* tensor(Bytes content, double lasts_s = 0) const {
    if (content.empty()) return nullptr;
    auto* const at = static_cast<std::byte*>(fake().allocate(content.size()));
    fake().launch(stream, lasts_s,
                  [at, content = std::move(content)] { std::copy(content.begin(), content.end(), at); });
    return at;
  }
  // What a kernel of the stream finds.
  Bytes read(const std::byte* at, size_t bytes) const {
    auto found = std::make_shared<Bytes>(bytes);
    auto ran = std::make_shared<std::atomic<bool>>(false);
    fake().launch(stream, 0, [=] {
      std::copy_n(at, bytes, found->begin());
      ran->store(true);
    });
    for (const Deadline deadline = Deadline::in(20); !ran->load(); usleep(50)) CHECK(!deadline.passed());
    return *found;
  }
  Submission on(Submission given) const {
    given.device = device;
    given.stream = stream;
    return given;
  }
  Submission all_reduce(std::byte* at, uint64_t elems, double timeout_s = 0) const {
    Submission given;
    given.call = {Operation::all_reduce, Dtype::int32, Reduction::sum, 0, elems};
    given.send = given.recv = at;
    given.timeout_s = timeout_s;
    return on(given);
  }
};

inline void run_gpu_ranks(uint32_t ranks, const std::string& words,
                          const std::function<void(Communicator&, const GpuRank&)>& body,
                          DeviceSizes sizes = {}) {
  fake().configure(words);
  run_ranks(
      ranks, [&](Communicator& communicator) { body(communicator, GpuRank()); }, 60, {}, {},
      [&](Communicator::Options& options) {
        options.device_sizes = sizes;
        options.reduce_helpers = 2;
      });
}

inline constexpr DeviceSizes kSmallRings{4096, 4};  // many chunks with little data

inline Bytes ints(uint64_t elems, int32_t first) {
  Bytes bytes(elems * 4);
  std::iota(reinterpret_cast<int32_t*>(bytes.data()), reinterpret_cast<int32_t*>(bytes.data()) + elems,
            first);
  return bytes;
}

// Of all ranks' ints(elems, rank).
inline Bytes sum_of_ints(uint64_t elems, uint32_t ranks) {
  Bytes bytes(elems * 4);
  for (uint64_t i = 0; i < elems; ++i)
    reinterpret_cast<int32_t*>(bytes.data())[i] = static_cast<int32_t>(ranks * i + ranks * (ranks - 1) / 2);
  return bytes;
}

}  // namespace photinus::test
