// What the operations of one group share: who its ranks are, the memory through which they meet, and whether
// the group still works.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "collectives/mismatch.h"
#include "collectives/plan.h"
#include "collectives/update_history.h"
#include "engine/executor.h"
#include "progress/progress.h"
#include "shm/channels.h"
#include "shm/local_group.h"
#include "shm/mailbox.h"
#include "shm/peer_watch.h"

namespace photinus {

// How long what may last. A rank that runs but does not come is spoken of after `waiting_s` and ends the
// collective at its own deadline; one that shows no sign of life (stopped, swapped out, a frozen container)
// is suspected, aloud, after `suspect_s` and given up after `grace_s`.
struct Limits {
  double timeout_s = 300;  // of the rendezvous, and of operations that bring no other
  double waiting_s = 5;
  double suspect_s = 2;
  double grace_s = 120;
};

struct GroupOptions {
  uint32_t rank = 0, world_size = 1;
  std::string address;         // from new_address(); unused in a world of one
  std::string name = "world";  // for messages
  Limits limits;
  std::shared_ptr<Progress> progress;  // default: this process's
  SlotSizes sizes;
  bool strict_sites = false;  // calls from lines that show ranks out of step are errors, not warnings
};

// The end of a peer, as the error that it causes.
struct PeerLost : Error {
  PeerLost(uint32_t rank_, const std::string& message) : Error(ErrorKind::peer_lost, message), rank(rank_) {}
  uint32_t rank;
};

// A wait that cannot end, because the ranks in it wait for each other in different operations. The group is
// then of no more use: its ranks are out of step.
struct Deadlock : Error {
  explicit Deadlock(const std::string& message) : Error(ErrorKind::mismatch, message) {}
};

class Group {
 public:
  // Meets the other ranks.
  explicit Group(const GroupOptions& given);
  ~Group();

  uint32_t rank() const { return options.rank; }
  uint32_t ranks() const { return options.world_size; }
  std::string who(uint32_t rank) const;  // "rank 2 (pid 71 on host-b)"
  ProcessPage& page(uint32_t rank) const { return Arena::page_of(*local.peers[rank].arena); }
  // Where an own buffer lies for peers; kNowhere: in ordinary memory.
  uint64_t place(const void* buffer, uint64_t bytes) const;
  const Plan& plan(const Call& call, Algorithm algorithm);

  // A failure stays. `error` is what later operations throw, `reason` what peers read; `culprit`: because of
  // whom.
  void fail(const std::exception_ptr& error, const std::string& reason, uint32_t culprit = kOwnFault);
  // Keeps the error of an operation if the group is of no more use after it.
  void ended_with(const std::exception_ptr& error);
  void abort(const std::string& reason);
  // Ends operations with this text; peers are told that this rank has left.
  void leave(const std::string& reason);
  std::exception_ptr failure() const;
  // Whether something ends all operations of this group; `check` throws it.
  bool is_over() const {
    return failed_.load(std::memory_order_acquire) || ended_.load(std::memory_order_acquire);
  }
  void check(const std::string& description) const;

  const GroupOptions options;
  const pid_t owner;
  uint64_t id;  // the same on all ranks, another for each group
  LocalGroup local;
  std::shared_ptr<Mailbox> mailbox;
  std::unique_ptr<Channels> channels;
  std::unique_ptr<PeerWatch> watch;
  Memory memory;          // of the collective that runs; used by one at a time
  SiteHistory sites;      // likewise
  UpdateHistory updates;  // likewise

 private:
  std::map<std::tuple<Operation, Dtype, Reduction, uint32_t, uint64_t, Algorithm>, Plan> plans_;
  mutable std::mutex mutex_;  // guards what follows
  std::exception_ptr failure_;
  std::string end_reason_;
  std::atomic<bool> failed_{false}, ended_{false};
};

}  // namespace photinus
