#include "engine/group.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/clock.h"
#include "base/hash.h"
#include "device/host.h"
#include "shm/shm_peers.h"

namespace photinus {
namespace {

constexpr uint32_t kRanksLimit = 1024;
std::optional<Levels> levels_among(const GroupOptions& options) {
  std::vector<std::string> hosts;
  for (const HostPlace& place : options.places) hosts.push_back(place.host_key);
  if (std::all_of(hosts.begin(), hosts.end(), [&](const auto& host) { return host == hosts[0]; }))
    return std::nullopt;
  return levels_of(hosts);
}

GroupOptions checked(GroupOptions options) {
  if (options.world_size < 1 || options.world_size > kRanksLimit || options.rank >= options.world_size)
    throw Error(ErrorKind::invalid_argument, text("rank %u of %u: needs 0 <= rank < world_size <= %u",
                                                  options.rank, options.world_size, kRanksLimit));
  if (!options.places.empty() && options.places.size() != options.world_size)
    throw Error(ErrorKind::invalid_argument, text("places of %zu ranks were given for a group of %u",
                                                  options.places.size(), options.world_size));
  options.sizes =
      sizes_for(options.sizes, options.world_size, !options.peers && levels_among(options).has_value());
  if (options.sizes.chunks < 3 || options.sizes.chunk_bytes % kLineBytes ||
      options.sizes.flat_bytes % kLineBytes)
    throw Error(
        ErrorKind::invalid_argument,
        text("slots of %u chunks of %llu bytes, flat slots of %llu: needs at least 3 chunks, and whole cache "
             "lines of %llu bytes",
             options.sizes.chunks, static_cast<unsigned long long>(options.sizes.chunk_bytes),
             static_cast<unsigned long long>(options.sizes.flat_bytes),
             static_cast<unsigned long long>(kLineBytes)));
  // A place in the rings for GPUs holds a cache line for each rank, too.
  DeviceSizes& rings = options.device_sizes;
  rings.chunk_bytes = std::max<uint64_t>(rings.chunk_bytes, options.world_size * kLineBytes);
  if (rings.chunks < 2 || rings.chunks % 2 || rings.bytes() % 4096 || rings.chunk_bytes % kLineBytes)
    throw Error(
        ErrorKind::invalid_argument,
        text("rings for GPUs of %u chunks of %llu bytes: needs an even number of whole cache lines, and "
             "whole pages in all",
             rings.chunks, static_cast<unsigned long long>(rings.chunk_bytes)));
  if (!options.progress) options.progress = Progress::of_this_process();
  if (!options.device) options.device = host::device();
  return options;
}

// All ranks have the same address.
uint64_t id_of(const std::string& address, uint64_t fallback) {
  return address.empty() ? fallback : fnv1a(address);
}

std::shared_ptr<Peers> meet(const GroupOptions& options, const std::optional<Levels>& levels) {
  const SlotSizes& sizes = options.sizes;
  const DeviceSizes& rings = options.device_sizes;
  uint64_t settings = 0;
  for (const uint64_t size : {sizes.flat_bytes, sizes.chunk_bytes, uint64_t{sizes.chunks}, rings.chunk_bytes,
                              uint64_t{rings.chunks}})
    settings = settings * 1000003 + size;
  const ShmPeers::Options ranks{options.rank,
                                options.world_size,
                                options.address,
                                options.name,
                                sizes.bytes(),
                                settings,
                                options.limits.timeout_s,
                                options.limits.waiting_s,
                                options.progress->arena(),
                                rings.bytes()};
  if (!levels) return std::make_shared<ShmPeers>(ranks);
  std::vector<uint32_t> counterparts;
  for (size_t level = 0; level < levels->sizes.size(); ++level)
    for (const uint32_t rank : levels->counterparts(options.rank, level)) counterparts.push_back(rank);
  return std::make_shared<NetPeers>(
      NetPeers::Options{ranks, options.places, counterparts, options.job, options.attempt, options.network,
                        &options.progress->processes(), options.limits.grace_s});
}

}  // namespace

Group::Group(const GroupOptions& given)
    : options(checked(given)),
      owner(getpid()),
      levels(levels_among(options)),
      peers(options.peers ? options.peers : meet(options, levels)),
      id(id_of(options.address, peers->own().page->id.load())) {
  for (const uint32_t rank : peers->locals())
    options.progress->processes().add((*peers)[rank].page, peers->who(rank));
}

void Group::fail(const Error& error, uint32_t culprit, bool in_deadlock) {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_.emplace(error);
  }
  failed_.store(true, std::memory_order_release);
  peers->set_reason(error.what());
  peers->end(Presence::failed, culprit, in_deadlock);
}

