// The ranks of one host: they meet through a Unix socket (local_group.h), tell each other everything through
// a segment that all have mapped, and reach into each other's arenas. The group's segment holds, in this
// order:
//
//   sleepers   a count of all threads that sleep, so that nobody looks for them in vain
//   blocks     one for each rank
//   parts      for each rank two rows, of even and odd calls, with one part for each rank
//   offers     for each ordered pair of ranks a page of offers; begins on a page of memory, as what follows
//   slots      of each rank
//   losses     one for each rank of all hosts, if there are others
//   rings      for GPUs, if all ranks are on this host: the result ring, and the landing ring of each rank
//
// Fresh memory, all zero, is a group in which nobody is present: no rank has to prepare it for the others.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/clock.h"
#include "peers/peers.h"
#include "shm/arena.h"
#include "shm/local_group.h"
#include "shm/peer_watch.h"

namespace photinus {

// That a rank of another host went without a word, and how: the first of this host to know tells the others.
struct Loss {
  enum State : uint32_t { none, being_written, known };
  std::atomic<uint32_t> state{none};
  char how[252] = {};
};

class ShmPeers final : public Peers {
 public:
  struct Options {
    uint32_t rank = 0, world_size = 1;
    std::string address, name;
    uint64_t slot_bytes = 0;  // of one rank, whole cache lines
    uint64_t settings = 0;    // a fingerprint of what must be equal on all ranks besides
    double timeout_s = 300, waiting_s = 5;
    std::shared_ptr<Arena> arena;
    uint64_t ring_bytes = 0;  // of a ring for GPUs, whole pages
    uint32_t all_ranks = 0;   // of all hosts, and as many parts does each rank post; 0: there is one host
    std::function<void()> on_loss = [] {};  // runs when a rank has gone without a word
  };
  // Meets the other ranks (join_local_group says what it throws).
  explicit ShmPeers(const Options& options);
  ~ShmPeers() override { ShmPeers::close(); }

  std::string who(uint32_t rank) const override;
  bool is_lost(uint32_t rank) const override;
  std::string how_it_went(uint32_t rank) const override;
  std::string what_holds(uint32_t rank) const override;
  double transit_s() const override { return 0; }
  uint64_t place(const void* buffer, uint64_t bytes) const override;
  void advance(Counter counter, uint64_t to) override;
  void show(uint32_t peer, Offer& offer) override;
  void set_reason(const std::string& reason) override;
  void end(Presence how, uint32_t culprit, bool in_deadlock) override;
  void wake(uint32_t rank) override { photinus::wake(views_[rank].page->futex); }
  void announce_sleep() override;
  void end_sleep() override;
  void close() override;

  Loss& loss(uint32_t rank_of_all) const { return losses_[rank_of_all]; }

 private:
  void wake_if_asleep(uint32_t rank);

  const std::shared_ptr<Arena> arena_;
  LocalGroup local_;
  std::atomic<uint32_t>* sleepers_;
  Loss* losses_;
  std::atomic<bool> ended_{false};
  std::mutex writing_reason_;
  std::optional<PeerWatch> watch_;
};

}  // namespace photinus
