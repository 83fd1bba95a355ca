#include <algorithm>

#include "collectives/shm.h"

namespace photinus {
namespace {

// Copies piece [at, at + bytes) of everyone's input, found at `from_offset` of `place`, into the own output.
void collect(std::vector<Step>& steps, Seat seat, Place place, uint64_t from_offset, uint64_t at,
             uint64_t bytes, uint64_t input_bytes) {
  for (uint32_t i = 0; i < seat.ranks; ++i) {
    const uint32_t rank = (seat.rank + i) % seat.ranks;
    const Region from = rank == seat.rank ? Region{Place::send, rank, at} : Region{place, rank, from_offset};
    steps.push_back(copy_step({Place::recv, seat.rank, rank * input_bytes + at}, from, bytes));
  }
}

Plan flat(Seat seat, uint64_t bytes) {
  Plan plan{Algorithm::flat, {}, {}};
  plan.before.push_back(copy_step({Place::flat, seat.rank, 0}, {Place::send, seat.rank, 0}, bytes));
  collect(plan.after, seat, Place::flat, 0, 0, bytes, bytes);
  return plan;
}

// Inputs are read where they lie; nobody may return (and change its input) before all have read it.
Plan arena(Seat seat, uint64_t bytes) {
  Plan plan{Algorithm::arena, {}, {}};
  collect(plan.after, seat, Place::send, 0, 0, bytes, bytes);
  plan.after.push_back(advance_step(Counter::finished, 1));
  plan.after.push_back(wait_step(Counter::finished, 1));
  return plan;
}

Plan staged(Seat seat, uint64_t bytes, const SlotSizes& sizes) {
  Plan plan{Algorithm::staged, {}, {}};
  const uint64_t chunks = (bytes + sizes.chunk_bytes - 1) / sizes.chunk_bytes;
  auto at = [&](uint64_t chunk) { return chunk * sizes.chunk_bytes; };
  auto slot_at = [&](uint64_t chunk) { return chunk % sizes.chunks * sizes.chunk_bytes; };
  auto bytes_of = [&](uint64_t chunk) { return std::min(sizes.chunk_bytes, bytes - at(chunk)); };
  for (uint64_t round = 0; round < chunks + 1; ++round) {
    if (round < chunks) {
      if (round >= sizes.chunks) plan.after.push_back(wait_step(Counter::finished, round - sizes.chunks + 1));
      plan.after.push_back(copy_step({Place::slot, seat.rank, slot_at(round)},
                                     {Place::send, seat.rank, at(round)}, bytes_of(round)));
      plan.after.push_back(advance_step(Counter::staged, round + 1));
    }
    if (round >= 1) {
      const uint64_t chunk = round - 1;
      plan.after.push_back(wait_step(Counter::staged, chunk + 1));
      collect(plan.after, seat, Place::slot, slot_at(chunk), at(chunk), bytes_of(chunk), bytes);
      plan.after.push_back(advance_step(Counter::finished, chunk + 1));
    }
  }
  return plan;
}

}  // namespace

Plan shm_all_gather(const Call& call, Seat seat, Algorithm algorithm, const SlotSizes& sizes) {
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
