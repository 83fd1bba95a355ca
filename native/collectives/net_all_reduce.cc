#include <algorithm>
#include <iterator>

#include "collectives/net_steps.h"

namespace photinus {
namespace {

// all_reduce, and reduce, in which results go to the root alone.
bool everywhere(const Call& call) {
  return call.operation == Operation::all_reduce;
}

Slice flat_slice(const Call& call, const Levels& levels, uint32_t index, const NetSizes& net) {
  return slice_of(call.elems, levels.slices(), index, net.frame_bytes / size_bytes(call.dtype));
}

// Small: one round a level, in which everyone sends all that it has and adds all that comes; in reduce,
// everyone but the member that is the root's sends it to that one, and is done. A host's ranks share the
// tensor as long as that leaves frames worth sending.
Plan flat(const Call& call, const Levels& levels, uint32_t rank, const NetSizes& net) {
  NetSteps s(levels, rank);
  const uint32_t root_host = levels.host_of(call.root);
  Plan plan{Algorithm::flat, {}, {}};
  const Kernels kernels = kernels_of(call);
  const bool narrow = kernels.last.to != call.dtype;
  const uint64_t size = size_bytes(call.dtype), wire = size_bytes(kernels.partial.from);
  const bool alone = s.locals.size() == 1;
  if (!alone)
    plan.before.push_back(copy_step({Place::flat, s.me, 0}, {Place::send, s.me, 0}, call.elems * size));
  auto slice = [&](uint32_t index) { return flat_slice(call, levels, index, net); };

  // Before each level a place for the partial results, which stay as they are while they are sent; behind it
  // the places for what comes.
  uint64_t landing = 0;
  auto take = [&](uint64_t bytes) {
    landing += bytes;
    return landing - bytes;
  };
  struct Part {
    uint32_t slice;
    Slice where;
    Region partial;
  };
  std::vector<Part> parts;
  for (uint32_t index : s.carried)
    if (const Slice where = slice(index); where.elems > 0)
      parts.push_back({index, where, {Place::landing, s.me, take(where.elems * wire)}});
  for (const Part& part : parts) {
    const uint64_t at = part.where.first * size;
    Step step = reduce_step({part.partial}, s.of_locals(Place::flat, at, {Place::send, s.me, at}),
                            part.where.elems * size);
    step.kernel = kernels.tensors;
    s.add(step);
  }
  auto homes = [&](const Part& part) {
    std::vector<Region> regions;
    const uint64_t at = part.where.first * size;
    if (everywhere(call) || s.me == call.root) regions.push_back({Place::recv, s.me, at});
    if (!alone) regions.push_back({Place::slot, s.me, at});
    return regions;
  };
  bool goes_on = true;
  for (size_t level = 0; level < s.depth(); ++level) {
    s.tell(level);
    const uint32_t members = levels.sizes[level], to = levels.member_of(root_host, level);
    const bool sends = goes_on;
    goes_on = goes_on && (everywhere(call) || s.member(level) == to);
    for (const Part& part : parts)
      for (uint32_t i = 1; i < members; ++i) {
        const uint32_t member = (s.member(level) + i) % members;
        if (everywhere(call) || (sends && !goes_on && member == to))
          s.send(s.counterpart(level, member, part.slice), part.partial, part.where.elems * wire);
      }
    s.hear(level);
    if (!goes_on) continue;
    std::vector<std::vector<Region>> sources;
    std::vector<Frame> frames;
    for (const Part& part : parts) {
      const uint64_t bytes = part.where.elems * wire;
      sources.emplace_back(members, part.partial);
      for (uint32_t i = 1; i < members; ++i) {
        const uint32_t member = (s.member(level) + i) % members;
        const Region place{Place::landing, s.me, take(bytes)};
        frames.push_back(s.receive(s.counterpart(level, member, part.slice), place, bytes));
        sources.back()[member] = place;
      }
    }
    s.wait_received(frames);
    const bool last = level + 1 == s.depth();
    for (size_t p = 0; p < parts.size(); ++p) {
      Part& part = parts[p];
      const bool is_result = last && !narrow;
      const uint64_t bytes = part.where.elems * wire;
      if (!is_result) part.partial = {Place::landing, s.me, take(bytes)};
      Step step = reduce_step(is_result ? homes(part) : std::vector{part.partial}, sources[p], bytes);
      step.kernel = last ? kernels.last : kernels.partial;
      s.add(step);
      if (!last || is_result) continue;
      Step widen = reduce_step(homes(part), {part.partial}, bytes);
      widen.kernel = kernels.widened;
      s.add(widen);
    }
  }
  if (!alone) {
    s.add(advance_step(Counter::reduced, 1));
    for (uint32_t peer : s.locals) {
      if (peer == s.me || !(everywhere(call) || s.me == call.root)) continue;
      bool waits = true;
      for (uint32_t index = 0; index < s.slices; ++index) {
        const Slice theirs = slice(index);
        if (levels.carrier(s.host, index) != peer || theirs.elems == 0) continue;
        if (waits) s.add(wait_step(Counter::reduced, 1, peer));
        waits = false;
        s.add(copy_step({Place::recv, s.me, theirs.first * size}, {Place::slot, peer, theirs.first * size},
                        theirs.elems * size));
      }
    }
  }
  s.wait_sent();
  plan.after = std::move(s.steps);
  return plan;
}

// A pipeline over chunks, one stage a round: of a chunk, this rank adds the slices that it carries, over its
// host; in each level it sends each other member its piece, adds what comes to its own, and goes on with that
// piece; then back down, each member sends the others what it has (in reduce: sends it to the one that is the
// root's). So in each round one chunk is added while others are on their way: kAhead more than a chunk a
// stage, up and down, so that the link has something to carry while a rank is woken.
class Pipeline : public StepSource {
 public:
  Pipeline(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm, const SlotSizes& sizes,
           const NetSizes& net)
      : s_(levels, rank),
        everywhere_(everywhere(call)),
        root_(call.root),
        root_host_(levels.host_of(call.root)),
        kernels_(kernels_of(call)),
        size_(size_bytes(call.dtype)),
        wire_(size_bytes(kernels_.partial.from)),
        result_size_(size_bytes(kernels_.last.to)),
        narrow_(result_size_ < size_),
        past_caches_(call.elems * size_ >= kPastCachesBytes),
        staged_(algorithm == Algorithm::staged && s_.locals.size() > 1),
        // What is sent as it is need not be added first.
        direct_(s_.locals.size() == 1 && call.reduction != Reduction::premul_sum && size_ == wire_),
        stages_(2 * s_.depth() + 3 + 2 * kAhead),
        // On all hosts the same, as is what follows from it. Four hosts lost a quarter by it at 1 MiB.
        alone_(direct_ && s_.slices == 1 && levels.hosts.size() == 2),
        ring_(alone_ ? kFirstUp + 1 : stages_ + 1),
        cut_(levels, {call.elems, s_.slices, 1, slot_parts(), size_, wire_, ring_, alone_}, sizes, net),
        up_(s_.depth()),
        down_(s_.depth()),
        marks_(ring_) {
    for (auto* frames : {&up_, &down_})
      for (auto& of_level : *frames) of_level.resize(ring_);
  }

