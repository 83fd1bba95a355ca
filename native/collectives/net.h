// The plans of the collectives of several hosts (levels.h has the terms). H hosts in levels r1, r2, ..., S
// bytes of one rank's tensor. Inside a host work is shared through memory as in shm.h; between hosts each
// slice travels by itself, over links of the rank that carries it, so no rank leads.
//
//   collective       algorithm      rounds in a row   bytes that one host sends, and receives
//   all_reduce       flat           levels            S((r1-1) + (r2-1) + ...)
//                    arena, staged  2 levels          2S(H-1)/H
//   reduce_scatter   all            levels            SL(H-1), L ranks on each host
//   all_gather       flat           levels            SL(H-1)
//                    arena, staged  2 levels          SL(H-1)
//   reduce           flat           levels            up to S out, S((r1-1) + (r2-1) + ...) into the root's
//                    arena, staged  2 levels          2S(H-1)/H into the root's, up to S out of others
//   broadcast        flat           2 levels          S((r1-1) + (r2-1) + ...) out of the root's, S in
//                    arena, staged  3 levels          2S(H-1)/H out of the root's, S into others
//   barrier                         levels            nothing
//
// The algorithm is that of this host (flat: of all), for only its ranks know where their tensors lie; how
// tensors are cut depends on none of it. arena needs in the arenas of this host's ranks: for all_reduce all
// inputs and outputs, reduce_scatter all inputs, all_gather all outputs, reduce all inputs and on the root's
// host its output, broadcast on the root's host its input and elsewhere all outputs. Nothing is written into
// recv before this rank has heard, over others, from every host: a mismatch leaves outputs as they were. All
// plans tell and hear in the levels' order, whatever the operation: so hosts whose calls differ hear of it.
//
// Exchanging in groups of r1, r2, ... is BlueConnect's (Cho et al., MLSys 2019) and gloo's bcube; [H] is
// direct exchange and [2, 2, ...] recursive halving and doubling (Thakur et al., 2005). All move the least
// bytes.
#pragma once

#include <memory>

#include "collectives/levels.h"
#include "collectives/plan.h"

namespace photinus {

// What a rank has for frames, the same on all ranks.
struct NetSizes {
  uint64_t landing_bytes = 16 << 20;    // place for what comes in and for partial results
  uint64_t slice_bytes = 256 << 10;     // of one slice of one chunk as it crosses, at most, and
  uint64_t most_slice_bytes = 1 << 20;  // of a long tensor
  uint64_t frame_bytes = 4 << 10;       // flat: smaller slices are not worth a frame of their own
  double latency_s = 0;                 // to another host, as measured; 0: not known
  double bytes_per_s = 0;               // of payload into a host, as measured; 0: not known
};

// The bytes that a slice of one chunk may have as it crosses, of a tensor whose slices have so many there.
uint64_t longest_slice(const NetSizes& net, const Levels& levels, uint64_t bytes);
// The bytes of a chunk of a tensor of so many that two hosts of one rank each exchange as it is.
uint64_t exchanged_chunk(const NetSizes& net, uint64_t bytes);

// What a group has of what was asked for: a chunk has a cache line for each rank. Over hosts more chunks are
// under way at a time: fewer would be cut into frames that are hardly worth a call.
SlotSizes sizes_for(SlotSizes asked, uint32_t ranks, bool over_hosts);

// The type in which partial results of a reduction cross between hosts: the one that the call asks for; else
// that of the elements, or a wider one for averages of integers (whose sums may not wrap). Where it is
// narrower than the elements, results cross in it too.
Dtype wire_dtype(const Call& call);

// Whether a call may ask for a type: for that of its elements, and where it adds or multiplies, for a 16-bit
// float in place of float32 or for float32 in place of a 16-bit float.
bool can_cross_as(const Call& call, Dtype wire);

// Whether partial results are rounded on the way, once a level: then the bits of a call depend on the list.
bool is_rounded_in_levels(const Call& call);

Plan net_all_reduce(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm,
                    const SlotSizes& sizes, const NetSizes& net);
Plan net_reduce_scatter(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm,
                        const SlotSizes& sizes, const NetSizes& net);
Plan net_all_gather(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm,
                    const SlotSizes& sizes, const NetSizes& net);
Plan net_reduce(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm,
                const SlotSizes& sizes, const NetSizes& net);
Plan net_broadcast(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm,
                   const SlotSizes& sizes, const NetSizes& net);
Plan net_barrier(const Levels& levels, uint32_t rank);

// The steps of an all_reduce after its meeting, arena or staged, of at least one element: made some at a
// time, for plans of a long tensor and of many ranks have no room all at once (bench/simulate).
class StepSource {
 public:
  virtual ~StepSource() = default;
  // Appends what comes next; false when that was all. `levels` must still be there.
  virtual bool next(std::vector<Step>& steps) = 0;
};
std::unique_ptr<StepSource> net_all_reduce_steps(const Call& call, const Levels& levels, uint32_t rank,
                                                 Algorithm algorithm, const SlotSizes& sizes,
                                                 const NetSizes& net);

// Whether what comes to a rank in a flat all_reduce, reduce or broadcast has room everywhere. Where it has
// not, the plan of the first two is staged.
bool fits_flat(const Call& call, const Levels& levels, const NetSizes& net);

// The plan of any of these.
Plan net_plan(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm,
              const SlotSizes& sizes, const NetSizes& net);

}  // namespace photinus
