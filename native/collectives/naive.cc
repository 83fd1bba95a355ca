#include "collectives/naive.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/error.h"

namespace photinus {
namespace {

// Narrow floats: value and rounding by definition (sign, exponent, significand), not by bit tricks.
struct Narrow {
  int significand_bits, exponent_bits;
};
constexpr Narrow kHalf{10, 5}, kBrain{7, 8};

float widen(uint16_t word, Narrow format) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const int exponent = (word >> format.significand_bits) & ((1 << format.exponent_bits) - 1);
  const int significand = word & ((1 << format.significand_bits) - 1);
  const float sign = (word & 0x8000) ? -1.0f : 1.0f;
  if (exponent == (1 << format.exponent_bits) - 1)
    return significand ? std::numeric_limits<float>::quiet_NaN()
                       : sign * std::numeric_limits<float>::infinity();
  if (exponent == 0)
    return sign * std::ldexp(static_cast<float>(significand), 1 - bias - format.significand_bits);
  return sign * std::ldexp(1.0f + std::ldexp(static_cast<float>(significand), -format.significand_bits),
                           exponent - bias);
}

uint16_t narrow(float value, Narrow format) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1, top = (1 << format.exponent_bits) - 1;
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
  auto make = [&](int exponent, int significand) {
    return static_cast<uint16_t>(sign | (exponent << format.significand_bits) | significand);
  };
  if (std::isnan(value)) return make(top, 1 << (format.significand_bits - 1));
  double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(magnitude)) return make(top, 0);
  int exponent = magnitude > 0 ? std::ilogb(magnitude) : 1 - bias;
  if (exponent < 1 - bias) exponent = 1 - bias;  // subnormals share the smallest exponent
  // How many steps of the format's spacing; nearbyint rounds to nearest, ties to even, and the double holds
  // it exactly.
  double steps = std::nearbyint(std::ldexp(magnitude, format.significand_bits - exponent));
  if (steps >= std::ldexp(1.0, format.significand_bits + 1)) {
    steps /= 2;
    ++exponent;
  }
  if (exponent > bias) return make(top, 0);
  const int whole = static_cast<int>(steps), hidden = 1 << format.significand_bits;
  return whole >= hidden ? make(exponent + bias, whole - hidden) : make(0, whole);
}

template <class T>
T read(const Bytes& bytes, uint64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void write(Bytes& bytes, uint64_t index, T value) {
  std::memcpy(bytes.data() + index * sizeof(T), &value, sizeof(T));
}

template <class T>
T combine_floats(T a, T b, Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
    case Reduction::avg:
    case Reduction::premul_sum:  // multiplied by now
      return a + b;
    case Reduction::product:
      return a * b;
    case Reduction::min:
      return std::isnan(a) ? a : std::isnan(b) ? b : (b < a ? b : a);
    case Reduction::max:
      return std::isnan(a) ? a : std::isnan(b) ? b : (b > a ? b : a);
    case Reduction::band:
    case Reduction::bor:
    case Reduction::bxor:
      break;  // mean nothing on floating types
  }
  return a;
}

template <class T>
T combine_integers(T a, T b, Reduction reduction) {
  using Wide = unsigned long long;  // wraps, and the low bits are those of the narrow type
  switch (reduction) {
    case Reduction::sum:
    case Reduction::avg:
      return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
    case Reduction::product:
      return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
    case Reduction::min:
      return b < a ? b : a;
    case Reduction::max:
      return b > a ? b : a;
    case Reduction::band:
      return static_cast<T>(a & b);
    case Reduction::bor:
      return static_cast<T>(a | b);
    case Reduction::bxor:
      return static_cast<T>(a ^ b);
    case Reduction::premul_sum:
      break;  // means nothing on integers
  }
  return a;
}

// The tree over value(first) ... value(last - 1): the left part has the largest power of two below their
// number.
template <class Value, class Combine>
auto tree(size_t first, size_t last, Value&& value, Combine&& combine) -> decltype(value(first)) {
  if (last - first == 1) return value(first);
  const size_t left = std::bit_floor(last - first - 1);
  return combine(tree(first, first + left, value, combine), tree(first + left, last, value, combine));
}

// The ranks of each host, then hosts, level by level. What crosses to another level is `sent`.
template <class Load, class Combine, class Sent>
auto over_levels(const Levels& levels, Load&& load, Combine&& combine, Sent&& sent) {
  auto over_host = [&](const auto& ranks) {
    return tree(0, ranks.size(), [&](size_t i) { return load(ranks[i]); }, combine);
  };
  if (levels.sizes.empty()) return over_host(levels.hosts[0]);  // without memory for each element
  std::vector<decltype(load(0))> sums;
  for (const auto& ranks : levels.hosts) sums.push_back(over_host(ranks));
  for (const uint32_t size : levels.sizes) {
    decltype(sums) next;
    for (size_t first = 0; first < sums.size(); first += size)
      next.push_back(tree(first, first + size, [&](size_t i) { return sent(sums[i]); }, combine));
    sums = next;
  }
  return sums[0];
}

