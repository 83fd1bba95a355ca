#include "data.h"

#include <cstdio>
#include <cstring>

namespace photinus::test {

Bytes random_elements(Dtype dtype, uint64_t elems, std::mt19937_64& random) {
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

bool same(Dtype dtype, const std::byte* a, const std::byte* b, uint64_t elems) {
  const size_t size = size_bytes(dtype);
  if (elems == 0 || std::memcmp(a, b, elems * size) == 0) return true;
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

}  // namespace photinus::test
