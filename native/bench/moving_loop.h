// The bound that all_reduce in the arena is measured against: only moving the bytes that it must move.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace photinus::bench {

// Loads the bytes [first, first + bytes) of every tensor and stores as many into each of them: what a rank
// that owns this slice moves in an all_reduce of tensors that lie in shared memory. Nothing is added; line i
// of tensor t goes to line i of tensor t + 1, so that every load is needed. Both numbers are whole cache
// lines.
void move_slice(const std::vector<std::byte*>& tensors, uint64_t first, uint64_t bytes);

}  // namespace photinus::bench
