// Which algorithm a collective takes: pure functions that return their reason. All ranks of a host see the
// same facts (equal calls, everyone's descriptors), so all choose the same.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "collectives/cost.h"

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

// The lists that need no links but those of `sizes`: with levels cut into smaller ones, itself first.
std::vector<std::vector<uint32_t>> finer_lists(const std::vector<uint32_t>& sizes);

struct ListChoice {
  std::vector<uint32_t> sizes;
  std::string reason;
};
// Of these, for `levels`, the one with which all_reduces of small to large tensors take the least time;
// another than the list that `levels` has only where it gains something.
ListChoice choose_list(const Model& model, const Levels& levels, const SlotSizes& sizes, const NetSizes& net);

// The list for a group: `wish` where it is for as many hosts; else by speeds, where they are known and nobody
// wished for none (an empty list); else the one that `levels` has, by the number of hosts.
ListChoice list_for(const Levels& levels, const std::optional<std::vector<uint32_t>>& wish,
                    const Speeds& speeds, const SlotSizes& sizes, const NetSizes& net);
bool is_for(const std::optional<std::vector<uint32_t>>& wish, const Levels& levels);

// How a call would run, all tensors in arenas or none, and for how long by the model: for people.
struct Explanation {
  Algorithm algorithm;
  std::string levels;  // empty on one host
  const char* kernels;
  double seconds;
  const char* reason;
};
Explanation explain(const Call& call, const Levels& levels, uint32_t rank, bool in_arena, const Model& model,
                    const SlotSizes& sizes, const NetSizes& net);

}  // namespace photinus
