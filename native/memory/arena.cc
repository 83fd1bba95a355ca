#include "memory/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.h"

namespace photinus {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;
constexpr size_t kGiveBackBytes = 1 << 20;  // smaller blocks keep their pages: they will be used again soon

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

Arena::Arena(size_t capacity_bytes)
    : segment_(Segment::create("photinus-arena", round_up(capacity_bytes, kPage))),
      gaps_{{0, segment_->bytes()}} {}

std::shared_ptr<Arena> Arena::of_this_process() {
  static std::mutex mutex;
  static pid_t owner = 0;
  static auto* arena = new std::shared_ptr<Arena>;  // leaked: buffers may outlive static destruction
  std::lock_guard lock(mutex);
  if (!*arena || owner != getpid()) {
    size_t memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    if (*arena) new std::shared_ptr<Arena>(*arena);  // the parent's stays mapped in a forked child
    *arena = std::make_shared<Arena>(std::clamp(2 * memory, size_t{1} << 30, size_t{1} << 42));
    owner = getpid();
  }
  return *arena;
}

std::byte* Arena::allocate(size_t bytes) {
  size_t alignment = bytes >= kPage ? kPage : kLine;
  size_t wanted = round_up(std::max<size_t>(bytes, 1), alignment);
  std::lock_guard lock(mutex_);
  for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
    size_t start = round_up(gap->first, alignment), end = gap->first + gap->second;
    if (start + wanted > end) continue;
    size_t before = start - gap->first;
    if (before > 0)
      gap->second = before;
    else
      gaps_.erase(gap);
    if (start + wanted < end) gaps_[start + wanted] = end - start - wanted;
    blocks_[start] = wanted;
    used_bytes_ += wanted;
    return segment_->base() + start;
  }
  throw Error(ErrorKind::system, text("the shared arena has no gap of %zu bytes (capacity %zu, in use %zu)",
                                      wanted, segment_->bytes(), used_bytes_));
}

void Arena::free(std::byte* address) {
  std::lock_guard lock(mutex_);
  size_t start = static_cast<size_t>(address - segment_->base());
  auto block = blocks_.find(start);
  if (block == blocks_.end())
    throw Error(ErrorKind::invalid_argument, "freeing an address that the arena did not hand out");
  size_t bytes = block->second;
  blocks_.erase(block);
  used_bytes_ -= bytes;
  if (bytes >= kGiveBackBytes) madvise(address, bytes, MADV_REMOVE);
  auto next = gaps_.lower_bound(start);
  if (next != gaps_.end() && next->first == start + bytes) {
    bytes += next->second;
    next = gaps_.erase(next);
  }
  if (next != gaps_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == start) {
      previous->second += bytes;
      return;
    }
  }
  gaps_[start] = bytes;
}

std::optional<size_t> Arena::offset(const void* address, size_t bytes) const {
  auto* at = static_cast<const std::byte*>(address);
  if (at < segment_->base() || at + bytes > segment_->base() + segment_->bytes()) return std::nullopt;
  return static_cast<size_t>(at - segment_->base());
}

size_t Arena::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_bytes_;
}

}  // namespace photinus
