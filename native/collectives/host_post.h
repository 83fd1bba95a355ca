// What ranks tell each other over hosts (plan.h: tell): the calls of all ranks of which the teller knows.
//
// Compared over hosts is what is compared inside one: all that must be equal, and the lines that vote. Where
// each of those that a call without a vote has come from is not kept, nor where a tensor lies, or what each
// rank has counted: of updates only the least and the most travel, of the sizes of parts a sum.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "collectives/mismatch.h"
#include "collectives/update_history.h"

namespace photinus {

struct HostPost {
  static constexpr size_t kMostCalls = 4;
  static constexpr size_t kMostBytes = 2112;  // encoded

  uint64_t sequence = 0;
  std::vector<PostedCall> calls;  // that differ, or came from different lines; in the order of hearing
  RankSet left_out;               // ranks whose calls agree with none of these and do not fit
  bool has_all_sites = true;      // false: some of those that agree came from further lines
  UpdateRange updates;
  uint64_t parts_sum = 0;  // net_exchange.h: 0 once all ranks are in it, when they agree about sizes

  RankSet ranks() const;  // whose calls it knows
};

// What a rank of this host posted, with the texts beside it.
void add(HostPost& post, const CallDescriptor& facts, const char* site, const char* label, uint32_t rank,
         const char* shape = "");

// What another rank told. In a level two ranks know of the same hosts or of none in common, so what is partly
// known is wholly known.
void merge(HostPost& post, const HostPost& heard);

// Whether all these calls agree, but for the sizes of parts.
bool agrees(const HostPost& post);

// For SiteHistory: a call for each rank, or one when all came from one line; none where lines are missing.
std::vector<CallDescriptor> calls_by_rank(const HostPost& post);

// Returns how many bytes were written: at most kMostBytes.
size_t encode(const HostPost& post, std::byte* to);
// Nothing unless the bytes are exactly an encoded post.
std::optional<HostPost> decode(const std::byte* from, size_t bytes);

}  // namespace photinus
