#include "communicator.h"

#include <unistd.h>

#include <map>
#include <tuple>

#include "base/error.h"
#include "base/process.h"
#include "base/thread.h"
#include "collectives/choose.h"
#include "collectives/shm.h"
#include "executor.h"
#include "kernels/reduce.h"
#include "memory/mailbox.h"
#include "transport/local_group.h"
#include "transport/peer_watch.h"

namespace photinus {
namespace {

constexpr double kLookAround_s = 0.1;  // how often a waiting caller asks whether it was interrupted
constexpr size_t kPlansKept = 64;
constexpr uint32_t kRanksLimit = 1024;

uint64_t page_up(uint64_t bytes) {
  return (bytes + 4095) / 4096 * 4096;
}

// "all_reduce #4 of float32[100] (sum)"; without a sequence number when that is 0.
std::string describe(const Call& call, uint64_t sequence = 0) {
  std::string out = name(call.operation);
  if (sequence > 0) out += text(" #%llu", static_cast<unsigned long long>(sequence));
  if (call.operation != Operation::barrier)
    out += text(" of %s[%llu]", name(call.dtype), static_cast<unsigned long long>(call.elems));
  if (has_reduction(call.operation)) out += text(" (%s)", name(call.reduction));
  if (has_root(call.operation)) out += text(" from rank %u", call.root);
  return out;
}

std::string list_of(const std::vector<uint32_t>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) out += text(i ? ", %u" : "%u", ranks[i]);
  return out;
}

Call call_of(const CallDescriptor& d) {
  return {d.operation, d.dtype, d.reduction, d.root, d.elems};
}

}  // namespace

struct Communicator::State {
  Options options;
  pid_t owner = getpid();
  LocalGroup group;
  std::unique_ptr<Mailbox> mailbox;
  std::unique_ptr<Executor> executor;
  std::unique_ptr<PeerWatch> watch;
  Patience patience;
  Memory memory;
  std::map<std::tuple<Operation, Dtype, Reduction, uint32_t, uint64_t, Algorithm>, Plan> plans;

  // Guards what follows. `changed` is signalled when the queue, `running` or `closing` changes.
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Work>> queue;
  bool running = false, closing = false, closed = false;
  uint64_t sequence = 0;
  std::thread progress;

  // A failure stays. `ended` is set when waits must end, with the error to throw.
  mutable std::mutex failure_mutex;
  std::exception_ptr failure;
  std::atomic<bool> aborted{false};
  std::string abort_reason;
};

// ----------------------------------------------------------------------------------------------------------------
// Work

void Work::wait(double timeout_s, const std::function<bool()>& interrupted) {
  if (!is_completed()) {
    if (auto owner = owner_.lock()) owner->help(*this, timeout_s, interrupted);
  }
  if (error_) std::rethrow_exception(error_);
}

std::exception_ptr Work::error() const {
  return is_completed() ? error_ : nullptr;
}

double Work::duration_s() const {
  return is_completed() ? ended_s_ - begun_s_ : 0;
}

// -------------------------------------------------------------------------------------------------- making
// and leaving

std::shared_ptr<Communicator> Communicator::create(const Options& options) {
  if (options.world_size < 1 || options.world_size > kRanksLimit || options.rank >= options.world_size)
    throw Error(ErrorKind::invalid_argument, text("rank %u of %u: needs 0 <= rank < world_size <= %u",
                                                  options.rank, options.world_size, kRanksLimit));
  if (options.sizes.chunks < 3 || options.sizes.chunk_bytes < options.world_size * kLineBytes ||
      options.sizes.chunk_bytes % kLineBytes != 0 || options.sizes.flat_bytes % kLineBytes != 0)
    throw Error(ErrorKind::invalid_argument,
                text("slots of %u chunks of %llu bytes: needs at least 3 chunks, of whole cache lines, one "
                     "for each rank",
                     options.sizes.chunks, static_cast<unsigned long long>(options.sizes.chunk_bytes)));
  return std::shared_ptr<Communicator>(new Communicator(options));
}

