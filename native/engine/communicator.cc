#include "engine/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <compare>

#include "base/clock.h"
#include "base/error.h"
#include "collectives/choose.h"
#include "kernels/reduce.h"

namespace photinus {
namespace {

// Bytes that a call reads or writes.
struct Bytes {
  uintptr_t begin, end;
  Bytes(const void* at, uint64_t bytes) : begin(reinterpret_cast<uintptr_t>(at)), end(begin + bytes) {}
  bool overlaps(const Bytes& other) const { return begin < other.end && other.begin < end && begin != end; }
  auto operator<=>(const Bytes&) const = default;
};

constexpr const char* kOverlap =
    "the result overlaps what the call reads. In place are: all_reduce, reduce and broadcast in one buffer; "
    "a reduce_scatter into this rank's own slice of its input; an all_gather from its own slice of the "
    "result; this rank's part for itself. Give any other call a buffer of its own";

constexpr size_t kIdleLanes = 64;
constexpr double kFarewell_s = 1;  // in which calls that nobody waits for may end before the group is left

}  // namespace

std::shared_ptr<Communicator> Communicator::create(const Options& options) {
  best_instruction_set();  // a wrong wish in the environment is found before anybody is met
  return std::shared_ptr<Communicator>(new Communicator(options));
}

Communicator::Communicator(const Options& options)
    : group_(std::make_shared<Group>(options)),
      watchdog_(std::make_shared<Watchdog>(*group_)),
      send_orders_(std::make_shared<SendOrders>()),
      collectives_(std::make_shared<Lane>(group_->peers, group_->levels
                                                             ? SpinTimes::for_hosts()
                                                             : SpinTimes::for_ranks(options.world_size))) {
  send_orders_->orders.resize(options.world_size);
  use(group_->levels ? group_->levels->sizes : std::vector<uint32_t>{}, false);
  if (group_->levels) {
    look_at_hosts();
  } else if (options.world_size > 1 && group_->peers->own().result_ring) {
    state_->memory.device_sizes = group_->options.device_sizes;
    state_->rings = std::make_unique<DeviceRings>(group_->peers, group_->options.device_sizes,
                                                  group_->options.reduce_helpers);
    state_->memory.rings = state_->rings.get();
  }
}

Communicator::~Communicator() {
  if (is_own()) {
    close();
    return;
  }
  // A forked child has copies of everything but the threads; the parent's group is none of its business, and
  // is leaked here, since its destructors would touch what peers see.
  new std::shared_ptr<Group>(group_);
  new std::shared_ptr<CollectiveState>(state_);
}

void Communicator::close() {
  if (!is_own()) return;
  std::vector<std::shared_ptr<Lane>> lanes{collectives_};
  {
    std::unique_lock lock(mutex_);
    if (closing_) {
      closed_changed_.wait(lock, [&] { return closed_; });
      return;
    }
    closing_ = true;
    for (const auto& [key, lane] : messages_) lanes.push_back(lane);
  }
  const Deadline patience = Deadline::in(kFarewell_s);
  for (const auto& lane : lanes)
    while (lane->runs_by_itself() && !group_->is_over() && !patience.passed()) usleep(200);
  group_->leave("the communicator was closed on this rank");
  for (const auto& lane : lanes) group_->options.progress->drain(lane);
  group_->options.progress->release_landed();
  group_->peers->close();
  std::lock_guard lock(mutex_);
  closed_ = true;
  closed_changed_.notify_all();
}

// `what` is put into words only where they are needed.
void Communicator::check_open(const std::function<std::string()>& what) const {
  if (!is_own())
    throw Error(ErrorKind::aborted,
                what() + ": the communicator belongs to the process that forked this one");
  if (closing_)
    throw Error(ErrorKind::aborted,
                what() + " in group " + group_->options.name + ": the communicator is closed");
}

void Communicator::check(const Submission& given) const {
  const Call& call = given.call;
  const uint32_t ranks = group_->ranks();
  auto invalid = [&](const std::string& what) {
    return Error(ErrorKind::invalid_argument, describe(call) + ": " + what);
  };
  if (static_cast<uint8_t>(call.operation) >= kOperationCount ||
      static_cast<uint8_t>(call.dtype) >= kDtypeCount ||
      static_cast<uint8_t>(call.reduction) >= kReductionCount ||
      (call.wire && static_cast<uint8_t>(*call.wire) >= kDtypeCount))
    throw Error(ErrorKind::invalid_argument, "unknown operation, element type or reduction");
  if (call.operation == Operation::send || call.operation == Operation::recv)
    throw invalid("a message is no collective");
  if (has_root(call.operation) && call.root >= ranks)
    throw invalid(text("root %u is not a rank of this group of %u", call.root, ranks));
  auto too_many = [&](uint64_t elems) { return elems > (uint64_t{1} << 48) / ranks; };
  if (has_reduction(call.operation) && !find_reduce(call.dtype, call.reduction, InstructionSet::baseline))
    throw invalid("this reduction means nothing on this element type");
  if (call.wire && !can_cross_as(call, *call.wire))
    throw invalid(
        "nothing crosses so: where all_reduce, reduce and reduce_scatter add or multiply, float32 may cross "
        "between hosts as bfloat16 or float16, and these as float32");
  const bool parts = !given.send_parts.empty() || !given.recv_parts.empty();
  if (parts != takes_parts(call.operation) && !(parts && call.operation == Operation::all_gather))
    throw invalid(parts ? "this collective takes no parts" : "this collective takes one part for each rank");
  uint64_t bytes = call.elems;
  if (call.operation == Operation::reduce_scatter || call.operation == Operation::all_gather) bytes *= ranks;
  for (const Part& part : given.send_parts) bytes += part.elems;
  bytes *= size_bytes(call.dtype);
  if (bytes / group_->options.sizes.chunk_bytes > kMaxSteps / 2)
    throw invalid(text("%llu bytes are too many for chunks of %llu; use larger chunks",
                       static_cast<unsigned long long>(bytes),
                       static_cast<unsigned long long>(group_->options.sizes.chunk_bytes)));
  if (!parts) {
    if (too_many(call.elems)) throw invalid("more elements than memory can hold");
    const bool recvs = call.operation != Operation::reduce || call.root == group_->rank();
    if (call.elems > 0 && call.operation != Operation::barrier && (!given.send || (recvs && !given.recv)))
      throw invalid("a buffer is missing");
    const uint64_t one = call.elems * size_bytes(call.dtype), all = one * ranks, own = one * group_->rank();
    const bool gathers = call.operation == Operation::all_gather;
    const bool scatters = call.operation == Operation::reduce_scatter;
    const Bytes read(given.send, scatters ? all : one), written(given.recv, gathers ? all : one);
    const bool in_place = read.begin + (scatters ? own : 0) == written.begin + (gathers ? own : 0);
    if (recvs && !in_place && given.send && read.overlaps(written)) throw invalid(kOverlap);
    return;
  }
  if (given.send_parts.size() != ranks || given.recv_parts.size() != ranks)
    throw invalid(text("%zu parts to send and %zu to receive, where the group has %u ranks",
                       given.send_parts.size(), given.recv_parts.size(), ranks));
  for (const auto* list : {&given.send_parts, &given.recv_parts})
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      if (too_many((*list)[peer].elems)) throw invalid("more elements than memory can hold");
      if ((*list)[peer].elems > 0 && !(*list)[peer].buffer)
        throw invalid(text("the buffer for rank %u is missing", peer));
    }
  auto bytes_of = [&](const Part& part) { return Bytes(part.buffer, part.elems * size_bytes(call.dtype)); };
  const Bytes own = bytes_of(given.recv_parts[group_->rank()]);
  const bool own_stays = own == bytes_of(given.send_parts[group_->rank()]);
  std::vector<Bytes> written;
  for (const Part& part : given.recv_parts)
    if (part.elems > 0) written.push_back(bytes_of(part));
  std::sort(written.begin(), written.end());
  for (size_t i = 1; i < written.size(); ++i)
    if (written[i].overlaps(written[i - 1]))
      throw invalid("two parts to receive overlap; give each a buffer of its own");
  for (const Part& part : given.send_parts) {
    const Bytes read = bytes_of(part);
    auto next = std::partition_point(written.begin(), written.end(),
                                     [&](const Bytes& other) { return other.end <= read.begin; });
    for (; next != written.end() && next->begin < read.end; ++next)
      if (read.overlaps(*next) && !(own_stays && *next == own)) throw invalid(kOverlap);
  }
}

