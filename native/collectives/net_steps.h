// What the plans of several hosts have in common: where this rank is, how tensors are cut, which kernel
// partial results take, and steps over links, with the count of frames that waits need.
#pragma once

#include <map>
#include <vector>

#include "collectives/net.h"
#include "collectives/slices.h"

namespace photinus {

// A frame on its way: the `count`-th of this plan from (or to) `rank`.
struct Frame {
  uint32_t rank = 0;
  uint64_t count = 0;
};

class NetSteps {
 public:
  NetSteps(const Levels& levels, uint32_t rank);

  const Levels& levels;
  const uint32_t me, host;
  const std::vector<uint32_t>& locals;  // the ranks of this host, in their order
  const uint32_t slices;
  std::vector<uint32_t> carried;  // the slices that this rank carries
  std::vector<Step> steps;

  // The hosts whose parts this one still has to do with when it comes to a level, on the way up: those that
  // are the same member as this one in all levels before.
  std::vector<uint32_t> reached(size_t level) const;
  bool has(uint32_t of_host, uint32_t slice) const { return slice < levels.hosts[of_host].size(); }
  size_t depth() const { return levels.sizes.size(); }
  uint32_t member(size_t level) const { return levels.member_of(host, level); }
  // Who carries `slice` on the host that is `member` of this host's group in a level.
  uint32_t counterpart(size_t level, uint32_t of_member, uint32_t slice) const {
    return levels.carrier(levels.peer(host, level, of_member), slice);
  }

  void add(Step step) { steps.push_back(std::move(step)); }
  void send(uint32_t to, Region from, uint64_t bytes);
  Frame receive(uint32_t from, Region to, uint64_t bytes);
  void wait_received(const std::vector<Frame>& frames);
  // The first time in a level: what its ranks tell each other of their calls. Levels come in their order in
  // all plans, since hosts whose calls differ must still hear each other.
  void tell(size_t level);
  void hear(size_t level);
  // In all levels, after which this rank has heard from all hosts.
  void agree();
  // What goes to counterparts in a level, for each slice that this rank carries: `body(c, member, peer)` for
  // the c-th of them and each other member.
  template <typename Body>
  void for_others(size_t level, Body body) const {
    const uint32_t members = levels.sizes[level];
    for (size_t c = 0; c < carried.size(); ++c)
      for (uint32_t i = 1; i < members; ++i) {
        const uint32_t other = (member(level) + i) % members;
        body(c, other, counterpart(level, other, carried[c]));
      }
  }
  // Until all that was sent up to now, or to when `mark` was taken, has left.
  using Mark = std::map<uint32_t, uint64_t>;
  Mark mark() const { return sent_; }
  void wait_sent(const Mark& mark);
  void wait_sent() { wait_sent(sent_); }

  // `offset_bytes` of `place` of each rank of this host; of the own rank `own` instead.
  std::vector<Region> of_locals(Place place, uint64_t offset_bytes, Region own) const;

 private:
  Mark sent_, received_;
  size_t told_ = 0, heard_ = 0;  // levels
};

// Kernels for partial results: of a host's tensors; of results of a level; of those of the last level. And
// for results that cross in fewer bits, so that all ranks get the same, whoever made them: to what callers
// get.
struct Kernels {
  Kernel tensors, partial, last, widened;
};
Kernels kernels_of(const Call& call);

// How tensors are cut into chunks, and where each chunk's frames land. `ring` chunks are under way at a time.
// A chunk is some elements of a tensor, in as many slices as `slices` says, or (1) the same elements of the
// part of each rank. Of each chunk the landing has an entry for each slice that a rank carries: `entry_parts`
// partial results, then for each level a place for what each other member sends; and a slot holds
// `slot_parts` (0: no chunk comes into a slot).
struct CutOf {
  uint64_t elems = 0, slices = 1, entry_parts = 1, slot_parts = 1;
  uint64_t elem_bytes = 1, wire_bytes = 1;
  uint64_t ring = 1;
  bool alone = false;  // two hosts have one rank each, which sends its tensor as it is: nothing lies in an
                       // entry but what comes, and chunks are as long as exchanged_chunk() says
};

class NetCut {
 public:
  NetCut(const Levels& levels, const CutOf& of, const SlotSizes& sizes, const NetSizes& net);

  uint64_t chunks() const { return (of_.elems + chunk_elems_ - 1) / chunk_elems_; }
  Slice chunk(uint64_t chunk) const;
  Slice slice(uint64_t chunk, uint32_t slice) const;  // of the tensor
  // What member `member` adds of a part of a slice.
  Slice piece(Slice span, uint32_t size, uint32_t member) const;

  // Each `part` where there are several.
  uint64_t slot_at(uint64_t chunk, uint64_t part = 0) const {
    return (chunk % of_.ring * of_.slot_parts + part) * part_units_ * kLineBytes;
  }
  uint64_t partial_at(uint64_t chunk, uint64_t carried, uint64_t part = 0) const;
  uint64_t landing_at(uint64_t chunk, uint64_t carried, size_t level, uint32_t member,
                      uint64_t part = 0) const;

 private:
  const CutOf of_;
  const uint64_t unit_;  // elements
  uint64_t carried_ = 1, part_units_ = 1, chunk_elems_ = 0, entry_units_ = 0;
  std::vector<uint64_t> level_at_, piece_units_;  // within an entry, in units
};

}  // namespace photinus
