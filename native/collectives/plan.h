// A collective as plain data: the steps that one rank does, in order. Plans are pure functions of the call,
// so they can be printed, and tested by a simulator that runs the ranks' steps in any interleaving
// (tests/plans_test.cc); the executor does the same steps on real memory.
//
// All ranks "meet" between the two parts of a plan: each posts its call's descriptor after `before` and sees
// everyone's before `after`. Meeting orders memory: what a rank wrote before it is visible to all after it.
// Where there are several hosts, the ranks of each meet by themselves: memory, counters and meeting are a
// host's own. Ranks of different hosts tell each other beside the data, in one level (levels.h) after
// the other. One that hears of a call unlike its own gives its plan up, and only tells and hears in the
// levels that are left, so that all ranks hear of it in the same call. Frames that others wait for may then
// never come. So who waits, for whatever, tells and hears meanwhile in the next levels, ahead of its plan.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "peers/posts.h"

namespace photinus {

inline constexpr uint32_t kEveryone = UINT32_MAX;

// Where bytes lie. send and recv are a rank's own tensors (a peer's can be reached only when they lie in its
// arena); send_part and recv_part are what it sends to or receives from the rank `part`, where each has a
// buffer of its own; flat is the rank's small slot that alternates with the sequence number; slot is its ring
// of chunk slots; landing is memory of its own, which no peer reads, for what comes from other hosts and for
// partial results. landing_ring and result_ring are for GPUs (device_plans.h): offsets in the former count
// from where this collective's half begins, and in the latter from its first result.
enum class Place : uint8_t {
  none,
  send,
  recv,
  flat,
  slot,
  send_part,
  recv_part,
  landing,
  landing_ring,
  result_ring
};

struct Region {
  Place place = Place::none;
  uint32_t rank = 0;
  uint64_t offset_bytes = 0;
  uint32_t part = 0;
};

// What a reduce step does where that is not what the call says: to partial results of several hosts.
struct Kernel {
  Reduction reduction = Reduction::sum;
  Dtype from = Dtype::float32, to = Dtype::float32;  // types of the sources and of the results
};

struct Step {
  // copy: `bytes` from `from` to `to`.
  // reduce: `bytes` of all `sources`, as a tree in their order, into each of `results`.
  // advance: the own `counter` to `value`.
  // wait: until `counter` of `rank` (or kEveryone on this host) is at least `value`.
  // send: give the link to `rank` the next frame, `bytes` from `from`. It goes on while later steps run, so
  //   the bytes must stay as they are until it has left.
  // receive: tell the link from `rank` where its next frame goes, `bytes` to `to`; goes on likewise.
  // wait_sent, wait_received: until the first `value` frames of this plan to or from `rank` have left or
  //   come.
  // tell: say to each counterpart in the level `value` which calls this rank knows of: its host's and those
  //   of which it has heard. Stands before any frame to one of them.
  // hear: until each of them has told. Stands before any frame of one of them is received.
  // start_copy: begin a copy of `bytes` from `from` to `to`, one of which lies in a GPU's memory; it goes on
  //   while later steps run. Those of one direction land in their order.
  // wait_copied: until the first `value` of those to the host have landed.
  // wait_room: until the result `value` may be written: the copies of `rank` (or kEveryone) from its place
  // have
  //   ended.
  // let_go: this rank is done with the result `value` when the copies begun so far have ended.
  enum class Kind : uint8_t {
    copy,
    reduce,
    advance,
    wait,
    send,
    receive,
    wait_sent,
    wait_received,
    tell,
    hear,
    start_copy,
    wait_copied,
    wait_room,
    let_go
  };
  Kind kind;
  Counter counter = Counter::posted;
  uint32_t rank = kEveryone;
  uint64_t value = 0;
  uint64_t bytes = 0;
  Region to{}, from{};
  std::vector<Region> results{}, sources{};
  std::optional<Kernel> kernel{};  // reduce: the call's own where none is said
  bool past_caches = false;        // copy: nobody reads the destination soon
};

Step copy_step(Region to, Region from, uint64_t bytes);
Step reduce_step(std::vector<Region> results, std::vector<Region> sources, uint64_t bytes);
Step advance_step(Counter counter, uint64_t value);
Step wait_step(Counter counter, uint64_t value, uint32_t rank = kEveryone);
Step send_step(uint32_t rank, Region from, uint64_t bytes);
Step receive_step(uint32_t rank, Region to, uint64_t bytes);
Step wait_sent_step(uint32_t rank, uint64_t frames);
Step wait_received_step(uint32_t rank, uint64_t frames);
Step tell_step(size_t level);
Step hear_step(size_t level);
Step start_copy_step(Region to, Region from, uint64_t bytes);
Step wait_copied_step(uint64_t copies);
Step wait_room_step(uint64_t result, uint32_t rank = kEveryone);
Step let_go_step(uint64_t result);

enum class Algorithm : uint8_t {
  flat,    // small: everyone copies in, meets, and reads everyone; one exchange
  arena,   // the tensors lie in shared memory: peers read them where they are
  staged,  // ordinary memory: through slots, chunk by chunk, copying and adding overlapped
  parts,   // sizes differ from rank to rank: each sender's way is chosen for itself
  device,  // tensors on GPUs: through rings, chunk by chunk, copying both ways and adding overlapped
};
const char* name(Algorithm algorithm);

struct Plan {
  Algorithm algorithm = Algorithm::flat;
  std::vector<Step> before, after;
  uint64_t results = 0;  // in the result ring
};
std::string print(const Plan& plan);

// What a plan depends on besides the algorithm.
struct Call {
  Operation operation = Operation::barrier;
  Dtype dtype = Dtype::float32;
  Reduction reduction = Reduction::sum;
  uint32_t root = 0;
  // all_gather: of one rank's input; reduce_scatter: of one rank's output; 0 where parts say it
  uint64_t elems = 0;
  // The type in which partial results cross between hosts, if another than they would by themselves (net.h)
  std::optional<Dtype> wire{};
  DeviceType device = DeviceType::cpu;  // where the tensors lie; nothing to a barrier
  bool operator==(const Call&) const = default;
};
inline bool multiplies(const Call& call) {  // each rank's values by its own factor
  return has_reduction(call.operation) && call.reduction == Reduction::premul_sum;
}

// Whether a rank alone has more to do than a copy: bytes of booleans become 0 or 1, as where several add.
inline bool computes_alone(const Call& call) {
  return multiplies(call) || (has_reduction(call.operation) && call.dtype == Dtype::boolean);
}

struct Seat {
  uint32_t rank = 0, ranks = 1;
};

// `offset_bytes` of `place` of every rank, in the order of ranks; of the own rank `own` instead.
std::vector<Region> of_all(Seat seat, Place place, uint64_t offset_bytes, Region own);

// Sizes of the slots, the same on all ranks. A chunk holds at least a cache line for each rank.
struct SlotSizes {
  uint64_t flat_bytes = 32 << 10;
  uint64_t chunk_bytes =
      256 << 10;        // measured: 64 to 256 KiB are best, larger falls out of the second-level cache
  uint32_t chunks = 4;  // copy-in, reduction and copy-out are each one chunk apart; one more for slack

  // Of one rank: two flat ones and the ring of chunks.
  uint64_t bytes() const { return 2 * flat_bytes + chunks * chunk_bytes; }
};

// Sizes of the rings for GPUs, the same on all ranks. A chunk is what a link of 25 GB/s brings in 40 us,
// several times what it takes to begin a copy; smaller ones let a tensor of a few MiB overlap. No GPU has
// measured it.
struct DeviceSizes {
  uint64_t chunk_bytes = 1 << 20;
  uint32_t chunks = 8;  // a collective uses half a landing ring, and the next one the other half

  uint64_t bytes() const { return chunks * chunk_bytes; }
};

// "all_reduce #4 of float32[100] (sum)"; without a sequence number when that is 0.
std::string describe(const Call& call, uint64_t sequence = 0);

// Borders between ranks' slices fall on cache lines, so that no line is written by two ranks.
inline constexpr uint64_t kLineBytes = 64;

// A tensor of this size is no longer in a cache when its end is reached: what is written need not be fetched
// before it is overwritten, nor push the chunks out. (Measured: 5 to 15 % faster from 16 MiB on, 40 % slower
// at 4 MiB.)
inline constexpr uint64_t kPastCachesBytes = 16 << 20;

}  // namespace photinus