void Communicator::check(const MessageCall& call) const {
  const uint32_t ranks = group_->ranks();
  if (static_cast<uint8_t>(call.dtype) >= kDtypeCount ||
      (call.operation != Operation::send && call.operation != Operation::recv))
    throw Error(ErrorKind::invalid_argument, "unknown element type, or no message");
  auto invalid = [&](const std::string& what) {
    return Error(ErrorKind::invalid_argument, text("%s of %s[%llu]: ", name(call.operation), name(call.dtype),
                                                   static_cast<unsigned long long>(call.elems)) +
                                                  what);
  };
  if (call.peer == kAnyRank && call.operation == Operation::recv) {
    if (ranks == 1) throw invalid("there is no other rank to receive from");
  } else if (call.peer >= ranks) {
    throw invalid(text("%u is not a rank of this group of %u", call.peer, ranks));
  } else if (call.peer == group_->rank()) {
    throw invalid(text("rank %u can't exchange messages with itself", call.peer));
  }
  if (call.elems > uint64_t{1} << 48) throw invalid("more elements than memory can hold");
  if (call.elems > 0 && !call.buffer) throw invalid("the buffer is missing");
}

std::shared_ptr<Work> Communicator::submit(const Call& call, const void* send, void* recv, double timeout_s,
                                           bool asynchronous) {
  Submission given;
  given.call = call;
  given.send = send;
  given.recv = recv;
  given.timeout_s = timeout_s;
  given.asynchronous = asynchronous;
  return submit(std::move(given));
}

