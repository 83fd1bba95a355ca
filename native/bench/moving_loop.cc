#include "moving_loop.h"

namespace photinus::bench {
namespace {

// As wide as a cache line; the compiler splits it for instruction sets that have less.
typedef uint64_t Line __attribute__((vector_size(64), may_alias));

template <size_t kTensors>
[[gnu::always_inline]] inline void rotate(std::byte* const* tensors, uint64_t first, uint64_t end) {
  for (uint64_t at = first; at < end; at += sizeof(Line)) {
    Line lines[kTensors];
    for (size_t i = 0; i < kTensors; ++i) lines[i] = *reinterpret_cast<const Line*>(tensors[i] + at);
    for (size_t i = 0; i < kTensors; ++i)
      *reinterpret_cast<Line*>(tensors[(i + 1) % kTensors] + at) = lines[i];
  }
}

#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void move(std::byte* const* tensors, size_t count, uint64_t first, uint64_t end) {
  switch (count) {
    case 2:
      return rotate<2>(tensors, first, end);
    case 3:
      return rotate<3>(tensors, first, end);
    case 4:
      return rotate<4>(tensors, first, end);
    case 8:
      return rotate<8>(tensors, first, end);
    default:  // in pairs, so that every tensor is still loaded and stored once (one of an odd count: twice)
      for (size_t i = 0; i < count; i += 2) {
        std::byte* pair[] = {tensors[i], tensors[i + 1 < count ? i + 1 : 0]};
        rotate<2>(pair, first, end);
      }
  }
}

}  // namespace

void move_slice(const std::vector<std::byte*>& tensors, uint64_t first, uint64_t bytes) {
  if (tensors.size() > 1) move(tensors.data(), tensors.size(), first, first + bytes);
}

}  // namespace photinus::bench
