// What the ranks of a group tell each other: for each rank a block with its newest call, its counters and the
// reason it leaves behind. Rules:
//
// * `posted` holds the sequence number of the newest collective that the rank has begun; its descriptor lies
// in
//   calls[sequence % 2], its texts and parts beside it. A rank posts number s only after it has seen all
//   ranks post s-1, and so after all have finished s-2: whoever posts s may overwrite what s-2 used. This one
//   rule protects the descriptors and the flat slots.
// * `returned` counts the results for GPUs with which the rank is done (collectives/device_plans.h), over all
//   collectives.
// * The other counters hold sequence and step (see `mark`), so that they only ever grow and a rank that skips
//   steps of an earlier collective holds nobody up.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "peers/shared_text.h"

namespace photinus {

inline constexpr uint64_t kNowhere = UINT64_MAX;

// What a rank is about to do; ranks compare these before any data is used. One cache line.
struct alignas(64) CallDescriptor {
  uint64_t label = 0,
           shape = 0;  // hashes of the texts beside it; 0: none, or the rank's tensors have several shapes
  uint64_t elems = 0;
  Operation operation = Operation::barrier;
  Dtype dtype = Dtype::float32;
  Reduction reduction = Reduction::sum;
  uint8_t has_parts : 1 = 0;     // whether the rank's parts stand beside it
  uint8_t strict_sites : 1 = 0;  // whether calls that look out of step are errors
  uint16_t root = 0;
  Dtype wire = Dtype::float32;  // in which partial results cross between hosts; that of the elements: as ever
  DeviceType device = DeviceType::cpu;
  uint64_t send_offset = kNowhere;  // where the buffers lie in memory that peers see, kNowhere: elsewhere
  uint64_t recv_offset = kNowhere;
  uint32_t site = 0;  // as label
  // How often the rank has updated the parameters whose gradients the group exchanges, plus one; negative
  // where ranks may differ in it since the call before; 0: it does not tell.
  int32_t updates = 0;
  double factor = 1;  // of premul_sum: the rank's own
};
static_assert(sizeof(CallDescriptor) == 64);

// What a rank exchanges with one other rank, where the sizes differ from rank to rank.
struct PostedPart {
  uint64_t send_elems = 0, recv_elems = 0;
  uint64_t send_offset = kNowhere;  // in the sender's memory that peers see
};

enum class Counter : uint8_t { posted, staged, reduced, finished, returned };
inline constexpr size_t kCounterCount = 5;

// A step of a collective as a counter's value: 40 bits of sequence number, 24 of steps. At a million
// collectives a second the former last for twelve days of nothing else; both limits are checked when a call
// is submitted.
inline constexpr int kStepBits = 24;
inline constexpr uint64_t kMaxSequence = (uint64_t{1} << 40) - 1, kMaxSteps = (uint64_t{1} << kStepBits) - 1;
inline uint64_t mark(uint64_t sequence, uint64_t step) {
  return sequence << kStepBits | step;
}

// Writes a text into a field, as far as it fits.
template <size_t kBytes>
void put(char (&field)[kBytes], const std::string& value) {
  field[value.copy(field, kBytes - 1)] = '\0';
}

enum class Presence : uint32_t { absent, active, left, failed };

// Why a rank gives up: what it met itself, or the end of another rank.
inline constexpr uint32_t kOwnFault = UINT32_MAX;

struct RankBlock {
  struct alignas(64) Line {
    std::atomic<uint64_t> value{0};
  };
  static constexpr size_t kTextBytes = 128, kShapeBytes = 48;

  Line counters[kCounterCount];
  CallDescriptor calls[2];
  char sites[2][kTextBytes];    // where in the user's program the call stands
  char labels[2][kTextBytes];   // what the user calls it
  char shapes[2][kShapeBytes];  // of its tensors: "[4, 6]"
  alignas(64) std::atomic<uint32_t> asleep{0};
  alignas(64) std::atomic<Presence> presence{Presence::absent};
  std::atomic<uint32_t> culprit{kOwnFault};  // the rank because of which this one has failed
  std::atomic<bool> in_deadlock{false};      // it failed because ranks wait for each other
  // The collective that the rank gave up after it had posted: it may change its tensors from now on.
  std::atomic<uint64_t> withdrawn{0};
  SharedText<1024> reason;
  SharedText<kTextBytes> gpu;  // on which tensors of its calls lay last

  std::atomic<uint64_t>& counter(Counter which) { return counters[static_cast<size_t>(which)].value; }
};

}  // namespace photinus