  bool next(std::vector<Step>& steps) override {
    const uint64_t rounds = cut_.chunks() + stages_;
    s_.steps.clear();
    while (s_.steps.empty() && round_ < rounds) {
      if (round_ >= stage_ && round_ - stage_ < cut_.chunks()) run(stage_, round_ - stage_);
      if (++stage_ == stages_) {
        stage_ = 0;
        ++round_;
      }
    }
    if (round_ == rounds && !ended_) {
      ended_ = true;
      if (s_.locals.size() > 1 && !staged_) {  // others write into the tensor
        s_.add(advance_step(Counter::finished, 1));
        s_.add(wait_step(Counter::finished, 1));
      }
      s_.wait_sent();
    }
    steps.insert(steps.end(), std::make_move_iterator(s_.steps.begin()),
                 std::make_move_iterator(s_.steps.end()));
    return !s_.steps.empty();
  }

 private:
  static constexpr uint64_t kAhead = 1;
  static constexpr uint64_t kFirstUp = 2 + kAhead;  // the stage that combines in the first level

  // Copying in, adding, then combining in each level, coming back down in each, copying out.
  void run(size_t stage, uint64_t chunk) {
    const size_t depth = s_.depth(), first_down = kFirstUp + depth + kAhead;
    if (stage == 0) {
      copy_in(chunk);
    } else if (stage == 1) {
      add(chunk);
      send_up(chunk, 0);
    } else if (stage >= kFirstUp && stage < kFirstUp + depth) {
      const size_t level = stage - kFirstUp;
      combine(chunk, level);
      level + 1 < depth ? send_up(chunk, level + 1) : send_down(chunk, level);
    } else if (stage >= first_down && stage < first_down + depth) {
      const size_t level = first_down + depth - 1 - stage;
      s_.wait_received(down_[level][chunk % ring_]);
      level > 0 ? send_down(chunk, level - 1) : share(chunk);
    } else if (stage + 1 == stages_) {
      copy_out(chunk);
    }
  }
  uint64_t slot_parts() const { return s_.slices > 1 ? s_.slices : 0; }  // alike on all hosts
  // The part of a slice that this rank has when it comes to a level.
  Slice span(uint64_t chunk, uint32_t slice, size_t level) const {
    Slice span = cut_.slice(chunk, slice);
    for (size_t l = 0; l < level; ++l) span = cut_.piece(span, s_.levels.sizes[l], s_.member(l));
    return span;
  }
  // Where the partial result of some elements lies.
  Region partial(uint64_t chunk, size_t c, size_t level, uint64_t first) const {
    if (direct_ && level == 0) return {Place::send, s_.me, first * size_};
    const uint64_t from = cut_.slice(chunk, s_.carried[c]).first;
    return {Place::landing, s_.me, cut_.partial_at(chunk, c) + (first - from) * wire_};
  }
  Region slot(uint32_t rank, uint64_t chunk, uint64_t first) const {
    return {Place::slot, rank, cut_.slot_at(chunk) + (first - cut_.chunk(chunk).first) * size_};
  }
  // Where this host's ranks find results, this rank first.
  std::vector<Region> homes(uint64_t chunk, uint64_t first) const {
    auto recv = [&](uint32_t rank) { return Region{Place::recv, rank, first * size_}; };
    if (!everywhere_ && s_.host != root_host_) return {};
    if (!everywhere_ && s_.me == root_) return {recv(root_)};
    if (!everywhere_) return {staged_ ? slot(s_.me, chunk, first) : recv(root_)};
    if (staged_) return {recv(s_.me), slot(s_.me, chunk, first)};
    std::vector<Region> regions{recv(s_.me)};
    for (uint32_t rank : s_.locals)
      if (rank != s_.me) regions.push_back(recv(rank));
    return regions;
  }
  // Where results lie while they cross. In fewer bits: in the places of partial results, for who sends one
  // has what lay there. On other hosts than the root's: in the place for what this rank would send itself.
  Region result(uint64_t chunk, size_t c, uint64_t first) const {
    if (narrow_) return partial(chunk, c, 0, first);
    if (everywhere_ || s_.host == root_host_) return homes(chunk, first)[0];
    const uint64_t from = span(chunk, s_.carried[c], 1).first;
    return {Place::landing, s_.me, cut_.landing_at(chunk, c, 0, s_.member(0)) + (first - from) * size_};
  }
  bool is_roots(uint32_t member, size_t level) const {
    return member == s_.levels.member_of(root_host_, level);
  }
  // Whether results come to this host's group in a level: it is the root's in all levels after.
  bool leads_to_root(size_t level) const {
    for (size_t l = level + 1; l < s_.depth(); ++l)
      if (!is_roots(s_.member(l), l)) return false;
    return true;
  }

