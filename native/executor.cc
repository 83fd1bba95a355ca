#include "executor.h"

#include <cassert>

#include "device/host.h"

namespace photinus {

std::byte* Memory::find(const Region& region, uint32_t rank, uint32_t me) const {
  switch (region.place) {
    case Place::send:
      if (rank == me) return send + region.offset_bytes;
      return arena_bases[rank] + descriptors[rank].send_offset + region.offset_bytes;
    case Place::recv:
      if (rank == me) return recv + region.offset_bytes;
      return arena_bases[rank] + descriptors[rank].recv_offset + region.offset_bytes;
    case Place::flat:
      return slots + rank * slot_bytes(sizes) + sequence % 2 * sizes.flat_bytes + region.offset_bytes;
    case Place::slot:
      return slots + rank * slot_bytes(sizes) + 2 * sizes.flat_bytes + region.offset_bytes;
    case Place::none:
      break;
  }
  assert(false && "a plan speaks of no place");
  return nullptr;
}

void Executor::run(const std::vector<Step>& steps, const Call& call, const Memory& memory, const Look& look) {
  const uint32_t me = mailbox_.rank();
  const uint64_t epoch = memory.sequence << 32;  // counters of one collective never satisfy waits of another
  for (const Step& step : steps) {
    switch (step.kind) {
      case Step::Kind::copy:
        host::copy(memory.find(step.to, step.to.rank, me), memory.find(step.from, step.from.rank, me),
                   step.bytes);
        break;
      case Step::Kind::reduce:
        reduce(step, call, memory);
        break;
      case Step::Kind::advance:
        mailbox_.advance(step.counter, epoch | step.value);
        break;
      case Step::Kind::wait: {
        const bool all = step.rank == kEveryone;
        mailbox_.wait(step.counter, epoch | step.value, all ? 0 : step.rank,
                      all ? mailbox_.ranks() : step.rank + 1, patience_, look);
        break;
      }
    }
  }
}

void Executor::reduce(const Step& step, const Call& call, const Memory& memory) {
  const uint32_t me = mailbox_.rank(), ranks = mailbox_.ranks();
  sources_.clear();
  destinations_.clear();
  for (uint32_t rank = 0; rank < ranks; ++rank)
    sources_.push_back(rank == me ? memory.find(step.own, me, me) : memory.find(step.from, rank, me));
  destinations_.push_back(memory.find(step.to, me, me));
  if (step.also.place != Place::none) {
    if (step.also.rank == kEveryone) {
      for (uint32_t rank = 0; rank < ranks; ++rank)
        if (rank != me) destinations_.push_back(memory.find(step.also, rank, me));
    } else {
      destinations_.push_back(memory.find(step.also, step.also.rank, me));
    }
  }
  ReduceFunction function = find_reduce(call.dtype, call.reduction, best_instruction_set());
  assert(function && "calls without a kernel are refused when they are submitted");
  function({sources_.data(), ranks, destinations_.data(), static_cast<uint32_t>(destinations_.size()),
            step.bytes / size_bytes(call.dtype), ranks});
}

}  // namespace photinus
