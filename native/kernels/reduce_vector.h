// The reduction kernels, written once on the compiler's vector types and compiled once for each instruction
// set, each time into another namespace (PHOTINUS_KERNELS). Nothing from the standard library's templates is
// used here: an inline function compiled with wider instructions must not become the copy that the rest of
// the program calls.
//
// Work goes block by block: a block of all sources is loaded and combined in registers before the results are
// stored, so a destination may be one of the sources.
//
// Narrow floats are converted to float32 and back, although newer processors can add halves as they are
// (AVX512-FP16, the half arithmetic of ARMv8.2) or round to bfloat16 in one instruction (vcvtneps2bf16 of
// AVX512-BF16). The former would accumulate in 16 bits and round at every step; the latter takes subnormals
// for zero. Either way the bits would depend on the processor.
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels/reduce.h"

#ifndef PHOTINUS_VECTOR_BYTES
#error "the including file says how wide a vector is"
#endif

namespace photinus::PHOTINUS_KERNELS {

inline constexpr uint64_t kVectorBytes = PHOTINUS_VECTOR_BYTES;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::type;

// How elements lie in memory and in which vector they are combined.
template <class T>
struct Plain {
  using Element = T;
  using Accumulated = T;
  using Lanes = Vector<T>;
  static constexpr uint64_t kLanes = kVectorBytes / sizeof(T);
  static Lanes load(const Element* from) {
    Lanes lanes;
    __builtin_memcpy(&lanes, from, sizeof lanes);
    return lanes;
  }
  static void store(Element* to, Lanes lanes) { __builtin_memcpy(to, &lanes, sizeof lanes); }
};

// Any byte but 0 is true and leaves as 1.
struct Boolean : Plain<uint8_t> {
  static Lanes load(const Element* from) {
    Lanes lanes = Plain<uint8_t>::load(from);
    return lanes > 1 ? 1 : lanes;
  }
};

// Small integers to be averaged: summed and divided as floating-point numbers, which processors divide many
// at a time. That is exact: Wide holds every sum of up to 2^16 of them, and a quotient of two whole numbers
// that Wide holds is too far from the next whole number to be rounded up to it, so cutting off its fraction
// truncates the exact quotient.
template <class T, class Wide>
struct Averaged {
  static_assert(sizeof(T) == 1 || sizeof(Wide) == 8);
  using Element = T;
  using Accumulated = Wide;
  using Lanes = Vector<Wide>;
  static constexpr uint64_t kLanes = kVectorBytes / sizeof(Wide);
  typedef T Narrow __attribute__((vector_size(kLanes * sizeof(T))));
  typedef int32_t Words __attribute__((vector_size(kLanes * sizeof(int32_t))));

  static Lanes load(const Element* from) {
    Narrow narrow;
    __builtin_memcpy(&narrow, from, sizeof narrow);
    return __builtin_convertvector(__builtin_convertvector(narrow, Words), Lanes);
  }
  static void store(Element* to, Lanes lanes) {
    Narrow narrow = __builtin_convertvector(__builtin_convertvector(lanes, Words), Narrow);
    __builtin_memcpy(to, &narrow, sizeof narrow);
  }
};

// bfloat16: the upper half of a float32. The two elements in each 32-bit word are widened in place, into one
// vector of those that lay low and one of those that lay high, and put together again the same way: no
// element ever moves to another lane, which is what makes other conversions slow.
struct Bfloat16 {
  using Element = uint16_t;
  using Accumulated = float;
  using Words = Vector<uint32_t>;
  static constexpr uint64_t kLanes = kVectorBytes / sizeof(Element);

  struct Lanes {
    Vector<float> low, high;
    Lanes operator*(float factor) const { return {low * factor, high * factor}; }
    Lanes operator/(float divisor) const { return {low / divisor, high / divisor}; }
  };

