#include "collectives/choose.h"

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "collectives/shm.h"
#include "kernels/reduce.h"

namespace photinus {
namespace {

// Flat reads every rank's tensor on every rank; past this many bytes per rank the extra exchange of another
// algorithm costs less than the reading.
constexpr uint64_t kFlatReadBytes = 128 << 10;
constexpr uint64_t kAlwaysFlatBytes = 4 << 10;
// What a round of frames costs beside the latency: calls and wakings on both ends.
constexpr double kRound_s = 40e-6;
// What a rank moves through its sockets, at most.
constexpr double kRankBytes_s = 2e9;
constexpr uint64_t kLeastRoundBytes = 8 << 10;
// Larger ones are better added while they come, chunk by chunk.
constexpr uint64_t kAloneBytes = 256 << 10;

uint64_t input_bytes(const Call& call, uint32_t ranks) {
  const uint64_t bytes = call.elems * size_bytes(call.dtype);
  return call.operation == Operation::reduce_scatter ? bytes * ranks : bytes;
}

// What a host could send while a round lasts.
uint64_t round_bytes(const NetSizes& net, uint32_t slices) {
  const double bytes_per_s = std::min(net.bytes_per_s, kRankBytes_s * slices);
  return std::max(kLeastRoundBytes, static_cast<uint64_t>(bytes_per_s * (kRound_s + net.latency_s)));
}

}  // namespace

bool is_flat(const Call& call, uint32_t ranks, const SlotSizes& sizes) {
  const uint64_t bytes = input_bytes(call, ranks);
  return bytes <= std::min(kAlwaysFlatBytes, sizes.flat_bytes) ||
         (bytes <= sizes.flat_bytes && bytes * ranks <= kFlatReadBytes);
}

Choice choose(const Call& call, const std::vector<CallDescriptor>& descriptors, const SlotSizes& sizes) {
  const auto ranks = static_cast<uint32_t>(descriptors.size());
  if (is_flat(call, ranks, sizes))
    return {Algorithm::flat, "small: one exchange costs less than sharing the work"};
  auto all = [&](auto&& holds) { return std::all_of(descriptors.begin(), descriptors.end(), holds); };
  const bool sends = all([](const CallDescriptor& d) { return d.send_offset != kNowhere; });
  const bool recvs = all([](const CallDescriptor& d) { return d.recv_offset != kNowhere; });
  bool reachable = false;
  switch (call.operation) {
    case Operation::all_reduce:
      reachable = sends && recvs;
      break;
    case Operation::broadcast:
      reachable = descriptors[call.root].send_offset != kNowhere;
      break;
    case Operation::all_gather:
    case Operation::reduce_scatter:
      reachable = sends;
      break;
    case Operation::reduce:
      reachable = sends && descriptors[call.root].recv_offset != kNowhere;
      break;
    default:
      reachable = true;
      break;
  }
  if (reachable) return {Algorithm::arena, "all tensors that peers read or write lie in arenas"};
  return {Algorithm::staged, "a tensor lies in ordinary memory"};
}

// Flat saves a round in each level. all_reduce, reduce and broadcast pay with bytes: in a level of r hosts a
// host sends the tensor r-1 times, against not quite twice over all levels. all_gather pays with a copy of
// all that comes; reduce_scatter with none.
bool is_flat(const Call& call, const Levels& levels, const SlotSizes& sizes, const NetSizes& net) {
  const uint64_t ranks = levels.ranks(), bytes = input_bytes(call, levels.ranks());
  if (call.operation == Operation::reduce_scatter) return bytes <= sizes.flat_bytes;
  if (call.operation == Operation::all_gather) return bytes * ranks <= kFlatReadBytes;
  uint64_t more = 0;  // bytes that a host sends beyond one tensor
  for (const uint32_t size : levels.sizes) more += (size - 1) * bytes;
  more -= std::min(more, bytes);
  // Where each host has one rank, nothing passes through the flat slot.
  const uint64_t most = levels.slices() == 1 ? kAloneBytes : sizes.flat_bytes;
  return bytes <= std::min(most, sizes.chunks * sizes.chunk_bytes) &&
         more <= round_bytes(net, levels.slices()) * levels.sizes.size() && fits_flat(call, levels, net);
}

Choice choose(const Call& call, const Levels& levels, uint32_t rank,
              const std::vector<CallDescriptor>& descriptors, const SlotSizes& sizes, const NetSizes& net) {
  if (is_flat(call, levels, sizes, net))
    return {Algorithm::flat, "small: one round a level costs less than sending less"};
  const auto& locals = levels.hosts[levels.host_of(rank)];
  if (locals.size() == 1) return {Algorithm::staged, "a host's only rank shares its part with nobody"};
  auto sends = [&](uint32_t local) { return descriptors[local].send_offset != kNowhere; };
  auto recvs = [&](uint32_t local) { return descriptors[local].recv_offset != kNowhere; };
  const bool all_send = std::all_of(locals.begin(), locals.end(), sends);
  const bool all_recv = std::all_of(locals.begin(), locals.end(), recvs);
  const bool has_root = levels.host_of(call.root) == levels.host_of(rank);
  bool reachable = false;
  switch (call.operation) {
    case Operation::all_reduce:
      reachable = all_send && all_recv;
      break;
    case Operation::broadcast:
      reachable = has_root ? sends(call.root) : all_recv;
      break;
    case Operation::all_gather:
      reachable = all_recv;
      break;
    case Operation::reduce_scatter:
      reachable = all_send;
      break;
    case Operation::reduce:
      reachable = all_send && (!has_root || recvs(call.root));
      break;
    default:
      reachable = true;
      break;
  }
  if (reachable)
    return {Algorithm::arena,
            "all tensors that ranks of this host read or write of each other lie in arenas"};
  return {Algorithm::staged, "a tensor lies in ordinary memory on this host"};
}

namespace {

// Sizes by which lists are compared, and from which gain on another one is taken than that which the number
// of hosts says: what is measured is not the same twice.
constexpr uint64_t kComparedBytes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20};
constexpr double kGain = 1.05;

void cut(uint32_t size, bool last, const std::vector<uint32_t>& before,
         std::vector<std::vector<uint32_t>>& lists) {
  auto with = [&](uint32_t next) {
    std::vector<uint32_t> list = before;
    list.push_back(next);
    return list;
  };
  if (last || std::has_single_bit(size)) lists.push_back(with(size));
  for (uint32_t first = size / 2; first >= 2; --first)
    if (std::has_single_bit(first) && size % first == 0) cut(size / first, last, with(first), lists);
}

Algorithm likely_algorithm(const Call& call, const Levels& levels, uint32_t rank, bool in_arena,
                           const SlotSizes& sizes, const NetSizes& net, const char*& reason) {
  std::vector<CallDescriptor> descriptors(levels.ranks());
  for (CallDescriptor& d : descriptors) d.send_offset = d.recv_offset = in_arena ? 0 : kNowhere;
  const Choice choice = levels.sizes.empty() ? choose(call, descriptors, sizes)
                                             : choose(call, levels, rank, descriptors, sizes, net);
  reason = choice.reason;
  return choice.algorithm;
}

}  // namespace

