#include "collectives/cost.h"

#include <algorithm>
#include <cmath>

namespace photinus {
namespace {

double seconds_per_byte(const Model& model) {
  return (1 + model.header_bytes / model.payload_bytes) * 8e-9 / model.rate_gbit;
}

double hop_s(const Model& model) {
  return (model.latency_us + model.send_us + model.receive_us) * 1e-6;
}

struct Cost {
  double fixed_s = 0, core_s = 0, card_s = 0;  // waits and latencies; of the busiest rank; of a host
};

// What a rank has to do for the ranks of its host, of a tensor of which it holds `bytes`: the table of
// docs/engine-internals.md, Algorithms and costs.
Cost cost_on_host(const Model& model, const Call& call, double ranks, double bytes, Algorithm algorithm,
                  const SlotSizes& sizes) {
  const bool reduces = has_reduction(call.operation);
  const double combine = (reduces ? model.add_ns : model.copy_ns) * 1e-9, copy = model.copy_ns * 1e-9;
  const double counter = model.counter_us * 1e-6;
  if (algorithm == Algorithm::flat) return {counter, bytes * (copy + (reduces ? ranks : 1) * combine), 0};
  if (algorithm == Algorithm::arena)  // where they reduce, each adds its slice of all and writes it into all
    return {2 * counter, bytes * (reduces ? (1 - 1 / ranks) * (combine + copy) : copy), 0};
  const double chunks = std::ceil(bytes / static_cast<double>(sizes.chunk_bytes));
  return {(2 + chunks) * counter, bytes * (combine + 2 * (1 - 1 / ranks) * copy), 0};
}

// How much of a tensor is under way together: slots hold all slices of a ring of chunks.
double chunk_bytes(double bytes, const Levels& levels, const SlotSizes& sizes, const NetSizes& net) {
  const double ring = 4 + 2 * static_cast<double>(levels.sizes.size());
  const auto slices = static_cast<double>(levels.slices());
  const auto slice = static_cast<double>(longest_slice(net, levels, static_cast<uint64_t>(bytes / slices)));
  const double chunk = std::min(slice, static_cast<double>(net.landing_bytes) / (2 * ring)) * slices;
  return slices > 1 ? std::min(chunk, static_cast<double>(sizes.chunks * sizes.chunk_bytes) / ring) : chunk;
}

Cost cost_between_hosts(const Model& model, const Call& call, const Levels& levels, double bytes, bool flat,
                        const SlotSizes& sizes, const NetSizes& net) {
  const auto hosts = static_cast<double>(levels.hosts.size()), slices = static_cast<double>(levels.slices());
  const bool parts = call.operation == Operation::all_gather || call.operation == Operation::reduce_scatter;
  const double rounds = flat || parts || call.operation == Operation::barrier ? 1 : 2;
  double peers = 0;
  for (const uint32_t size : levels.sizes) peers += size - 1;
  // Whole tensors to everyone in a level, or each byte once on the way up and once down.
  const double crosses = flat && !parts ? bytes * peers : rounds * bytes * (hosts - 1) / hosts;
  const double per_rank = flat ? crosses : crosses / slices;
  const double chunks = flat ? 1 : std::max(1.0, std::ceil(bytes / chunk_bytes(bytes, levels, sizes, net)));
  const double adds = has_reduction(call.operation) ? per_rank / rounds * model.add_ns * 1e-9 : 0;
  // Of small frames cards carry little but headers.
  const double told = slices * peers * (static_cast<double>(kToldBytes) + (1 + rounds) * model.header_bytes) *
                      8e-9 / model.rate_gbit;
  const double frame = (model.send_us + model.receive_us) * 1e-6;
  return {rounds * static_cast<double>(levels.sizes.size()) * model.latency_us * 1e-6 +
              rounds * peers * frame + told,
          rounds * peers * frame * (chunks - 1) + per_rank * 2 * model.socket_ns * 1e-9 + adds,
          crosses * seconds_per_byte(model)};
}

}  // namespace

Model model_of(const Speeds& speeds) {
  Model model;
  if (speeds.latency_s > 0) model.latency_us = speeds.latency_s * 1e6;
  // What was measured is payload; the model adds headers to it.
  if (speeds.bytes_per_s > 0)
    model.rate_gbit = speeds.bytes_per_s * 8e-9 * (1 + model.header_bytes / model.payload_bytes);
  return model;
}

double predicted_s(const Model& model, const Call& call, const Levels& levels, Algorithm algorithm,
                   const SlotSizes& sizes, const NetSizes& net) {
  const bool parts = call.operation == Operation::all_gather || call.operation == Operation::reduce_scatter;
  const double bytes =
      static_cast<double>(call.elems * size_bytes(call.dtype)) * (parts ? levels.ranks() : 1);
  Cost all{model.call_us * 1e-6};
  auto add = [&](const Cost& cost) {
    all.fixed_s += cost.fixed_s;
    all.core_s += cost.core_s;
    all.card_s += cost.card_s;
  };
  const bool flat = algorithm == Algorithm::flat;
  const uint32_t locals = levels.slices();
  if (locals > 1) add(cost_on_host(model, call, locals, bytes, algorithm, sizes));
  if (!levels.sizes.empty()) add(cost_between_hosts(model, call, levels, bytes, flat, sizes, net));
  if (model.cores > 0) all.core_s *= std::max(1.0, locals / model.cores);
  // A small tensor is one chunk: nothing of it is sent while it is added.
  return all.fixed_s + (flat ? all.core_s + all.card_s : std::max(all.core_s, all.card_s));
}

double least_s(const Model& model, uint32_t hosts, double bytes) {
  return 2 * (hosts - 1.0) / hosts * bytes * seconds_per_byte(model);
}

double ring_s(const Model& model, uint32_t hosts, double bytes) {
  return least_s(model, hosts, bytes) + 2 * (hosts - 1.0) * hop_s(model);
}

// Each host sends and receives the tensor twice but for two hosts, which exchange halves, and three. A chunk
// is halved, passes up a tree and back down; one chunk is behind the other.
double double_tree_s(const Model& model, uint32_t hosts, double bytes) {
  if (hosts < 2) return 0;
  const double times = hosts == 2 ? 1 : hosts == 3 ? 1.5 : 2;
  const double wire = times * bytes * seconds_per_byte(model);
  const double hops = 2 * std::ceil(std::log2(hosts));
  // (hops + m - 1) (hop + wire / m) is least at this m.
  const double chunks = std::max(1.0, std::sqrt((hops - 1) * wire / hop_s(model)));
  return (hops + chunks - 1) * (hop_s(model) + wire / chunks);
}

}  // namespace photinus
