// What a simulation knows of a rank: where it is in its plan, and what others have done for it.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "collectives/net.h"
#include "simulate/events.h"

namespace photinus::simulate {

inline constexpr Time kNever = UINT64_MAX;

// The steps of one plan after the other, made as they are asked for.
struct Steps {
  std::vector<Step> made;
  size_t next = 0;
  std::unique_ptr<StepSource> source;

  // Null at the end.
  const Step* now() {
    while (next == made.size()) {
      made.clear();
      next = 0;
      if (!source || !source->next(made)) return nullptr;
    }
    return &made[next];
  }
};

// When a counter reached what. Nobody asks for what lies further back than a ring of chunks.
class Marks {
 public:
  void add(uint64_t value, Time at) {
    if (ring_.size() < kKept) {
      ring_.push_back({value, at});
    } else {
      ring_[next_] = {value, at};
      next_ = (next_ + 1) % kKept;
    }
  }
  Time reached(uint64_t value) const {
    Time at = kNever;
    for (size_t i = 0; i < ring_.size(); ++i) {
      const auto& mark = ring_[(next_ + ring_.size() - 1 - i) % ring_.size()];
      if (mark.value < value) break;
      at = mark.at;
    }
    return at;
  }

 private:
  struct Mark {
    uint64_t value;
    Time at;
  };
  static constexpr size_t kKept = 64;
  std::vector<Mark> ring_;
  size_t next_ = 0;
};

// What comes to a rank from a counterpart.
struct Link {
  struct Arrival {
    Time at;
    uint64_t bytes;
    bool is_with_told;
  };
  uint32_t peer = 0;     // whom frames go to, and, but where folded, come from
  uint32_t to_rank = 0;  // whose link gets what this one sends, and which of its links that is
  uint32_t to_link = 0;
  uint32_t level = 0;
  uint64_t sent = 0, taken = 0, arrived = 0;  // frames, of all calls
  uint64_t before = 0;                        // how many had been asked for when this call began
  uint64_t asked = 0;
  bool is_untold = false;    // the next frame takes along what there is to tell, or hearing does without one
  Time last = 0;             // arrival
  uint64_t told = 0;         // in how many calls the peer has told
  Time told_at[2] = {0, 0};  // in the last two
  std::vector<Arrival> waiting;                     // arrived, not taken
  size_t first = 0;                                 // of those
  std::vector<std::pair<Region, uint64_t>> places;  // where sums are followed
};

struct Rank {
  Steps steps;
  std::vector<Link> links;  // by peer
  Marks marks[kCounterCount];
  std::vector<uint32_t> waiters;  // local ranks that wait for one of its counters
  Time now = 0;
  uint32_t rank = 0, host = 0, core = 0;
  uint64_t sequence = 0;  // of the call
  bool has_met = false, is_done = false, is_scheduled = false;
  // For what it waits of which nobody knows yet when it will be: the next frame of a link, what is told in a
  // level.
  enum class Waits : uint8_t { no, counter, frame, told } waits = Waits::no;
  size_t waits_for = 0;

  size_t link_with(uint32_t peer) const {
    const auto at = std::lower_bound(links.begin(), links.end(), peer,
                                     [](const Link& link, uint32_t other) { return link.peer < other; });
    return static_cast<size_t>(at - links.begin());
  }
};

}  // namespace photinus::simulate