  // All but the slices that it carries itself.
  void copy_in(uint64_t chunk) {
    if (!staged_) return;
    if (chunk >= ring_) s_.add(wait_step(Counter::finished, chunk - ring_ + 1));
    for (uint32_t slice = 0; slice < s_.slices; ++slice) {
      const Slice where = cut_.slice(chunk, slice);
      if (where.elems == 0 || s_.levels.carrier(s_.host, slice) == s_.me) continue;
      s_.add(copy_step(slot(s_.me, chunk, where.first), {Place::send, s_.me, where.first * size_},
                       where.elems * size_));
    }
    s_.add(advance_step(Counter::staged, chunk + 1));
  }

  void add(uint64_t chunk) {
    // What lay in the landing before: partial results whose sums have come back down are known to have left.
    if (!everywhere_ || narrow_) s_.wait_sent(marks_[chunk % ring_]);
    if (direct_) return;
    if (staged_) s_.add(wait_step(Counter::staged, chunk + 1));
    for (size_t c = 0; c < s_.carried.size(); ++c) {
      const Slice where = cut_.slice(chunk, s_.carried[c]);
      if (where.elems == 0) continue;
      const Region own{Place::send, s_.me, where.first * size_};
      Step step =
          reduce_step({partial(chunk, c, 0, where.first)},
                      staged_ ? s_.of_locals(Place::slot, slot(0, chunk, where.first).offset_bytes, own)
                              : s_.of_locals(Place::send, own.offset_bytes, own),
                      where.elems * size_);
      step.kernel = kernels_.tensors;
      s_.add(step);
    }
  }

