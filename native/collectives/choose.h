// Which algorithm a collective takes: pure functions that return their reason. All ranks of a host see the
// same facts (equal calls, everyone's descriptors), so all choose the same.
#pragma once

#include <vector>

#include "collectives/net.h"

namespace photinus {

// Whether a call goes through the flat slots. Decided from the call alone, since data is copied in before
// ranks meet.
bool is_flat(const Call& call, uint32_t ranks, const SlotSizes& sizes);

struct Choice {
  Algorithm algorithm;
  const char* reason;
};

// The choice once all ranks' descriptors are known.
Choice choose(const Call& call, const std::vector<CallDescriptor>& descriptors, const SlotSizes& sizes);

// The same for several hosts. Whether a call is flat is equal on all of them; how a host shares its part of
// another is its own affair, for of the descriptors (by rank) only those of the host of `rank` are known.
bool is_flat(const Call& call, const Levels& levels, const SlotSizes& sizes, const NetSizes& net);
Choice choose(const Call& call, const Levels& levels, uint32_t rank,
              const std::vector<CallDescriptor>& descriptors, const SlotSizes& sizes, const NetSizes& net);

}  // namespace photinus
