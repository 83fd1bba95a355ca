// A message from one rank to another (send, recv) as a state machine over a channel (peers/offers.h). To a
// rank of another host the data go over a link, in one frame, once the offer is taken: its place is known
// then.
#pragma once

#include <mutex>
#include <optional>
#include <string>

#include "engine/collective.h"
#include "engine/group.h"
#include "engine/watchdog.h"
#include "net/link.h"
#include "progress/work.h"

namespace photinus {

inline constexpr uint32_t kAnyRank = UINT32_MAX;

// What a caller wants of a message.
struct MessageCall {
  Operation operation = Operation::send;  // or recv
  Dtype dtype = Dtype::float32;
  std::string kind;  // what the elements are that travel as `dtype`, if not that; equal on both sides
  uint64_t elems = 0;
  void* buffer = nullptr;
  std::shared_ptr<cuda::CudaDevice> device;  // as in Submission
  cuda::CUstream stream = nullptr;
  uint32_t peer = 0;  // recv: may be kAnyRank
  int64_t tag = 0;
  const CallSite* site = nullptr;
  std::shared_ptr<void> owner;  // as in Submission
  double timeout_s = 0;
  bool asynchronous = true;
};

// What the messages of a group share on this rank.
struct SendOrders {
  std::mutex claiming;           // held while a free offer is sought and claimed
  std::vector<uint64_t> orders;  // offers made so far, by receiver
};

class MessageWork : public Work {
 public:
  MessageWork(const std::shared_ptr<Group>& group, const std::shared_ptr<Watchdog>& watchdog,
              const MessageCall& call);
  std::string description() const override;
  void order(void* stream) override;
  bool has_landed() override { return is_completed() && (!copies_ || copies_->has_landed()); }

 protected:
  Poll advance() override;
  virtual Poll exchange() = 0;  // between memory of hosts
  double look(Alone caller) override;
  void fail() override;
  void abandon(const std::string& reason) override { group_->abort(reason); }
  void end_wait() override { group_->peers->own().page->wait_record.clear(); }
  void keep(const std::shared_ptr<Failure>& failure) override {
    // A receive posted ahead, from a rank that has left in order without a message, and never waited for.
    const bool is_spare = call_.operation == Operation::recv && !offer_ && call_.peer != kAnyRank &&
                          group_->peers->presence(call_.peer) == Presence::left;
    if (!is_spare) group_->keep(failure);
  }
  virtual bool can_go_on() const = 0;  // whether advance() would find something to do
  void begin();
  Poll go_on();
  DeviceType device() const { return call_.device ? DeviceType::cuda : DeviceType::cpu; }
  uint64_t bytes() const { return call_.elems * size_bytes(call_.dtype); }
  std::shared_ptr<Group> group_;
  std::shared_ptr<Watchdog> watchdog_;
  MessageCall call_;
  std::optional<WaitState> wait_;
  CopyInFlight copy_;
  std::unique_ptr<DeviceCopies> copies_;       // of a tensor on a device
  std::unique_ptr<HostTensors> host_tensors_;  // instead of that one
  enum class Phase : uint8_t { bringing, exchanging, returning } phase_ = Phase::bringing;
  uint64_t piece_ = 0;  // bytes of the copy
  Offer* offer_ = nullptr;
  uint64_t order_ = 0;  // of the offer
  Transfer transfer_;   // to or from a rank of another host
  bool transfers_ = false;
};

class Send final : public MessageWork {
 public:
  Send(const std::shared_ptr<Group>& group, const std::shared_ptr<Watchdog>& watchdog,
       const MessageCall& call, std::shared_ptr<SendOrders> orders)
      : MessageWork(group, watchdog, call), send_orders_(std::move(orders)) {}
  ~Send() override;

 private:
  Poll exchange() override;
  bool can_go_on() const override;
  bool make_offer();
  bool fill();
  bool send_frame();

  std::shared_ptr<SendOrders> send_orders_;
  std::byte* ring_ = nullptr;  // in the arena, when the tensor does not lie there
};

class Receive final : public MessageWork {
 public:
  using MessageWork::MessageWork;
  int source_rank() const override { return source_ == kAnyRank ? -1 : static_cast<int>(source_); }

 private:
  Poll exchange() override;
  bool can_go_on() const override;
  Offer* find_offer(uint32_t from, OfferWord& seen) const;
  bool take_offer();
  bool receive_frame();

  uint32_t source_ = kAnyRank;
};

}  // namespace photinus
