#include "engine/group.h"

#include <unistd.h>

#include <algorithm>

#include "collectives/shm.h"

namespace photinus {
namespace {

constexpr size_t kPlansKept = 64;
constexpr uint32_t kRanksLimit = 1024;

uint64_t page_up(uint64_t bytes) {
  return (bytes + 4095) / 4096 * 4096;
}

GroupOptions checked(GroupOptions options) {
  if (options.world_size < 1 || options.world_size > kRanksLimit || options.rank >= options.world_size)
    throw Error(ErrorKind::invalid_argument, text("rank %u of %u: needs 0 <= rank < world_size <= %u",
                                                  options.rank, options.world_size, kRanksLimit));
  // A chunk holds a cache line for each rank; that is a need of the plans, not of the user.
  options.sizes.chunk_bytes = std::max<uint64_t>(options.sizes.chunk_bytes, options.world_size * kLineBytes);
  if (options.sizes.chunks < 3 || options.sizes.chunk_bytes % kLineBytes ||
      options.sizes.flat_bytes % kLineBytes)
    throw Error(
        ErrorKind::invalid_argument,
        text("slots of %u chunks of %llu bytes, flat slots of %llu: needs at least 3 chunks, and whole cache "
             "lines of %llu bytes",
             options.sizes.chunks, static_cast<unsigned long long>(options.sizes.chunk_bytes),
             static_cast<unsigned long long>(options.sizes.flat_bytes),
             static_cast<unsigned long long>(kLineBytes)));
  if (!options.progress) options.progress = Progress::of_this_process();
  return options;
}

// FNV-1a; all ranks have the same address.
uint64_t id_of(const std::string& address, uint64_t fallback) {
  uint64_t hash = 0xcbf29ce484222325;
  for (char c : address) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return address.empty() ? fallback : hash | 1;
}

}  // namespace

Group::Group(const GroupOptions& given) : options(checked(given)), owner(getpid()) {
  const uint64_t mailbox_bytes = page_up(Mailbox::bytes(ranks()));
  const uint64_t channel_bytes = page_up(Channels::bytes(ranks()));
  const uint64_t slot_bytes = Memory::slot_bytes(options.sizes) * ranks();
  const std::shared_ptr<Arena>& arena = options.progress->arena();
  const SlotSizes& sizes = options.sizes;
  const Layout layout{mailbox_bytes + channel_bytes + slot_bytes,
                      (sizes.flat_bytes * 1000003 + sizes.chunk_bytes) * 1000003 + sizes.chunks};
  local = join_local_group(rank(), ranks(), options.address, options.name, layout, arena,
                           Deadline::in(options.limits.timeout_s), options.limits.waiting_s);
  id = id_of(options.address, arena->page().id.load());
  std::vector<Futex*> futexes;
  for (uint32_t r = 0; r < ranks(); ++r) futexes.push_back(&page(r).futex);
  mailbox = std::make_shared<Mailbox>(local.shared, rank(), std::move(futexes));
  channels = std::make_unique<Channels>(local.shared->base() + mailbox_bytes, ranks());
  memory.sizes = options.sizes;
  memory.slots = local.shared->base() + mailbox_bytes + channel_bytes;
  for (const Peer& peer : local.peers) {
    memory.arena_bases.push_back(peer.arena->base());
    options.progress->processes().add(peer.arena, who(peer.rank));
  }
  mailbox->own().presence.store(Presence::active, std::memory_order_release);
  if (ranks() > 1)
    watch = std::make_unique<PeerWatch>(local.peers, *mailbox, arena->page().heartbeat,
                                        [arena](uint32_t) { wake(arena->page().futex); });
}

Group::~Group() {
  if (watch) watch->stop();
}

std::string Group::who(uint32_t of) const {
  const Peer& peer = local.peers[of];
  if (peer.pid <= 0) return text("rank %u (in another container on %s)", of, peer.host.c_str());
  return text("rank %u (pid %d on %s)", of, peer.pid, peer.host.c_str());
}

uint64_t Group::place(const void* buffer, uint64_t bytes) const {
  return options.progress->arena()->offset(buffer, bytes).value_or(kNowhere);
}

const Plan& Group::plan(const Call& call, Algorithm algorithm) {
  const auto key =
      std::make_tuple(call.operation, call.dtype, call.reduction, call.root, call.elems, algorithm);
  auto found = plans_.find(key);
  if (found != plans_.end()) return found->second;
  if (plans_.size() >= kPlansKept) plans_.clear();
  return plans_.emplace(key, shm_plan(call, {rank(), ranks()}, algorithm, options.sizes)).first->second;
}

void Group::fail(const std::exception_ptr& error, const std::string& reason, uint32_t culprit) {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = error;
  }
  failed_.store(true, std::memory_order_release);
  mailbox->own().culprit.store(culprit, std::memory_order_release);
  mailbox->set_reason(reason);
  // Presence before ringing: whoever wakes up must see why.
  Presence active = Presence::active;
  mailbox->own().presence.compare_exchange_strong(active, Presence::failed);
  mailbox->wake_all();
}

void Group::ended_with(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& lost) {
    fail(error, lost.what(), lost.rank);
  } catch (const Deadlock& stuck) {
    mailbox->own().in_deadlock.store(true, std::memory_order_release);
    fail(error, stuck.what());
  } catch (const Error& other) {
    // Ranks that disagree about one call are still in step; everything else leaves them apart.
    if (other.kind() != ErrorKind::mismatch) fail(error, other.what());
  } catch (const std::exception& other) {  // memory ran out
    fail(error, other.what());
  }
}

void Group::abort(const std::string& reason) {
  const std::string full = "aborted on " + who(rank()) + ": " + reason;
  {
    std::lock_guard lock(mutex_);
    if (ended_.load()) return;
    end_reason_ = full;
  }
  fail(std::make_exception_ptr(Error(ErrorKind::aborted, full)), full);
  ended_.store(true, std::memory_order_release);
  mailbox->wake_all();
}

void Group::leave(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (!ended_.load()) end_reason_ = reason;
  }
  ended_.store(true, std::memory_order_release);
  Presence active = Presence::active;
  mailbox->own().presence.compare_exchange_strong(active, Presence::left);
  mailbox->wake_all();
}

std::exception_ptr Group::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Group::check(const std::string& description) const {
  if (failed_.load(std::memory_order_acquire)) std::rethrow_exception(failure());
  if (!ended_.load(std::memory_order_acquire)) return;
  std::lock_guard lock(mutex_);
  throw Error(ErrorKind::aborted, description + ": " + end_reason_);
}

}  // namespace photinus
