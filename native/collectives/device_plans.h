// The plans of collectives on tensors in GPUs' memory, inside a host. Chunks travel to the host by the GPU's
// copy engine, are added there, and travel back, all at the same time. W ranks, S bytes of one rank's tensor.
//
//   collective       over a link, each way          the host adds or moves
//   all_reduce       S to the host, S back          each rank its slice of every chunk, once
//   reduce           S to the host, S to the root   the same
//   reduce_scatter   SW to the host, S back         each rank its own part
//   all_gather       S to the host, SW back         nothing
//   broadcast        S from the root, S to others   nothing
//
// What is to be added lands in the rank's landing ring (Place::landing_ring), of which a collective uses one
// half and the next one the other, so that the first chunks may come before ranks have met. Sums, and what is
// not added, stand in the group's one result ring (Place::result_ring), from which every rank copies back. A
// collective ends when its copies back are queued; its places in the result ring are counted on from
// collective to collective, and one is used again when the copies of all ranks from it have ended (wait_room,
// let_go).
#pragma once

#include "collectives/plan.h"

namespace photinus {

Plan device_plan(const Call& call, Seat seat, const DeviceSizes& sizes);

}  // namespace photinus
