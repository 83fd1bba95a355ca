// Ranks of one process that tell each other everything late. What a rank says reaches each other rank after a
// random delay, in the order in which it was said, but sooner at one than at another: so the ranks have
// different views of the group at any time, as over a network. In one of three schedules there is one view
// for all and the speaker is slow instead, as in shared memory on a busy machine; then peers reach into
// arenas too. A rank may die: part of what it has said last is lost.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "peers/peers.h"
#include "shm/arena.h"

namespace photinus::test {

class FakeNetwork {
 public:
  FakeNetwork(const std::vector<std::shared_ptr<Arena>>& arenas, uint64_t slot_bytes, uint64_t seed)
      : arenas(arenas),
        ranks(static_cast<uint32_t>(arenas.size())),
        one_view(seed % 3 == 2),
        random_(seed),
        seen_(ranks * ranks),
        offers_(2 * ranks * ranks),
        wires_(ranks * ranks),
        dead_(ranks) {
    const double longest_s[] = {0, 20e-6, 200e-6, 2e-3};
    delay_s_ = longest_s[random_() % std::size(longest_s)];
    for (Seen& seen : seen_) {
      for (auto& row : seen.parts) row.resize(ranks);
      seen.block.presence.store(Presence::active);
    }
    for (auto& page : offers_) page = std::vector<Offer>(kOffers);
    for (uint32_t rank = 0; rank < ranks; ++rank) slots_.emplace_back(slot_bytes);
    thread_ = std::thread([this] { run(); });
  }