void Group::keep_error() {
  try {
    throw;
  } catch (const PeerLost& lost) {
    fail(lost, lost.rank);
  } catch (const Deadlock& deadlock) {
    fail(deadlock, kOwnFault, true);
  } catch (const Error& other) {
    // Ranks that disagree about one call are still in step; everything else leaves them apart.
    if (other.kind() != ErrorKind::mismatch) fail(other);
  } catch (const std::exception& other) {  // memory ran out
    fail(Error(ErrorKind::system, other.what()));
  }
}

void Group::abort(const std::string& reason) {
  const std::string full = "aborted on " + peers->who(rank()) + ": " + reason;
  {
    std::lock_guard lock(mutex_);
    if (ended_.load()) return;
    end_reason_ = full;
  }
  fail(Error(ErrorKind::aborted, full));
  ended_.store(true, std::memory_order_release);
  peers->wake(rank());
}

void Group::leave(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (!ended_.load()) end_reason_ = reason;
  }
  ended_.store(true, std::memory_order_release);
  peers->end(Presence::left, kOwnFault, false);
}

void Group::keep(const std::shared_ptr<Failure>& failure) {
  std::lock_guard lock(mutex_);
  failures_.push_back(failure);
  has_failures_.store(true, std::memory_order_release);
}

std::optional<Error> Group::take_failure(bool of_dropped) {
  std::lock_guard lock(mutex_);
  // What ends the group ends all that is in flight: once is enough.
  auto ends_group = [&](const auto& failure) {
    const Error& error = failure->error;
    return failure_ && (error.kind() != ErrorKind::mismatch || !std::strcmp(error.what(), failure_->what()));
  };
  for (const auto& failure : failures_) is_failure_seen_ |= failure->seen && ends_group(failure);
  // Who closes or aborts a group knows it.
  std::erase_if(failures_, [&](const auto& failure) {
    return failure->seen || failure->error.kind() == ErrorKind::aborted ||
           (is_failure_seen_ && ends_group(failure));
  });
  const auto rest = std::stable_partition(failures_.begin(), failures_.end(), [&](const auto& failure) {
    return of_dropped && failure.use_count() > 1;
  });
  std::optional<Error> taken;
  if (rest != failures_.end()) {
    const Error& first = (*rest)->error;
    std::string what =
        text("[rank %u, group %s] nobody has waited for a call that failed: ", rank(), options.name.c_str()) +
        first.what();
    if (failures_.end() - rest > 1) what += text(" (%td more failed.)", failures_.end() - rest - 1);
    taken.emplace(first.kind(), what);
    is_failure_seen_ |= std::any_of(rest, failures_.end(), ends_group);
    failures_.erase(rest, failures_.end());
  }
  has_failures_.store(!failures_.empty(), std::memory_order_release);
  return taken;
}

PeerLost Group::given_up_by(uint32_t rank, const std::string& description) const {
  const std::string what = peers->who(rank) + " gave up in the middle of " + description;
  const uint32_t culprit = (*peers)[rank].block->culprit.load(std::memory_order_acquire);
  if (culprit != kOwnFault && culprit != this->rank()) {
    auto said_nothing = [&] { return peers->presence(culprit) == Presence::active; };
    const Deadline patience = Deadline::in(kRootCausePatience_s + peers->transit_s());
    bool lost = false;  // read before its presence: a rank that gives up and then ends gave up
    while (!(lost = peers->is_lost(culprit)) && said_nothing() && !patience.passed())
      if (!peers->poll()) usleep(200);
    if (lost && said_nothing())
      return PeerLost(culprit, peers->who(culprit) + " " + peers->how_it_went(culprit) + ", and so " + what +
                                   ". Its own output says more; restart the job to go on from the last "
                                   "checkpoint.");
  }
  const std::string reason = peers->reason(rank);
  return PeerLost(rank, what + ": " + (reason.empty() ? "it has left the group" : reason));
}

Error Group::of_copy(const Error& error, const std::string& description) const {
  return Error(error.kind(), description + " on " + peers->who(rank()) + ": " + error.what());
}

void Group::retire(const std::shared_ptr<Group>& group) {
  static std::mutex mutex;
  static auto* retired = new std::vector<std::shared_ptr<Group>>;
  std::lock_guard lock(mutex);
  retired->push_back(group);
}

void Group::check(const std::string& description) const {
  if (!is_over()) return;
  std::lock_guard lock(mutex_);
  if (failure_) throw Error(*failure_);
  throw Error(ErrorKind::aborted, description + ": " + end_reason_);
}

}  // namespace photinus
