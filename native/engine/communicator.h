// The roof of the engine and the one class that bindings see: the operations of a group of ranks, on
// one host or on several.
//
// Collectives of a communicator run in the order in which they are submitted, one at a time; messages run
// beside them, in order for each peer, direction and tag; different communicators are independent. Whoever
// has time drives them (progress/progress.h). All methods may be called from any thread.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/process.h"
#include "collectives/cost.h"
#include "engine/collective.h"
#include "engine/group.h"
#include "engine/message.h"
#include "engine/outside_wait.h"
#include "engine/watchdog.h"
#include "progress/progress.h"
#include "progress/work.h"
#include "shm/local_group.h"  // new_address

namespace photinus {

class Communicator {
 public:
  using Options = GroupOptions;

  // Meets the other ranks. Throws Error(timeout) naming those that are missing.
  static std::shared_ptr<Communicator> create(const Options& options);
  ~Communicator();

  uint32_t rank() const { return group_->rank(); }
  uint32_t world_size() const { return group_->ranks(); }
  // What drives its operations; give it to other groups of the same process.
  const std::shared_ptr<Progress>& progress() const { return group_->options.progress; }
  const std::shared_ptr<Arena>& arena() const { return group_->options.progress->arena(); }

  // Starts a collective; the buffers must live until it is done. all_reduce, reduce and broadcast work in
  // place when send equals recv; reduce_scatter's recv may be the own slice of send, all_gather's send the
  // own slice of recv; any other overlap is refused. reduce writes only the root's recv. all_to_all, gather
  // and scatter, and all_gather of different sizes, take parts: one buffer for each rank (empty ones where
  // nothing goes). Throws Error(invalid_argument) before anything is exchanged. With `asynchronous` it runs
  // by itself; without, when somebody waits for it.
  std::shared_ptr<Work> submit(Submission submission);
  std::shared_ptr<Work> submit(const Call& call, const void* send, void* recv, double timeout_s = 0,
                               bool asynchronous = true);

  // Starts a message. A send ends when the receiver has all of it.
  std::shared_ptr<Work> submit(const MessageCall& call);

  // Begins a wait for ranks of this group that does not go through one of its operations.
  std::unique_ptr<OutsideWait> wait_outside(const std::string& key, double timeout_s);

  // Ends everything here and, at once, at the peers that wait for this rank. Later calls raise.
  void abort(const std::string& reason) {
    if (is_own()) group_->abort(reason);
  }
  // What peers read as this rank's own reason if it goes away.
  void set_reason(const std::string& reason) {
    if (is_own()) group_->peers->set_reason(reason);
  }
  // Leaves in order; calls that are still queued end with Error(aborted). Idempotent. Calls for which nobody
  // waits have a moment to end by themselves.
  void close();
  bool has_failures() const { return group_->has_failures(); }
  // See Group.
  std::optional<Error> take_failure(bool of_dropped) { return group_->take_failure(of_dropped); }
  // How a call like this would run if all tensors lay in arenas (or in ordinary memory): for people.
  std::string explain(const Call& call, bool in_arena) const;
  const Speeds& speeds() const { return speeds_; }  // between hosts, as measured
  // For how long bytes of data were under way on the links of this rank's collectives, by rank at the other
  // end.
  std::vector<std::pair<uint32_t, double>> under_way_s() const;
  // What was measured between the hosts and which levels are taken, with the reason; empty on one host.
  const std::string& about_hosts() const { return about_hosts_; }

 private:
  using LaneKey = std::tuple<Operation, uint32_t, int64_t>;  // of messages: direction, peer, tag

  explicit Communicator(const Options& options);
  void look_at_hosts();
  void use(const std::vector<uint32_t>& sizes, bool for_all);
  NetSizes net_sizes() const;
  void check(const Submission& submission) const;
  void check(const MessageCall& call) const;
  void show_gpu(const std::shared_ptr<cuda::CudaDevice>& device);
  [[noreturn]] void end_if_broken(const Error& error, const std::string& what);
  void check_open(const std::function<std::string()>& what) const;
  bool is_own() const {
    return group_->owner == own_pid();
  }  // and not that of the process that forked this one

  std::shared_ptr<Group> group_;
  std::shared_ptr<Watchdog> watchdog_;
  std::shared_ptr<SendOrders> send_orders_;
  std::shared_ptr<CollectiveState> state_;
  Speeds speeds_;
  std::string about_hosts_;

  std::mutex mutex_;  // guards what follows
  bool closing_ = false, closed_ = false;
  std::condition_variable closed_changed_;
  uint64_t sequence_ = 0;
  std::shared_ptr<cuda::CudaDevice> shown_;  // the GPU of which peers know
  std::shared_ptr<Lane> collectives_;
  std::map<LaneKey, std::shared_ptr<Lane>> messages_;
};

}  // namespace photinus
