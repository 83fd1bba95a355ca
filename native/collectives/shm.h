// The plans of the collectives inside a host, through shared memory. W ranks, S bytes of one rank's tensor.
//
//   collective       algorithm  waits in a row   bytes that one rank reads + writes
//   all_reduce       flat       1                S(W+1) + 2S
//                    arena      2                S + S, as each rank adds one slice for everyone
//                    staged     2 + chunks       S(3-2/W) + 2S, most of it in cache
//   reduce           flat       1                SW + S at the root, S + S elsewhere
//                    arena      2                S + S/W
//                    staged     2 + chunks       S(3-2/W) + S(2-1/W) at the root, S(2-1/W) + S elsewhere
//   broadcast        flat       1                S + S
//                    arena      2                S + S
//                    staged     1 + chunks       S + S
//   all_gather       flat       1                S(W+1) + S(W+1)
//                    arena      2                SW + SW
//                    staged     1 + chunks       S(W+1) + S(W+1)
//   reduce_scatter   flat       1                SW + SW in, SW + S
//                    arena      2                SW + S
//                    staged     1 + chunks       S(2W-1) + SW
//
// The design is the intra-host half of HFReduce (Fire-Flyer AI-HPC, SC24, arXiv 2408.14158, section IV), with
// every rank adding one slice instead of one process adding all.
#pragma once

#include "collectives/plan.h"

namespace photinus {

Plan shm_all_reduce(const Call& call, Seat seat, Algorithm algorithm, const SlotSizes& sizes);
Plan shm_reduce(const Call& call, Seat seat, Algorithm algorithm, const SlotSizes& sizes);
Plan shm_broadcast(const Call& call, Seat seat, Algorithm algorithm, const SlotSizes& sizes);
Plan shm_all_gather(const Call& call, Seat seat, Algorithm algorithm, const SlotSizes& sizes);
Plan shm_reduce_scatter(const Call& call, Seat seat, Algorithm algorithm, const SlotSizes& sizes);

// The plan of any collective without parts (for those see exchange.h).
Plan shm_plan(const Call& call, Seat seat, Algorithm algorithm, const SlotSizes& sizes);

}  // namespace photinus
