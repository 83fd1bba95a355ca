#include <algorithm>

#include "collectives/shm.h"

namespace photinus {
namespace {

Plan flat(Seat seat, uint32_t root, uint64_t bytes) {
  Plan plan{Algorithm::flat, {}, {}};
  if (seat.rank == root)
    plan.before.push_back(copy_step({Place::flat, root, 0}, {Place::send, root, 0}, bytes));
  else
    plan.after.push_back(copy_step({Place::recv, seat.rank, 0}, {Place::flat, root, 0}, bytes));
  return plan;
}

// The root's tensor is read where it lies; the root must not return before everyone has read it.
Plan arena(Seat seat, uint32_t root, uint64_t bytes) {
  Plan plan{Algorithm::arena, {}, {}};
  if (seat.rank != root)
    plan.after.push_back(copy_step({Place::recv, seat.rank, 0}, {Place::send, root, 0}, bytes));
  plan.after.push_back(advance_step(Counter::finished, 1));
  if (seat.rank == root) plan.after.push_back(wait_step(Counter::finished, 1));
  return plan;
}

Plan staged(Seat seat, uint32_t root, uint64_t bytes, const SlotSizes& sizes) {
  Plan plan{Algorithm::staged, {}, {}};
  const uint64_t chunks = (bytes + sizes.chunk_bytes - 1) / sizes.chunk_bytes;
  for (uint64_t chunk = 0; chunk < chunks; ++chunk) {
    const uint64_t at = chunk * sizes.chunk_bytes, count = std::min(sizes.chunk_bytes, bytes - at);
    const Region slot{Place::slot, root, chunk % sizes.chunks * sizes.chunk_bytes};
    if (seat.rank == root) {
      plan.after.push_back(advance_step(Counter::finished, chunk + 1));  // the root never holds itself up
      if (chunk >= sizes.chunks) plan.after.push_back(wait_step(Counter::finished, chunk - sizes.chunks + 1));
      plan.after.push_back(copy_step(slot, {Place::send, root, at}, count));
      plan.after.push_back(advance_step(Counter::staged, chunk + 1));
    } else {
      plan.after.push_back(wait_step(Counter::staged, chunk + 1, root));
      plan.after.push_back(copy_step({Place::recv, seat.rank, at}, slot, count));
      plan.after.push_back(advance_step(Counter::finished, chunk + 1));
    }
  }
  return plan;
}

}  // namespace

Plan shm_broadcast(const Call& call, Seat seat, Algorithm algorithm, const SlotSizes& sizes) {
  const uint64_t bytes = call.elems * size_bytes(call.dtype);
  switch (algorithm) {
    case Algorithm::flat:
      return flat(seat, call.root, bytes);
    case Algorithm::arena:
      return arena(seat, call.root, bytes);
    default:
      return staged(seat, call.root, bytes, sizes);
  }
}

}  // namespace photinus
