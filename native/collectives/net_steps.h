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
  // Until all that was sent up to now, or to when `mark` was taken, has left.
  using Mark = std::map<uint32_t, uint64_t>;
  Mark mark() const { return sent_; }
  void wait_sent(const Mark& mark);
  void wait_sent() { wait_sent(sent_); }

  // `offset_bytes` of `place` of each rank of this host; of the own rank `own` instead.
  std::vector<Region> of_locals(Place place, uint64_t offset_bytes, Region own) const;

 private:
  Mark sent_, received_;
};

// Kernels for partial results: of a host's tensors; of results of a level; of those of the last level.
struct Kernels {
  Kernel tensors, partial, last;
};
Kernels kernels_of(const Call& call, bool exact);

// How a tensor of several chunks is cut, and where each chunk's frames land. `ring` chunks are under way at a
// time. An entry of the landing is for one slice of one of them: its partial result, then for each level a
// place for what each other member sends.
class NetCut {
 public:
  NetCut(const Levels& levels, uint64_t elems, uint64_t elem_bytes, uint64_t wire_bytes, uint64_t ring,
         const SlotSizes& sizes, const NetSizes& net);

  uint64_t chunks() const { return (elems_ + chunk_elems_ - 1) / chunk_elems_; }
  Slice chunk(uint64_t chunk) const;
  Slice slice(uint64_t chunk, uint32_t slice) const;  // of the tensor
  // What member `member` adds of a part of a slice.
  Slice piece(Slice span, uint32_t size, uint32_t member) const;

  uint64_t slot_at(uint64_t chunk) const { return chunk % ring_ * chunk_elems_ * elem_bytes_; }
  uint64_t partial_at(uint64_t chunk, uint64_t carried) const;
  uint64_t landing_at(uint64_t chunk, uint64_t carried, size_t level, uint32_t member) const;

 private:
  const uint64_t elems_, elem_bytes_, wire_bytes_, unit_, ring_, slices_;
  uint64_t carried_ = 1, slice_units_ = 1, chunk_elems_ = 0, entry_units_ = 0;
  std::vector<uint64_t> level_at_, piece_units_;  // within an entry, in units
};

}  // namespace photinus
