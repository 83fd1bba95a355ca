#include <functional>

#include "collectives/net_steps.h"

namespace photinus {
namespace {

// A slice is the parts for the ranks that have one place on their hosts: what a rank carries ends with the
// part for itself. A pipeline over chunks of the parts: add them over this host; in each level send each
// other member the parts for the hosts that it leads to, and add what comes to the rest.
class Pipeline {
 public:
  Pipeline(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm, const SlotSizes& sizes,
           const NetSizes& net)
      : s_(levels, rank),
        kernels_(kernels_of(call)),
        part_elems_(call.elems),
        size_(size_bytes(call.dtype)),
        wire_(size_bytes(kernels_.partial.from)),
        ranks_(levels.ranks()),
        algorithm_(algorithm),
        direct_(s_.locals.size() == 1 && call.reduction != Reduction::premul_sum && size_ == wire_),
        ring_(s_.depth() + 3),
        cut_(levels, {call.elems, 1, levels.hosts.size(), ranks_, size_, wire_, ring_}, sizes, net),
        up_(s_.depth(), std::vector<std::vector<Frame>>(ring_)),
        marks_(ring_) {}

  Plan plan() {
    Plan plan{algorithm_, {}, {}};
    const bool alone = s_.locals.size() == 1;
    if (algorithm_ == Algorithm::flat && !alone)
      plan.before.push_back(
          copy_step({Place::flat, s_.me, 0}, {Place::send, s_.me, 0}, ranks_ * part_elems_ * size_));
    std::vector<std::function<void(uint64_t)>> stages;
    stages.push_back([this](uint64_t chunk) { copy_in(chunk); });
    stages.push_back([this](uint64_t chunk) {
      add(chunk);
      send_up(chunk, 0);
    });
    for (size_t level = 0; level < s_.depth(); ++level)
      stages.push_back([this, level](uint64_t chunk) {
        combine(chunk, level);
        if (level + 1 < s_.depth()) send_up(chunk, level + 1);
      });
    for (uint64_t round = 0; round < cut_.chunks() + stages.size(); ++round)
      for (size_t stage = 0; stage < stages.size(); ++stage)
        if (round >= stage && round - stage < cut_.chunks()) stages[stage](round - stage);
    if (algorithm_ == Algorithm::arena && !alone) {  // others read the tensor
      s_.add(advance_step(Counter::finished, 1));
      s_.add(wait_step(Counter::finished, 1));
    }
    s_.wait_sent();
    plan.after = std::move(s_.steps);
    return plan;
  }

 private:
  bool staged() const { return algorithm_ == Algorithm::staged && s_.locals.size() > 1; }
  uint64_t bytes(uint64_t chunk, uint64_t of_each) const { return cut_.chunk(chunk).elems * of_each; }
  uint32_t target(uint32_t host, size_t c) const { return s_.levels.hosts[host][s_.carried[c]]; }
  uint64_t input_at(uint64_t chunk, uint32_t rank) const {
    return (rank * part_elems_ + cut_.chunk(chunk).first) * size_;
  }
  Region partial(uint64_t chunk, size_t c, size_t level, uint32_t host) const {
    if (direct_ && level == 0) return {Place::send, s_.me, input_at(chunk, target(host, c))};
    return {Place::landing, s_.me, cut_.partial_at(chunk, c, host)};
  }

  // What others of this host add. They have added the chunk that lay there before: this rank has waited until
  // they had come further.
  void copy_in(uint64_t chunk) {
    if (!staged()) return;
    for (uint32_t host = 0; host < s_.levels.hosts.size(); ++host)
      for (uint32_t slice = 0; slice < s_.levels.hosts[host].size(); ++slice) {
        const uint32_t to = s_.levels.hosts[host][slice];
        if (s_.levels.carrier(s_.host, slice) == s_.me) continue;
        s_.add(copy_step({Place::slot, s_.me, cut_.slot_at(chunk, to)},
                         {Place::send, s_.me, input_at(chunk, to)}, bytes(chunk, size_)));
      }
    s_.add(advance_step(Counter::staged, chunk + 1));
  }