  void send_up(uint64_t chunk, size_t level) {
    const uint32_t members = s_.levels.sizes[level], own = s_.member(level);
    auto& frames = up_[level][chunk % ring_];
    frames.clear();
    auto piece = [&](size_t c, uint32_t member) {
      return cut_.piece(span(chunk, s_.carried[c], level), members, member);
    };
    s_.tell(level);
    s_.for_others(level, [&](size_t c, uint32_t member, uint32_t peer) {
      if (const Slice theirs = piece(c, member); theirs.elems > 0)
        s_.send(peer, partial(chunk, c, level, theirs.first), theirs.elems * wire_);
    });
    s_.hear(level);
    s_.for_others(level, [&](size_t c, uint32_t member, uint32_t peer) {
      if (const Slice mine = piece(c, own); mine.elems > 0)
        frames.push_back(s_.receive(peer, {Place::landing, s_.me, cut_.landing_at(chunk, c, level, member)},
                                    mine.elems * wire_));
    });
  }

  void combine(uint64_t chunk, size_t level) {
    const uint32_t members = s_.levels.sizes[level], own = s_.member(level);
    s_.wait_received(up_[level][chunk % ring_]);
    for (size_t c = 0; c < s_.carried.size(); ++c) {
      const Slice mine = span(chunk, s_.carried[c], level + 1);
      if (mine.elems == 0) continue;
      std::vector<Region> sources;
      for (uint32_t member = 0; member < members; ++member)
        sources.push_back(member == own
                              ? partial(chunk, c, level, mine.first)
                              : Region{Place::landing, s_.me, cut_.landing_at(chunk, c, level, member)});
      const bool last = level + 1 == s_.depth();
      std::vector<Region> results;
      if (last && !narrow_) results = homes(chunk, mine.first);  // at once, while they are in registers
      if (results.empty())
        results = {last ? result(chunk, c, mine.first) : partial(chunk, c, level + 1, mine.first)};
      Step step = reduce_step(std::move(results), std::move(sources), mine.elems * wire_);
      step.kernel = last ? kernels_.last : kernels_.partial;
      s_.add(step);
    }
  }

  void send_down(uint64_t chunk, size_t level) {
    const uint32_t members = s_.levels.sizes[level], own = s_.member(level);
    auto& frames = down_[level][chunk % ring_];
    frames.clear();
    if (!everywhere_ && !leads_to_root(level)) return;
    const bool gets = everywhere_ || is_roots(own, level);
    s_.for_others(level, [&](size_t c, uint32_t member, uint32_t peer) {
      const Slice whole = span(chunk, s_.carried[c], level);
      const Slice mine = cut_.piece(whole, members, own), theirs = cut_.piece(whole, members, member);
      if (mine.elems > 0 && (everywhere_ || (!gets && is_roots(member, level))))
        s_.send(peer, result(chunk, c, mine.first), mine.elems * result_size_);
      if (theirs.elems > 0 && gets)
        frames.push_back(s_.receive(peer, result(chunk, c, theirs.first), theirs.elems * result_size_));
    });
    if (!everywhere_ || narrow_) marks_[chunk % ring_] = s_.mark();
  }

