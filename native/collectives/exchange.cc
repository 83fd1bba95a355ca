#include "collectives/exchange.h"

#include <algorithm>

#include "base/error.h"

namespace photinus {
namespace {

// The chunks of what travels through slots. Ranks work in rounds: in round t a rank sends to the rank t
// places behind it and receives from the one t places before it. Positions count a rank's staged (or drained)
// chunks from the start of the collective, so that one counter each says how far it is.
//
// No deadlock: a step at (round, chunk) waits only for steps at an earlier (round, chunk), or for the staging
// of the very chunk that it drains.
class Rounds {
 public:
  Rounds(const Exchange& exchange, const SlotSizes& sizes) : exchange_(exchange), sizes_(sizes) {
    for (uint32_t rank = 0; rank < exchange.ranks; ++rank)
      staged_.push_back(exchange.way_of(rank, sizes) == Algorithm::staged);
  }

  uint32_t receiver(uint32_t rank, uint32_t round) const { return (rank + round) % exchange_.ranks; }
  uint32_t sender(uint32_t rank, uint32_t round) const {
    return (rank + exchange_.ranks - round) % exchange_.ranks;
  }

  // Chunks that `from` sends in a round through its slots.
  uint64_t chunks(uint32_t from, uint32_t round) const {
    if (!staged_[from]) return 0;
    return (exchange_.sent_bytes(from, receiver(from, round)) + sizes_.chunk_bytes - 1) / sizes_.chunk_bytes;
  }
  uint64_t staged_before(uint32_t rank, uint32_t round) const {
    uint64_t sum = 0;
    for (uint32_t t = 1; t < round; ++t) sum += chunks(rank, t);
    return sum;
  }
  uint64_t drained_before(uint32_t rank, uint32_t round) const {
    uint64_t sum = 0;
    for (uint32_t t = 1; t < round; ++t) sum += chunks(sender(rank, t), t);
    return sum;
  }

