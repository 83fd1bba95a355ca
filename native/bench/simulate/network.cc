#include "simulate/network.h"

#include <cmath>

namespace photinus::simulate {

Network::Network(const Model& model, std::vector<uint32_t> host_of_rank, uint32_t hosts)
    : model_(model),
      host_of_rank_(std::move(host_of_rank)),
      burst_(time_of(model.burst_bytes * 8e-9 / model.rate_gbit)),
      out_(hosts),
      in_(hosts) {
  if (model_.leaf_hosts == 0) return;
  up_.resize(static_cast<size_t>(std::ceil(hosts / model_.leaf_hosts)));
  down_.resize(up_.size());
}

size_t Network::leaf(uint32_t rank) const {
  return static_cast<size_t>(host_of(rank) / model_.leaf_hosts);
}

Time Network::busiest(const std::vector<Pipe>& pipes) {
  Time most = 0;
  for (const Pipe& pipe : pipes) most = std::max(most, pipe.busy);
  return most;
}

uint64_t Network::sent_bytes() const {
  uint64_t most = 0;
  for (const Pipe& card : out_) most = std::max(most, card.bytes);
  return most;
}

uint64_t Network::received_bytes() const {
  uint64_t most = 0;
  for (const Pipe& card : in_) most = std::max(most, card.bytes);
  return most;
}

Time Network::wire(uint64_t bytes) const {
  const double packets = std::ceil(static_cast<double>(bytes) / model_.payload_bytes);
  const double all = static_cast<double>(bytes) + packets * model_.header_bytes;
  return time_of(all * 8e-9 / model_.rate_gbit);
}

Time Network::latency(const Event& event) const {
  double seconds = model_.latency_us * 1e-6;
  if (model_.jitter_us >
      0) {  // drawn from who sends what when, not from the order in which events are looked at
    uint64_t x = static_cast<uint64_t>(model_.seed) * 0x9e3779b97f4a7c15 + event.at;
    for (const uint64_t part : {uint64_t{event.from} << 32 | event.to, uint64_t{event.link}, event.bytes}) {
      x = (x ^ part) * 0xff51afd7ed558ccd;
      x ^= x >> 33;
    }
    seconds -= model_.jitter_us * 1e-6 * std::log((static_cast<double>(x >> 11) + 0.5) * 0x1p-53);
  }
  return time_of(seconds);
}

Event Network::pass(Event event) {
  if (event.kind == Event::Kind::rise) return cross(event, up_[leaf(event.from)], Event::Kind::fall, 0);
  if (event.kind == Event::Kind::fall)
    return cross(event, down_[leaf(event.to)], Event::Kind::enter, latency(event));
  Pipe& card = out_[host_of(event.from)];
  card.bytes += event.frame_bytes();
  const Time needs = wire(event.bytes), through = card.take(event.at, needs, burst_);
  event.at = std::max(event.at, through - std::min(through, needs));  // when its first byte leaves
  const bool crosses = !up_.empty() && leaf(event.from) != leaf(event.to);
  event.kind = crosses ? Event::Kind::rise : Event::Kind::enter;
  if (!crosses) event.at += latency(event);
  return event;
}

Event Network::cross(Event event, Pipe& pipe, Event::Kind next, Time more) const {
  const double share = model_.oversubscription / model_.leaf_hosts;
  const auto needs = static_cast<Time>(static_cast<double>(wire(event.bytes)) * share);
  event.at = pipe.take(event.at, needs) - needs + more;
  event.kind = next;
  return event;
}

Time Network::enter(const Event& event) {
  Pipe& card = in_[host_of(event.to)];
  card.bytes += event.frame_bytes();
  return card.take(event.at, wire(event.bytes), burst_);
}

}  // namespace photinus::simulate
