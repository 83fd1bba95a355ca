// A group's rings for chunks from and to GPUs (collectives/device_plans.h), as one rank uses them: its
// landing ring and the group's result ring are locked from the first collective on that takes them.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "collectives/plan.h"
#include "device/cuda/cuda_device.h"
#include "kernels/reduce_threads.h"
#include "peers/peers.h"

namespace photinus {

class DeviceRings {
 public:
  // `helpers`: of the thread that adds; without, as many as this rank's share of the cores has to spare.
  DeviceRings(std::shared_ptr<Peers> peers, const DeviceSizes& sizes, std::optional<uint32_t> helpers)
      : peers_(std::move(peers)), sizes_(sizes), helpers_(helpers) {}
  ~DeviceRings() { unlock(); }
  DeviceRings(const DeviceRings&) = delete;
  DeviceRings& operator=(const DeviceRings&) = delete;

  // Locks them for a GPU; for another one than before when nothing is under way any more.
  void use(const std::shared_ptr<cuda::CudaDevice>& device);

  // What adds chunks, once they are used.
  ReduceThreads& threads() { return *threads_; }

  // Where a place of the result ring that this collective counts from 0 on lies in memory.
  std::byte* result(uint64_t offset_bytes) const;
  // Whether the copies of all ranks from what was there before have ended.
  bool has_room(uint32_t rank, uint64_t chunk) const;
  bool has_room(uint64_t chunk) const;
  // This rank is done with a result when the copy of the ticket has ended.
  void let_go(uint64_t chunk, uint64_t ticket);
  // The collective is done; it had so many results.
  void count_on(uint64_t results) { first_ += results; }
  // Tells of copies that have ended.
  void poll();
  // When poll() may find something next.
  double nap_s() const;

 private:
  struct Return {
    uint64_t count, ticket;
  };
  void unlock();

  const std::shared_ptr<Peers> peers_;
  const DeviceSizes sizes_;
  const std::optional<uint32_t> helpers_;
  std::optional<ReduceThreads> threads_;
  std::shared_ptr<cuda::CudaDevice> device_;
  uint64_t first_ = 0;  // result of this collective, counted from the group's first on; equal on all ranks
  std::deque<Return> returns_;
};

}  // namespace photinus
