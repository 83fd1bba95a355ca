#include <functional>

#include "collectives/net_steps.h"

namespace photinus {
namespace {

// After all have heard of each other, a pipeline over chunks: scatter every slice down the levels, then
// gather it back up, so that each host sends on only a part of what it gets. Small ones go whole, one round a
// level. On the root's host ranks take the tensor from the root; on the others each rank passes on what it
// carries.
class Pipeline {
 public:
  Pipeline(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm, const SlotSizes& sizes,
           const NetSizes& net)
      : s_(levels, rank),
        root_(call.root),
        root_host_(levels.host_of(call.root)),
        size_(size_bytes(call.dtype)),
        algorithm_(algorithm),
        ring_(2 * s_.depth() + 4),
        cut_(levels, {call.elems, s_.slices, 0, s_.slices, size_, size_, ring_}, sizes, net),
        down_(s_.depth(), std::vector<std::vector<Frame>>(ring_)),
        up_(s_.depth(), std::vector<std::vector<Frame>>(ring_)) {}

  Plan plan() {
    s_.agree();
    std::vector<std::function<void(uint64_t)>> stages;
    stages.push_back([this](uint64_t chunk) {
      if (at_root()) from_root(chunk);
    });
    if (algorithm_ == Algorithm::flat) {
      for (size_t level = 0; level < s_.depth(); ++level)
        stages.push_back([this, level](uint64_t chunk) {
          send_whole(chunk, level);
          s_.wait_received(down_[level][chunk % ring_]);
        });
    } else {
      for (size_t level = 0; level < s_.depth(); ++level)
        stages.push_back([this, level](uint64_t chunk) {
          if (level > 0) s_.wait_received(down_[level - 1][chunk % ring_]);
          scatter(chunk, level);
        });
      for (size_t level = s_.depth(); level-- > 0;)
        stages.push_back([this, level](uint64_t chunk) {
          s_.wait_received(level + 1 < s_.depth() ? up_[level + 1][chunk % ring_]
                                                  : down_[level][chunk % ring_]);
          gather(chunk, level);
        });
    }
    stages.push_back([this](uint64_t chunk) {
      if (algorithm_ != Algorithm::flat) s_.wait_received(up_[0][chunk % ring_]);
      if (!at_root()) share(chunk);
    });
    stages.push_back([this](uint64_t chunk) {
      if (!at_root()) copy_out(chunk);
    });
    for (uint64_t round = 0; round < cut_.chunks() + stages.size(); ++round)
      for (size_t stage = 0; stage < stages.size(); ++stage)
        if (round >= stage && round - stage < cut_.chunks()) stages[stage](round - stage);
    if (!staged() && s_.locals.size() > 1) {  // others read or write the tensor
      s_.add(advance_step(Counter::finished, 1));
      s_.add(wait_step(Counter::finished, 1));
    }
    s_.wait_sent();
    return {algorithm_, {}, std::move(s_.steps)};
  }

 private:
  bool at_root() const { return s_.host == root_host_; }
  bool staged() const { return algorithm_ != Algorithm::arena && s_.locals.size() > 1; }
  Slice span(uint64_t chunk, uint32_t slice, size_t level) const {
    Slice span = cut_.slice(chunk, slice);
    for (size_t l = 0; l < level; ++l) span = cut_.piece(span, s_.levels.sizes[l], s_.member(l));
    return span;
  }
  Region mine(uint64_t first) const {
    return {s_.me == root_ ? Place::send : Place::recv, s_.me, first * size_};
  }
  Region slot(uint32_t rank, uint64_t chunk, uint64_t first) const {
    return {Place::slot, rank, cut_.slot_at(chunk) + (first - cut_.chunk(chunk).first) * size_};
  }
  bool is_roots(uint32_t host, size_t level) const {
    return s_.levels.member_of(host, level) == s_.levels.member_of(root_host_, level);
  }
  // Whether the scatter begins at a host in this level, or has come to it in one before: it is the root's
  // member in this level and in all after.
  bool has_span(uint32_t host, size_t level) const {
    for (size_t l = level; l < s_.depth(); ++l)
      if (!is_roots(host, l)) return false;
    return true;
  }

  // The ranks of the root's host, which send on from their own tensors.
  void from_root(uint64_t chunk) {
    if (s_.locals.size() == 1) return;
    const Slice whole = cut_.chunk(chunk);
    const uint64_t bytes = whole.elems * size_;
    if (staged() && s_.me == root_) {
      if (chunk >= ring_) s_.add(wait_step(Counter::finished, chunk - ring_ + 1));
      s_.add(copy_step(slot(root_, chunk, whole.first), mine(whole.first), bytes));
      s_.add(advance_step(Counter::staged, chunk + 1));
    }
    if (s_.me != root_) {
      if (staged()) s_.add(wait_step(Counter::staged, chunk + 1, root_));
      s_.add(copy_step(
          mine(whole.first),
          staged() ? slot(root_, chunk, whole.first) : Region{Place::send, root_, whole.first * size_},
          bytes));
    }
    if (staged()) s_.add(advance_step(Counter::finished, chunk + 1));
  }

