#include "collectives/net_steps.h"

#include <algorithm>
#include <cassert>

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

void NetSteps::tell(size_t level) {
  if (level < told_) return;
  assert(level == told_ && level == heard_);
  add(tell_step(told_++));
}

void NetSteps::hear(size_t level) {
  if (level < heard_) return;
  assert(level + 1 == told_ && level == heard_);
  add(hear_step(heard_++));
}

void NetSteps::agree() {
  for (size_t level = 0; level < depth(); ++level) {
    tell(level);
    hear(level);
  }
}

std::vector<uint32_t> NetSteps::reached(size_t level) const {
  const uint32_t step = levels.stride(level);
  std::vector<uint32_t> hosts;
  for (uint32_t h = host % step; h < levels.hosts.size(); h += step) hosts.push_back(h);
  return hosts;
}

void NetSteps::wait_sent(const Mark& mark) {
  for (const auto& [to, count] : mark) add(wait_sent_step(to, count));
}

std::vector<Region> NetSteps::of_locals(Place place, uint64_t offset_bytes, Region own) const {
  std::vector<Region> regions;
  for (uint32_t rank : locals) regions.push_back(rank == me ? own : Region{place, rank, offset_bytes});
  return regions;
}

SlotSizes sizes_for(SlotSizes asked, uint32_t ranks, bool over_hosts) {
  constexpr uint32_t kChunksOverHosts = 32;
  asked.chunk_bytes = std::max<uint64_t>(asked.chunk_bytes, ranks * kLineBytes);
  if (over_hosts) asked.chunks = std::max(asked.chunks, kChunksOverHosts);
  return asked;
}

namespace {

constexpr uint64_t kLeastChunkBytes = 128 << 10;  // of a slice; shorter ones cost more than they save

// What crosses the card in a time and some latencies: what a round trip takes has to be under way.
double crossing_bytes(const NetSizes& net, double time_s) {
  constexpr double kLatencies = 4;
  return net.bytes_per_s * (time_s + kLatencies * net.latency_s);
}

// From `least` to `most`.
uint64_t bounded(double bytes, uint64_t least, uint64_t most) {
  return static_cast<uint64_t>(std::clamp(bytes, static_cast<double>(least), static_cast<double>(most)));
}

}  // namespace

// Cut into more than this, a tensor costs frames that nobody is earlier for (three hosts of two ranks, 64
// MiB: with slices of 256 KiB 1.3 times the processor time). But with much under way over many links of a
// slow card, its queue drops packets and calls take longer (four hosts of two ranks at 100 Mbit/s, 64 MiB:
// with slices of 256 KiB 1.15 of bytes / rate, of some 140 KiB 1.08 and 1.10). So what a slice of each link
// has is to cross the card in kCrossing_s.
uint64_t longest_slice(const NetSizes& net, const Levels& levels, uint64_t bytes) {
  constexpr uint64_t kEnoughChunks = 32;
  constexpr double kCrossing_s = 0.075;
  const uint64_t of_length = std::clamp(bytes / kEnoughChunks, net.slice_bytes, net.most_slice_bytes);
  uint64_t links = 0;
  for (const uint32_t size : levels.sizes) links += uint64_t{levels.slices()} * (size - 1);
  if (net.bytes_per_s <= 0 || links == 0) return of_length;
  const double of_link = crossing_bytes(net, kCrossing_s) / static_cast<double>(links);
  return bounded(of_link, std::min(kLeastChunkBytes, of_length), of_length);
}

// Each host can be ahead of the other by the chunks that are under way, and what it has sent ahead lies in
// the queue of its card, where the acknowledgements of what comes wait behind it. TCP that has lost a packet,
// or takes one that was overtaken for lost, has a small window for seconds, and would stand still meanwhile
// (1 Gbit/s, 4 MiB in chunks of 1 MiB: 1.4 of bytes / rate). So a chunk of a short tensor crosses a slow card
// within some milliseconds.
uint64_t exchanged_chunk(const NetSizes& net, uint64_t bytes) {
  constexpr uint64_t kFewChunks = 64, kLongBytes = 512 << 10;
  constexpr double kCrossing_s = 1e-3;
  if (net.bytes_per_s <= 0) return net.most_slice_bytes;
  const uint64_t of_length = std::clamp(bytes / kFewChunks, kLeastChunkBytes, kLongBytes);
  return bounded(crossing_bytes(net, kCrossing_s), std::min(of_length, net.most_slice_bytes),
                 net.most_slice_bytes);
}

Dtype wire_dtype(const Call& call) {
  if (call.wire) return *call.wire;
  if (call.reduction != Reduction::avg) return call.dtype;
  switch (call.dtype) {
    case Dtype::int8:
    case Dtype::uint8:
    case Dtype::int16:
      return Dtype::int32;
    case Dtype::int32:
      return Dtype::int64;
    default:
      return call.dtype;
  }
}

namespace {

bool is_half(Dtype dtype) {
  return dtype == Dtype::float16 || dtype == Dtype::bfloat16;
}

bool computes(const Call& call) {
  return has_reduction(call.operation) &&
         (call.reduction == Reduction::sum || call.reduction == Reduction::avg ||
          call.reduction == Reduction::premul_sum || call.reduction == Reduction::product);
}

}  // namespace

bool is_rounded_in_levels(const Call& call) {
  return computes(call) && is_half(wire_dtype(call));
}

