// Runs one rank's steps on real memory: the only place that turns a plan into copies and additions. A step
// that must wait ends the run; it goes on from there when called again.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/plan.h"
#include "kernels/reduce.h"
#include "shm/mailbox.h"

namespace photinus {

// Where this rank finds everything that regions speak of.
struct Memory {
  std::byte* send = nullptr;  // the own tensors
  std::byte* recv = nullptr;
  std::vector<std::byte*> send_parts, recv_parts;  // the own ones, by peer
  std::vector<std::byte*> arena_bases;             // by rank
  std::vector<CallDescriptor> descriptors;  // by rank, once ranks have met: peers' tensors in their arenas
  std::byte* slots = nullptr;               // of all ranks, in this rank's map of the group's segment
  SlotSizes sizes;
  uint64_t sequence = 0;
  std::vector<double> factors;  // by rank, for premul_sum

  // Bytes of slots that one rank has: two flat ones and the ring of chunks.
  static uint64_t slot_bytes(const SlotSizes& sizes) {
    return 2 * sizes.flat_bytes + sizes.chunks * sizes.chunk_bytes;
  }
  std::byte* find(const Region& region, uint32_t rank, const Mailbox& mailbox) const;
};

class Executor {
 public:
  explicit Executor(const Mailbox& mailbox) : mailbox_(mailbox) {}

  // Does steps from `next` on; false when the step at `next` must wait.
  bool run(const std::vector<Step>& steps, size_t& next, const Call& call, const Memory& memory);
  // The ranks for which a wait step waits.
  std::vector<uint32_t> missing(const Step& step, uint64_t sequence) const;

 private:
  bool is_reached(const Step& step, uint64_t sequence) const;
  void reduce(const Step& step, const Call& call, const Memory& memory);

  const Mailbox& mailbox_;
  std::vector<const void*> sources_;  // kept to save an allocation for each step
  std::vector<void*> destinations_;
};

}  // namespace photinus
