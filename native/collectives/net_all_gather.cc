#include <functional>

#include "collectives/net_steps.h"

namespace photinus {
namespace {

// A slice is what the ranks bring that have one place on their hosts. In each level, each member sends the
// others all that it has of a slice. A pipeline over chunks of what each rank brings. Small ones come to the
// landing first, as nothing may be written into recv before all hosts are known to agree, so levels come in
// the order in which they are told. Large ones come straight into recv, after all have heard, and from the
// last level to the first: so most bytes go between hosts that follow on each other.
class Pipeline {
 public:
  Pipeline(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm, const SlotSizes& sizes,
           const NetSizes& net)
      : s_(levels, rank),
        elems_(call.elems),
        size_(size_bytes(call.dtype)),
        ranks_(levels.ranks()),
        algorithm_(algorithm),
        ring_(s_.depth() + 3),
        cut_(levels, {elems_, 1, is_flat() ? levels.hosts.size() : 0, ranks_, size_, size_, ring_}, sizes,
             net),
        frames_(s_.depth(), std::vector<std::vector<Frame>>(ring_)),
        marks_(ring_) {}

  Plan plan() {
    Plan plan{algorithm_, {}, {}};
    if (!is_flat()) s_.agree();
    std::vector<std::function<void(uint64_t)>> stages;
    for (size_t round = 0; round < s_.depth(); ++round)
      stages.push_back([this, round](uint64_t chunk) {
        if (round == 0) s_.wait_sent(marks_[chunk % ring_]);  // what lay in the landing before
        if (round > 0) s_.wait_received(frames_[round - 1][chunk % ring_]);
        exchange(chunk, round);
      });
    stages.push_back([this](uint64_t chunk) {
      s_.wait_received(frames_[s_.depth() - 1][chunk % ring_]);
      share(chunk);
    });
    stages.push_back([this](uint64_t chunk) { copy_out(chunk); });
    for (uint64_t round = 0; round < cut_.chunks() + stages.size(); ++round)
      for (size_t stage = 0; stage < stages.size(); ++stage)
        if (round >= stage && round - stage < cut_.chunks()) stages[stage](round - stage);
    if (algorithm_ == Algorithm::arena && !alone()) {  // others write into the tensor
      s_.add(advance_step(Counter::finished, 1));
      s_.add(wait_step(Counter::finished, 1));
    }
    s_.wait_sent();
    plan.after = std::move(s_.steps);
    return plan;
  }

 private:
  bool is_flat() const { return algorithm_ == Algorithm::flat; }
  bool alone() const { return s_.locals.size() == 1; }
  bool pushes() const { return algorithm_ == Algorithm::arena; }
  uint64_t bytes(uint64_t chunk) const { return cut_.chunk(chunk).elems * size_; }
  uint64_t own_at(uint64_t chunk) const { return cut_.chunk(chunk).first * size_; }
  Region out(uint32_t rank, uint64_t chunk, uint32_t from) const {
    return {Place::recv, rank, from * elems_ * size_ + own_at(chunk)};
  }
  // Where this rank has what a carried slice's rank on a host brought.
  Region part(uint64_t chunk, size_t c, uint32_t host) const {
    const uint32_t from = s_.levels.hosts[host][s_.carried[c]];
    if (from == s_.me) return {Place::send, s_.me, own_at(chunk)};
    if (is_flat()) return {Place::landing, s_.me, cut_.partial_at(chunk, c, host)};
    return out(s_.me, chunk, from);
  }

  // The hosts of which a host has what they bring when it comes to a level.
  std::vector<uint32_t> gathered(uint32_t by, size_t level) const {
    std::vector<uint32_t> hosts;
    const uint32_t below = s_.levels.stride(level), above = below * s_.levels.sizes[level];
    for (uint32_t host = 0; host < s_.levels.hosts.size(); ++host)
      if (is_flat() ? host / below == by / below : host % above == by % above) hosts.push_back(host);
    return hosts;
  }

  void exchange(uint64_t chunk, size_t round) {
    const size_t level = is_flat() ? round : s_.depth() - 1 - round;
    auto& frames = frames_[round][chunk % ring_];
    frames.clear();
    s_.tell(level);
    s_.for_others(level, [&](size_t c, uint32_t, uint32_t peer) {
      for (uint32_t host : gathered(s_.host, level))
        if (s_.has(host, s_.carried[c])) s_.send(peer, part(chunk, c, host), bytes(chunk));
    });
    s_.hear(level);
    s_.for_others(level, [&](size_t c, uint32_t member, uint32_t peer) {
      for (uint32_t host : gathered(s_.levels.peer(s_.host, level, member), level))
        if (s_.has(host, s_.carried[c]))
          frames.push_back(s_.receive(peer, part(chunk, c, host), bytes(chunk)));
    });
    marks_[chunk % ring_] = s_.mark();
  }

  // What this rank carries, to where its host's ranks find it. They have copied the chunk that lay there
  // before: in copy_out this rank has waited until they had come further.
  void share(uint64_t chunk) {
    for (size_t c = 0; c < s_.carried.size(); ++c)
      for (uint32_t host = 0; host < s_.levels.hosts.size(); ++host) {
        if (!s_.has(host, s_.carried[c])) continue;
        const uint32_t from = s_.levels.hosts[host][s_.carried[c]];
        const Region where = part(chunk, c, host);
        if (where.place != Place::recv) s_.add(copy_step(out(s_.me, chunk, from), where, bytes(chunk)));
        if (staged()) s_.add(copy_step({Place::slot, s_.me, cut_.slot_at(chunk, from)}, where, bytes(chunk)));
        if (pushes())
          for (uint32_t rank : s_.locals)
            if (rank != s_.me) s_.add(copy_step(out(rank, chunk, from), where, bytes(chunk)));
      }
    if (staged()) s_.add(advance_step(Counter::reduced, chunk + 1));
  }

  void copy_out(uint64_t chunk) {
    if (!staged()) return;
    for (uint32_t host = 0; host < s_.levels.hosts.size(); ++host)
      for (uint32_t slice = 0; slice < s_.levels.hosts[host].size(); ++slice) {
        const uint32_t peer = s_.levels.carrier(s_.host, slice), from = s_.levels.hosts[host][slice];
        if (peer == s_.me) continue;
        s_.add(wait_step(Counter::reduced, chunk + 1, peer));
        s_.add(
            copy_step(out(s_.me, chunk, from), {Place::slot, peer, cut_.slot_at(chunk, from)}, bytes(chunk)));
      }
  }
  bool staged() const { return !pushes() && !alone(); }

  NetSteps s_;
  const uint64_t elems_, size_;
  const uint32_t ranks_;
  const Algorithm algorithm_;
  const uint64_t ring_;
  const NetCut cut_;
  std::vector<std::vector<std::vector<Frame>>> frames_;  // by round and place in the ring
  std::vector<NetSteps::Mark> marks_;
};

}  // namespace

Plan net_all_gather(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm,
                    const SlotSizes& sizes, const NetSizes& net) {
  if (call.elems == 0) return net_barrier(levels, rank);
  return Pipeline(call, levels, rank, algorithm, sizes, net).plan();
}

}  // namespace photinus
