// Exchanges (exchange.h) over several hosts. A rank knows what its own host's ranks send and expect, no more:
// among them it is exchanged as inside one host; what goes to ranks of other hosts travels straight from the
// sender's part into the receiver's, over a link of the pair. Whether both sides of all pairs agree is told
// by a sum over all ranks (HostPost::parts_sum).
//
// Bytes that a host sends: what its ranks send to those of others, each once. Rounds in a row: one more than
// there are levels.
#pragma once

#include <string>
#include <vector>

#include "collectives/exchange.h"
#include "collectives/levels.h"

namespace photinus {

struct HostParts {
  const Levels& levels;
  uint32_t rank = 0;
  uint64_t item_bytes = 1;
  // What ranks of this host, in their order, posted about all ranks; before they meet only this rank's own is
  // there, and the others are null.
  std::vector<const PostedPart*> rows;

  const std::vector<uint32_t>& locals() const { return levels.hosts[levels.host_of(rank)]; }
  const PostedPart& part(uint32_t peer) const { return rows[levels.local_index(rank)][peer]; }
};

// Among the ranks of this host, of which each is called by its place there.
Exchange among_locals(const HostParts& exchange);

std::vector<Step> net_exchange_before(const HostParts& exchange, const SlotSizes& sizes);
// When calls agree and the sum is 0 after the last level, this can be done. Where ranks of this host disagree
// (find_disagreement) it cannot be made: the plan of a barrier then tells the other hosts.
std::vector<Step> net_exchange_after(const HostParts& exchange, const SlotSizes& sizes);

// What a rank adds to the sum: something made of who sends how much to whom for each part that it sends, and
// the negative for each that it expects. So over all ranks it is 0 where all agree, and else (but for one
// case in 2^64) not.
uint64_t parts_sum(uint32_t rank, const PostedPart* row, uint32_t ranks);

// The error's text when the sum is not 0: the pair, where it is one of this host, else this rank's sizes.
std::string disagreement_text(const std::string& call, const HostParts& exchange);

}  // namespace photinus
