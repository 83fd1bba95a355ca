#include "memory/mailbox.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/cores.h"
#include "base/error.h"

namespace photinus {

struct Mailbox::Header {
  alignas(64) std::atomic<uint32_t> sleepers{0};
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "counters in shared memory must not hide a lock");

namespace {

constexpr size_t kHeaderBytes = 64;
constexpr double kSleepSlice_s = 0.1;  // a sleeper looks around at least this often, whatever wakes it

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Shared between processes, hence not FUTEX_PRIVATE_FLAG.
void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, double timeout_s) {
  timespec timeout{
      static_cast<time_t>(timeout_s),
      static_cast<long>((timeout_s - static_cast<double>(static_cast<time_t>(timeout_s))) * 1e9)};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace

Patience Patience::for_ranks(uint32_t ranks_on_host) {
  Patience patience;
  if (ranks_on_host > static_cast<uint32_t>(usable_cores())) patience.pause_s = 1e-6;
  return patience;
}

size_t Mailbox::bytes(uint32_t ranks) {
  return kHeaderBytes + ranks * sizeof(RankBlock);
}

Mailbox::Mailbox(std::shared_ptr<Segment> segment, uint32_t rank, uint32_t ranks)
    : segment_(std::move(segment)),
      blocks_(reinterpret_cast<RankBlock*>(segment_->base() + kHeaderBytes)),
      rank_(rank),
      ranks_(ranks) {}

Mailbox::Header& Mailbox::header() const {
  return *reinterpret_cast<Header*>(segment_->base());
}

void Mailbox::advance(Counter counter, uint64_t to) {
  own().counters[static_cast<size_t>(counter)].value.store(to, std::memory_order_seq_cst);
  if (header().sleepers.load(std::memory_order_seq_cst) == 0) return;
  for (uint32_t rank = 0; rank < ranks_; ++rank)
    if (rank != rank_ && blocks_[rank].asleep.load(std::memory_order_seq_cst)) ring(rank);
}

void Mailbox::ring(uint32_t rank) const {
  blocks_[rank].bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(blocks_[rank].bell);
}

void Mailbox::ring_all() const {
  for (uint32_t rank = 0; rank < ranks_; ++rank) ring(rank);
}

void Mailbox::wait(Counter counter, uint64_t wanted, uint32_t first, uint32_t last, const Patience& patience,
                   const Look& look) const {
  uint32_t missing = first;
  auto all_there = [&] {
    while (missing < last && value(missing, counter) >= wanted) ++missing;
    return missing == last;
  };
  if (all_there()) return;
  // 1. A short pause: the peer runs on another core and is nearly there.
  double start = now_s();
  for (double now = start; now - start < patience.pause_s; now = now_s()) {
    for (int i = 0; i < 16; ++i) {
      if (all_there()) return;
      pause_cpu();
    }
  }
  // 2. Yielding: the peer may need this very core.
  while (now_s() - start < patience.yield_s) {
    if (all_there()) return;
    sched_yield();
  }
  // 3. Sleeping on the own bell.
  RankBlock& me = own();
  struct Asleep {
    Header& header;
    RankBlock& me;
    Asleep(Header& h, RankBlock& m) : header(h), me(m) {
      header.sleepers.fetch_add(1, std::memory_order_seq_cst);
      me.asleep.store(1, std::memory_order_seq_cst);
    }
    ~Asleep() {
      me.asleep.store(0, std::memory_order_seq_cst);
      header.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
  } asleep(header(), me);
  while (true) {
    uint32_t bell = me.bell.load(std::memory_order_seq_cst);
    if (all_there()) return;
    std::vector<uint32_t> ranks;
    for (uint32_t rank = missing; rank < last; ++rank)
      if (value(rank, counter) < wanted) ranks.push_back(rank);
    if (ranks.empty()) return;
    look(ranks);
    futex_wait(me.bell, bell, kSleepSlice_s);
  }
}

void Mailbox::set_reason(const std::string& reason) const {
  RankBlock& me = own();
  me.has_reason.store(1, std::memory_order_release);
  size_t length = std::min(reason.size(), sizeof me.reason - 1);
  std::memcpy(me.reason, reason.data(), length);
  me.reason[length] = '\0';
  me.has_reason.store(reason.empty() ? 0 : 2, std::memory_order_release);
}

std::string Mailbox::reason(uint32_t rank) const {
  RankBlock& peer = blocks_[rank];
  if (peer.has_reason.load(std::memory_order_acquire) != 2) return "";
  return std::string(peer.reason, strnlen(peer.reason, sizeof peer.reason));
}

}  // namespace photinus
