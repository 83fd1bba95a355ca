#include <algorithm>

#include "collectives/shm.h"

namespace photinus {
namespace {

Plan flat(Seat seat, uint64_t bytes) {
  Plan plan{Algorithm::flat, {}, {}};
  plan.before.push_back(
      copy_step({Place::flat, seat.rank, 0}, {Place::send, seat.rank, 0}, seat.ranks * bytes));
  plan.after.push_back(reduce_step(
      {{Place::recv, seat.rank}},
      of_all(seat, Place::flat, seat.rank * bytes, {Place::send, seat.rank, seat.rank * bytes}), bytes));
  return plan;
}

Plan arena(Seat seat, uint64_t bytes) {
  Plan plan{Algorithm::arena, {}, {}};
  plan.after.push_back(reduce_step(
      {{Place::recv, seat.rank}},
      of_all(seat, Place::send, seat.rank * bytes, {Place::send, seat.rank, seat.rank * bytes}), bytes));
  plan.after.push_back(advance_step(Counter::finished, 1));
  plan.after.push_back(wait_step(Counter::finished, 1));
  return plan;
}

// A chunk slot holds one piece for each rank; everyone adds the pieces that are meant for it.
Plan staged(Seat seat, uint64_t bytes, const SlotSizes& sizes) {
  Plan plan{Algorithm::staged, {}, {}};
  const uint32_t me = seat.rank;
  const uint64_t piece_bytes =
      std::max(sizes.chunk_bytes / seat.ranks / kLineBytes, uint64_t{1}) * kLineBytes;
  const uint64_t chunks = (bytes + piece_bytes - 1) / piece_bytes;
  auto bytes_of = [&](uint64_t chunk) { return std::min(piece_bytes, bytes - chunk * piece_bytes); };
  auto slot_at = [&](uint64_t chunk) { return chunk % sizes.chunks * sizes.chunk_bytes; };
  for (uint64_t round = 0; round < chunks + 1; ++round) {
    if (round < chunks) {
      if (round >= sizes.chunks) plan.after.push_back(wait_step(Counter::finished, round - sizes.chunks + 1));
      for (uint32_t peer = 0; peer < seat.ranks; ++peer) {
        if (peer == me) continue;
        plan.after.push_back(copy_step({Place::slot, me, slot_at(round) + peer * piece_bytes},
                                       {Place::send, me, peer * bytes + round * piece_bytes},
                                       bytes_of(round)));
      }
      plan.after.push_back(advance_step(Counter::staged, round + 1));
    }
    if (round >= 1) {
      const uint64_t chunk = round - 1;
      plan.after.push_back(wait_step(Counter::staged, chunk + 1));
      plan.after.push_back(reduce_step({{Place::recv, me, chunk * piece_bytes}},
                                       of_all(seat, Place::slot, slot_at(chunk) + me * piece_bytes,
                                              {Place::send, me, me * bytes + chunk * piece_bytes}),
                                       bytes_of(chunk)));
      plan.after.push_back(advance_step(Counter::finished, chunk + 1));
    }
  }
  return plan;
}

}  // namespace

Plan shm_reduce_scatter(const Call& call, Seat seat, Algorithm algorithm, const SlotSizes& sizes) {
  const uint64_t bytes = call.elems * size_bytes(call.dtype);
  switch (algorithm) {
    case Algorithm::flat:
      return flat(seat, bytes);
    case Algorithm::arena:
      return arena(seat, bytes);
    default:
      return staged(seat, bytes, sizes);
  }
}

}  // namespace photinus
