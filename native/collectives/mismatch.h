// Whether all ranks called the same collective: pure functions of what they posted.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "collectives/exchange.h"
#include "collectives/plan.h"
#include "collectives/rank_set.h"

namespace photinus {

// What ranks posted, with the texts beside it.
struct PostedCall {
  CallDescriptor facts;
  std::string site, label;
  RankSet ranks;
  std::string shape{};
};

// "all_reduce of float32[100] (sum) labelled 'loss' at train.py:41"
std::string describe(const PostedCall& posted);

// Whether the calls agree in everything that must be equal on all ranks. Sites may differ: rank 0 often has a
// line of its own. Sizes of parts are compared elsewhere, pair by pair. Cheap: this runs in every collective.
// Shapes are compared among all ranks: tensors of as many elements may differ in them.
bool agree(const CallDescriptor& a, const CallDescriptor& b);
bool agree(const std::vector<CallDescriptor>& calls);
// Whether the root has a part for each other rank, so that its shape is what all have, or nobody needs to.
bool follows_root(const CallDescriptor& call);

// The error's text for calls that do not agree, and for ranks of which only that is known.
std::string mismatch_text(const std::string& group, uint64_t sequence, const std::vector<PostedCall>& calls,
                          const RankSet& others = {});

// The error's text for calls that agree, where it is one that they look as if ranks were out of step.
std::string out_of_step_text(const std::string& group, uint64_t sequence,
                             const std::vector<PostedCall>& calls);

// The warning's text for calls that agree, but look as if the ranks were out of step.
std::string suspicion_text(const std::string& group, uint64_t sequence, const std::vector<PostedCall>& calls);

// Remembers the places in the user's program from which ranks called. Two patterns look as if ranks were out
// of step although their calls look alike: ranks come from different places, each of which is known as one
// where all came together before (one has skipped or added a call); or two calls in a row come from the same
// places, each rank from another one than before (two calls on tensors of equal size are swapped). It is no
// proof: a program may have branches that each rank takes for itself.
class SiteHistory {
 public:
  // Whether the calls' sites look like that: every time, or once for each set of sites. Learns them.
  bool look_out_of_step(const std::vector<CallDescriptor>& calls, bool every_time);

 private:
  bool all_together_before(const std::vector<CallDescriptor>& calls) const;
  bool swapped_since_last(const std::vector<CallDescriptor>& calls) const;

  static constexpr size_t kKept = 4096;
  std::unordered_set<uint32_t> together_;
  std::unordered_set<uint64_t> told_;  // sets of sites
  uint32_t last_ = 0;
  std::vector<CallDescriptor> apart_;  // the call before, when it came from different places
};

}  // namespace photinus
