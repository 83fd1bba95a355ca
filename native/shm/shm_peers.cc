#include "shm/shm_peers.h"

#include "base/error.h"
#include "base/process.h"

namespace photinus {
namespace {

constexpr size_t kSleepersBytes = 64;

struct Offsets {
  size_t parts, offers, slots, losses, rings, end;
  Offsets(uint32_t ranks, uint32_t all_ranks, uint64_t slot_bytes, uint64_t ring_bytes) {
    const uint32_t each = all_ranks ? all_ranks : ranks;
    auto page_up = [](size_t bytes) { return (bytes + 4095) / 4096 * 4096; };
    parts = kSleepersBytes + ranks * sizeof(RankBlock);
    offers = page_up(parts + sizeof(PostedPart) * 2 * ranks * each);
    slots = page_up(offers + sizeof(Offer) * kOffers * ranks * ranks);
    losses = slots + slot_bytes * ranks;
    rings = page_up(losses + sizeof(Loss) * all_ranks);
    end = rings + (all_ranks ? 0 : ring_bytes * (ranks + 1));
  }
};

}  // namespace

ShmPeers::ShmPeers(const Options& options) : Peers(options.rank, options.world_size), arena_(options.arena) {
  const uint32_t ranks = options.world_size, parts = options.all_ranks ? options.all_ranks : ranks;
  const Offsets layout(ranks, options.all_ranks, options.slot_bytes, options.ring_bytes);
  local_ = join_local_group(rank_, ranks, options.address, options.name, {layout.end, options.settings},
                            arena_, Deadline::in(options.timeout_s), options.waiting_s);
  std::byte* base = local_.shared->base();
  sleepers_ = reinterpret_cast<std::atomic<uint32_t>*>(base);
  losses_ = reinterpret_cast<Loss*>(base + layout.losses);
  auto offers = [&](uint32_t from, uint32_t to) {
    return reinterpret_cast<Offer*>(base + layout.offers) + (from * ranks + to) * kOffers;
  };
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    PeerView& view = views_[rank];
    view.block = reinterpret_cast<RankBlock*>(base + kSleepersBytes) + rank;
    for (uint32_t side : {0u, 1u})
      view.parts[side] = reinterpret_cast<PostedPart*>(base + layout.parts) + (side * ranks + rank) * parts;
    view.page = {local_.peers[rank].arena, &Arena::page_of(*local_.peers[rank].arena)};
    view.memory = local_.peers[rank].arena->base();
    view.slots = base + layout.slots + rank * options.slot_bytes;
    if (!options.all_ranks) {
      view.result_ring = base + layout.rings;
      view.landing_ring = view.result_ring + (rank + 1) * options.ring_bytes;
    }
    view.sent = offers(rank_, rank);
    view.received = offers(rank, rank_);
  }
  own().block->presence.store(Presence::active, std::memory_order_release);
  if (ranks > 1)
    watch_.emplace(local_.peers, *this, own().page->heartbeat, [this, on_loss = options.on_loss](uint32_t) {
      photinus::wake(own().page->futex);
      on_loss();
    });
}

std::string ShmPeers::who(uint32_t rank) const {
  const Peer& peer = local_.peers[rank];
  if (peer.pid <= 0) return text("rank %u (in another container on %s)", rank, peer.host.c_str());
  return text("rank %u (pid %d on %s)", rank, peer.pid, peer.host.c_str());
}

bool ShmPeers::is_lost(uint32_t rank) const {
  return rank != rank_ && watch_ && watch_->is_lost(rank);
}

std::string ShmPeers::how_it_went(uint32_t rank) const {
  return watch_->how(rank);
}

std::string ShmPeers::what_holds(uint32_t rank) const {
  return photinus::what_holds(local_.peers[rank].pid);
}

uint64_t ShmPeers::place(const void* buffer, uint64_t bytes) const {
  return arena_->offset(buffer, bytes).value_or(kNowhere);
}

void ShmPeers::advance(Counter counter, uint64_t to) {
  own().block->counter(counter).store(to, std::memory_order_seq_cst);
  if (sleepers_->load(std::memory_order_seq_cst) == 0) return;
  for (uint32_t rank = 0; rank < ranks(); ++rank)
    if (rank != rank_) wake_if_asleep(rank);
}

void ShmPeers::show(uint32_t peer, Offer&) {
  wake_if_asleep(peer);
}

void ShmPeers::wake_if_asleep(uint32_t rank) {
  if (views_[rank].block->asleep.load(std::memory_order_seq_cst)) wake(rank);
}

void ShmPeers::set_reason(const std::string& reason) {
  std::lock_guard lock(writing_reason_);
  own().block->reason.write(reason);
}

// Presence before waking: whoever wakes up must see why.
void ShmPeers::end(Presence how, uint32_t culprit, bool in_deadlock) {
  if (!ended_.exchange(true)) {
    own().block->culprit.store(culprit, std::memory_order_release);
    own().block->in_deadlock.store(in_deadlock, std::memory_order_release);
    own().block->presence.store(how, std::memory_order_seq_cst);
  }
  for (uint32_t rank = 0; rank < ranks(); ++rank) wake(rank);
}

void ShmPeers::announce_sleep() {
  sleepers_->fetch_add(1, std::memory_order_seq_cst);
  own().block->asleep.fetch_add(1, std::memory_order_seq_cst);
}

void ShmPeers::end_sleep() {
  own().block->asleep.fetch_sub(1, std::memory_order_seq_cst);
  sleepers_->fetch_sub(1, std::memory_order_seq_cst);
}

void ShmPeers::close() {
  if (watch_) watch_->stop();
  // Closing the lifeline tells peers that are not looking at the shared memory.
  local_.own_lifeline.reset();
  for (Peer& peer : local_.peers) {
    peer.lifeline.reset();
    peer.process.reset();
  }
}

}  // namespace photinus