bool can_cross_as(const Call& call, Dtype wire) {
  if (!has_reduction(call.operation)) return false;
  if (wire == call.dtype) return true;
  return computes(call) &&
         ((call.dtype == Dtype::float32 && is_half(wire)) || (is_half(call.dtype) && wire == Dtype::float32));
}

Kernels kernels_of(const Call& call) {
  const Dtype wire = wire_dtype(call);
  const bool narrows = size_bytes(wire) < size_bytes(call.dtype);
  // A part of a reduce_scatter stays where it was made.
  const Dtype result = narrows && call.operation != Operation::reduce_scatter ? wire : call.dtype;
  const bool sums = call.reduction == Reduction::avg || call.reduction == Reduction::premul_sum;
  const Reduction between = sums ? Reduction::sum : call.reduction;
  // The average divides at the end; factors multiply what ranks bring.
  return {{call.reduction == Reduction::avg ? Reduction::sum : call.reduction, call.dtype, wire},
          {between, wire, wire},
          {call.reduction == Reduction::avg ? Reduction::avg : between, wire, result},
          {Reduction::sum, result, call.dtype}};
}

NetCut::NetCut(const Levels& levels, const CutOf& of, const SlotSizes& sizes, const NetSizes& net)
    : of_(of), unit_(kLineBytes / of.elem_bytes) {
  const uint32_t slices = levels.slices();
  for (const auto& ranks : levels.hosts)
    carried_ = std::max<uint64_t>(carried_, (slices + ranks.size() - 1) / ranks.size());
  // How long an entry is when a part of it has `units`.
  auto lay_out = [&](uint64_t units) {
    level_at_.clear();
    piece_units_.clear();
    uint64_t span = units * of_.entry_parts, at = of_.alone ? 0 : span;
    for (const uint32_t size : levels.sizes) {
      span = (span + size - 1) / size;
      level_at_.push_back(at);
      piece_units_.push_back(span);
      at += span * size;
    }
    return at;
  };
  const uint64_t slot_parts = std::max<uint64_t>(of_.slot_parts, 1);
  const uint64_t slot_units = sizes.chunks * sizes.chunk_bytes / of_.ring / kLineBytes / slot_parts;
  // As what crosses: a frame's header and the network do not know how wide the tensor is here.
  const uint64_t unit_bytes = unit_ * of_.wire_bytes, bytes = of_.elems * of_.wire_bytes;
  const uint64_t landing_units = net.landing_bytes / (of_.ring * carried_ * unit_bytes);
  const uint64_t most =
      of_.alone ? exchanged_chunk(net, bytes) : longest_slice(net, levels, bytes / of_.slices);
  part_units_ = std::min(most / unit_bytes, landing_units);
  if (of_.slot_parts > 0) part_units_ = std::min(part_units_, slot_units);
  while (part_units_ > 0 && lay_out(part_units_) > landing_units)
    part_units_ -= std::max<uint64_t>(part_units_ / 16, 1);
  if (part_units_ == 0)
    throw Error(
        ErrorKind::invalid_argument,
        text("%llu bytes for slots and %llu for landing do not hold %llu chunks of %llu parts",
             static_cast<unsigned long long>(sizes.chunks * sizes.chunk_bytes),
             static_cast<unsigned long long>(net.landing_bytes), static_cast<unsigned long long>(of_.ring),
             static_cast<unsigned long long>(of_.slot_parts)));
  entry_units_ = lay_out(part_units_);
  chunk_elems_ = part_units_ * of_.slices * unit_;
}

Slice NetCut::chunk(uint64_t chunk) const {
  const uint64_t first = chunk * chunk_elems_;
  return {first, std::min(chunk_elems_, of_.elems - first)};
}

Slice NetCut::slice(uint64_t of_chunk, uint32_t slice) const {
  const Slice whole = chunk(of_chunk);
  const Slice part = slice_of(whole.elems, of_.slices, slice, unit_);
  return {whole.first + part.first, part.elems};
}

Slice NetCut::piece(Slice span, uint32_t size, uint32_t member) const {
  const Slice part = slice_of(span.elems, size, member, unit_);
  return {span.first + part.first, part.elems};
}

uint64_t NetCut::partial_at(uint64_t chunk, uint64_t carried, uint64_t part) const {
  return ((chunk % of_.ring * carried_ + carried) * entry_units_ + part * part_units_) * unit_ *
         of_.wire_bytes;
}

uint64_t NetCut::landing_at(uint64_t chunk, uint64_t carried, size_t level, uint32_t member,
                            uint64_t part) const {
  return partial_at(chunk, carried, part) +
         (level_at_[level] + member * piece_units_[level]) * unit_ * of_.wire_bytes;
}

Plan net_plan(const Call& call, const Levels& levels, uint32_t rank, Algorithm algorithm,
              const SlotSizes& sizes, const NetSizes& net) {
  switch (call.operation) {
    case Operation::all_reduce:
      return net_all_reduce(call, levels, rank, algorithm, sizes, net);
    case Operation::reduce_scatter:
      return net_reduce_scatter(call, levels, rank, algorithm, sizes, net);
    case Operation::all_gather:
      return net_all_gather(call, levels, rank, algorithm, sizes, net);
    case Operation::reduce:
      return net_reduce(call, levels, rank, algorithm, sizes, net);
    case Operation::broadcast:
      return net_broadcast(call, levels, rank, algorithm, sizes, net);
    default:
      return net_barrier(levels, rank);
  }
}

}  // namespace photinus
