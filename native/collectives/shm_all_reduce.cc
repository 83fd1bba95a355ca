#include <algorithm>

#include "collectives/shm.h"
#include "collectives/slices.h"

namespace photinus {
namespace {

// Everyone shows its whole tensor, then everyone adds everything: the same sum in the same order on all
// ranks.
Plan flat(Seat seat, uint64_t bytes) {
  Plan plan{Algorithm::flat, {}, {}};
  const uint32_t me = seat.rank;
  plan.before.push_back(copy_step({Place::flat, me, 0}, {Place::send, me, 0}, bytes));
  plan.after.push_back(
      reduce_step({{Place::recv, me}}, of_all(seat, Place::flat, 0, {Place::send, me}), bytes));
  return plan;
}

// Each rank adds its slice of all tensors where they lie and writes the sum into all of them. Nobody may
// return before the others have finished: they write into its tensor.
Plan arena(Seat seat, uint64_t elems, uint64_t size) {
  Plan plan{Algorithm::arena, {}, {}};
  Slice mine = slice_of(elems, seat.ranks, seat.rank, kLineBytes / size);
  if (mine.elems > 0) {
    uint64_t at = mine.first * size;
    plan.after.push_back(reduce_step(of_all(seat, Place::recv, at, {Place::recv, seat.rank, at}),
                                     of_all(seat, Place::send, at, {Place::send, seat.rank, at}),
                                     mine.elems * size));
  }
  plan.after.push_back(advance_step(Counter::finished, 1));
  plan.after.push_back(wait_step(Counter::finished, 1));
  return plan;
}

// A pipeline over chunks. In round k a rank copies chunk k of its tensor in (all but the slice that it will
// add itself), adds its slice of chunk k-1, and copies the others' sums of chunk k-2 out. Nobody waits for a
// whole chunk of anybody as long as the others are at most a slot behind.
Plan staged(Seat seat, uint64_t elems, uint64_t size, const SlotSizes& sizes) {
  Plan plan{Algorithm::staged, {}, {}};
  const uint32_t me = seat.rank;
  const uint64_t chunk_elems = sizes.chunk_bytes / size, unit = kLineBytes / size;
  const uint64_t chunks = (elems + chunk_elems - 1) / chunk_elems;
  auto elems_of = [&](uint64_t chunk) { return std::min(chunk_elems, elems - chunk * chunk_elems); };
  auto slot_at = [&](uint64_t chunk) { return chunk % sizes.chunks * sizes.chunk_bytes; };
  auto mine_of = [&](uint64_t chunk) { return slice_of(elems_of(chunk), seat.ranks, me, unit); };
  auto& steps = plan.after;

  auto copy_in = [&](uint64_t chunk) {
    if (chunk >= sizes.chunks) steps.push_back(wait_step(Counter::finished, chunk - sizes.chunks + 1));
    const uint64_t base = chunk * chunk_elems * size;
    const Slice mine = mine_of(chunk);
    const uint64_t before = mine.first * size, after = (mine.first + mine.elems) * size;
    const uint64_t end = elems_of(chunk) * size;
    if (before > 0)
      steps.push_back(copy_step({Place::slot, me, slot_at(chunk)}, {Place::send, me, base}, before));
    if (after < end)
      steps.push_back(
          copy_step({Place::slot, me, slot_at(chunk) + after}, {Place::send, me, base + after}, end - after));
    steps.push_back(advance_step(Counter::staged, chunk + 1));
  };
  auto add = [&](uint64_t chunk) {
    const Slice mine = mine_of(chunk);
    if (mine.elems > 0) {
      steps.push_back(wait_step(Counter::staged, chunk + 1));
      const uint64_t at = mine.first * size, base = chunk * chunk_elems * size + at;
      steps.push_back(reduce_step({{Place::recv, me, base}, {Place::slot, me, slot_at(chunk) + at}},
                                  of_all(seat, Place::slot, slot_at(chunk) + at, {Place::send, me, base}),
                                  mine.elems * size));
    }
    steps.push_back(advance_step(Counter::reduced, chunk + 1));
  };
  auto copy_out = [&](uint64_t chunk) {
    for (uint32_t i = 1; i < seat.ranks; ++i) {
      const uint32_t peer =
          (me + i) % seat.ranks;  // start at different peers, so that they are not all read at once
      const Slice theirs = slice_of(elems_of(chunk), seat.ranks, peer, unit);
      if (theirs.elems == 0) continue;
      steps.push_back(wait_step(Counter::reduced, chunk + 1, peer));
      const uint64_t at = theirs.first * size;
      Step step = copy_step({Place::recv, me, chunk * chunk_elems * size + at},
                            {Place::slot, peer, slot_at(chunk) + at}, theirs.elems * size);
      step.past_caches = elems * size >= kPastCachesBytes;
      steps.push_back(step);
    }
    steps.push_back(advance_step(Counter::finished, chunk + 1));
  };

  for (uint64_t round = 0; round < chunks + 2; ++round) {
    if (round < chunks) copy_in(round);
    if (round >= 1 && round - 1 < chunks) add(round - 1);
    if (round >= 2) copy_out(round - 2);
  }
  return plan;
}

}  // namespace

Plan shm_all_reduce(const Call& call, Seat seat, Algorithm algorithm, const SlotSizes& sizes) {
  const uint64_t size = size_bytes(call.dtype);
  switch (algorithm) {
    case Algorithm::flat:
      return flat(seat, call.elems * size);
    case Algorithm::arena:
      return arena(seat, call.elems, size);
    default:
      return staged(seat, call.elems, size, sizes);
  }
}

}  // namespace photinus