  ~FakeNetwork() {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  // What rank `at` knows of rank `of`.
  struct Seen {
    RankBlock block;
    std::vector<PostedPart> parts[2];
    std::atomic<bool> lost{false};
  };
  Seen& seen(uint32_t at, uint32_t of) { return seen_[(one_view ? of : at) * ranks + of]; }
  std::atomic<bool>& lost(uint32_t at, uint32_t of) { return seen_[at * ranks + of].lost; }
  // Offers from one rank to another, as rank `at`, one of the two, sees them.
  Offer* offers(uint32_t at, uint32_t from, uint32_t to) {
    return offers_[2 * (from * ranks + to) + (at == to && !one_view)].data();
  }
  std::byte* slots(uint32_t rank) { return slots_[rank].data(); }

  // Lets a rank see something, some time after all that it was shown by this one before.
  void send(uint32_t from, uint32_t to, std::function<void()> show) {
    std::lock_guard lock(mutex_);
    if (dead_[from]) return;
    double& last_s = wires_[from * ranks + to];
    last_s = std::max(last_s, now_s() + delay_s_ * std::uniform_real_distribution()(random_));
    queue_.emplace(last_s, Message{from, to, std::move(show)});
    changed_.notify_all();
  }

  // Before a rank that shares one view with all changes it.
  void dawdle() {
    double delay_s;
    {
      std::lock_guard lock(mutex_);
      delay_s = delay_s_ * std::uniform_real_distribution()(random_) / 4;
    }
    if (delay_s > 0) usleep(static_cast<useconds_t>(delay_s * 1e6));
  }

  void kill(uint32_t rank) {
    for (uint32_t to = 0; to < ranks; ++to)
      if (to != rank) send(rank, to, [this, to, rank] { lost(to, rank).store(true); });
    std::lock_guard lock(mutex_);
    dead_[rank] = true;
    for (uint32_t to = 0; to < ranks; ++to) {
      std::vector<decltype(queue_)::iterator> unseen;
      for (auto message = queue_.begin(); message != queue_.end(); ++message)
        if (message->second.from == rank && message->second.to == to) unseen.push_back(message);
      if (unseen.empty()) continue;
      unseen.pop_back();  // the news of its end arrives
      const size_t kept = random_() % (unseen.size() + 1);
      for (size_t i = kept; i < unseen.size(); ++i) queue_.erase(unseen[i]);
    }
  }
  bool is_dead(uint32_t rank) {
    std::lock_guard lock(mutex_);
    return dead_[rank];
  }

  const std::vector<std::shared_ptr<Arena>> arenas;
  const uint32_t ranks;
  const bool one_view;

 private:
  struct Message {
    uint32_t from, to;
    std::function<void()> show;
  };

  void run() {
    std::unique_lock lock(mutex_);
    double beat_s = 0;
    while (!ending_) {
      const double now = now_s();
      if (now - beat_s > 0.02) {
        beat_s = now;
        for (uint32_t rank = 0; rank < ranks; ++rank)
          if (!dead_[rank]) arenas[rank]->page().heartbeat.fetch_add(1, std::memory_order_relaxed);
      }
      const double next_s = queue_.empty() ? now + 0.02 : std::min(queue_.begin()->first, now + 0.02);
      if (next_s > now) {
        changed_.wait_for(lock, std::chrono::duration<double>(next_s - now));
        continue;
      }
      const Message message = std::move(queue_.begin()->second);
      queue_.erase(queue_.begin());
      lock.unlock();
      message.show();
      Futex& futex = arenas[message.to]->page().futex;
      if (futex.asleep.load(std::memory_order_seq_cst)) wake(futex);
      lock.lock();
    }
  }

  std::mutex mutex_;  // guards random_ and what follows slots_
  std::mt19937_64 random_;
  double delay_s_;
  std::vector<Seen> seen_;
  std::vector<std::vector<Offer>> offers_;
  std::vector<std::vector<std::byte>> slots_;
  std::multimap<double, Message> queue_;  // by the time when it is seen
  std::vector<double> wires_;             // by pair of ranks: when the last message on it is seen
  std::vector<bool> dead_;
  bool ending_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

class FakePeers final : public Peers {
 public:
  FakePeers(std::shared_ptr<FakeNetwork> network, uint32_t rank)
      : Peers(rank, network->ranks), network_(std::move(network)) {
    for (uint32_t peer = 0; peer < ranks(); ++peer) {
      PeerView& view = views_[peer];
      FakeNetwork::Seen& seen = network_->seen(rank, peer);
      view.block = &seen.block;
      for (size_t side : {0, 1}) view.parts[side] = seen.parts[side].data();
      view.page = {network_->arenas[peer], &network_->arenas[peer]->page()};
      view.memory = network_->arenas[peer]->segment()->base();
      view.slots = network_->slots(peer);
      view.sent = network_->offers(rank, rank, peer);
      view.received = network_->offers(rank, peer, rank);
    }
  }

  std::string who(uint32_t rank) const override { return text("rank %u (pid %d on fake)", rank, getpid()); }
  bool is_lost(uint32_t rank) const override { return network_->lost(rank_, rank).load(); }
  std::string how_it_went(uint32_t) const override { return "was killed by SIGKILL"; }
  std::string what_holds(uint32_t) const override { return ""; }
  double transit_s() const override { return network_->one_view ? 0 : 1; }
  uint64_t place(const void* buffer, uint64_t bytes) const override {
    if (!network_->one_view) return kNowhere;  // nobody sees at once who has given up
    return network_->arenas[rank_]->offset(buffer, bytes).value_or(kNowhere);
  }

  void advance(Counter counter, uint64_t to) override {
    if (network_->one_view) network_->dawdle();
    if (network_->is_dead(rank_)) return;
    RankBlock& mine = *own().block;
    mine.counter(counter).store(to, std::memory_order_seq_cst);
    const size_t side = to % 2;
    std::vector<PostedPart> parts(own().parts[side], own().parts[side] + ranks());
    const CallDescriptor call = mine.calls[side];
    const std::string site = mine.sites[side], label = mine.labels[side];
    tell_all([=](const PeerView& me) {
      if (counter == Counter::posted) {
        me.block->calls[side] = call;
        std::copy(parts.begin(), parts.end(), me.parts[side]);
        std::copy_n(site.c_str(), site.size() + 1, me.block->sites[side]);
        std::copy_n(label.c_str(), label.size() + 1, me.block->labels[side]);
      }
      me.block->counter(counter).store(to, std::memory_order_seq_cst);
    });
  }

  void show(uint32_t peer, Offer& offer) override {
    const PeerView& view = views_[peer];
    const bool mine = &offer >= view.sent && &offer < view.sent + kOffers;
    Offer& theirs = mine ? network_->offers(peer, rank_, peer)[&offer - view.sent]
                         : network_->offers(peer, peer, rank_)[&offer - view.received];
    struct Facts {
      OfferWord word;
      int64_t tag;
      Dtype dtype;
      DeviceType device;
      uint64_t elems, offset, ring_bytes, moved;
      std::string site;
    };
    const Facts now{offer.look(),
                    offer.tag.load(),
                    mine ? offer.dtype : offer.recv_dtype,
                    mine ? offer.device : offer.recv_device,
                    mine ? offer.elems : offer.recv_elems,
                    offer.offset,
                    offer.ring_bytes,
                    mine ? offer.filled.load() : offer.drained.load(),
                    mine ? offer.send_site : offer.recv_site};
    if (network_->one_view) return send(peer, [] {});
    if (mine && now.word.state != OfferState::offered && now.word.state != OfferState::taken) return;
    send(peer, [&theirs, now, mine] {
      const OfferWord there = theirs.look();
      if (!mine) {
        theirs.recv_dtype = now.dtype;
        theirs.recv_device = now.device;
        theirs.recv_elems = now.elems;
        std::copy_n(now.site.c_str(), now.site.size() + 1, theirs.recv_site);
        theirs.drained.store(now.moved);
        theirs.set(now.word);
      } else if (there.order == now.word.order && theirs.word.load() != 0) {
        theirs.filled.store(now.moved);
      } else {
        theirs.tag.store(now.tag);
        theirs.dtype = now.dtype;
        theirs.device = now.device;
        theirs.elems = now.elems;
        theirs.offset = now.offset;
        theirs.ring_bytes = now.ring_bytes;
        theirs.filled.store(now.moved);
        theirs.drained.store(0);
        std::copy_n(now.site.c_str(), now.site.size() + 1, theirs.send_site);
        theirs.set({now.word.order, OfferState::offered});
      }
    });
  }

  void set_reason(const std::string& reason) override {
    std::lock_guard lock(writing_reason_);
    if (network_->is_dead(rank_)) return;
    own().block->reason.write(reason);
    tell_all([=](const PeerView& me) { me.block->reason.write(reason); });
  }

  void end(Presence how, uint32_t culprit, bool in_deadlock) override {
    if (network_->one_view) network_->dawdle();
    if (!ended_.exchange(true) && !network_->is_dead(rank_)) {
      auto show_end = [=](const PeerView& me) {
        me.block->culprit.store(culprit);
        me.block->in_deadlock.store(in_deadlock);
        me.block->presence.store(how, std::memory_order_seq_cst);
      };
      show_end(own());
      tell_all(show_end);
    }
    wake(rank_);
  }

  void wake(uint32_t rank) override { photinus::wake(views_[rank].page->futex); }
  void announce_sleep() override {}
  void end_sleep() override {}
  void close() override {}
  void die() { network_->kill(rank_); }

 private:
  void send(uint32_t peer, std::function<void()> change) { network_->send(rank_, peer, std::move(change)); }

  // Changes what each other rank sees of this one.
  template <class Change>
  void tell_all(const Change& change) {
    for (uint32_t peer = 0; peer < ranks(); ++peer) {
      if (peer == rank_) continue;
      FakeNetwork::Seen& seen = network_->seen(peer, rank_);
      PeerView me;
      me.block = &seen.block;
      for (size_t side : {0, 1}) me.parts[side] = seen.parts[side].data();
      if (network_->one_view)
        send(peer, [] {});
      else
        send(peer, [me, change] { change(me); });
    }
  }

  const std::shared_ptr<FakeNetwork> network_;
  std::atomic<bool> ended_{false};
  std::mutex writing_reason_;
};

}  // namespace photinus::test
