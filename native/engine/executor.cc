#include "engine/executor.h"

#include <cassert>

namespace photinus {

std::byte* Memory::find(const Region& region, const Peers& peers) const {
  const uint32_t rank = region.rank;
  const bool own = rank == peers.rank();
  const PeerView& peer = peers[rank];
  switch (region.place) {
    case Place::send:
      return (own ? send : peer.memory + descriptors[rank].send_offset) + region.offset_bytes;
    case Place::recv:
      return (own ? recv : peer.memory + descriptors[rank].recv_offset) + region.offset_bytes;
    case Place::send_part:
      if (own) return send_parts[region.part] + region.offset_bytes;
      return peer.memory + peer.parts[sequence % 2][region.part].send_offset + region.offset_bytes;
    case Place::recv_part:
      assert(own && "nobody writes into another rank's parts");
      return recv_parts[region.part] + region.offset_bytes;
    case Place::flat:
      return peer.slots + sequence % 2 * sizes.flat_bytes + region.offset_bytes;
    case Place::slot:
      return peer.slots + 2 * sizes.flat_bytes + region.offset_bytes;
    case Place::landing:  // of plans that use links
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
        if (!copy_.run(memory.find(step.to, peers_), memory.find(step.from, peers_), step.bytes,
                       step.past_caches))
          return false;
        break;
      case Step::Kind::reduce:
        reduce(step, call, memory);
        break;
      case Step::Kind::advance:
        peers_.advance(step.counter, mark(memory.sequence, step.value));
        break;
      case Step::Kind::wait:
        if (!is_reached(step, memory.sequence)) return false;
        break;
      case Step::Kind::send:
      case Step::Kind::receive:
      case Step::Kind::wait_sent:
      case Step::Kind::wait_received:
      case Step::Kind::tell:
      case Step::Kind::hear:
        assert(false && "plans of one host use no links");
        return false;
    }
  }
  return true;
}

// Counters of one collective never satisfy waits of another.
bool Executor::is_reached(const Step& step, uint64_t sequence) const {
  const uint64_t wanted = mark(sequence, step.value);
  if (step.rank != kEveryone) return peers_.value(step.rank, step.counter) >= wanted;
  for (uint32_t rank = 0; rank < peers_.ranks(); ++rank)
    if (peers_.value(rank, step.counter) < wanted) return false;
  return true;
}

std::vector<uint32_t> Executor::missing(const Step& step, uint64_t sequence) const {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < peers_.ranks(); ++rank)
    if ((step.rank == kEveryone || step.rank == rank) &&
        peers_.value(rank, step.counter) < mark(sequence, step.value))
      ranks.push_back(rank);
  return ranks;
}

void Executor::reduce(const Step& step, const Call& call, const Memory& memory) {
  auto& [sources, destinations, factors] = operands_;
  sources.clear();
  destinations.clear();
  for (const Region& source : step.sources) sources.push_back(memory.find(source, peers_));
  for (const Region& result : step.results) destinations.push_back(memory.find(result, peers_));
  const bool premultiplies = call.reduction == Reduction::premul_sum;
  if (premultiplies) {
    factors.clear();
    for (const Region& source : step.sources) factors.push_back(memory.factors[source.rank]);
  }
  ReduceFunction function = find_reduce(call.dtype, call.reduction, best_instruction_set());
  assert(function && "calls without a kernel are refused when they are submitted");
  function({sources.data(), static_cast<uint32_t>(sources.size()), destinations.data(),
            static_cast<uint32_t>(destinations.size()), step.bytes / size_bytes(call.dtype), peers_.ranks(),
            premultiplies ? factors.data() : nullptr});
}

}  // namespace photinus