  // What has come goes to the others of this host; what this rank added itself is there.
  void share(uint64_t chunk) {
    for (size_t c = 0; c < s_.carried.size(); ++c) {
      const Slice where = cut_.slice(chunk, s_.carried[c]);
      const std::vector<Region> places = homes(chunk, where.first);
      if (where.elems == 0 || places.empty()) continue;
      if (narrow_) {
        Step step = reduce_step(places, {result(chunk, c, where.first)}, where.elems * result_size_);
        step.kernel = kernels_.widened;
        s_.add(step);
      } else {
        const Slice own = span(chunk, s_.carried[c], s_.depth());
        const uint64_t after = own.first + own.elems;
        for (const auto& [first, end] :
             {std::pair{where.first, own.first}, {after, where.first + where.elems}}) {
          if (first == end) continue;
          const std::vector<Region> parts = homes(chunk, first);
          for (size_t i = 1; i < parts.size(); ++i)
            s_.add(copy_step(parts[i], parts[0], (end - first) * size_));
        }
      }
    }
    if (staged_) s_.add(advance_step(Counter::reduced, chunk + 1));
  }

  void copy_out(uint64_t chunk) {
    if (!staged_) return;
    for (uint32_t slice = 0; slice < s_.slices; ++slice) {
      const uint32_t peer = s_.levels.carrier(s_.host, slice);
      const Slice where = cut_.slice(chunk, slice);
      if (where.elems == 0 || peer == s_.me || !(everywhere_ || s_.me == root_)) continue;
      s_.add(wait_step(Counter::reduced, chunk + 1, peer));
      Step step = copy_step({Place::recv, s_.me, where.first * size_}, slot(peer, chunk, where.first),
                            where.elems * size_);
      step.past_caches = past_caches_;
      s_.add(std::move(step));
    }
    s_.add(advance_step(Counter::finished, chunk + 1));
  }

  NetSteps s_;
  const bool everywhere_;
  const uint32_t root_, root_host_;
  const Kernels kernels_;
  const uint64_t size_, wire_, result_size_;  // bytes of an element; of one that goes up, and down
  const bool narrow_;                         // results cross in fewer bits than tensors have
  const bool past_caches_;
  const bool staged_, direct_;
  const size_t stages_;
  const bool alone_;     // nothing is added before it crosses, on no host
  const uint64_t ring_;  // of chunks whose frames, or partial results, may still need their places
  const NetCut cut_;
  // By level and place in the ring.
  std::vector<std::vector<std::vector<Frame>>> up_, down_;
  std::vector<NetSteps::Mark> marks_;
  uint64_t round_ = 0;
  size_t stage_ = 0;
  bool ended_ = false;
};

}  // namespace

// Whether everyone's landing holds all that comes: a partial result before each level and one after the last,
// and in each what the others send.
bool fits_flat(const Call& call, const Levels& levels, const NetSizes& net) {
  size_t fewest = levels.slices(), places = 1;
  for (const auto& ranks : levels.hosts) fewest = std::min(fewest, ranks.size());
  for (const uint32_t size : levels.sizes) places += size;
  const size_t carried = (levels.slices() + fewest - 1) / fewest;
  const Dtype wire = wire_dtype(call);
  return carried * places * flat_slice(call, levels, 0, net).elems * size_bytes(wire) <= net.landing_bytes;
}

Plan net_all_reduce(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm,
                    const SlotSizes& sizes, const NetSizes& net) {
  if (call.elems == 0) return net_barrier(levels, rank);
  if (algorithm == Algorithm::flat) {
    if (fits_flat(call, levels, net)) return flat(call, levels, rank, net);
    algorithm = Algorithm::staged;
  }
  Plan plan{algorithm, {}, {}};
  Pipeline pipeline(call, levels, rank, algorithm, sizes, net);
  while (pipeline.next(plan.after)) continue;
  return plan;
}

std::unique_ptr<StepSource> net_all_reduce_steps(const Call& call, const Levels& levels, uint32_t rank,
                                                 Algorithm algorithm, const SlotSizes& sizes,
                                                 const NetSizes& net) {
  return std::make_unique<Pipeline>(call, levels, rank, algorithm, sizes, net);
}

Plan net_reduce(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm,
                const SlotSizes& sizes, const NetSizes& net) {
  return net_all_reduce(call, levels, rank, algorithm, sizes, net);
}

}  // namespace photinus
