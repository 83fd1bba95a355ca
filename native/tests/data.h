// Test data: reproducible elements of every type, with the values that break things (NaN, infinities,
// extremes).
#pragma once

#include <optional>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "collectives/naive.h"
#include "collectives/net.h"

namespace photinus::test {

inline constexpr Dtype kAllDtypes[] = {Dtype::float32, Dtype::float64, Dtype::float16, Dtype::bfloat16,
                                       Dtype::int8,    Dtype::int16,   Dtype::int32,   Dtype::int64,
                                       Dtype::uint8,   Dtype::boolean};
inline constexpr Reduction kAllReductions[] = {Reduction::sum, Reduction::avg,     Reduction::min,
                                               Reduction::max, Reduction::product, Reduction::band,
                                               Reduction::bor, Reduction::bxor,    Reduction::premul_sum};

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Under every seed the same; of wide floats most are moderate, of narrow ones any pattern may occur.
Bytes random_elements(Dtype dtype, uint64_t elems, std::mt19937_64& random);

// Equal bits, except that one NaN is as good as another (which payload survives is the processor's business).
// Says which element differs.
bool same(Dtype dtype, const std::byte* a, const std::byte* b, uint64_t elems);

inline bool exists(Dtype dtype, Reduction reduction) {
  const bool floating = dtype == Dtype::float32 || dtype == Dtype::float64 || dtype == Dtype::float16 ||
                        dtype == Dtype::bfloat16;
  switch (reduction) {
    case Reduction::avg:
      return dtype != Dtype::boolean;
    case Reduction::band:
    case Reduction::bor:
    case Reduction::bxor:
      return !floating;
    case Reduction::premul_sum:
      return floating;
    default:
      return true;
  }
}

// The types in which partial results of a call may cross between hosts; the first is as they do by
// themselves.
inline std::vector<std::optional<Dtype>> wires_of(const Call& call) {
  std::vector<std::optional<Dtype>> wires{std::nullopt};
  for (Dtype wire : kAllDtypes)
    if (wire != call.dtype && can_cross_as(call, wire)) wires.emplace_back(wire);
  return wires;
}

}  // namespace photinus::test
