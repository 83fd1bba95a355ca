// The ranks of a group on several hosts. Those of this host share memory (shm/shm_peers.h); of the others
// this rank keeps what they say in memory of its own, where operations look as they look at shared memory,
// and tells them what it says over links.
//
// Links. From the start there are those to the ranks with which this one exchanges in some level
// (`counterparts`); others are made when they are first asked for. A link's lower rank dials, so both ends
// may ask for it; and because a message's receiver does not know who will send, a sender of higher rank dials
// a second one, for its messages.
//
// Ends. Who learns that a rank has ended tells all that it has links with, once, so the news reaches
// everyone. Heartbeats of a host's ranks come with every link to it; a rank of which none were heard yet
// counts as alive.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hosts/network.h"
#include "hosts/words.h"
#include "peers/processes.h"
#include "shm/shm_peers.h"

namespace photinus {

// Where a rank is. Ranks with equal keys share memory.
struct HostPlace {
  std::string host_key, host_name;
  int pid = 0;
  std::vector<SocketAddress> addresses;  // at which ranks of other hosts reach it
};

class NetPeers final : public Peers, private Network::Member {
 public:
  struct Options {
    ShmPeers::Options ranks;  // of the whole group; `address` is its secret too
    std::vector<HostPlace> places;
    std::vector<uint32_t> counterparts;
    std::string job;
    uint32_t attempt = 0;
    std::shared_ptr<Network> network;
    Processes* processes = nullptr;  // those of this process's progress; lives as long
    double grace_s = 120;            // for which a host may be silent
  };
  // Meets the ranks of this host and makes the first links. Throws as join_local_group and Opening::link do.
  explicit NetPeers(const Options& options);
  ~NetPeers() override { NetPeers::close(); }

  std::string who(uint32_t rank) const override;
  bool is_lost(uint32_t rank) const override;
  std::string how_it_went(uint32_t rank) const override;
  std::string what_holds(uint32_t rank) const override;
  double transit_s() const override { return 0.3; }  // a heartbeat comes every quarter of a second
  bool has_data_under_way() const override { return network_->connections().have_data_under_way(); }
  uint64_t place(const void* buffer, uint64_t bytes) const override { return shm_->place(buffer, bytes); }
  void advance(Counter counter, uint64_t to) override { shm_->advance(counter, to); }
  void show(uint32_t peer, Offer& offer) override;
  void set_reason(const std::string& reason) override;
  void end(Presence how, uint32_t culprit, bool in_deadlock) override;
  void wake(uint32_t rank) override;
  void announce_sleep() override;
  void end_sleep() override { shm_->end_sleep(); }
  void close() override;

  Link* link(uint32_t rank, LinkUse use) override;
  void forget(uint32_t channel) override;
  void tell(uint32_t rank, uint64_t sequence, std::span<const std::byte> what,
            uint32_t stream = kAtOnce) override;
  std::span<const std::byte> told(uint32_t rank, uint64_t sequence) const override;
  bool poll() override;

 private:
  // What a rank has told of a collective; two, for the numbers that alternate.
  struct Told {
    std::atomic<uint64_t> sequence{0};
    uint64_t bytes = 0;
    std::byte what[kControlBytes];
  };
  // What is known of a rank of another host. Fresh memory, all zero, is one that has said nothing.
  struct Known {
    RankBlock block;
    alignas(64) ProcessPage page;
    Told told[2];
    Offer sent[kOffers], received[kOffers];
  };
  // A link with a rank of another host.
  struct Way {
    std::shared_ptr<Opening> opening;
    std::shared_ptr<Link> kept;
    std::atomic<Link*> link{nullptr};
    bool has_ended = false;  // of the thread that tends
  };
  enum Direction : uint8_t { up, down };  // dialled by the lower, or by the higher rank
  // How a rank has ended, as far as it is known; of ranks of other hosts without a word.
  struct End {
    std::atomic<bool> lost{false};
    bool passed_on = false;  // to all links
    bool said_left = false;  // its data may still be under way
    double suspected_s = 0;  // when a link of it ended; its host may tell more
    std::string how;
  };

  std::string group(Direction way) const { return name_ + (way == up ? "#up" : "#down"); }
  Way& way(uint32_t rank, Direction direction) const { return ways_[2 * rank + direction]; }
  std::vector<uint32_t> on_host_of(uint32_t rank) const;
  void open(uint32_t rank, Direction direction);
  Link* adopt(Way& way);
  void await_links(const std::vector<uint32_t>& ranks, double timeout_s);
  void end_openings();
  // net_peers_hear.cc
  void hear(uint32_t from, uint32_t channel, uint64_t sequence, const std::byte* payload, size_t bytes);
  void note_posted(uint32_t rank, uint64_t sequence);
  void hear_beat(uint32_t from, Reader& reader);
  void hear_end(Reader& reader);
  void note_loss(uint32_t rank, const std::string& how);
  void hear_waits(Reader& reader);
  void hear_offer(uint32_t from, Reader& reader);

  void say(Link* link, uint32_t channel, uint64_t sequence, std::span<const std::byte> payload,
           uint32_t stream = kAtOnce);
  void say_to_all(uint32_t channel, std::span<const std::byte> payload);
  // What newer words will take the place of: not where older ones lie still, else a host that is silent for
  // minutes would fill the link. Whether all got it.
  bool say_newest(uint32_t channel, std::span<const std::byte> payload);
  void say_end(uint32_t rank);
  // net_peers_tend.cc
  bool tend(double now_s) override;
  void say_ends_here();
  bool look_for_ends(double now_s);
  void note_left(uint32_t rank);
  bool suspect(uint32_t rank, double now_s);
  void beat();
  void tell_waits();
  std::vector<std::byte> wait_of(uint32_t rank) const;

  const std::vector<HostPlace> places_;
  const std::string job_, name_;
  const std::shared_ptr<Network> network_;
  std::shared_ptr<ShmPeers> shm_;        // the ranks of this host, by their place in locals()
  std::vector<uint32_t> local_index_;    // by rank; UINT32_MAX: on another host
  std::shared_ptr<Known> known_memory_;  // by rank
  Known* known_ = nullptr;
  Processes* const processes_;
  const double timeout_s_, grace_s_;
  std::unique_ptr<Way[]> ways_;              // two for each rank
  std::unique_ptr<End[]> ends_;              // by rank
  mutable std::mutex mutex_;                 // guards the openings, and the ends but for `lost`
  std::vector<std::atomic<bool>> heard_of_;  // ranks whose heartbeats come
  double beaten_s_ = 0, told_waits_s_ = 0;
  uint64_t seen_wait_ = 0, said_wait_ = 0, said_affirmed_ = 0;
  std::atomic<bool> closed_{false};
};

}  // namespace photinus
