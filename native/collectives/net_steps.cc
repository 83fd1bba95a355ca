#include "collectives/net_steps.h"

#include <algorithm>

#include "base/error.h"

namespace photinus {

NetSteps::NetSteps(const Levels& all, uint32_t rank)
    : levels(all), me(rank), host(all.host_of(rank)), locals(all.hosts[host]), slices(all.slices()) {
  for (uint32_t slice = 0; slice < slices; ++slice)
    if (levels.carrier(host, slice) == me) carried.push_back(slice);
}

void NetSteps::send(uint32_t to, Region from, uint64_t bytes) {
  ++sent_[to];
  add(send_step(to, from, bytes));
}

Frame NetSteps::receive(uint32_t from, Region to, uint64_t bytes) {
  add(receive_step(from, to, bytes));
  return {from, ++received_[from]};
}

void NetSteps::wait_received(const std::vector<Frame>& frames) {
  for (const Frame& frame : frames) add(wait_received_step(frame.rank, frame.count));
}

void NetSteps::wait_sent(const Mark& mark) {
  for (const auto& [to, count] : mark) add(wait_sent_step(to, count));
}

std::vector<Region> NetSteps::of_locals(Place place, uint64_t offset_bytes, Region own) const {
  std::vector<Region> regions;
  for (uint32_t rank : locals) regions.push_back(rank == me ? own : Region{place, rank, offset_bytes});
  return regions;
}

Kernels kernels_of(const Call& call, bool exact) {
  const Dtype wire = wire_dtype(call.dtype, call.reduction, exact);
  const bool sums = call.reduction == Reduction::avg || call.reduction == Reduction::premul_sum;
  const Reduction between = sums ? Reduction::sum : call.reduction;
  // The average divides at the end; factors multiply what ranks bring.
  return {{call.reduction == Reduction::avg ? Reduction::sum : call.reduction, call.dtype, wire},
          {between, wire, wire},
          {call.reduction == Reduction::avg ? Reduction::avg : between, wire, call.dtype}};
}

NetCut::NetCut(const Levels& levels, uint64_t elems, uint64_t elem_bytes, uint64_t wire_bytes, uint64_t ring,
               const SlotSizes& sizes, const NetSizes& net)
    : elems_(elems),
      elem_bytes_(elem_bytes),
      wire_bytes_(wire_bytes),
      unit_(kLineBytes / elem_bytes),
      ring_(ring),
      slices_(levels.slices()) {
  for (const auto& ranks : levels.hosts)
    carried_ = std::max<uint64_t>(carried_, (slices_ + ranks.size() - 1) / ranks.size());
  // How long an entry is when a slice has `units`.
  auto lay_out = [&](uint64_t units) {
    level_at_.clear();
    piece_units_.clear();
    uint64_t at = units, span = units;
    for (const uint32_t size : levels.sizes) {
      span = (span + size - 1) / size;
      level_at_.push_back(at);
      piece_units_.push_back(span);
      at += span * size;
    }
    return at;
  };
  const uint64_t slot_units = sizes.chunks * sizes.chunk_bytes / ring / kLineBytes;
  const uint64_t landing_units = net.landing_bytes / (ring * carried_ * unit_ * wire_bytes);
  slice_units_ = std::min({net.slice_bytes / kLineBytes, slot_units / slices_, landing_units});
  while (slice_units_ > 0 && lay_out(slice_units_) > landing_units) --slice_units_;
  if (slice_units_ == 0)
    throw Error(ErrorKind::invalid_argument,
                text("%llu bytes for slots and %llu for landing do not hold %llu chunks of %llu slices",
                     static_cast<unsigned long long>(sizes.chunks * sizes.chunk_bytes),
                     static_cast<unsigned long long>(net.landing_bytes),
                     static_cast<unsigned long long>(ring), static_cast<unsigned long long>(slices_)));
  entry_units_ = lay_out(slice_units_);
  chunk_elems_ = slice_units_ * slices_ * unit_;
}

Slice NetCut::chunk(uint64_t chunk) const {
  const uint64_t first = chunk * chunk_elems_;
  return {first, std::min(chunk_elems_, elems_ - first)};
}

Slice NetCut::slice(uint64_t of_chunk, uint32_t slice) const {
  const Slice whole = chunk(of_chunk);
  const Slice part = slice_of(whole.elems, slices_, slice, unit_);
  return {whole.first + part.first, part.elems};
}

Slice NetCut::piece(Slice span, uint32_t size, uint32_t member) const {
  const Slice part = slice_of(span.elems, size, member, unit_);
  return {span.first + part.first, part.elems};
}

uint64_t NetCut::partial_at(uint64_t chunk, uint64_t carried) const {
  return (chunk % ring_ * carried_ + carried) * entry_units_ * unit_ * wire_bytes_;
}

uint64_t NetCut::landing_at(uint64_t chunk, uint64_t carried, size_t level, uint32_t member) const {
  return partial_at(chunk, carried) + (level_at_[level] + member * piece_units_[level]) * unit_ * wire_bytes_;
}

}  // namespace photinus
