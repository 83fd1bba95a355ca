// Latency and rate between the hosts of a group that has just formed, over its own links.
#pragma once

#include "collectives/cost.h"
#include "collectives/levels.h"
#include "peers/peers.h"

namespace photinus {

// Called by all ranks at the same time. The first rank of each host sends half a MiB to that of the next host
// of its group in the first level, and takes as much from the one before, so cards are measured both ways.
// What has not come after `limit_s` is given up. The latency is half the least round trip that the kernel has
// seen. All other ranks return at once, knowing nothing.
Speeds measure(Peers& peers, const Levels& levels, double limit_s);

}  // namespace photinus