std::vector<std::vector<uint32_t>> finer_lists(const std::vector<uint32_t>& sizes) {
  std::vector<std::vector<uint32_t>> lists{{}};
  for (size_t level = 0; level < sizes.size(); ++level) {
    std::vector<std::vector<uint32_t>> longer;
    for (const auto& list : lists) cut(sizes[level], level + 1 == sizes.size(), list, longer);
    lists = std::move(longer);
  }
  return lists;
}

ListChoice choose_list(const Model& model, const Levels& levels, const SlotSizes& sizes,
                       const NetSizes& net) {
  auto seconds = [&](const std::vector<uint32_t>& list, uint64_t bytes) {
    const Levels with{levels.hosts, list};
    const Call call{Operation::all_reduce, Dtype::float32, Reduction::sum, 0, bytes / sizeof(float)};
    const char* why;
    return predicted_s(model, call, with, likely_algorithm(call, with, 0, true, sizes, net, why), sizes, net);
  };
  const auto lists = finer_lists(levels.sizes);
  if (lists.size() == 1) return {levels.sizes, text("the only list for %zu hosts", levels.hosts.size())};
  ListChoice best;
  double least = 0;
  for (const auto& list : lists) {
    double share = 0;
    for (const uint64_t bytes : kComparedBytes)
      share += seconds(list, bytes) / seconds(levels.sizes, bytes) / std::size(kComparedBytes);
    if (!best.sizes.empty() && share >= least) continue;
    best.sizes = list;
    least = share;
  }
  if (least * kGain > 1) return {levels.sizes, "no other list would gain 5 %"};
  best.reason = text("%.0f %% less time than with %s, by the model, in the mean of 4 KiB to 16 MiB",
                     100 * (1 - least), print(levels.sizes).c_str());
  return best;
}

