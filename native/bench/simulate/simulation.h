// Runs the engine's plans on a model of hosts and network (collectives/cost.h): no memory, no sockets, only
// times.
//
// A rank's plan is made a few steps at a time, as it is run. A rank runs ahead of the others up to where it
// needs what they have not done yet: what it did has times, so who waits for it knows for how long. Only
// cores and cards, for which ranks compete, are given out in the order of time.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/cost.h"
#include "collectives/net.h"
#include "simulate/events.h"
#include "simulate/sums.h"

namespace photinus::simulate {

struct Setup {
  Levels levels;
  Call call;
  bool in_arenas = true;  // tensors; where a small one is not flat anyway
  SlotSizes slots;
  NetSizes net;
  Model model;
  uint32_t calls = 1;  // back to back
  // Only the first host is simulated, and all others are taken to do the same at the same time. True where
  // hosts are alike, pieces are of one size, and nothing is random; otherwise off by what the pieces differ,
  // of which the first host's are the largest.
  bool folded = false;
  std::vector<uint64_t> followed;  // elements whose sums are checked; none where folded
};

struct Outcome {
  Algorithm algorithm = Algorithm::flat;
  double seconds = 0;                         // of a call
  double sent_bytes = 0, received_bytes = 0;  // of payload in a call, of the host with most
  double least_bytes = 0;                     // an all_reduce's bound for both
  // The share of the time in which the busiest of each was busy.
  double card_out = 0, card_in = 0, core = 0, switches = 0;
  uint64_t frames = 0, steps = 0, sums = 0;

  std::string binds() const;  // what is busiest, or that nothing is
};

// Throws Error(invalid_argument) for what cannot be, and Error(system) where ranks get stuck or a sum is not
// what it must be.
Outcome run(const Setup& setup);

}  // namespace photinus::simulate