Communicator::Communicator(const Options& options) : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.options = options;
  if (!s.options.arena) s.options.arena = Arena::of_this_process();
  const uint32_t ranks = options.world_size;
  const uint64_t mailbox_bytes = page_up(Mailbox::bytes(ranks));
  const uint64_t slot_bytes = Memory::slot_bytes(options.sizes) * ranks;
  s.group = join_local_group(options.rank, ranks, options.address, options.name, mailbox_bytes + slot_bytes,
                             s.options.arena, Deadline::in(options.timeout_s));
  s.mailbox = std::make_unique<Mailbox>(s.group.shared, options.rank, ranks);
  s.patience = Patience::for_ranks(ranks);
  s.executor = std::make_unique<Executor>(*s.mailbox, s.patience);
  s.memory.sizes = options.sizes;
  s.memory.slots = s.group.shared->base() + mailbox_bytes;
  for (const Peer& peer : s.group.peers) s.memory.arena_bases.push_back(peer.arena->base());
  s.mailbox->own().presence.store(Presence::active, std::memory_order_release);
  if (ranks > 1)
    s.watch = std::make_unique<PeerWatch>(
        s.group.peers, *s.mailbox, [mailbox = s.mailbox.get()](uint32_t) { mailbox->ring(mailbox->rank()); });
}

Communicator::~Communicator() {
  if (state_->owner != getpid()) {
    // A forked child has copies of everything but the threads; the parent's group is none of its business.
    static_cast<void>(state_.release());
    return;
  }
  close();
}

void Communicator::close() {
  State& s = *state_;
  if (s.owner != getpid()) return;
  {
    std::unique_lock lock(s.mutex);
    if (s.closing) {
      s.changed.wait(lock, [&] { return s.closed; });
      return;
    }
    s.closing = true;
  }
  {
    std::lock_guard lock(s.failure_mutex);
    if (!s.aborted) s.abort_reason = "the communicator was closed on this rank";
  }
  s.aborted.store(true, std::memory_order_release);
  // Presence before ringing: whoever wakes up must see why.
  Presence active = Presence::active;
  s.mailbox->own().presence.compare_exchange_strong(active, Presence::left);
  s.mailbox->ring_all();
  std::unique_lock lock(s.mutex);
  s.changed.notify_all();
  while (!s.queue.empty() || s.running) {
    if (!s.running)
      run_next(lock);  // ends at once with the abort reason
    else
      s.changed.wait_for(lock, std::chrono::milliseconds(10));
  }
  lock.unlock();
  if (s.progress.joinable()) s.progress.join();
  if (s.watch) s.watch->stop();
  // Closing the connections tells peers that are not looking at the shared memory.
  for (Peer& peer : s.group.peers) peer.connection.reset();
  lock.lock();
  s.closed = true;
  s.changed.notify_all();
}

void Communicator::abort(const std::string& reason) {
  State& s = *state_;
  std::string full = "aborted on " + who(s.options.rank) + ": " + reason;
  {
    std::lock_guard lock(s.failure_mutex);
    if (s.aborted) return;
    s.abort_reason = full;
  }
  fail(std::make_exception_ptr(Error(ErrorKind::aborted, full)), full);
  s.aborted.store(true, std::memory_order_release);
  s.mailbox->ring_all();
}

void Communicator::set_reason(const std::string& reason) {
  state_->mailbox->set_reason(reason);
}

uint32_t Communicator::rank() const {
  return state_->options.rank;
}
uint32_t Communicator::world_size() const {
  return state_->options.world_size;
}
const std::shared_ptr<Arena>& Communicator::arena() const {
  return state_->options.arena;
}

std::exception_ptr Communicator::failure() const {
  std::lock_guard lock(state_->failure_mutex);
  return state_->failure;
}

void Communicator::fail(const std::exception_ptr& error, const std::string& reason) {
  State& s = *state_;
  {
    std::lock_guard lock(s.failure_mutex);
    if (s.failure) return;
    s.failure = error;
  }
  s.mailbox->set_reason(reason);
  Presence active = Presence::active;
  s.mailbox->own().presence.compare_exchange_strong(active, Presence::failed);
  s.mailbox->ring_all();
}

// ------------------------------------------------------------------------------------------------------------
// the queue

