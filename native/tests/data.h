// Test data: reproducible elements of every type, with the values that break things (NaN, infinities,
// extremes).
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

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

inline Bytes random_elements(Dtype dtype, uint64_t elems, std::mt19937_64& random) {
  const size_t size = size_bytes(dtype);
  Bytes bytes(elems * size);
  for (uint64_t i = 0; i < elems; ++i) {
    uint64_t bits = random();
    if (dtype == Dtype::boolean) bits &= 1;
    // Floats: every bit pattern may occur in narrow types; wide ones get moderate values with some patterns
    // between.
    if (dtype == Dtype::float32 && bits % 8 != 0) {
      float value = static_cast<float>(static_cast<int64_t>(random() % 20001) - 10000) / 7.0f;
      std::memcpy(&bits, &value, sizeof value);
    }
    if (dtype == Dtype::float64 && bits % 8 != 0) {
      double value = static_cast<double>(static_cast<int64_t>(random() % 20001) - 10000) / 7.0;
      std::memcpy(&bits, &value, sizeof value);
    }
    std::memcpy(bytes.data() + i * size, &bits, size);
  }
  return bytes;
}

// Equal bits, except that one NaN is as good as another (which payload survives is the processor's business).
inline bool same(Dtype dtype, const std::byte* a, const std::byte* b, uint64_t elems) {
  const size_t size = size_bytes(dtype);
  for (uint64_t i = 0; i < elems; ++i) {
    if (std::memcmp(a + i * size, b + i * size, size) == 0) continue;
    uint64_t x = 0, y = 0;
    std::memcpy(&x, a + i * size, size);
    std::memcpy(&y, b + i * size, size);
    auto is_nan = [&](uint64_t bits) {
      switch (dtype) {
        case Dtype::float32:
          return (bits & 0x7fffffff) > 0x7f800000;
        case Dtype::float64:
          return (bits & 0x7fffffffffffffff) > 0x7ff0000000000000;
        case Dtype::float16:
          return (bits & 0x7fff) > 0x7c00;
        case Dtype::bfloat16:
          return (bits & 0x7fff) > 0x7f80;
        default:
          return false;
      }
    };
    if (!is_nan(x) || !is_nan(y)) {
      std::fprintf(stderr, "element %llu of %s: %llx is not %llx\n", static_cast<unsigned long long>(i),
                   name(dtype), static_cast<unsigned long long>(x), static_cast<unsigned long long>(y));
      return false;
    }
  }
  return true;
}

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
