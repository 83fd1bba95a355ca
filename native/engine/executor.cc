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
    case Place::landing:
      assert(own && "nobody reads another rank's landing");
      return landing + region.offset_bytes;
    case Place::landing_ring:
      return peer.landing_ring + sequence % 2 * (device_sizes.bytes() / 2) + region.offset_bytes;
    case Place::result_ring:
      return rings->result(region.offset_bytes);
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
      case Step::Kind::copy: {
        std::byte *const to = memory.find(step.to, peers_), *const from = memory.find(step.from, peers_);
        if (memory.copies)
          memory.copies->start(cuda::Way::to_gpu, to, from, step.bytes, true);
        else if (to != from && !copy_.run(to, from, step.bytes, step.past_caches))
          return false;
        break;
      }
      case Step::Kind::reduce:
        reduce(step, call, memory);
        break;
      case Step::Kind::advance:
        peers_.advance(step.counter, mark(memory.sequence, step.value));
        break;
      case Step::Kind::wait:
        if (!is_reached(step, memory.sequence)) return false;
        break;
      case Step::Kind::tell:
        hosts_->tell(step.value);
        break;
      case Step::Kind::hear:
        if (!hosts_->hear(step.value) || hosts_->is_refused()) return false;
        break;
      case Step::Kind::send:
        if (!hosts_->send(step.rank, memory.find(step.from, peers_), step.bytes)) return false;
        break;
      case Step::Kind::receive:
        if (!hosts_->receive(step.rank, memory.find(step.to, peers_), step.bytes)) return false;
        break;
      case Step::Kind::wait_sent:
        if (!hosts_->have_left(step.rank, step.value)) return false;
        break;
      case Step::Kind::wait_received:
        if (!hosts_->have_come(step.rank, step.value)) return false;
        break;
      case Step::Kind::start_copy:
        memory.copies->start(step.to.place == Place::recv ? cuda::Way::to_gpu : cuda::Way::to_host,
                             memory.find(step.to, peers_), memory.find(step.from, peers_), step.bytes);
        break;
      case Step::Kind::wait_copied:
        if (!memory.copies->have_come(step.value)) return false;
        break;
      case Step::Kind::wait_room:
        if (step.rank == kEveryone ? !memory.rings->has_room(step.value)
                                   : !memory.rings->has_room(step.rank, step.value))
          return false;
        break;
      case Step::Kind::let_go:
        memory.rings->let_go(step.value, memory.copies->newest(cuda::Way::to_gpu));
        break;
    }
  }
  return true;
}

// Counters of one collective never satisfy waits of another.
bool Executor::is_reached(const Step& step, uint64_t sequence) const {
  const uint64_t wanted = mark(sequence, step.value);
  if (step.rank != kEveryone) return peers_.value(step.rank, step.counter) >= wanted;
  for (const uint32_t rank : peers_.locals())
    if (peers_.value(rank, step.counter) < wanted) return false;
  return true;
}

std::vector<uint32_t> Executor::missing(const Step& step, const Memory& memory) {
  std::vector<uint32_t> ranks;
  switch (step.kind) {
    case Step::Kind::hear:
      return hosts_->missing();
    case Step::Kind::send:
    case Step::Kind::receive:
      return {step.rank};
    case Step::Kind::wait_sent:
      if (!hosts_->have_left(step.rank, step.value)) ranks.push_back(step.rank);
      return ranks;
    case Step::Kind::wait_received:
      if (!hosts_->have_come(step.rank, step.value)) ranks.push_back(step.rank);
      return ranks;
    case Step::Kind::wait_room:
      for (const uint32_t rank : peers_.locals())
        if ((step.rank == kEveryone || step.rank == rank) && !memory.rings->has_room(rank, step.value))
          ranks.push_back(rank);
      return ranks;
    default:
      break;
  }
  for (const uint32_t rank : peers_.locals())
    if ((step.rank == kEveryone || step.rank == rank) &&
        peers_.value(rank, step.counter) < mark(memory.sequence, step.value))
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
  const Kernel kernel = step.kernel.value_or(Kernel{call.reduction, call.dtype, call.dtype});
  const ReduceCall reduced{sources.data(),
                           static_cast<uint32_t>(sources.size()),
                           destinations.data(),
                           static_cast<uint32_t>(destinations.size()),
                           step.bytes / size_bytes(kernel.from),
                           peers_.ranks(),
                           premultiplies ? factors.data() : nullptr};
  const InstructionSet set = best_instruction_set();
  if (step.results.front().place == Place::result_ring)
    memory.rings->threads().reduce(kernel.from, kernel.to, kernel.reduction, set, reduced);
  else
    reduce_between(kernel.from, kernel.to, kernel.reduction, set, reduced);
}

}  // namespace photinus
