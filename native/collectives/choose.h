// Which algorithm a collective takes: pure functions that return their reason. All ranks see the same facts
// (equal calls, everyone's descriptors), so all choose the same.
#pragma once

#include <vector>

#include "collectives/plan.h"

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

}  // namespace photinus
