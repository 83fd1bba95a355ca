// Decides, for an operation that waits, whether it should wait on. Root cause first: a rank that died is
// named rather than one that gave up because of it. Liveness (does the process run?) and progress (has it
// come?) are kept apart, each with a limit at which it is spoken of and one at which it is fatal.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/group.h"

namespace photinus {

// One operation's wait: what it waits for, and what it remembers from look to look.
struct WaitState {
  WaitState(double start_s, double timeout_s) : deadline(Deadline::from(start_s, timeout_s)) {}

  Deadline deadline;
  double first_look_s = 0, last_look_s = 0;
  bool any_will_do = false;             // one of the missing ranks suffices
  bool is_message = false;              // a message has no place in the sequence of collectives
  bool spoke = false;                   // of the ranks that have not come
  double consequence_since_s = 0;       // since when only the consequence of another rank's end is known
  std::vector<uint32_t> published;      // the missing ranks that peers know of, as of
  uint64_t published_version = 0;       // this version of the process's page
  std::vector<uint64_t> published_for;  // their processes; of other hosts' they come to be known later
  uint64_t cycle = 0;                   // fingerprint of the cycle that was seen last
  double cycle_since_s = 0;
  std::vector<uint64_t> affirmed;  // by its processes, when it was first seen
  bool has_spoken_of_cycle = false;
};

class Watchdog {
 public:
  // The text of an operation, made where somebody is to read it.
  using Describe = std::function<std::string()>;

  explicit Watchdog(Group& group) : group_(group), signs_(group.ranks()) {}

  // `missing`: gives the ranks for which the operation waits now; none if it need not wait. `lane`: of the
  // operation, the same on all ranks for operations that these do one after the other. Throws to end the
  // wait; returns for how long it need not be called again.
  double look(WaitState& wait, const std::function<std::vector<uint32_t>()>& missing,
              const Describe& description, uint64_t lane, Alone caller);
  // The same for an operation that waits for a copy of its own, after which it may look again in `nap_s`.
  // `needed`: the ranks without which it cannot end then; may be empty.
  double look_at_copy(WaitState& wait, double nap_s, const std::function<std::vector<uint32_t>()>& needed,
                      const Describe& description);

 private:
  struct Sign {  // of life
    uint64_t heartbeat = 0;
    double since_s = 0;  // on the own clock, when it last changed
    bool suspected = false;
  };

  double note_look(WaitState& wait);
  std::string what_became_of(uint32_t rank) const;
  std::string what_they_do(const std::vector<uint32_t>& missing) const;
  bool look_for_ends(WaitState& wait, const std::function<std::vector<uint32_t>()>& missing,
                     const std::string& awaited, const Describe& situation);
  void look_for_life(const WaitState& wait, const std::vector<uint32_t>& missing, const Describe& description,
                     double now);
  double look_for_deadlock(WaitState& wait, const std::vector<uint32_t>& missing, const Describe& description,
                           uint64_t lane, Alone caller, double now);
  void learn_of_deadlock(const WaitState& wait);
  [[noreturn]] void end_deadlock(const std::vector<WaitRecord::Wait>& waits, const std::string& message);

  Group& group_;
  std::mutex mutex_;  // guards signs_: the group's lanes look independently
  std::vector<Sign> signs_;
};

}  // namespace photinus