std::shared_ptr<Work> Communicator::submit(const Call& call, const void* send, void* recv, double timeout_s,
                                           bool asynchronous) {
  State& s = *state_;
  auto invalid = [&](const std::string& what) {
    return Error(ErrorKind::invalid_argument, describe(call) + ": " + what);
  };
  if (static_cast<uint8_t>(call.operation) >= kOperationCount ||
      static_cast<uint8_t>(call.dtype) >= kDtypeCount ||
      static_cast<uint8_t>(call.reduction) >= kReductionCount)
    throw Error(ErrorKind::invalid_argument, "unknown operation, element type or reduction");
  if (has_root(call.operation) && call.root >= s.options.world_size)
    throw invalid(text("root %u is not a rank of this group of %u", call.root, s.options.world_size));
  if (call.elems > (uint64_t{1} << 48) / s.options.world_size)
    throw invalid("more elements than memory can hold");
  if (call.elems > 0 && call.operation != Operation::barrier && (!send || !recv))
    throw invalid("a buffer is missing");
  if (has_reduction(call.operation) && !find_reduce(call.dtype, call.reduction, InstructionSet::baseline))
    throw invalid("this reduction means nothing on this element type");
  if (s.owner != getpid())
    throw Error(ErrorKind::aborted,
                describe(call) + ": the communicator belongs to the process that forked this one");

  auto work = std::make_shared<Work>();
  work->call_ = call;
  work->send_ = send;
  work->recv_ = recv;
  work->timeout_s_ = timeout_s > 0 ? timeout_s : s.options.timeout_s;
  work->owner_ = weak_from_this();
  std::lock_guard lock(s.mutex);
  if (s.closing)
    throw Error(ErrorKind::aborted,
                describe(call) + " in group " + s.options.name + ": the communicator is closed");
  work->sequence_ = ++s.sequence;
  work->description_ = describe(call, work->sequence_) + " in group " + s.options.name;
  s.queue.push_back(work);
  if (asynchronous) {
    if (!s.progress.joinable()) s.progress = start_thread("photinus-run", [this] { progress(); });
    s.changed.notify_all();
  }
  return work;
}

void Communicator::progress() {
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  while (true) {
    s.changed.wait(lock, [&] { return s.closing || (!s.queue.empty() && !s.running); });
    if (s.closing) return;  // who closes empties the queue
    run_next(lock);
  }
}

void Communicator::help(Work& work, double timeout_s, const std::function<bool()>& interrupted) {
  State& s = *state_;
  Deadline deadline = Deadline::in(timeout_s);
  std::unique_lock lock(s.mutex);
  if (timeout_s > 0 && !s.progress.joinable() && !s.closing && !work.is_completed()) {
    // Whoever runs a collective cannot leave it; a caller with a shorter deadline lets the progress thread
    // run it.
    s.progress = start_thread("photinus-run", [this] { progress(); });
  }
  while (!work.is_completed()) {
    if (timeout_s == 0 && !s.running && !s.queue.empty()) {
      s.queue.front()->interrupted_ = interrupted;
      run_next(lock);
      continue;
    }
    double nap_s = timeout_s > 0 ? std::min(deadline.left_s(), kLookAround_s) : kLookAround_s;
    s.changed.wait_for(lock, std::chrono::duration<double>(nap_s));
    if (work.is_completed()) return;
    if (timeout_s > 0 && deadline.passed())
      throw Error(ErrorKind::timeout, text("%s is not done after waiting %.3g s for it; it goes on",
                                           work.description_.c_str(), timeout_s));
    if (interrupted) {
      lock.unlock();
      if (interrupted()) {
        abort("interrupted by a signal while waiting for " + work.description_);
        throw Error(ErrorKind::interrupted, "interrupted while waiting for " + work.description_);
      }
      lock.lock();
    }
  }
}

// Runs the first call of the queue; `lock` is held before and after.
void Communicator::run_next(std::unique_lock<std::mutex>& lock) {
  State& s = *state_;
  std::shared_ptr<Work> work = std::move(s.queue.front());
  s.queue.pop_front();
  s.running = true;
  lock.unlock();
  work->begun_s_ = now_s();
  try {
    execute(*work);
  } catch (const Error& error) {
    work->error_ = std::current_exception();
    if (error.kind() != ErrorKind::mismatch) fail(work->error_, error.what());
  }
  work->ended_s_ = now_s();
  work->interrupted_ = nullptr;
  work->done_.store(true, std::memory_order_release);
  lock.lock();
  s.running = false;
  s.changed.notify_all();
}