  // From the root's members of the levels up to this one to all others of this one.
  void send_whole(uint64_t chunk, size_t level) {
    auto& frames = down_[level][chunk % ring_];
    frames.clear();
    for (size_t l = level + 1; l < s_.depth(); ++l)
      if (!is_roots(s_.host, l)) return;
    const uint32_t members = s_.levels.sizes[level], own = s_.member(level);
    for (uint32_t slice : s_.carried) {
      const Slice where = cut_.slice(chunk, slice);
      if (where.elems == 0) continue;
      for (uint32_t i = 1; i < members; ++i) {
        const uint32_t member = (own + i) % members, peer = s_.counterpart(level, member, slice);
        if (is_roots(s_.host, level)) {
          s_.send(peer, mine(where.first), where.elems * size_);
        } else if (is_roots(s_.levels.peer(s_.host, level, member), level)) {
          frames.push_back(s_.receive(peer, mine(where.first), where.elems * size_));
        }
      }
    }
  }

  void scatter(uint64_t chunk, size_t level) {
    auto& frames = down_[level][chunk % ring_];
    frames.clear();
    if (!has_span(s_.host, level + 1)) return;
    const uint32_t members = s_.levels.sizes[level], own = s_.member(level);
    for (uint32_t slice : s_.carried) {
      const Slice whole = span(chunk, slice, level), ours = cut_.piece(whole, members, own);
      for (uint32_t i = 1; i < members; ++i) {
        const uint32_t member = (own + i) % members, peer = s_.counterpart(level, member, slice);
        const Slice theirs = cut_.piece(whole, members, member);
        if (has_span(s_.host, level)) {
          if (theirs.elems > 0) s_.send(peer, mine(theirs.first), theirs.elems * size_);
        } else if (ours.elems > 0 && is_roots(s_.levels.peer(s_.host, level, member), level)) {
          frames.push_back(s_.receive(peer, mine(ours.first), ours.elems * size_));
        }
      }
    }
  }

  void gather(uint64_t chunk, size_t level) {
    auto& frames = up_[level][chunk % ring_];
    frames.clear();
    const uint32_t members = s_.levels.sizes[level], own = s_.member(level);
    for (uint32_t slice : s_.carried) {
      const Slice whole = span(chunk, slice, level), ours = cut_.piece(whole, members, own);
      for (uint32_t i = 1; i < members; ++i) {
        const uint32_t member = (own + i) % members, peer = s_.counterpart(level, member, slice);
        const Slice theirs = cut_.piece(whole, members, member);
        if (ours.elems > 0 && !has_span(s_.levels.peer(s_.host, level, member), level))
          s_.send(peer, mine(ours.first), ours.elems * size_);
        if (theirs.elems > 0 && !has_span(s_.host, level))
          frames.push_back(s_.receive(peer, mine(theirs.first), theirs.elems * size_));
      }
    }
  }

  // On other hosts, to where a host's ranks find it. They have copied the chunk that lay there before: in
  // copy_out this rank has waited until they had come further.
  void share(uint64_t chunk) {
    if (s_.locals.size() == 1) return;
    for (uint32_t slice : s_.carried) {
      const Slice where = cut_.slice(chunk, slice);
      if (where.elems == 0) continue;
      if (staged())
        s_.add(copy_step(slot(s_.me, chunk, where.first), mine(where.first), where.elems * size_));
      else
        for (uint32_t rank : s_.locals)
          if (rank != s_.me)
            s_.add(
                copy_step({Place::recv, rank, where.first * size_}, mine(where.first), where.elems * size_));
    }
    if (staged()) s_.add(advance_step(Counter::reduced, chunk + 1));
  }

  void copy_out(uint64_t chunk) {
    if (!staged()) return;
    for (uint32_t slice = 0; slice < s_.slices; ++slice) {
      const uint32_t peer = s_.levels.carrier(s_.host, slice);
      const Slice where = cut_.slice(chunk, slice);
      if (where.elems == 0 || peer == s_.me) continue;
      s_.add(wait_step(Counter::reduced, chunk + 1, peer));
      s_.add(copy_step(mine(where.first), slot(peer, chunk, where.first), where.elems * size_));
    }
  }

  NetSteps s_;
  const uint32_t root_, root_host_;
  const uint64_t size_;
  const Algorithm algorithm_;
  const uint64_t ring_;
  const NetCut cut_;
  std::vector<std::vector<std::vector<Frame>>> down_, up_;  // by level and place in the ring
};

}  // namespace

Plan net_broadcast(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm,
                   const SlotSizes& sizes, const NetSizes& net) {
  if (call.elems == 0) return net_barrier(levels, rank);
  return Pipeline(call, levels, rank, algorithm, sizes, net).plan();
}

}  // namespace photinus
