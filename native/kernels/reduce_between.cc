#include <algorithm>
#include <cassert>
#include <cstddef>
#include <vector>

#include "kernels/reduce.h"
#include "kernels/subnormals.h"

namespace photinus {

// Strip by strip, through copies in the wider type that stay in the first-level cache.
void reduce_between(Dtype from, Dtype to, Reduction reduction, InstructionSet set, const ReduceCall& call) {
  const KeepSubnormals keep;
  if (from == to) return find_reduce(from, reduction, set)(call);
  constexpr uint64_t kStrip = 512;
  const ConvertFunction convert = find_converter(from, to, set);
  assert(convert && "plans ask for conversions that exist");
  const uint64_t from_size = size_bytes(from), to_size = size_bytes(to);
  const bool widens = to_size > from_size;
  const uint64_t wide_size = std::max(from_size, to_size);
  const ReduceFunction wide_reduce = find_reduce(widens ? to : from, reduction, set);
  std::vector<std::byte> strips((widens ? call.source_count : 1) * kStrip * wide_size);
  std::vector<const void*> sources(call.source_count);
  std::vector<void*> destinations(call.destination_count);
  for (uint64_t at = 0; at < call.elems; at += kStrip) {
    ReduceCall strip = call;
    strip.elems = std::min(kStrip, call.elems - at);
    strip.sources = sources.data();
    strip.destinations = destinations.data();
    auto result = [&](void* whole) { return static_cast<std::byte*>(whole) + at * to_size; };
    for (uint32_t s = 0; s < call.source_count; ++s) {
      const auto* source = static_cast<const std::byte*>(call.sources[s]) + at * from_size;
      std::byte* copy = strips.data() + s * kStrip * wide_size;
      if (widens) convert(source, copy, strip.elems);
      sources[s] = widens ? copy : source;
    }
    if (widens) {
      for (uint32_t d = 0; d < call.destination_count; ++d) destinations[d] = result(call.destinations[d]);
      wide_reduce(strip);
    } else {
      destinations[0] = strips.data();
      strip.destination_count = 1;
      wide_reduce(strip);
      for (uint32_t d = 0; d < call.destination_count; ++d)
        convert(strips.data(), result(call.destinations[d]), strip.elems);
    }
  }
}

}  // namespace photinus