// ------------------------------------------------------------------------------------------------------ one
// collective

void Communicator::execute(Work& work) {
  State& s = *state_;
  const Deadline deadline = Deadline::in(work.timeout_s_);
  if (auto error = failure()) std::rethrow_exception(error);
  if (s.aborted.load(std::memory_order_acquire)) {
    std::lock_guard lock(s.failure_mutex);
    throw Error(ErrorKind::aborted, work.description_ + ": " + s.abort_reason);
  }
  const Call& call = work.call_;
  const uint32_t ranks = s.options.world_size;
  auto look_around = [&](const std::vector<uint32_t>& missing) { look(work, deadline, missing); };
  s.memory.send = static_cast<std::byte*>(const_cast<void*>(work.send_));
  s.memory.recv = static_cast<std::byte*>(work.recv_);
  s.memory.sequence = work.sequence_;

  const bool flat = ranks > 1 && is_flat(call, ranks, s.options.sizes);
  if (flat) s.executor->run(plan(call, Algorithm::flat).before, call, s.memory, look_around);
  s.memory.descriptors = meet(work, look_around);
  refuse_mismatch(work, s.memory.descriptors);
  const Algorithm algorithm = choose(call, s.memory.descriptors, s.options.sizes).algorithm;
  s.executor->run(plan(call, algorithm).after, call, s.memory, look_around);
}

std::vector<CallDescriptor> Communicator::meet(Work& work, const Look& look_around) {
  State& s = *state_;
  const Call& call = work.call_;
  const uint64_t size = size_bytes(call.dtype), ranks = s.options.world_size;
  const uint64_t one = call.elems * size;
  auto where = [&](const void* buffer, uint64_t bytes) {
    return s.options.arena->offset(buffer, bytes).value_or(kNowhere);
  };
  CallDescriptor& own = s.mailbox->own().calls[work.sequence_ % 2];
  own = CallDescriptor{work.sequence_,
                       call.elems,
                       call.operation,
                       call.dtype,
                       call.reduction,
                       0,
                       call.root,
                       where(work.send_, call.operation == Operation::reduce_scatter ? one * ranks : one),
                       where(work.recv_, call.operation == Operation::all_gather ? one * ranks : one)};
  s.mailbox->advance(Counter::posted, work.sequence_);
  s.mailbox->wait(Counter::posted, work.sequence_, 0, s.mailbox->ranks(), s.patience, look_around);
  std::vector<CallDescriptor> all(ranks);
  for (uint32_t rank = 0; rank < ranks; ++rank) all[rank] = s.mailbox->block(rank).calls[work.sequence_ % 2];
  return all;
}

const Plan& Communicator::plan(const Call& call, Algorithm algorithm) {
  State& s = *state_;
  // Reductions share plans, but not keys: a key with only what matters would save nothing that counts.
  const auto key =
      std::make_tuple(call.operation, call.dtype, call.reduction, call.root, call.elems, algorithm);
  auto found = s.plans.find(key);
  if (found != s.plans.end()) return found->second;
  if (s.plans.size() >= kPlansKept) s.plans.clear();
  const Seat seat{s.options.rank, s.options.world_size};
  return s.plans.emplace(key, shm_plan(call, seat, algorithm, s.options.sizes)).first->second;
}

void Communicator::refuse_mismatch(const Work& work, const std::vector<CallDescriptor>& descriptors) const {
  std::vector<std::pair<Call, std::vector<uint32_t>>> groups;
  for (uint32_t rank = 0; rank < descriptors.size(); ++rank) {
    Call call = call_of(descriptors[rank]);
    if (!has_reduction(call.operation)) call.reduction = Reduction::sum;
    if (!has_root(call.operation)) call.root = 0;
    size_t g = 0;
    while (g < groups.size() && !(groups[g].first == call)) ++g;
    if (g == groups.size()) groups.push_back({call, {}});
    groups[g].second.push_back(rank);
  }
  if (groups.size() == 1) return;
  std::string message =
      text("the ranks of group %s called different collectives as #%llu:", state_->options.name.c_str(),
           static_cast<unsigned long long>(work.sequence_));
  for (const auto& [call, ranks] : groups)
    message += text(" %s called %s;", list_of(ranks).c_str(), describe(call).c_str());
  message +=
      " no output was written. Every rank must call the same collectives, in the same order, on tensors of "
      "the same "
      "size and type.";
  throw Error(ErrorKind::mismatch, message);
}