bool is_for(const std::optional<std::vector<uint32_t>>& wish, const Levels& levels) {
  if (!wish || wish->empty()) return false;
  const Levels wished{levels.hosts, *wish};
  return wished.stride(wish->size()) == levels.hosts.size();
}

ListChoice list_for(const Levels& levels, const std::optional<std::vector<uint32_t>>& wish,
                    const Speeds& speeds, const SlotSizes& sizes, const NetSizes& net) {
  if (is_for(wish, levels)) return {*wish, "as asked for"};
  ListChoice choice{levels.sizes, "by the number of hosts"};
  if (speeds.known() && (!wish || !wish->empty())) choice = choose_list(model_of(speeds), levels, sizes, net);
  if (wish && !wish->empty()) choice.reason += "; " + print(*wish) + " is for another number of hosts";
  return choice;
}

Explanation explain(const Call& call, const Levels& levels, uint32_t rank, bool in_arena, const Model& model,
                    const SlotSizes& sizes, const NetSizes& net) {
  const char* reason;
  const Algorithm algorithm = likely_algorithm(call, levels, rank, in_arena, sizes, net, reason);
  return {algorithm, levels.sizes.empty() ? "" : print(levels.sizes), name(best_instruction_set()),
          predicted_s(model, call, levels, algorithm, sizes, net), reason};
}

// Of a rank alone: at most a copy.
static Plan lone_plan(const Call& call, Algorithm algorithm) {
  Plan plan{algorithm, {}, {}};
  const uint64_t bytes = call.elems * size_bytes(call.dtype);
  if (call.operation == Operation::barrier || bytes == 0) return plan;
  plan.after.push_back(computes_alone(call) ? reduce_step({{Place::recv}}, {{Place::send}}, bytes)
                                            : copy_step({Place::recv}, {Place::send}, bytes));
  return plan;
}

Plan shm_plan(const Call& call, Seat seat, Algorithm algorithm, const SlotSizes& sizes) {
  if (seat.ranks == 1) return lone_plan(call, algorithm);
  switch (call.operation) {
    case Operation::all_reduce:
      return shm_all_reduce(call, seat, algorithm, sizes);
    case Operation::reduce:
      return shm_reduce(call, seat, algorithm, sizes);
    case Operation::broadcast:
      return shm_broadcast(call, seat, algorithm, sizes);
    case Operation::all_gather:
      return shm_all_gather(call, seat, algorithm, sizes);
    case Operation::reduce_scatter:
      return shm_reduce_scatter(call, seat, algorithm, sizes);
    default:
      return {};  // barrier: meeting is all there is to it
  }
}

}  // namespace photinus
