// What the ranks of a group tell each other: for each rank a block with its newest call, its counters and the
// reason it leaves behind. Layout and rules:
//
// * `posted` holds the sequence number of the newest collective that the rank has begun; its descriptor lies
// in
//   calls[sequence % 2], its texts and parts beside it. A rank posts number s only after it has seen all
//   ranks post s-1, and so after all have finished s-2: whoever posts s may overwrite what s-2 used. This one
//   rule protects the descriptors and the flat slots.
// * The other counters hold sequence and step (see `mark`), so that they only ever grow and a rank that skips
// steps of an
//   earlier collective holds nobody up.
// * Threads sleep on their process's futex (base/futex.h) and announce it in the blocks of the groups they
// wait for;
//   whoever advances a counter wakes the futexes of those that announced themselves.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/futex.h"
#include "shm/segment.h"
#include "shm/shared_text.h"

namespace photinus {

inline constexpr uint64_t kNowhere = UINT64_MAX;

// What a rank is about to do; ranks compare these before any data is used. One cache line.
struct alignas(64) CallDescriptor {
  uint64_t sequence = 0;
  uint64_t elems = 0;
  Operation operation = Operation::barrier;
  Dtype dtype = Dtype::float32;
  Reduction reduction = Reduction::sum;
  uint8_t has_parts = 0;  // whether the rank's parts stand beside it
  uint32_t root = 0;
  uint64_t send_offset = kNowhere;  // where the buffers lie in the rank's arena, kNowhere: in ordinary memory
  uint64_t recv_offset = kNowhere;
  uint32_t label = 0;  // hashes of the texts beside it; 0: none
  uint32_t site = 0;
  double factor = 1;  // of premul_sum: the rank's own
  // How often the rank has updated the parameters whose gradients the group exchanges, plus one; negative
  // where ranks may differ in it since the call before; 0: it does not tell.
  int32_t updates = 0;
};

// What a rank exchanges with one other rank, where the sizes differ from rank to rank.
struct PostedPart {
  uint64_t send_elems = 0, recv_elems = 0;
  uint64_t send_offset = kNowhere;  // in the sender's arena
};

enum class Counter : uint8_t { posted, staged, reduced, finished };
inline constexpr size_t kCounterCount = 4;

// A step of a collective as a counter's value: 40 bits of sequence number, 24 of steps. At a million
// collectives a second the former last for twelve days of nothing else; both limits are checked when a call
// is submitted.
inline constexpr int kStepBits = 24;
inline constexpr uint64_t kMaxSequence = (uint64_t{1} << 40) - 1, kMaxSteps = (uint64_t{1} << kStepBits) - 1;
inline uint64_t mark(uint64_t sequence, uint64_t step) {
  return sequence << kStepBits | step;
}

enum class Presence : uint32_t { absent, active, left, failed };

// Why a rank gives up: what it met itself, or the end of another rank.
inline constexpr uint32_t kOwnFault = UINT32_MAX;

struct RankBlock {
  struct alignas(64) Line {
    std::atomic<uint64_t> value{0};
  };
  static constexpr size_t kTextBytes = 128;

  Line counters[kCounterCount];
  CallDescriptor calls[2];
  char sites[2][kTextBytes];   // where in the user's program the call stands
  char labels[2][kTextBytes];  // what the user calls it
  alignas(64) std::atomic<uint32_t> asleep{0};
  alignas(64) std::atomic<Presence> presence{Presence::absent};
  std::atomic<uint32_t> culprit{kOwnFault};  // the rank because of which this one has failed
  std::atomic<bool> in_deadlock{false};      // it failed because ranks wait for each other
  SharedText<1024> reason;
};

class Mailbox {
 public:
  // Bytes that the mailbox of `ranks` takes at the start of a segment. Fresh memory, all zero, is a mailbox
  // in which nobody is present: no rank has to prepare it for the others.
  static size_t bytes(uint32_t ranks);

  // `futexes`: the ranks' processes', by rank.
  Mailbox(std::shared_ptr<Segment> segment, uint32_t rank, std::vector<Futex*> futexes);

  RankBlock& block(uint32_t rank) const { return blocks_[rank]; }
  RankBlock& own() const { return blocks_[rank_]; }
  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return ranks_; }

  uint64_t value(uint32_t rank, Counter counter) const {
    return blocks_[rank].counters[static_cast<size_t>(counter)].value.load(std::memory_order_seq_cst);
  }
  // The parts that `rank` posted with call number `sequence`, one for each rank.
  PostedPart* parts(uint32_t rank, uint64_t sequence) const;

  // Sets the own counter and wakes whoever sleeps.
  void advance(Counter counter, uint64_t to) const;
  // Wakes a rank if it announced that it sleeps.
  void wake(uint32_t rank) const;
  void wake_all() const;

  // A thread of this rank will sleep, or slept.
  void announce_sleep() const;
  void end_sleep() const;

  // Leaves a text that peers read when this rank goes away or fails; later texts replace earlier ones.
  void set_reason(const std::string& reason) const;
  std::string reason(uint32_t rank) const { return blocks_[rank].reason.read(); }

 private:
  struct Header {
    alignas(64) std::atomic<uint32_t> sleepers{0};
  };
  Header& header() const { return *reinterpret_cast<Header*>(segment_->base()); }

  std::shared_ptr<Segment> segment_;
  uint32_t rank_, ranks_;
  std::vector<Futex*> futexes_;
  mutable std::mutex writing_reason_;
  RankBlock* blocks_;
  PostedPart* parts_;
};

}  // namespace photinus