std::string Communicator::explain(const Call& call, bool in_arena) const {
  std::vector<CallDescriptor> descriptors(state_->options.world_size);
  for (CallDescriptor& d : descriptors) d.send_offset = d.recv_offset = in_arena ? 0 : kNowhere;
  Choice choice = choose(call, descriptors, state_->options.sizes);
  return text("%s by algorithm %s with %s kernels (%s)", describe(call).c_str(),
              photinus::name(choice.algorithm), photinus::name(best_instruction_set()), choice.reason);
}

// --------------------------------------------------------------------------------------------------- when
// others fail

std::string Communicator::who(uint32_t rank) const {
  const Peer& peer = state_->group.peers[rank];
  return text("rank %u (pid %d on %s)", rank, peer.pid, peer.host.c_str());
}

// What is known of a rank that will not come; empty while it may still come.
std::string Communicator::what_became_of(uint32_t rank) const {
  const State& s = *state_;
  if (rank == s.options.rank) return "";
  const Presence presence = s.mailbox->block(rank).presence.load(std::memory_order_acquire);
  const std::string reason = s.mailbox->reason(rank);
  if (presence == Presence::left)
    return who(rank) + " has left the group (it closed it, or its script ended)" +
           (reason.empty() ? "" : " after: " + reason);
  if (presence == Presence::failed) return who(rank) + " gave up: " + reason;
  if (!s.watch->is_lost(rank)) return "";
  return who(rank) + " " + s.watch->how(rank) + (reason.empty() ? "" : " after: " + reason);
}

void Communicator::look(const Work& work, const Deadline& deadline, const std::vector<uint32_t>& missing) {
  State& s = *state_;
  if (s.aborted.load(std::memory_order_acquire)) {
    std::lock_guard lock(s.failure_mutex);
    throw Error(ErrorKind::aborted, work.description_ + ": " + s.abort_reason);
  }
  if (work.interrupted_ && work.interrupted_())
    throw Error(ErrorKind::interrupted, "interrupted while waiting in " + work.description_);
  // Whoever is missing may never come; and a rank that has failed or aborted ends the collective for all,
  // missing or not.
  std::string fate;
  for (uint32_t rank : missing)
    if (fate.empty()) fate = what_became_of(rank);
  for (uint32_t rank = 0; rank < s.options.world_size && fate.empty(); ++rank)
    if (s.mailbox->block(rank).presence.load(std::memory_order_acquire) == Presence::failed)
      fate = what_became_of(rank);
  if (!fate.empty()) {
    // Root cause first: a rank that simply died explains those that gave up because of it.
    for (uint32_t rank = 0; rank < s.options.world_size; ++rank)
      if (rank != s.options.rank && s.watch->is_lost(rank) &&
          s.mailbox->block(rank).presence.load(std::memory_order_acquire) == Presence::active)
        fate = what_became_of(rank);
    throw Error(ErrorKind::peer_lost,
                text("%s. Rank %u of %u waited %.2f s for %s in %s. Its own output says more; restart the "
                     "job to go on from "
                     "the last checkpoint.",
                     fate.c_str(), s.options.rank, s.options.world_size, deadline.elapsed_s(),
                     list_of(missing).c_str(), work.description_.c_str()));
  }
  if (deadline.passed()) {
    std::string message =
        text("%s: rank %u of %u waited %.1f s for %s, which ", work.description_.c_str(), s.options.rank,
             s.options.world_size, deadline.elapsed_s(), list_of(missing).c_str());
    message += missing.size() == 1 ? "is alive but has not come:" : "are alive but have not come:";
    for (uint32_t rank : missing)
      message += text(" %s is at #%llu;", who(rank).c_str(),
                      static_cast<unsigned long long>(s.mailbox->value(rank, Counter::posted)));
    message +=
        " a longer step there, a missing call, or a hang. Raise the timeout if the step may take so long.";
    throw Error(ErrorKind::timeout, message);
  }
}

}  // namespace photinus
