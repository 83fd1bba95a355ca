// Runs one rank's steps on real memory: the only place that turns a plan into copies and additions. A step
// that must wait ends the run; it goes on from there when called again.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/plan.h"
#include "device/device.h"
#include "engine/device_copies.h"
#include "engine/device_rings.h"
#include "engine/host_traffic.h"
#include "kernels/reduce.h"
#include "peers/peers.h"

namespace photinus {

// Where this rank finds what regions speak of, besides what it knows of its peers.
struct Memory {
  std::byte* send = nullptr;  // the own tensors
  std::byte* recv = nullptr;
  std::byte* landing = nullptr;
  std::vector<std::byte*> send_parts, recv_parts;  // the own ones, by peer
  std::vector<CallDescriptor> descriptors;         // by rank, once ranks have met: where peers' tensors lie
  SlotSizes sizes;
  uint64_t sequence = 0;
  std::vector<double> factors;  // by rank, for premul_sum
  DeviceSizes device_sizes;
  DeviceRings* rings = nullptr;    // of plans for GPUs
  DeviceCopies* copies = nullptr;  // of the operation, if its tensors are on one

  std::byte* find(const Region& region, const Peers& peers) const;
};

// What one reduction reads and writes: kept from one to the next, to save the allocations.
struct Operands {
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  std::vector<double> factors;
};

class Executor {
 public:
  // `hosts`: null where all ranks are on one.
  Executor(Peers& peers, Device& device, Operands& operands, HostTraffic* hosts)
      : peers_(peers), copy_(device), operands_(operands), hosts_(hosts) {}

  // Does steps from `next` on; false when the step at `next` must wait, or when hosts turn out to disagree.
  bool run(const std::vector<Step>& steps, size_t& next, const Call& call, const Memory& memory);
  // The copy for which `run` ended, if it did for one.
  CopyInFlight& copy() { return copy_; }
  // The ranks for which a wait step waits.
  std::vector<uint32_t> missing(const Step& step, const Memory& memory);

 private:
  bool is_reached(const Step& step, uint64_t sequence) const;
  void reduce(const Step& step, const Call& call, const Memory& memory);

  Peers& peers_;
  CopyInFlight copy_;
  Operands& operands_;
  HostTraffic* const hosts_;
};

}  // namespace photinus
