// One collective as a state machine: it shows what it is about to do, meets the other ranks, compares, and
// does its plan's steps.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "collectives/exchange.h"
#include "collectives/mismatch.h"
#include "collectives/net_exchange.h"
#include "collectives/update_history.h"
#include "engine/device_copies.h"
#include "engine/device_rings.h"
#include "engine/executor.h"
#include "engine/group.h"
#include "engine/host_tensors.h"
#include "engine/watchdog.h"
#include "progress/work.h"

namespace photinus {

// A buffer of a rank for one of its peers.
struct Part {
  void* buffer = nullptr;
  uint64_t elems = 0;
};

// Where in the user's program a call stands. Sites live as long as the process.
struct CallSite {
  std::string text;   // "train.py:41", or "train.py:41 (photinus.evaluate)"
  uint32_t hash = 0;  // of the text, never 0
  bool votes = true;  // false where ranks come from different places by design: it is only shown
  static CallSite of(const std::string& text);
};

// Of a call's tensors, which all have the same: ranks compare it. Begins as that of a single number.
struct Shape {
  static constexpr size_t kMost = 8;  // are shown
  uint64_t hash = 0;                  // 0: not compared
  size_t dims = 0;
  int64_t sizes[kMost];
  static Shape scalar() { return {0xcbf29ce484222325, 0, {}}; }
  void add(int64_t size);
  std::string text() const;
};

// What a caller wants besides the call itself.
struct Submission {
  Call call;
  const void* send = nullptr;
  void* recv = nullptr;
  std::vector<Part> send_parts, recv_parts;  // by rank; both empty, or one for each rank
  std::shared_ptr<cuda::CudaDevice> device;  // in whose memory these lie; null: in the host's
  cuda::CUstream stream = nullptr;           // of the device: the call begins after all that is in it
  double factor = 1;                         // of premul_sum: this rank's own
  std::string label;                         // calls match only when their labels do
  const CallSite* site = nullptr;
  std::shared_ptr<void> owner;  // of the buffers, which live at least as long; null: the caller keeps them
  Shape shape{};
  int32_t updates = 0;   // see CallDescriptor
  double timeout_s = 0;  // 0: the group's
  bool asynchronous = true;
};

// What the collectives of a group, of which one runs at a time, leave to the next.
struct CollectiveState {
  const std::shared_ptr<Group> group;
  const std::shared_ptr<Watchdog> watchdog;
  Memory memory;
  Operands operands;
  SiteHistory sites;
  UpdateHistory updates;
  std::unique_ptr<HostTraffic> hosts;  // null: all ranks are on one
  std::unique_ptr<DeviceRings> rings;  // null: there are none
  uint64_t own_calls = 0;              // of the group itself, before those of its users

  CollectiveState(std::shared_ptr<Group> group_, std::shared_ptr<Watchdog> watchdog_)
      : group(std::move(group_)), watchdog(std::move(watchdog_)) {}

  const Plan& plan(const Call& call, Seat seat, Algorithm algorithm);

 private:
  using Key = std::tuple<Operation, Dtype, Reduction, uint32_t, uint64_t, std::optional<Dtype>, Algorithm>;
  std::map<Key, Plan> plans_;
  size_t steps_kept_ = 0;
  const Plan* last_ = nullptr;  // most calls are like the one before
  Call last_call_;
};

class Collective final : public Work {
 public:
  Collective(const std::shared_ptr<CollectiveState>& state, Submission&& submission, uint64_t sequence);

  std::string description() const override;
  void order(void* stream) override;
  bool has_landed() override { return is_completed() && (!copies_ || copies_->has_landed()); }

 private:
  Poll advance() override;
  Poll go_on();
  double look(Alone caller) override;
  void fail() override;
  void abandon(const std::string& reason) override { group_->abort(reason); }
  void end_wait() override { group_->peers->own().page->wait_record.clear(); }
  void keep(const std::shared_ptr<Failure>& failure) override { group_->keep(failure); }

  bool has_parts() const { return !given_.send_parts.empty(); }
  void begin();
  void work_on_host();
  void begin_steps();
  bool has_device_plan() const { return copies_ && !host_tensors_ && state_->rings; }
  bool end_copies(bool& moved);
  bool run_steps(bool& moved);
  void post();
  bool all_posted();
  bool is_flat() const;
  void fetch(const PeerView& peer) const;
  void check_peers() const;
  void await_peers() const;
  void agree_and_plan();
  // Over several hosts (collective_hosts.cc).
  void agree_on_host();
  void plan_over_hosts();
  HostParts exchange_of_hosts() const;
  std::string fault_of(const HostPost& post);
  bool run_on_with_hosts();
  std::vector<uint32_t> missing();
  std::vector<uint32_t> needed();

  const std::shared_ptr<CollectiveState> state_;
  Group* const group_;  // the state's
  Submission given_;
  uint64_t sequence_;
  uint64_t number_;  // of the calls of the group's users: in messages
  std::optional<WaitState> wait_;

  enum class Phase : uint8_t {
    queued,
    bringing,
    preparing,
    meeting,
    working,
    returning,
    disagreeing
  } phase_ = Phase::queued;
  std::unique_ptr<DeviceCopies> copies_;       // of tensors on a device
  std::unique_ptr<HostTensors> host_tensors_;  // instead of those, where no plan carries them
  size_t met_ = 0;                             // so many ranks of this host have posted
  Exchange exchange_;
  std::vector<Step> own_steps_;  // of calls with parts
  const std::vector<Step>* steps_ = &own_steps_;
  size_t next_ = 0;
  uint64_t results_ = 0;      // of a device plan
  bool reads_peers_ = false;  // or writes: their tensors, where they lie
  Executor executor_;
};

}  // namespace photinus