// One element: element `index` of each input.
void reduce_element(const Call& call, const std::vector<Bytes>& inputs, const std::vector<double>& factors,
                    const Levels& levels, uint64_t index, Bytes& out, uint64_t to) {
  const auto ranks = inputs.size();
  auto floats = [&](auto&& load_own, auto&& sent) {
    using Accumulated = decltype(load_own(0));
    auto load = [&](size_t r) -> Accumulated {
      if (call.reduction != Reduction::premul_sum || factors.empty()) return load_own(r);
      return load_own(r) * static_cast<Accumulated>(factors[r]);
    };
    auto combine = [&](Accumulated a, Accumulated b) { return combine_floats(a, b, call.reduction); };
    auto value = over_levels(levels, load, combine, sent);
    return call.reduction == Reduction::avg ? value / static_cast<Accumulated>(ranks) : value;
  };
  auto as_it_is = [](auto value) { return value; };
  auto narrow_floats = [&](Narrow format) {
    auto load = [&](size_t r) { return widen(read<uint16_t>(inputs[r], index), format); };
    auto rounded = [&](float value) { return widen(narrow(value, format), format); };
    const bool wide = call.wire == Dtype::float32;
    write(out, to, narrow(wide ? floats(load, as_it_is) : floats(load, rounded), format));
  };
  auto narrowed_between_hosts = [&](Narrow format) {
    auto rounded = [&](float value) { return widen(narrow(value, format), format); };
    const float sum = floats([&](size_t r) { return read<float>(inputs[r], index); }, rounded);
    write(out, to, call.operation == Operation::reduce_scatter ? sum : rounded(sum));
  };
  auto integers = [&]<class T>(T) {
    if (call.reduction == Reduction::avg) {
      unsigned long long sum = 0;
      for (const Bytes& input : inputs)
        sum += static_cast<unsigned long long>(static_cast<long long>(read<T>(input, index)));
      return write<T>(out, to, static_cast<T>(static_cast<long long>(sum) / static_cast<long long>(ranks)));
    }
    auto load = [&](size_t r) { return read<T>(inputs[r], index); };
    auto combine = [&](T a, T b) { return combine_integers<T>(a, b, call.reduction); };
    write<T>(out, to, over_levels(levels, load, combine, as_it_is));
  };
  switch (call.dtype) {
    case Dtype::float32:
      if (!levels.sizes.empty() && call.wire == Dtype::float16) return narrowed_between_hosts(kHalf);
      if (!levels.sizes.empty() && call.wire == Dtype::bfloat16) return narrowed_between_hosts(kBrain);
      return write(out, to, floats([&](size_t r) { return read<float>(inputs[r], index); }, as_it_is));
    case Dtype::float64:
      return write(out, to, floats([&](size_t r) { return read<double>(inputs[r], index); }, as_it_is));
    case Dtype::float16:
      return narrow_floats(kHalf);
    case Dtype::bfloat16:
      return narrow_floats(kBrain);
    case Dtype::int8:
      return integers(int8_t{});
    case Dtype::int16:
      return integers(int16_t{});
    case Dtype::int32:
      return integers(int32_t{});
    case Dtype::int64:
      return integers(int64_t{});
    case Dtype::uint8:
      return integers(uint8_t{});
    case Dtype::boolean: {
      size_t set = 0;
      for (const Bytes& input : inputs) set += read<uint8_t>(input, index) != 0;
      const bool any = call.reduction == Reduction::sum || call.reduction == Reduction::max ||
                       call.reduction == Reduction::bor;
      return write<uint8_t>(out, to,
                            call.reduction == Reduction::bxor ? set % 2 == 1
                            : any                             ? set > 0
                                                              : set == ranks);
    }
  }
}

}  // namespace

std::vector<Bytes> naive(const Call& call, const std::vector<Bytes>& inputs,
                         const std::vector<double>& factors, const Levels& given) {
  const size_t size = size_bytes(call.dtype), ranks = inputs.size();
  Levels levels = given;
  if (levels.hosts.empty()) {
    levels.hosts.resize(1);
    for (uint32_t r = 0; r < ranks; ++r) levels.hosts[0].push_back(r);
  }
  std::vector<Bytes> outputs(ranks);
  for (size_t r = 0; r < ranks; ++r) {
    Bytes& out = outputs[r];
    switch (call.operation) {
      case Operation::all_reduce:
        if (r > 0) {
          out = outputs[0];
          break;
        }
        out.resize(call.elems * size);
        for (uint64_t i = 0; i < call.elems; ++i) reduce_element(call, inputs, factors, levels, i, out, i);
        break;
      case Operation::reduce:
        if (r != call.root) break;
        out.resize(call.elems * size);
        for (uint64_t i = 0; i < call.elems; ++i) reduce_element(call, inputs, factors, levels, i, out, i);
        break;
      case Operation::reduce_scatter:
        out.resize(call.elems * size);
        for (uint64_t i = 0; i < call.elems; ++i)
          reduce_element(call, inputs, factors, levels, r * call.elems + i, out, i);
        break;
      case Operation::broadcast:
        out = inputs[call.root];
        break;
      case Operation::all_gather:
        for (const Bytes& input : inputs) out.insert(out.end(), input.begin(), input.end());
        break;
      default:  // those with parts are copies: see their tests
        break;
    }
  }
  return outputs;
}

}  // namespace photinus