 private:
  const Exchange& exchange_;
  const SlotSizes& sizes_;
  std::vector<bool> staged_;
};

}  // namespace

bool sends_flat(const PostedPart* own, Seat seat, uint64_t item_bytes, const SlotSizes& sizes) {
  uint64_t bytes = 0;
  for (uint32_t peer = 0; peer < seat.ranks; ++peer)
    if (peer != seat.rank) bytes += own[peer].send_elems * item_bytes;
  return bytes <= sizes.flat_bytes;
}

Algorithm Exchange::way_of(uint32_t rank, const SlotSizes& sizes) const {
  if (sends_flat(&parts[rank * ranks], {rank, ranks}, item_bytes, sizes)) return Algorithm::flat;
  for (uint32_t peer = 0; peer < ranks; ++peer)
    if (peer != rank && part(rank, peer).send_elems > 0 && part(rank, peer).send_offset == kNowhere)
      return Algorithm::staged;
  return Algorithm::arena;
}

uint64_t Exchange::flat_offset(uint32_t from, uint32_t to) const {
  uint64_t at = 0;
  for (uint32_t peer = 0; peer < to; ++peer)
    if (peer != from) at += sent_bytes(from, peer);
  return at;
}

std::vector<Step> exchange_before(const Exchange& exchange, Seat seat, const SlotSizes& sizes) {
  std::vector<Step> steps;
  if (exchange.way_of(seat.rank, sizes) != Algorithm::flat) return steps;
  for (uint32_t peer = 0; peer < seat.ranks; ++peer)
    if (uint64_t bytes = exchange.sent_bytes(seat.rank, peer); peer != seat.rank && bytes > 0)
      steps.push_back(copy_step({Place::flat, seat.rank, exchange.flat_offset(seat.rank, peer)},
                                {Place::send_part, seat.rank, 0, peer}, bytes));
  return steps;
}

std::vector<Step> exchange_after(const Exchange& exchange, Seat seat, const SlotSizes& sizes) {
  std::vector<Step> steps;
  const uint32_t me = seat.rank;
  const Rounds rounds(exchange, sizes);
  auto slot_at = [&](uint64_t position) { return position % sizes.chunks * sizes.chunk_bytes; };
  if (uint64_t bytes = exchange.sent_bytes(me, me); bytes > 0)
    steps.push_back(copy_step({Place::recv_part, me, 0, me}, {Place::send_part, me, 0, me}, bytes));

  auto stage = [&](uint32_t round, uint64_t chunk) {
    const uint32_t to = rounds.receiver(me, round);
    const uint64_t position = rounds.staged_before(me, round) + chunk, at = chunk * sizes.chunk_bytes;
    if (position >= sizes.chunks) {  // the slot's earlier chunk must have been drained by its receiver
      const uint64_t earlier = position - sizes.chunks;
      uint32_t then = round;
      while (rounds.staged_before(me, then) > earlier) --then;
      const uint32_t who = rounds.receiver(me, then);
      const uint64_t drained =
          rounds.drained_before(who, then) + earlier - rounds.staged_before(me, then) + 1;
      steps.push_back(wait_step(Counter::reduced, drained, who));
    }
    steps.push_back(copy_step({Place::slot, me, slot_at(position)}, {Place::send_part, me, at, to},
                              std::min(sizes.chunk_bytes, exchange.sent_bytes(me, to) - at)));
    steps.push_back(advance_step(Counter::staged, position + 1));
  };
  auto drain = [&](uint32_t round, uint64_t chunk) {
    const uint32_t from = rounds.sender(me, round);
    const uint64_t position = rounds.staged_before(from, round) + chunk, at = chunk * sizes.chunk_bytes;
    steps.push_back(wait_step(Counter::staged, position + 1, from));
    steps.push_back(copy_step({Place::recv_part, me, at, from}, {Place::slot, from, slot_at(position)},
                              std::min(sizes.chunk_bytes, exchange.sent_bytes(from, me) - at)));
    steps.push_back(advance_step(Counter::reduced, rounds.drained_before(me, round) + chunk + 1));
  };

  bool anyone_in_arena = false;
  for (uint32_t rank = 0; rank < seat.ranks; ++rank)
    anyone_in_arena |= exchange.way_of(rank, sizes) == Algorithm::arena;
  for (uint32_t round = 1; round < seat.ranks; ++round) {
    const uint32_t from = rounds.sender(me, round);
    const uint64_t out = rounds.chunks(me, round), in = rounds.chunks(from, round);
    for (uint64_t chunk = 0; chunk < std::max(out, in); ++chunk) {
      if (chunk < out) stage(round, chunk);
      if (chunk < in) drain(round, chunk);
    }
    const uint64_t bytes = exchange.sent_bytes(from, me);
    const Algorithm way = exchange.way_of(from, sizes);
    if (bytes == 0 || way == Algorithm::staged) continue;
    const Region source = way == Algorithm::flat ? Region{Place::flat, from, exchange.flat_offset(from, me)}
                                                 : Region{Place::send_part, from, 0, me};
    steps.push_back(copy_step({Place::recv_part, me, 0, from}, source, bytes));
  }
  // Who sends from its arena must not return (and change its tensors) before all have read them.
  if (anyone_in_arena) {
    steps.push_back(advance_step(Counter::finished, 1));
    if (exchange.way_of(me, sizes) == Algorithm::arena) steps.push_back(wait_step(Counter::finished, 1));
  }
  return steps;
}

std::optional<Disagreement> find_disagreement(const Exchange& exchange) {
  for (uint32_t from = 0; from < exchange.ranks; ++from)
    for (uint32_t to = 0; to < exchange.ranks; ++to) {
      const uint64_t sent = exchange.part(from, to).send_elems, expected = exchange.part(to, from).recv_elems;
      if (sent != expected) return Disagreement{from, to, sent, expected};
    }
  return std::nullopt;
}

}  // namespace photinus
