// Memory of one process that its peers on the host can see. Tensors that live here are reduced where they
// lie.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "memory/segment.h"

namespace photinus {

class Arena {
 public:
  // `capacity_bytes` is address space, not memory: pages are taken when first touched and given back when
  // freed.
  explicit Arena(size_t capacity_bytes);

  // The arena of this process, made at first use (in a forked child a new one, for the parent's is not the
  // child's to hand out). Its capacity is twice the machine's memory.
  static std::shared_ptr<Arena> of_this_process();

  // Memory of at least `bytes`, aligned to a cache line, to a page from 4 KiB up. Contents are zero or what a
  // freed block left. Throws Error(system) when no gap is large enough.
  std::byte* allocate(size_t bytes);
  void free(std::byte* address);

  // Offset of [address, address + bytes) in the arena, or nothing when it does not lie wholly inside.
  std::optional<size_t> offset(const void* address, size_t bytes) const;

  const std::shared_ptr<Segment>& segment() const { return segment_; }
  size_t used_bytes() const;

 private:
  std::shared_ptr<Segment> segment_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> gaps_;    // offset -> bytes, never adjacent
  std::map<size_t, size_t> blocks_;  // offset -> bytes
  size_t used_bytes_ = 0;
};

}  // namespace photinus
