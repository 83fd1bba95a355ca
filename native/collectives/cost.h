// What calls take by formula, from what hosts, cards and the network between them cost. The simulator
// (bench/simulate) runs plans on the same model.
//
// A rank does its steps one after the other, and each takes time of a core; it waits without one. A frame
// leaves through the card of its host, after what was given to the card before it, crosses the network, and
// comes in through the card of the other host, after what came before it; so it takes latency + bytes / rate
// where nothing else is under way. What a rank has sent lies in buffers of the kernel, and so does what has
// come for it, until it takes it.
#pragma once

#include "collectives/net.h"

namespace photinus {

// What a rank tells each counterpart of its call besides its data: a post of one line, with the header of its
// frame (collectives/host_post.h).
inline constexpr uint64_t kToldBytes = 132;

struct Model {
  double rate_gbit = 200;
  double burst_bytes = 0;
  double latency_us = 3;
  double payload_bytes = 1448, header_bytes = 90;
  double send_us = 1, receive_us = 1;
  double socket_ns = 0.12;
  double copy_ns = 0.1, add_ns = 0.1;
  double counter_us = 0.3;
  double call_us = 1;
  double cores = 0;
  double machines = 0;
  double switch_us = 2;
  double spin_us = 60, wake_us = 5;
  double leaf_hosts = 0, oversubscription = 1;
  double jitter_us = 0, seed = 1;
};

// Between hosts, as measured: one way, and of payload into a host; 0: not known.
struct Speeds {
  double latency_s = 0, bytes_per_s = 0;
  bool known() const { return latency_s > 0 && bytes_per_s > 0; }
};
// The model with these in place of its own, where they are known.
Model model_of(const Speeds& speeds);

// What a call takes, on one host (then without levels) or on several, where nothing else goes on: latencies,
// frames, bytes through cards and cores. Chunks hide all but the largest of the last two.
double predicted_s(const Model& model, const Call& call, const Levels& levels, Algorithm algorithm,
                   const SlotSizes& sizes, const NetSizes& net);

// What an all_reduce of `bytes` over `hosts` would take by two algorithms that the engine has not, were there
// nothing but cards, latency and frames: a ring, and two binary trees of half the tensor each, in the number
// of chunks that is best.
double ring_s(const Model& model, uint32_t hosts, double bytes);
double double_tree_s(const Model& model, uint32_t hosts, double bytes);
// What cards need at the rate at least, headers included.
double least_s(const Model& model, uint32_t hosts, double bytes);

}  // namespace photinus
