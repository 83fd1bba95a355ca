// All that an operation asks of the other ranks of its group, whatever carries it: shared memory
// (shm/shm_peers.h), links to other hosts beside it (hosts/net_peers.h), delays and deaths made up by a test
// (tests/fake_peers.h).
//
// What is known here of a rank lies in memory, so looking at it is a load; whoever carries what ranks say
// keeps it up to date. What this rank says goes through the virtual functions. The promise: who sees a
// counter, a presence or an offer sees all that its rank wrote before it; and a thread that has announced
// itself on its process's futex (base/futex.h) is woken when something new can be seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "peers/offers.h"
#include "peers/posts.h"
#include "peers/process_page.h"

namespace photinus {

class Link;
enum class LinkUse : uint8_t { collective, send, receive };

// One rank, as it is seen here. Only `received` of others is written here, and what is this rank's own.
struct PeerView {
  RankBlock* block = nullptr;
  PostedPart* parts[2] = {};          // that it posted with calls of even and odd numbers, one for each rank
  std::shared_ptr<ProcessPage> page;  // of its process
  // What this rank sees of its memory begins there: offsets count from it. Null, like the slots and the
  // parts: it is on another host.
  std::byte* memory = nullptr;
  std::byte* slots = nullptr;
  // Rings for GPUs (collectives/device_plans.h): its own, and the group's, the same in all views. Null: none.
  std::byte* landing_ring = nullptr;
  std::byte* result_ring = nullptr;
  Offer* sent = nullptr;      // kOffers to it
  Offer* received = nullptr;  // kOffers from it
};

class Peers {
 public:
  virtual ~Peers() = default;
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return static_cast<uint32_t>(views_.size()); }

  const PeerView& operator[](uint32_t rank) const { return views_[rank]; }
  const PeerView& own() const { return views_[rank_]; }
  // The ranks of this host, which share memory; the others are known by what comes over links.
  const std::vector<uint32_t>& locals() const { return locals_; }
  bool is_local(uint32_t rank) const { return views_[rank].memory; }
  uint64_t value(uint32_t rank, Counter counter) const {
    return views_[rank].block->counter(counter).load(std::memory_order_seq_cst);
  }
  Presence presence(uint32_t rank) const {
    return views_[rank].block->presence.load(std::memory_order_seq_cst);
  }
  std::string reason(uint32_t rank) const { return views_[rank].block->reason.read(); }

  // "rank 2 (pid 71 on host-b)".
  virtual std::string who(uint32_t rank) const = 0;
  // Whether a rank has gone without a word, and how: "was killed by SIGKILL".
  virtual bool is_lost(uint32_t rank) const = 0;
  virtual std::string how_it_went(uint32_t rank) const = 0;
  // What keeps a rank that is silent from running; empty when nothing is known.
  virtual std::string what_holds(uint32_t rank) const = 0;
  // For how long what a rank has said may be under way.
  virtual double transit_s() const = 0;
  // Data have left this rank that may be under way for longer.
  virtual bool has_data_under_way() const { return false; }
  // Where an own buffer lies for peers; kNowhere: they cannot reach it.
  virtual uint64_t place(const void* buffer, uint64_t bytes) const = 0;

  // Sets an own counter. With `posted` peers get the call of that number: what stands in the own block.
  virtual void advance(Counter counter, uint64_t to) = 0;
  // Shows a peer what changed in an offer: one of `sent`, or of `received` from it.
  virtual void show(uint32_t peer, Offer& offer) = 0;
  // What peers read when this rank goes away or fails; later texts replace earlier ones.
  virtual void set_reason(const std::string& reason) = 0;
  // This rank takes part no more: it left, or failed because of `culprit`. Only the first end counts.
  virtual void end(Presence how, uint32_t culprit, bool in_deadlock) = 0;
  // Wakes the process of a rank, that it may look around.
  virtual void wake(uint32_t rank) = 0;
  // A thread of this rank will sleep, or slept.
  virtual void announce_sleep() = 0;
  virtual void end_sleep() = 0;
  // Nothing is seen or said any more.
  virtual void close() = 0;

  // --- ranks of other hosts

  // The link with one; null while it is being made, and when it has ended (then is_lost will say so). The
  // first call makes it; that of a receiver is made by the sender.
  virtual Link* link(uint32_t, LinkUse) { return nullptr; }
  // An operation was given up: what comes and goes on its channel of all links is dropped.
  virtual void forget(uint32_t) {}
  // Tells one what is known here of the collective of this number, and what it has told; empty: nothing yet.
  // Who tells of number s has heard in s-1 from all that it tells and hears in s. With a stream it goes ahead
  // of the frame of data that is sent there next, and leaves with it.
  static constexpr uint32_t kAtOnce = UINT32_MAX;
  virtual void tell(uint32_t, uint64_t, std::span<const std::byte>, uint32_t /*stream*/ = kAtOnce) {}
  virtual std::span<const std::byte> told(uint32_t, uint64_t) const { return {}; }
  // Brings in what has come, for a thread that waits; whether something has.
  virtual bool poll() { return false; }

 protected:
  Peers(uint32_t rank, uint32_t ranks) : rank_(rank), views_(ranks) {
    for (uint32_t r = 0; r < ranks; ++r) locals_.push_back(r);
  }

  const uint32_t rank_;
  std::vector<PeerView> views_;
  std::vector<uint32_t> locals_;
};

}  // namespace photinus
