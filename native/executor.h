// Runs one rank's steps on real memory: the only place that turns a plan into copies, additions and waits.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/plan.h"
#include "kernels/reduce.h"
#include "memory/mailbox.h"

namespace photinus {

// Where this rank finds everything that regions speak of.
struct Memory {
  std::byte* send = nullptr;  // the own tensors
  std::byte* recv = nullptr;
  std::vector<std::byte*> arena_bases;      // by rank
  std::vector<CallDescriptor> descriptors;  // by rank, once ranks have met: peers' tensors in their arenas
  std::byte* slots = nullptr;               // of all ranks, in this rank's map of the group's segment
  SlotSizes sizes;
  uint64_t sequence = 0;

  // Bytes of slots that one rank has: two flat ones and the ring of chunks.
  static uint64_t slot_bytes(const SlotSizes& sizes) {
    return 2 * sizes.flat_bytes + sizes.chunks * sizes.chunk_bytes;
  }
  std::byte* find(const Region& region, uint32_t rank, uint32_t me) const;
};

class Executor {
 public:
  Executor(Mailbox& mailbox, const Patience& patience) : mailbox_(mailbox), patience_(patience) {}

  // Does the steps; `look` may end a wait by throwing.
  void run(const std::vector<Step>& steps, const Call& call, const Memory& memory, const Look& look);

 private:
  void reduce(const Step& step, const Call& call, const Memory& memory);

  Mailbox& mailbox_;
  Patience patience_;
  std::vector<const void*> sources_;  // kept to save an allocation for each step
  std::vector<void*> destinations_;
};

}  // namespace photinus
