// Memory of one process that its peers on the host can see. Tensors that live here are reduced where they
// lie.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "peers/process_page.h"
#include "shm/segment.h"

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
  // freed block left. Throws Error(system) when no gap is large enough, or when the control group's memory
  // limit leaves too little: touching the pages would get the process killed.
  std::byte* allocate(size_t bytes);
  // In a forked child nothing happens: the memory is the parent's, which still uses it.
  void free(std::byte* address);
  // Keeps the block around an address from ever being used again, even after it is freed: a peer may still
  // write into it (an operation was given up in its middle). Addresses outside of the arena are passed over.
  void retire(const void* address);

  // Offset of [address, address + bytes) in the arena, or nothing when it does not lie wholly inside.
  std::optional<size_t> offset(const void* address, size_t bytes) const;

  const std::shared_ptr<Segment>& segment() const { return segment_; }
  // What peers see of the process; it takes the first page.
  ProcessPage& page() const { return page_of(*segment_); }
  static ProcessPage& page_of(const Segment& arena) { return *reinterpret_cast<ProcessPage*>(arena.base()); }
  size_t used_bytes() const;

 private:
  std::shared_ptr<Segment> segment_;
  pid_t owner_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> gaps_;    // offset -> bytes, never adjacent
  std::map<size_t, size_t> blocks_;  // offset -> bytes
  std::set<size_t> retired_;         // blocks, by offset
  size_t used_bytes_ = 0;
};

}  // namespace photinus
