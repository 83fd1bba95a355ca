// What the operations of one group share: who its ranks are, what was asked for, and whether the group still
// works.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "collectives/cost.h"
#include "collectives/levels.h"
#include "collectives/net.h"
#include "collectives/plan.h"
#include "device/device.h"
#include "hosts/net_peers.h"
#include "peers/peers.h"
#include "progress/progress.h"

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
  DeviceSizes device_sizes;
  // Threads that help to add what comes from GPUs; default: as many cores as are to spare (reduce_threads.h).
  std::optional<uint32_t> reduce_helpers;
  NetSizes net;
  // Where each rank is, if not all are on this host; the group's address is then known on all hosts.
  std::vector<HostPlace> places;
  // Between hosts: the list of levels, on groups of as many hosts as it is for. Without: by speeds, which are
  // measured while the group forms; empty: by the number of hosts.
  std::optional<std::vector<uint32_t>> levels;
  Speeds speeds;                     // where they are known, as of a larger group, nothing is measured
  std::string job;                   // for links: those of another job or attempt are refused
  uint32_t attempt = 0;              // of the job
  std::shared_ptr<Network> network;  // default: this process's
  bool strict_sites = false;         // calls from lines that show ranks out of step are errors, not warnings
  // The other ranks, when they have been met already; default: those that have the address.
  std::shared_ptr<Peers> peers;
  // What copies between the callers' tensors and memory that peers see; default: the host's processor.
  std::shared_ptr<Device> device;
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

// A rank that gave up because of another one is quoted only after its own cause had time to show up here,
// which takes PeerWatch up to 0.15 s.
constexpr double kRootCausePatience_s = 0.25;

class Group {
 public:
  // Meets the other ranks.
  explicit Group(const GroupOptions& given);

  uint32_t rank() const { return options.rank; }
  uint32_t ranks() const { return options.world_size; }

  // A failure stays: later operations throw it, and peers read its text. `culprit`: because of whom.
  void fail(const Error& error, uint32_t culprit = kOwnFault, bool in_deadlock = false);
  // Keeps the error of an operation, the exception being handled, if the group is of no more use after it.
  void keep_error();
  void abort(const std::string& reason);
  // Ends operations with this text; peers are told that this rank has left.
  void leave(const std::string& reason);
  bool is_failed() const { return failed_.load(std::memory_order_acquire); }
  // Whether something ends all operations of this group; `check` throws it.
  bool is_over() const { return is_failed() || ended_.load(std::memory_order_acquire); }
  void check(const std::string& description) const;

  // Errors of operations, until somebody has seen them.
  void keep(const std::shared_ptr<Failure>& failure);
  bool has_failures() const { return has_failures_.load(std::memory_order_acquire); }
  // Takes those that nobody has seen; the caller raises the first one; `of_dropped`: whose works are gone,
  // so that nobody can ask.
  std::optional<Error> take_failure(bool of_dropped);

  // The error of an operation in the middle of which a rank has failed: it names who ended first, if that is
  // another one, and waits a little for the news of it.
  PeerLost given_up_by(uint32_t rank, const std::string& description) const;

  // The error of a copy of this rank's own, with the operation that it was for.
  Error of_copy(const Error& error, const std::string& description) const;

  // Keeps a group's memory for ever: a copy that has not ended may still write into it.
  static void retire(const std::shared_ptr<Group>& group);

  const GroupOptions options;
  const pid_t owner;
  const std::optional<Levels> levels;  // of the hosts, where there are several
  const std::shared_ptr<Peers> peers;
  const uint64_t id;  // the same on all ranks, another for each group

 private:
  mutable std::mutex mutex_;  // guards what follows
  std::optional<Error> failure_;
  std::string end_reason_;
  std::vector<std::shared_ptr<Failure>> failures_;
  bool is_failure_seen_ = false;  // that which has ended the group
  std::atomic<bool> failed_{false}, ended_{false}, has_failures_{false};
};

}  // namespace photinus
