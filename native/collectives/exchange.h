// Collectives in which each pair of ranks has its own size: all_to_all, gather, scatter, and all_gather of
// tensors of different sizes. Every rank posts what it sends to and expects of each other, so all ranks see
// the whole matrix, and the plan is a pure function of it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "collectives/plan.h"

namespace photinus {

struct Exchange {
  uint32_t ranks = 1;
  uint64_t item_bytes = 1;
  std::vector<PostedPart> parts;  // what rank r posted about its peer p stands at r * ranks + p

  const PostedPart& part(uint32_t rank, uint32_t peer) const { return parts[rank * ranks + peer]; }
  uint64_t sent_bytes(uint32_t from, uint32_t to) const { return part(from, to).send_elems * item_bytes; }

  // How what a rank sends travels: through its flat slot when all of it fits there, straight from its arena
  // when all of it lies there, through its ring of slots otherwise.
  Algorithm way_of(uint32_t rank, const SlotSizes& sizes) const;
  // Where the part for `to` stands in the flat slot of `from`.
  uint64_t flat_offset(uint32_t from, uint32_t to) const;
};

// Whether everything that a rank sends to others fits its flat slot; before ranks meet, a rank knows this of
// itself.
bool sends_flat(const PostedPart* own, Seat seat, uint64_t item_bytes, const SlotSizes& sizes);

// What a rank does before the meeting: only its own row of the matrix is read.
std::vector<Step> exchange_before(const Exchange& exchange, Seat seat, const SlotSizes& sizes);
std::vector<Step> exchange_after(const Exchange& exchange, Seat seat, const SlotSizes& sizes);

// The first pair of ranks that disagree about a size.
struct Disagreement {
  uint32_t from = 0, to = 0;
  uint64_t sent = 0, expected = 0;  // elements
};
std::optional<Disagreement> find_disagreement(const Exchange& exchange);

}  // namespace photinus
