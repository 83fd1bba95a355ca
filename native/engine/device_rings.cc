#include "engine/device_rings.h"

#include <algorithm>
#include <limits>

#include "base/cores.h"
#include "base/error.h"

namespace photinus {

void DeviceRings::use(const std::shared_ptr<cuda::CudaDevice>& device) {
  if (device_ == device) return;
  if (!threads_) {
    const auto ranks = static_cast<uint32_t>(peers_->locals().size());
    threads_.emplace(helpers_.value_or(ReduceThreads::spare(static_cast<uint32_t>(usable_cores()), ranks)));
  }
  unlock();
  poll();
  device_ = device;
  const PeerView& own = peers_->own();
  for (std::byte* ring : {own.landing_ring, own.result_ring})
    device->engines.add_memory(std::shared_ptr<std::byte>(peers_, ring), sizes_.bytes());
}

void DeviceRings::unlock() {
  if (!device_) return;
  const PeerView& own = peers_->own();
  for (std::byte* ring : {own.landing_ring, own.result_ring}) device_->engines.remove_memory(ring);
  device_.reset();
}

std::byte* DeviceRings::result(uint64_t offset_bytes) const {
  const uint64_t chunk = first_ + offset_bytes / sizes_.chunk_bytes;
  return peers_->own().result_ring + chunk % sizes_.chunks * sizes_.chunk_bytes +
         offset_bytes % sizes_.chunk_bytes;
}

bool DeviceRings::has_room(uint32_t rank, uint64_t chunk) const {
  return peers_->value(rank, Counter::returned) + sizes_.chunks > first_ + chunk;
}

bool DeviceRings::has_room(uint64_t chunk) const {
  const auto& ranks = peers_->locals();
  return std::all_of(ranks.begin(), ranks.end(), [&](uint32_t rank) { return has_room(rank, chunk); });
}

void DeviceRings::let_go(uint64_t chunk, uint64_t ticket) {
  returns_.push_back({first_ + chunk + 1, ticket});
}

void DeviceRings::poll() {
  uint64_t count = 0;
  while (!returns_.empty()) {
    const auto [next, ticket] = returns_.front();
    if (ticket != 0 && device_ && !device_->engines.poll(ticket)) break;
    count = next;
    returns_.pop_front();
  }
  if (count > 0) peers_->advance(Counter::returned, count);
}

double DeviceRings::nap_s() const {
  return returns_.empty() ? std::numeric_limits<double>::infinity()
                          : device_->engines.nap_s(returns_.front().ticket);
}

}  // namespace photinus
