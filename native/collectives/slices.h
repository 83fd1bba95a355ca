// How a message is divided among ranks: pure arithmetic.
#pragma once

#include <cstdint>

namespace photinus {

struct Slice {
  uint64_t first = 0;  // in elements
  uint64_t elems = 0;
};

// Slice `index` of `elems` elements in `count` slices whose borders are multiples of `unit` elements (the
// last one ends at `elems`). The first slices are the larger ones; slices at the end may be empty.
inline Slice slice_of(uint64_t elems, uint64_t count, uint64_t index, uint64_t unit) {
  uint64_t units = (elems + unit - 1) / unit;
  uint64_t base = units / count, extra = units % count;
  auto border = [&](uint64_t i) {
    uint64_t at = (i * base + (i < extra ? i : extra)) * unit;
    return at < elems ? at : elems;
  };
  uint64_t first = border(index);
  return {first, border(index + 1) - first};
}

}  // namespace photinus