  void add(uint64_t chunk) {
    s_.wait_sent(marks_[chunk % ring_]);  // what lay in the landing before
    if (direct_) return;
    if (staged()) s_.add(wait_step(Counter::staged, chunk + 1));
    for (size_t c = 0; c < s_.carried.size(); ++c)
      for (uint32_t host : s_.reached(0)) {
        if (!s_.has(host, s_.carried[c])) continue;
        const uint32_t to = target(host, c);
        const uint64_t at = input_at(chunk, to);
        const Region own{Place::send, s_.me, at};
        Step step = reduce_step(
            {partial(chunk, c, 0, host)},
            staged() ? s_.of_locals(Place::slot, cut_.slot_at(chunk, to), own)
                     : s_.of_locals(algorithm_ == Algorithm::flat ? Place::flat : Place::send, at, own),
            bytes(chunk, size_));
        step.kernel = kernels_.tensors;
        s_.add(step);
      }
  }

  void send_up(uint64_t chunk, size_t level) {
    auto& frames = up_[level][chunk % ring_];
    frames.clear();
    s_.tell(level);
    s_.for_others(level, [&](size_t c, uint32_t member, uint32_t peer) {
      for (uint32_t host : s_.reached(level))
        if (s_.levels.member_of(host, level) == member && s_.has(host, s_.carried[c]))
          s_.send(peer, partial(chunk, c, level, host), bytes(chunk, wire_));
    });
    s_.hear(level);
    const auto rest = s_.reached(level + 1);
    s_.for_others(level, [&](size_t c, uint32_t member, uint32_t peer) {
      for (uint32_t part = 0; part < rest.size(); ++part)
        if (s_.has(rest[part], s_.carried[c]))
          frames.push_back(s_.receive(peer,
                                      {Place::landing, s_.me, cut_.landing_at(chunk, c, level, member, part)},
                                      bytes(chunk, wire_)));
    });
    marks_[chunk % ring_] = s_.mark();
  }

  void combine(uint64_t chunk, size_t level) {
    const uint32_t members = s_.levels.sizes[level], own = s_.member(level);
    const bool last = level + 1 == s_.depth();
    const auto rest = s_.reached(level + 1);
    s_.wait_received(up_[level][chunk % ring_]);
    for (size_t c = 0; c < s_.carried.size(); ++c)
      for (uint32_t part = 0; part < rest.size(); ++part) {
        if (!s_.has(rest[part], s_.carried[c])) continue;
        std::vector<Region> sources;
        for (uint32_t member = 0; member < members; ++member)
          sources.push_back(
              member == own ? partial(chunk, c, level, rest[part])
                            : Region{Place::landing, s_.me, cut_.landing_at(chunk, c, level, member, part)});
        Step step = reduce_step({last ? Region{Place::recv, s_.me, cut_.chunk(chunk).first * size_}
                                      : partial(chunk, c, level + 1, rest[part])},
                                std::move(sources), bytes(chunk, wire_));
        step.kernel = last ? kernels_.last : kernels_.partial;
        s_.add(step);
      }
  }

  NetSteps s_;
  const Kernels kernels_;
  const uint64_t part_elems_, size_, wire_;
  const uint32_t ranks_;
  const Algorithm algorithm_;
  const bool direct_;  // what is sent as it is need not be added first
  const uint64_t ring_;
  const NetCut cut_;
  std::vector<std::vector<std::vector<Frame>>> up_;  // by level and place in the ring
  std::vector<NetSteps::Mark> marks_;
};

}  // namespace

Plan net_reduce_scatter(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm,
                        const SlotSizes& sizes, const NetSizes& net) {
  if (call.elems == 0) return net_barrier(levels, rank);
  return Pipeline(call, levels, rank, algorithm, sizes, net).plan();
}

}  // namespace photinus
