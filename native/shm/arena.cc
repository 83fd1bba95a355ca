#include "shm/arena.h"

#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include "base/control_group.h"
#include "base/error.h"
#include "base/process.h"

namespace photinus {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;
constexpr size_t kGiveBackBytes = 1 << 20;  // smaller blocks keep their pages: they will be used again soon

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Twice the machine's memory, for it is address space only; but each rank maps every peer's arena, so it
// stays below what lets 512 of them fit 128 TiB, and takes a sixteenth where address space is limited (ulimit
// -v).
size_t capacity_of_this_process() {
  size_t memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t capacity = std::clamp(2 * memory, size_t{1} << 30, size_t{1} << 38);
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    capacity = std::min(capacity, static_cast<size_t>(limit.rlim_cur) / 16 / kPage * kPage);
  return capacity;
}

}  // namespace

Arena::Arena(size_t capacity_bytes)
    : segment_(Segment::create("photinus-arena", ProcessPage::kBytes + round_up(capacity_bytes, kPage))),
      owner_(getpid()),
      gaps_{{ProcessPage::kBytes, segment_->bytes() - ProcessPage::kBytes}} {
  uint64_t id;
  if (getrandom(&id, sizeof id, 0) != sizeof id) throw_errno("asking the kernel for random bytes");
  page().id.store(id | 1, std::memory_order_relaxed);  // never 0
}

std::shared_ptr<Arena> Arena::of_this_process() {
  static std::mutex mutex;
  static pid_t owner = 0;
  static auto* arena = new std::shared_ptr<Arena>;  // leaked: buffers may outlive static destruction
  std::lock_guard lock(mutex);
  if (!*arena || owner != getpid()) {
    if (*arena) new std::shared_ptr<Arena>(*arena);  // the parent's stays mapped in a forked child
    *arena = std::make_shared<Arena>(capacity_of_this_process());
    owner = getpid();
  }
  return *arena;
}

std::byte* Arena::allocate(size_t bytes) {
  auto no_gap = [this](size_t wanted, size_t used) {
    return Error(ErrorKind::system,
                 text("the shared arena has no gap of %zu bytes (capacity %zu, in use %zu)", wanted,
                      segment_->bytes() - ProcessPage::kBytes, used));
  };
  if (bytes > segment_->bytes()) throw no_gap(bytes, used_bytes());  // before sums overflow
  size_t alignment = bytes >= kPage ? kPage : kLine;
  size_t wanted = round_up(std::max<size_t>(bytes, 1), alignment);
  if (wanted >= kGiveBackBytes) {
    const std::optional<MemoryLimit> limit = memory_limit();
    if (limit && wanted > limit->bytes - std::min(limit->bytes, limit->used_bytes))
      throw Error(
          ErrorKind::system,
          text("%zu bytes of shared memory are wanted, but the control group of this process may use %llu "
               "bytes and uses %llu (%zu of them in this arena); raise the memory limit (%s) or use less",
               wanted, static_cast<unsigned long long>(limit->bytes),
               static_cast<unsigned long long>(limit->used_bytes), used_bytes(), limit->file.c_str()));
  }
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
  throw no_gap(wanted, used_bytes_);
}

void Arena::retire(const void* address) {
  if (!offset(address, 1)) return;
  std::lock_guard lock(mutex_);
  auto block =
      blocks_.upper_bound(static_cast<size_t>(static_cast<const std::byte*>(address) - segment_->base()));
  if (block != blocks_.begin()) retired_.insert(std::prev(block)->first);
}

void Arena::free(std::byte* address) {
  if (owner_ != own_pid()) return;
  std::lock_guard lock(mutex_);
  size_t start = static_cast<size_t>(address - segment_->base());
  auto block = blocks_.find(start);
  if (block == blocks_.end())
    throw Error(ErrorKind::invalid_argument, "freeing an address that the arena did not hand out");
  if (retired_.count(start)) return;
  size_t bytes = block->second;
  blocks_.erase(block);
  used_bytes_ -= bytes;
  if (bytes >= kGiveBackBytes) {  // whole pages, of which some kernels have larger ones: the rest is others'
    const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t first = round_up(start, page_bytes), end = (start + bytes) / page_bytes * page_bytes;
    if (first < end) madvise(segment_->base() + first, end - first, MADV_REMOVE);
  }
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
