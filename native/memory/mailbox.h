// What the ranks of a host tell each other: for each rank a block with its newest call, its counters, a bell
// and the reason it leaves behind. Layout and rules:
//
// * `posted` holds the sequence number of the newest collective that the rank has begun; its descriptor lies
//   in calls[sequence % 2]. A rank posts number s only after it has seen all ranks post s-1, and so after all
//   have finished s-2: whoever posts s may overwrite what s-2 used. This one rule protects the descriptors
//   and the flat slots.
// * The other counters hold (sequence << 32 | step), so that they only ever grow and a rank that skips steps
//   of an earlier collective holds nobody up.
// * A rank sleeps on its own bell. Whoever advances a counter rings the bells of those that sleep. Sleeping
//   is announced before the last look at the counters and ringing is decided after the counter is written,
//   both sequentially consistent, so no wake-up is lost.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/dtype.h"
#include "memory/segment.h"

namespace photinus {

inline constexpr uint64_t kNowhere = UINT64_MAX;

// What a rank is about to do; ranks compare these before any data is used.
struct CallDescriptor {
  uint64_t sequence = 0;
  uint64_t elems = 0;
  Operation operation = Operation::barrier;
  Dtype dtype = Dtype::float32;
  Reduction reduction = Reduction::sum;
  uint8_t reserved = 0;
  uint32_t root = 0;
  uint64_t send_offset = kNowhere;  // where the buffers lie in the rank's arena, kNowhere: in ordinary memory
  uint64_t recv_offset = kNowhere;
};

enum class Counter : uint8_t { posted, staged, reduced, finished };
inline constexpr size_t kCounterCount = 4;

enum class Presence : uint32_t { absent, active, left, failed };

struct RankBlock {
  struct alignas(64) Line {
    std::atomic<uint64_t> value{0};
  };
  Line counters[kCounterCount];
  alignas(64) CallDescriptor calls[2];
  alignas(64) std::atomic<uint32_t> bell{0};
  alignas(64) std::atomic<uint32_t> asleep{0};
  alignas(64) std::atomic<Presence> presence{Presence::absent};
  std::atomic<uint32_t> has_reason{0};  // 1 while `reason` is written, 2 when it can be read
  char reason[1024];
};

// How long to wait in which way before sleeping. Long pauses are poison when ranks exceed cores: a spinning
// rank burns the time slice of the rank it waits for (measured: ten times slower), so the pause is then kept
// to a microsecond.
struct Patience {
  double pause_s = 20e-6;
  double yield_s = 200e-6;
  static Patience for_ranks(uint32_t ranks_on_host);
};

// Called now and then while a rank waits, with the ranks that are missing; it throws to end the wait.
using Look = std::function<void(const std::vector<uint32_t>& missing)>;

class Mailbox {
 public:
  // Bytes that `ranks` blocks take at the start of a segment. Fresh memory, all zero, is a mailbox in which
  // nobody is present: no rank has to prepare it for the others.
  static size_t bytes(uint32_t ranks);

  Mailbox(std::shared_ptr<Segment> segment, uint32_t rank, uint32_t ranks);

  RankBlock& block(uint32_t rank) const { return blocks_[rank]; }
  RankBlock& own() const { return blocks_[rank_]; }
  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return ranks_; }

  uint64_t value(uint32_t rank, Counter counter) const {
    return blocks_[rank].counters[static_cast<size_t>(counter)].value.load(std::memory_order_seq_cst);
  }

  // Sets the own counter and wakes whoever sleeps.
  void advance(Counter counter, uint64_t to);

  // Waits until the counter of every rank in [first, last) is at least `value`; looks around before and after
  // each sleep.
  void wait(Counter counter, uint64_t value, uint32_t first, uint32_t last, const Patience& patience,
            const Look& look) const;

  void ring(uint32_t rank) const;
  void ring_all() const;

  // Leaves a text that peers read when this rank goes away or fails; later texts replace earlier ones.
  void set_reason(const std::string& reason) const;
  std::string reason(uint32_t rank) const;

 private:
  struct Header;
  Header& header() const;

  std::shared_ptr<Segment> segment_;
  RankBlock* blocks_;
  uint32_t rank_, ranks_;
};

}  // namespace photinus