std::shared_ptr<Work> Communicator::submit(Submission given) {
  check(given);
  const bool asynchronous = given.asynchronous;
  if (given.device && given.call.operation != Operation::barrier) given.call.device = DeviceType::cuda;
  std::lock_guard lock(mutex_);
  check_open([&] { return describe(given.call); });
  if (sequence_ >= kMaxSequence)
    throw Error(ErrorKind::system,
                text("group %s has used up its %llu sequence numbers; make a new one",
                     group_->options.name.c_str(), static_cast<unsigned long long>(kMaxSequence)));
  const Call call = given.call;
  show_gpu(given.device);
  std::shared_ptr<Work> work;
  try {
    work = std::make_shared<Collective>(state_, std::move(given), sequence_ + 1);
  } catch (const Error& error) {  // of the caller's stream
    end_if_broken(error, describe(call, sequence_ + 1));
  }
  // A rank alone waits for nobody, and needs no thread.
  group_->options.progress->submit(collectives_, work, asynchronous && group_->ranks() > 1);
  sequence_ += 1;
  if (asynchronous && group_->ranks() == 1) group_->options.progress->drain(collectives_);
  return work;
}

// A call that could not be begun: others may wait for it for ever, unless all callers have made the same
// mistake.
void Communicator::end_if_broken(const Error& error, const std::string& what) {
  if (error.kind() == ErrorKind::invalid_argument) throw Error(error);
  const Error full = group_->of_copy(error, what + " in group " + group_->options.name);
  group_->fail(full);
  throw Error(full);
}

std::shared_ptr<Work> Communicator::submit(const MessageCall& call) {
  check(call);
  std::lock_guard lock(mutex_);
  check_open([&] { return std::string(name(call.operation)); });
  // Tags may be used once each: lanes that nobody uses any more go.
  if (messages_.size() >= kIdleLanes)
    std::erase_if(messages_, [](const auto& entry) {
      return entry.second.use_count() == 1 && entry.second->is_empty();
    });
  std::shared_ptr<Lane>& lane = messages_[{call.operation, call.peer, call.tag}];
  if (!lane) lane = std::make_shared<Lane>(group_->peers, collectives_->spin_times());
  show_gpu(call.device);
  std::shared_ptr<Work> work;
  try {
    if (call.operation == Operation::send)
      work = std::make_shared<Send>(group_, watchdog_, call, send_orders_);
    else
      work = std::make_shared<Receive>(group_, watchdog_, call);
  } catch (const Error& error) {  // of the caller's stream
    end_if_broken(error, name(call.operation));
  }
  group_->options.progress->submit(lane, work, call.asynchronous);
  return work;
}

// For whoever outlives this process.
void Communicator::show_gpu(const std::shared_ptr<cuda::CudaDevice>& device) {
  if (!device || device == shown_) return;
  shown_ = device;
  group_->peers->own().block->gpu.write(device->engines.gpu_name());
}

std::unique_ptr<OutsideWait> Communicator::wait_outside(const std::string& key, double timeout_s) {
  std::lock_guard lock(mutex_);
  check_open([&] { return "waiting for " + key; });
  return std::make_unique<OutsideWait>(group_, watchdog_, key, timeout_s);
}

std::string Communicator::explain(const Call& call, bool in_arena) const {
  if (takes_parts(call.operation))
    return std::string(photinus::name(call.operation)) +
           " by parts (small: through flat slots; from arenas where a sender's tensors lie there; chunk by "
           "chunk else)";
  const Levels all_here{{group_->peers->locals()}, {}};
  const Explanation how =
      photinus::explain(call, state_->hosts ? state_->hosts->levels_of(call) : all_here, rank(), in_arena,
                        model_of(speeds_), group_->options.sizes, net_sizes());
  return text("%s by algorithm %s%s with %s kernels, %.3g µs by the model (%s)", describe(call).c_str(),
              photinus::name(how.algorithm), how.levels.empty() ? "" : (" over levels " + how.levels).c_str(),
              how.kernels, how.seconds * 1e6, how.reason);
}

}  // namespace photinus
