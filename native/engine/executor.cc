#include "engine/executor.h"

#include <cassert>

#include "device/host.h"

namespace photinus {
std::byte* Memory::find(const Region& region, uint32_t rank, const Mailbox& mailbox) const {
  const bool own = rank == mailbox.rank();
  switch (region.place) {
    case Place::send:
      return (own ? send : arena_bases[rank] + descriptors[rank].send_offset) + region.offset_bytes;
    case Place::recv:
      return (own ? recv : arena_bases[rank] + descriptors[rank].recv_offset) + region.offset_bytes;
    case Place::send_part:
      if (own) return send_parts[region.part] + region.offset_bytes;
      return arena_bases[rank] + mailbox.parts(rank, sequence)[region.part].send_offset + region.offset_bytes;
    case Place::recv_part:
      assert(own && "nobody writes into another rank's parts");
      return recv_parts[region.part] + region.offset_bytes;
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

bool Executor::run(const std::vector<Step>& steps, size_t& next, const Call& call, const Memory& memory) {
  for (; next < steps.size(); ++next) {
    const Step& step = steps[next];
    switch (step.kind) {
      case Step::Kind::copy:
        (step.past_caches ? host::copy_streaming : host::copy)(
            memory.find(step.to, step.to.rank, mailbox_), memory.find(step.from, step.from.rank, mailbox_),
            step.bytes);
        break;
      case Step::Kind::reduce:
        reduce(step, call, memory);
        break;
      case Step::Kind::advance:
        mailbox_.advance(step.counter, mark(memory.sequence, step.value));
        break;
      case Step::Kind::wait:
        if (!is_reached(step, memory.sequence)) return false;
        break;
    }
  }
  return true;
}

// Counters of one collective never satisfy waits of another.
bool Executor::is_reached(const Step& step, uint64_t sequence) const {
  const uint64_t wanted = mark(sequence, step.value);
  if (step.rank != kEveryone) return mailbox_.value(step.rank, step.counter) >= wanted;
  for (uint32_t rank = 0; rank < mailbox_.ranks(); ++rank)
    if (mailbox_.value(rank, step.counter) < wanted) return false;
  return true;
}

std::vector<uint32_t> Executor::missing(const Step& step, uint64_t sequence) const {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < mailbox_.ranks(); ++rank)
    if ((step.rank == kEveryone || step.rank == rank) &&
        mailbox_.value(rank, step.counter) < mark(sequence, step.value))
      ranks.push_back(rank);
  return ranks;
}

void Executor::reduce(const Step& step, const Call& call, const Memory& memory) {
  const uint32_t me = mailbox_.rank(), ranks = mailbox_.ranks();
  sources_.clear();
  destinations_.clear();
  for (uint32_t rank = 0; rank < ranks; ++rank)
    sources_.push_back(rank == me ? memory.find(step.own, me, mailbox_)
                                  : memory.find(step.from, rank, mailbox_));
  destinations_.push_back(memory.find(step.to, step.to.rank, mailbox_));
  if (step.also.place != Place::none) {
    for (uint32_t rank = 0; rank < ranks; ++rank)
      if (step.also.rank == kEveryone ? rank != me : rank == step.also.rank)
        destinations_.push_back(memory.find(step.also, rank, mailbox_));
  }
  ReduceFunction function = find_reduce(call.dtype, call.reduction, best_instruction_set());
  assert(function && "calls without a kernel are refused when they are submitted");
  function({sources_.data(), ranks, destinations_.data(), static_cast<uint32_t>(destinations_.size()),
            step.bytes / size_bytes(call.dtype), ranks,
            call.reduction == Reduction::premul_sum ? memory.factors.data() : nullptr});
}

}  // namespace photinus
