#include "collectives/device_plans.h"

#include <algorithm>

#include "collectives/slices.h"

namespace photinus {
namespace {

// Chunks of one rank's tensor of `bytes`, where a place in a ring holds `width` bytes of it.
struct Chunks {
  uint64_t bytes, width;
  uint64_t count() const { return (bytes + width - 1) / width; }
  uint64_t at(uint64_t chunk) const { return chunk * width; }
  uint64_t bytes_of(uint64_t chunk) const { return std::min(width, bytes - chunk * width); }
};

// A place in a ring holds a piece for each rank.
uint64_t piece_bytes(Seat seat, const DeviceSizes& sizes) {
  return std::max(sizes.chunk_bytes / seat.ranks / kLineBytes, uint64_t{1}) * kLineBytes;
}

// all_reduce and reduce. While a chunk is added, the next ones land and those before it travel back.
Plan add_slices(const Call& call, Seat seat, const DeviceSizes& sizes) {
  Plan plan{Algorithm::device, {}, {}};
  const uint32_t me = seat.rank;
  const uint64_t size = size_bytes(call.dtype), ahead = sizes.chunks / 2;
  const Chunks chunks{call.elems * size, sizes.chunk_bytes};
  const bool returns = call.operation == Operation::all_reduce || call.root == me;
  auto slot_at = [&](uint64_t chunk) { return chunk % ahead * sizes.chunk_bytes; };
  auto bring = [&](std::vector<Step>& steps, uint64_t chunk) {
    steps.push_back(start_copy_step({Place::landing_ring, me, slot_at(chunk)},
                                    {Place::send, me, chunks.at(chunk)}, chunks.bytes_of(chunk)));
  };
  auto& steps = plan.after;
  for (uint64_t chunk = 0; chunk < std::min(chunks.count(), ahead); ++chunk) bring(plan.before, chunk);
  auto add = [&](uint64_t chunk) {
    steps.push_back(wait_copied_step(chunk + 1));
    steps.push_back(advance_step(Counter::staged, chunk + 1));
    const Slice mine = slice_of(chunks.bytes_of(chunk) / size, seat.ranks, me, kLineBytes / size);
    if (mine.elems > 0) {
      const uint64_t at = mine.first * size;
      steps.push_back(wait_step(Counter::staged, chunk + 1));
      steps.push_back(wait_room_step(chunk));
      steps.push_back(reduce_step({{Place::result_ring, me, chunk * sizes.chunk_bytes + at}},
                                  of_all(seat, Place::landing_ring, slot_at(chunk) + at,
                                         {Place::landing_ring, me, slot_at(chunk) + at}),
                                  mine.elems * size));
    }
    steps.push_back(advance_step(Counter::reduced, chunk + 1));
  };
  auto give_back = [&](uint64_t chunk) {
    const bool goes_on = chunk + ahead < chunks.count();
    if (returns || goes_on) steps.push_back(wait_step(Counter::reduced, chunk + 1));
    if (returns)
      steps.push_back(start_copy_step({Place::recv, me, chunks.at(chunk)},
                                      {Place::result_ring, me, chunk * sizes.chunk_bytes},
                                      chunks.bytes_of(chunk)));
    steps.push_back(let_go_step(chunk));
    if (goes_on) bring(steps, chunk + ahead);
  };
  for (uint64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    add(chunk);
    if (chunk > 0) give_back(chunk - 1);
  }
  if (chunks.count() > 0) give_back(chunks.count() - 1);
  // Who is done tells no more of what it lets go of. One that neither adds nor gets a part of the last chunk
  // may be done before the others have room to write that.
  if (call.operation == Operation::reduce && chunks.count() > 0)
    steps.push_back(wait_room_step(chunks.count() - 1, me));
  plan.results = chunks.count();
  return plan;
}

// A rank adds the pieces that are meant for it, and copies their sum back at once.
Plan reduce_scatter(const Call& call, Seat seat, const DeviceSizes& sizes) {
  Plan plan{Algorithm::device, {}, {}};
  const uint32_t me = seat.rank;
  const uint64_t piece = piece_bytes(seat, sizes), ahead = sizes.chunks / 2;
  const Chunks chunks{call.elems * size_bytes(call.dtype), piece};
  auto slot_at = [&](uint64_t chunk) { return chunk % ahead * sizes.chunk_bytes; };
  auto bring = [&](std::vector<Step>& steps, uint64_t chunk) {
    for (uint32_t peer = 0; peer < seat.ranks; ++peer)
      steps.push_back(start_copy_step({Place::landing_ring, me, slot_at(chunk) + peer * piece},
                                      {Place::send, me, peer * chunks.bytes + chunks.at(chunk)},
                                      chunks.bytes_of(chunk)));
  };
  auto& steps = plan.after;
  for (uint64_t chunk = 0; chunk < std::min(chunks.count(), ahead); ++chunk) bring(plan.before, chunk);
  for (uint64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    const uint64_t mine = chunk * sizes.chunk_bytes + me * piece, at = slot_at(chunk) + me * piece;
    steps.push_back(wait_copied_step((chunk + 1) * seat.ranks));
    steps.push_back(advance_step(Counter::staged, chunk + 1));
    steps.push_back(wait_step(Counter::staged, chunk + 1));
    steps.push_back(wait_room_step(chunk));
    steps.push_back(reduce_step({{Place::result_ring, me, mine}},
                                of_all(seat, Place::landing_ring, at, {Place::landing_ring, me, at}),
                                chunks.bytes_of(chunk)));
    steps.push_back(advance_step(Counter::reduced, chunk + 1));
    steps.push_back(start_copy_step({Place::recv, me, chunks.at(chunk)}, {Place::result_ring, me, mine},
                                    chunks.bytes_of(chunk)));
    steps.push_back(let_go_step(chunk));
    if (chunk + ahead >= chunks.count()) continue;
    steps.push_back(wait_step(Counter::reduced, chunk + 1));
    bring(steps, chunk + ahead);
  }
  plan.results = chunks.count();
  return plan;
}

// all_gather and broadcast: what one rank gives lands in the result ring, and others copy it from there.
Plan pass_on(const Call& call, Seat seat, const DeviceSizes& sizes) {
  Plan plan{Algorithm::device, {}, {}};
  const uint32_t me = seat.rank;
  const bool gathers = call.operation == Operation::all_gather;
  const bool gives = gathers || call.root == me, gets = gathers || call.root != me;
  const uint64_t piece = gathers ? piece_bytes(seat, sizes) : sizes.chunk_bytes, ahead = sizes.chunks / 2;
  const Chunks chunks{call.elems * size_bytes(call.dtype), piece};
  auto& steps = plan.after;
  auto place_of = [&](uint32_t giver, uint64_t chunk) {
    return Region{Place::result_ring, me, chunk * sizes.chunk_bytes + (gathers ? giver * piece : 0)};
  };
  auto bring = [&](uint64_t chunk) {
    if (!gives || chunk >= chunks.count()) return;
    steps.push_back(wait_room_step(chunk));
    steps.push_back(
        start_copy_step(place_of(me, chunk), {Place::send, me, chunks.at(chunk)}, chunks.bytes_of(chunk)));
  };
  for (uint64_t chunk = 0; chunk < ahead; ++chunk) bring(chunk);
  for (uint64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    if (gives) {
      steps.push_back(wait_copied_step(chunk + 1));
      steps.push_back(advance_step(Counter::staged, chunk + 1));
    }
    if (gets) steps.push_back(wait_step(Counter::staged, chunk + 1, gathers ? kEveryone : call.root));
    for (uint32_t i = 0; i < (gathers ? seat.ranks : gets ? 1 : 0); ++i)
      steps.push_back(start_copy_step({Place::recv, me, (gathers ? i * chunks.bytes : 0) + chunks.at(chunk)},
                                      place_of(i, chunk), chunks.bytes_of(chunk)));
    steps.push_back(let_go_step(chunk));
    bring(chunk + ahead);
  }
  plan.results = chunks.count();
  return plan;
}

}  // namespace

Plan device_plan(const Call& call, Seat seat, const DeviceSizes& sizes) {
  switch (call.operation) {
    case Operation::all_reduce:
    case Operation::reduce:
      return add_slices(call, seat, sizes);
    case Operation::reduce_scatter:
      return reduce_scatter(call, seat, sizes);
    default:
      return pass_on(call, seat, sizes);
  }
}

}  // namespace photinus
