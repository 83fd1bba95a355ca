#include "collectives/choose.h"

#include <algorithm>

#include "collectives/shm.h"

namespace photinus {
namespace {

// Flat reads every rank's tensor on every rank; past this many bytes per rank the extra exchange of another
// algorithm costs less than the reading.
constexpr uint64_t kFlatReadBytes = 128 << 10;
constexpr uint64_t kAlwaysFlatBytes = 4 << 10;

uint64_t input_bytes(const Call& call, uint32_t ranks) {
  const uint64_t bytes = call.elems * size_bytes(call.dtype);
  return call.operation == Operation::reduce_scatter ? bytes * ranks : bytes;
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

Plan shm_plan(const Call& call, Seat seat, Algorithm algorithm, const SlotSizes& sizes) {
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