  static Lanes load(const Element* from) {
    Words words;
    __builtin_memcpy(&words, from, sizeof words);
    return {reinterpret_cast<Vector<float>>(words << 16),
            reinterpret_cast<Vector<float>>(words & 0xffff0000u)};
  }
  // The upper half is the result.
  static Words rounded(Vector<float> lanes) {
    Words words = reinterpret_cast<Words>(lanes);
    Words nearest = words + 0x7fff + ((words >> 16) & 1);  // ties to even
    Words quiet = words | 0x400000;                        // a NaN must not round into an infinity
    return lanes != lanes ? quiet : nearest;
  }
  static void store(Element* to, Lanes lanes) {
    Words words = (rounded(lanes.low) >> 16) | (rounded(lanes.high) & 0xffff0000u);
    __builtin_memcpy(to, &words, sizeof words);
  }
};

struct Float16 {
  using Element = uint16_t;
  using Accumulated = float;
  using Lanes = Vector<float>;
  static constexpr uint64_t kLanes = kVectorBytes / sizeof(float);

#if defined(__AVX512F__) && PHOTINUS_VECTOR_BYTES == 64
  static Lanes load(const Element* from) {
    __m256i halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return reinterpret_cast<Lanes>(_mm512_cvtph_ps(halves));
  }
  static void store(Element* to, Lanes lanes) {
    __m256i halves = _mm512_cvtps_ph(reinterpret_cast<__m512>(lanes), _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(to, &halves, sizeof halves);
  }
#elif defined(__F16C__) && PHOTINUS_VECTOR_BYTES == 32
  static Lanes load(const Element* from) {
    __m128i halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return reinterpret_cast<Lanes>(_mm256_cvtph_ps(halves));
  }
  static void store(Element* to, Lanes lanes) {
    __m128i halves = _mm256_cvtps_ph(reinterpret_cast<__m256>(lanes), _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(to, &halves, sizeof halves);
  }
#elif defined(__aarch64__)
  static Lanes load(const Element* from) {
    float16x4_t halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return reinterpret_cast<Lanes>(vcvt_f32_f16(halves));
  }
  static void store(Element* to, Lanes lanes) {
    float16x4_t halves = vcvt_f16_f32(reinterpret_cast<float32x4_t>(lanes));
    __builtin_memcpy(to, &halves, sizeof halves);
  }
#else
  static float widen(uint16_t half) {
    uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fffu;
    float magnitude;
    if (rest >= 0x7c00) {  // infinity and NaN (made quiet, as the processors' own conversion does)
      uint32_t word = 0x7f800000u | ((rest & 0x3ffu) << 13) | ((rest & 0x3ffu) ? 0x400000u : 0);
      __builtin_memcpy(&magnitude, &word, sizeof magnitude);
    } else if (rest >= 0x400) {
      uint32_t word = (rest << 13) + (112u << 23);
      __builtin_memcpy(&magnitude, &word, sizeof magnitude);
    } else {
      magnitude = static_cast<float>(rest) * 0x1p-24f;  // subnormal: a whole number of the smallest steps
    }
    uint32_t word;
    __builtin_memcpy(&word, &magnitude, sizeof word);
    word |= sign;
    __builtin_memcpy(&magnitude, &word, sizeof magnitude);
    return magnitude;
  }
  static uint16_t narrow(float value) {
    uint32_t word;
    __builtin_memcpy(&word, &value, sizeof word);
    uint32_t sign = (word >> 16) & 0x8000u, rest = word & 0x7fffffffu;
    if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
    if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
    if (rest < 0x38800000u) {  // below the smallest normal half: let the adder round at the right bit
      float magnitude;
      __builtin_memcpy(&magnitude, &rest, sizeof magnitude);
      magnitude += 0.5f;
      __builtin_memcpy(&rest, &magnitude, sizeof rest);
      return static_cast<uint16_t>(sign | (rest - 0x3f000000u));
    }
    uint32_t rounded = rest + 0xfffu + ((rest >> 13) & 1);
    return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
  }
  static Lanes load(const Element* from) {
    Lanes lanes;
    for (uint64_t i = 0; i < kLanes; ++i) lanes[i] = widen(from[i]);
    return lanes;
  }
  static void store(Element* to, Lanes lanes) {
    for (uint64_t i = 0; i < kLanes; ++i) to[i] = narrow(lanes[i]);
  }
#endif
};

// How two vectors become one; what happens to each source before (factors) and to the result after (divides).
struct Plainly {
  static constexpr bool kFactors = false, kDivides = false;
};
struct Sum : Plainly {
  template <class Lanes>
  static Lanes combine(Lanes a, Lanes b) {
    return a + b;
  }
};
struct Average : Sum {
  static constexpr bool kDivides = true;
};
struct PremultipliedSum : Sum {
  static constexpr bool kFactors = true;
};
struct Product : Plainly {
  template <class Lanes>
  static Lanes combine(Lanes a, Lanes b) {
    return a * b;
  }
};
// A NaN in any source makes the result NaN, whichever rank it comes from.
struct Min : Plainly {
  template <class Lanes>
  static Lanes combine(Lanes a, Lanes b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};
struct Max : Plainly {
  template <class Lanes>
  static Lanes combine(Lanes a, Lanes b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};
struct And : Plainly {
  template <class Lanes>
  static Lanes combine(Lanes a, Lanes b) {
    return a & b;
  }
};
struct Or : Plainly {
  template <class Lanes>
  static Lanes combine(Lanes a, Lanes b) {
    return a | b;
  }
};
struct Xor : Plainly {
  template <class Lanes>
  static Lanes combine(Lanes a, Lanes b) {
    return a ^ b;
  }
};

template <class How, class Lanes>
inline Lanes combine(Lanes a, Lanes b) {
  return How::combine(a, b);
}
template <class How>
inline Bfloat16::Lanes combine(Bfloat16::Lanes a, Bfloat16::Lanes b) {
  return {How::combine(a.low, b.low), How::combine(a.high, b.high)};
}

template <class Format, class How>
inline typename Format::Lanes load_source(const ReduceCall& call, uint32_t source,
                                          const typename Format::Element* from) {
  auto lanes = Format::load(from);
  if constexpr (How::kFactors)
    if (call.factors) lanes = lanes * static_cast<typename Format::Accumulated>(call.factors[source]);
  return lanes;
}

// Which operand's NaN a sum keeps depends on the order in which a compiler puts the operands, which differs
// between instruction sets; ranks that add for themselves would get other bits. So all results that are NaN
// are the same NaN.
inline Vector<float> with_one_nan(Vector<float> lanes) {
  return lanes == lanes ? lanes : Vector<float>{} + __builtin_nanf("");
}
inline Vector<double> with_one_nan(Vector<double> lanes) {
  return lanes == lanes ? lanes : Vector<double>{} + __builtin_nan("");
}
inline Bfloat16::Lanes with_one_nan(Bfloat16::Lanes lanes) {
  return {with_one_nan(lanes.low), with_one_nan(lanes.high)};
}
template <class Lanes>
inline Lanes with_one_nan(Lanes integers) {
  return integers;
}

template <class Format, class How>
inline typename Format::Lanes finished(const ReduceCall& call, typename Format::Lanes lanes) {
  // In the type of accumulation, which holds the divisor, a number of ranks, exactly.
  if constexpr (How::kDivides) lanes = lanes / static_cast<typename Format::Accumulated>(call.divisor);
  return with_one_nan(lanes);
}

// How many of `sources` are in the left part of their tree (see reduce.h).
constexpr uint32_t left_of(uint32_t sources) {
  uint32_t left = 1;
  while (sources - left > left) left *= 2;
  return left;
}

// A vector of the sources from `first` on, kSources of them, combined.
template <class Format, class How, uint32_t kSources>
__attribute__((always_inline)) inline typename Format::Lanes combined(const ReduceCall& call, uint64_t at,
                                                                      uint32_t first = 0) {
  if constexpr (kSources == 1) {
    return load_source<Format, How>(call, first,
                                    static_cast<const typename Format::Element*>(call.sources[first]) + at);
  } else {
    constexpr uint32_t kLeft = left_of(kSources);
    return combine<How>(combined<Format, How, kLeft>(call, at, first),
                        combined<Format, How, kSources - kLeft>(call, at, first + kLeft));
  }
}

// Called, as short code would copy byte by byte.
[[gnu::noinline]] inline void copy_bytes(void* to, const void* from, uint64_t bytes) {
  __builtin_memcpy(to, from, bytes);
}

// Clang 19 to 22 make a loop of such a recursion, and stumble over their own code for vectors of 32 bytes.
#if defined(__clang__)
#define PHOTINUS_STAYS_RECURSIVE [[clang::disable_tail_calls]]
#else
#define PHOTINUS_STAYS_RECURSIVE
#endif

// Less than a vector, through a padded one, so that its arithmetic is the very same. (cold: short code.)
template <class Format, class How>
PHOTINUS_STAYS_RECURSIVE [[gnu::cold, gnu::noinline]] typename Format::Lanes combined_tail(
    const ReduceCall& call, uint64_t at, uint32_t first, uint32_t sources) {
  using Element = typename Format::Element;
  if (sources == 1) {
    Element padded[Format::kLanes] = {};
    copy_bytes(padded, static_cast<const Element*>(call.sources[first]) + at,
               (call.elems - at) * sizeof(Element));
    return load_source<Format, How>(call, first, padded);
  }
  const uint32_t left = left_of(sources);
  const auto sum = combined_tail<Format, How>(call, at, first, left);
  return combine<How>(sum, combined_tail<Format, How>(call, at, first + left, sources - left));
}

inline constexpr uint64_t kVectors = 4;  // are combined before they are stored

// The first `vectors` of these; all kVectors when there are more.
template <class Format, class How>
__attribute__((always_inline)) inline void store(const ReduceCall& call, uint64_t at,
                                                 const typename Format::Lanes* lanes,
                                                 uint64_t vectors = kVectors) {
  typename Format::Lanes results[kVectors];
  for (uint64_t v = 0; v < kVectors; ++v) results[v] = finished<Format, How>(call, lanes[v]);
  for (uint32_t d = 0; d < call.destination_count; ++d)
    for (uint64_t v = 0; v < kVectors; ++v)
      if (v < vectors)
        Format::store(static_cast<typename Format::Element*>(call.destinations[d]) + at + v * Format::kLanes,
                      results[v]);
}

template <class Format, class How>
[[gnu::cold, gnu::noinline]] void reduce_tail(const ReduceCall& call, uint64_t at) {
  using Element = typename Format::Element;
  if (at == call.elems) return;
  Element padded[Format::kLanes];
  Format::store(padded,
                finished<Format, How>(call, combined_tail<Format, How>(call, at, 0, call.source_count)));
  for (uint32_t d = 0; d < call.destination_count; ++d)
    copy_bytes(static_cast<Element*>(call.destinations[d]) + at, padded, (call.elems - at) * sizeof(Element));
}

// Any number of sources, by a stack as in a binary counter. Sources come in fours; after the n-th four, as
// many sums are combined as n has zero bits at its end; the one to three that may be left over combine with
// all.
template <class Format, class How>
class Stack {
 public:
  using Lanes = typename Format::Lanes;

  explicit Stack(const ReduceCall& call) : call_(call) {}

  // `vectors` of them, from `at` on; at most kStrip.
  const Lanes* combine_all(uint64_t at, uint64_t vectors) {
    at_ = at;
    vectors_ = vectors;
    depth_ = 0;
    uint32_t first = 0;
    for (; first + 4 <= call_.source_count; first += 4) {
      uint32_t sums = 0;
      while ((first / 4) >> sums & 1) ++sums;
      push<4>(first, first + 4 == call_.source_count ? depth_ : sums);
    }
    const uint32_t rest = call_.source_count - first;
    if (rest == 3) push<3>(first, depth_);
    if (rest == 2) push<2>(first, depth_);
    if (rest == 1) push<1>(first, depth_);
    return sums_[0];
  }

  static constexpr uint64_t kStrip = 16;

 private:
  // Takes `sums` off the stack, combines them with these sources, and puts the result there.
  template <uint32_t kSources>
  [[gnu::noinline]] void push(uint32_t first, uint32_t sums) {
    const Lanes(*from)[kStrip] = sums_ + depth_;
    depth_ -= sums;
    Lanes* to = sums_[depth_++];
    for (uint64_t v = 0; v < vectors_; ++v) {
      Lanes lanes = combined<Format, How, kSources>(call_, at_ + v * Format::kLanes, first);
      for (uint32_t s = 1; s <= sums; ++s) lanes = combine<How>((from - s)[0][v], lanes);
      to[v] = lanes;
    }
  }

  const ReduceCall& call_;
  uint64_t at_ = 0, vectors_ = 0;
  uint32_t depth_ = 0;
  Lanes sums_[32][kStrip];  // a level for each bit of a number of sources
};

// From element `at` on.
template <class Format, class How>
[[gnu::noinline]] void reduce_many(const ReduceCall& call, uint64_t at) {
  using Lanes = typename Format::Lanes;
  Stack<Format, How> stack(call);
  for (uint64_t left; (left = (call.elems - at) / Format::kLanes) > 0;) {
    const uint64_t vectors = left < stack.kStrip ? left : stack.kStrip;
    const Lanes* lanes = stack.combine_all(at, vectors);
    for (uint64_t v = 0; v < vectors; v += kVectors)
      store<Format, How>(call, at + v * Format::kLanes, lanes + v, vectors - v);
    at += vectors * Format::kLanes;
  }
  reduce_tail<Format, How>(call, at);
}

// Numbers of sources that occur often: all in registers, as far as whole blocks go.
template <class Format, class How, uint32_t kSources>
void reduce_few(const ReduceCall& call) {
  constexpr uint64_t kBlock = kVectors * Format::kLanes;
  uint64_t at = 0;
  for (; at + kBlock <= call.elems; at += kBlock) {
    typename Format::Lanes lanes[kVectors];
    for (uint64_t v = 0; v < kVectors; ++v)
      lanes[v] = combined<Format, How, kSources>(call, at + v * Format::kLanes);
    store<Format, How>(call, at, lanes);
  }
  if (call.elems - at < Format::kLanes)
    reduce_tail<Format, How>(call, at);
  else
    reduce_many<Format, How>(call, at);
}

template <class Format, class How>
void reduce(const ReduceCall& call) {
  switch (call.source_count) {
    case 2:
      return reduce_few<Format, How, 2>(call);
    case 4:
      return reduce_few<Format, How, 4>(call);
    case 8:
      return reduce_few<Format, How, 8>(call);
    default:
      return reduce_many<Format, How>(call, 0);
  }
}

// The average of integers: the exact sum (in 64 bits, wrapping around as sums do), divided with truncation
// towards zero.
inline void average_int64(const ReduceCall& call) {
  for (uint64_t at = 0; at < call.elems; ++at) {
    uint64_t sum = 0;
    for (uint32_t s = 0; s < call.source_count; ++s) sum += static_cast<const uint64_t*>(call.sources[s])[at];
    const int64_t average = static_cast<int64_t>(sum) / static_cast<int64_t>(call.divisor);
    for (uint32_t d = 0; d < call.destination_count; ++d)
      static_cast<int64_t*>(call.destinations[d])[at] = average;
  }
}

template <class T>
ReduceFunction average() {
  if constexpr (sizeof(T) == 8)
    return average_int64;
  else if constexpr (sizeof(T) == 1)
    return reduce<Averaged<T, float>, Average>;
  else
    return reduce<Averaged<T, double>, Average>;
}

template <class Format>
ReduceFunction floating(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return reduce<Format, Sum>;
    case Reduction::avg:
      return reduce<Format, Average>;
    case Reduction::min:
      return reduce<Format, Min>;
    case Reduction::max:
      return reduce<Format, Max>;
    case Reduction::product:
      return reduce<Format, Product>;
    case Reduction::premul_sum:
      return reduce<Format, PremultipliedSum>;
    case Reduction::band:
    case Reduction::bor:
    case Reduction::bxor:
      return nullptr;
  }
  return nullptr;
}

// Sums and products wrap around; on unsigned lanes that is defined and has the same bits.
template <class Signed, class Unsigned>
ReduceFunction integer(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return reduce<Plain<Unsigned>, Sum>;
    case Reduction::avg:
      return average<Signed>();
    case Reduction::min:
      return reduce<Plain<Signed>, Min>;
    case Reduction::max:
      return reduce<Plain<Signed>, Max>;
    case Reduction::product:
      return reduce<Plain<Unsigned>, Product>;
    case Reduction::band:
      return reduce<Plain<Unsigned>, And>;
    case Reduction::bor:
      return reduce<Plain<Unsigned>, Or>;
    case Reduction::bxor:
      return reduce<Plain<Unsigned>, Xor>;
    case Reduction::premul_sum:
      return nullptr;
  }
  return nullptr;
}

inline ReduceFunction logical(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
    case Reduction::max:
    case Reduction::bor:
      return reduce<Boolean, Or>;
    case Reduction::min:
    case Reduction::product:
    case Reduction::band:
      return reduce<Boolean, And>;
    case Reduction::bxor:
      return reduce<Boolean, Xor>;
    case Reduction::avg:
    case Reduction::premul_sum:
      return nullptr;
  }
  return nullptr;
}

ReduceFunction find(Dtype dtype, Reduction reduction) {
  switch (dtype) {
    case Dtype::float32:
      return floating<Plain<float>>(reduction);
    case Dtype::float64:
      return floating<Plain<double>>(reduction);
    case Dtype::float16:
      return floating<Float16>(reduction);
    case Dtype::bfloat16:
      return floating<Bfloat16>(reduction);
    case Dtype::int8:
      return integer<int8_t, uint8_t>(reduction);
    case Dtype::int16:
      return integer<int16_t, uint16_t>(reduction);
    case Dtype::int32:
      return integer<int32_t, uint32_t>(reduction);
    case Dtype::int64:
      return integer<int64_t, uint64_t>(reduction);
    case Dtype::uint8:
      return integer<uint8_t, uint8_t>(reduction);
    case Dtype::boolean:
      return logical(reduction);
  }
  return nullptr;
}

template <class From, class To>
void convert_integers(const void* from, void* to, uint64_t elems) {
  for (uint64_t i = 0; i < elems; ++i)
    static_cast<To*>(to)[i] = static_cast<To>(static_cast<const From*>(from)[i]);
}

inline void widen_bfloat16(const void* from, void* to, uint64_t elems) {
  for (uint64_t i = 0; i < elems; ++i)
    static_cast<uint32_t*>(to)[i] = static_cast<uint32_t>(static_cast<const uint16_t*>(from)[i]) << 16;
}

inline void widen_float16(const void* from, void* to, uint64_t elems) {
  uint16_t halves[Float16::kLanes] = {};
  for (uint64_t at = 0; at < elems; at += Float16::kLanes) {
    const uint64_t lanes = elems - at < Float16::kLanes ? elems - at : Float16::kLanes;
    __builtin_memcpy(halves, static_cast<const uint16_t*>(from) + at, lanes * sizeof(uint16_t));
    const Vector<float> wide = Float16::load(halves);
    __builtin_memcpy(static_cast<float*>(to) + at, &wide, lanes * sizeof(float));
  }
}

inline void narrow_bfloat16(const void* from, void* to, uint64_t elems) {
  constexpr uint64_t kLanes = Bfloat16::kLanes / 2;
  for (uint64_t at = 0; at < elems; at += kLanes) {
    const uint64_t lanes = elems - at < kLanes ? elems - at : kLanes;
    Vector<float> wide = {};
    __builtin_memcpy(&wide, static_cast<const float*>(from) + at, lanes * sizeof(float));
    const Bfloat16::Words words = Bfloat16::rounded(wide);
    for (uint64_t i = 0; i < lanes; ++i)
      static_cast<uint16_t*>(to)[at + i] = static_cast<uint16_t>(words[i] >> 16);
  }
}

inline void narrow_float16(const void* from, void* to, uint64_t elems) {
  uint16_t halves[Float16::kLanes];
  for (uint64_t at = 0; at < elems; at += Float16::kLanes) {
    const uint64_t lanes = elems - at < Float16::kLanes ? elems - at : Float16::kLanes;
    Vector<float> wide = {};
    __builtin_memcpy(&wide, static_cast<const float*>(from) + at, lanes * sizeof(float));
    Float16::store(halves, wide);
    __builtin_memcpy(static_cast<uint16_t*>(to) + at, halves, lanes * sizeof(uint16_t));
  }
}

ConvertFunction find_converter(Dtype from, Dtype to) {
  if (to == Dtype::float32 && from == Dtype::bfloat16) return widen_bfloat16;
  if (to == Dtype::float32 && from == Dtype::float16) return widen_float16;
  if (from == Dtype::float32 && to == Dtype::bfloat16) return narrow_bfloat16;
  if (from == Dtype::float32 && to == Dtype::float16) return narrow_float16;
  if (to == Dtype::int32 && from == Dtype::int8) return convert_integers<int8_t, int32_t>;
  if (to == Dtype::int32 && from == Dtype::uint8) return convert_integers<uint8_t, int32_t>;
  if (to == Dtype::int32 && from == Dtype::int16) return convert_integers<int16_t, int32_t>;
  if (to == Dtype::int64 && from == Dtype::int32) return convert_integers<int32_t, int64_t>;
  if (from == Dtype::int32 && to == Dtype::int8) return convert_integers<int32_t, int8_t>;
  if (from == Dtype::int32 && to == Dtype::uint8) return convert_integers<int32_t, uint8_t>;
  if (from == Dtype::int32 && to == Dtype::int16) return convert_integers<int32_t, int16_t>;
  if (from == Dtype::int64 && to == Dtype::int32) return convert_integers<int64_t, int32_t>;
  return nullptr;
}

}  // namespace photinus::PHOTINUS_KERNELS
