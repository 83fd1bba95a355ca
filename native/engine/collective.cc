#include "engine/collective.h"

#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cstring>

#include "base/hash.h"
#include "base/log.h"
#include "collectives/choose.h"
#include "collectives/device_plans.h"
#include "collectives/net.h"
#include "collectives/shm.h"

namespace photinus {
namespace {

// Copying a gigabyte takes a tenth of this; a rank that takes longer is stopped.
constexpr double kAwaitPeers_s = 1;
constexpr uint64_t kBriefBytes = 4 << 10;                // of tensors that are added within a microsecond
constexpr size_t kPlansKept = 64, kStepsKept = 1 << 17;  // of some 128 bytes

}  // namespace

CallSite CallSite::of(const std::string& text) {
  const uint64_t hash = fnv1a(text);
  return {text, static_cast<uint32_t>(hash ^ hash >> 32) | 1, true};
}

void Shape::add(int64_t size) {
  if (dims < kMost) sizes[dims] = size;
  dims += 1;
  hash = (hash ^ static_cast<uint64_t>(size)) * 0x9e3779b97f4a7c15;
  hash = (hash ^ hash >> 32) | 1;
}

std::string Shape::text() const {
  std::string out;
  for (size_t i = 0; i < std::min(dims, kMost); ++i)
    out += photinus::text(i ? ", %lld" : "%lld", static_cast<long long>(sizes[i]));
  return "[" + out + (dims > kMost ? ", ...]" : "]");
}

const Plan& CollectiveState::plan(const Call& call, Seat seat, Algorithm algorithm) {
  if (last_ && last_call_ == call && last_->algorithm == algorithm) return *last_;
  const Key key{call.operation, call.dtype, call.reduction, call.root, call.elems, call.wire, algorithm};
  auto found = plans_.find(key);
  if (found == plans_.end()) {
    Plan made =
        algorithm == Algorithm::device ? device_plan(call, seat, memory.device_sizes)
        : hosts ? net_plan(call, hosts->levels_of(call), seat.rank, algorithm, memory.sizes, hosts->sizes())
                : shm_plan(call, seat, algorithm, memory.sizes);
    const size_t steps = made.before.size() + made.after.size();
    if (plans_.size() >= kPlansKept || steps_kept_ + steps > kStepsKept) plans_.clear(), steps_kept_ = 0;
    steps_kept_ += steps;
    found = plans_.emplace(key, std::move(made)).first;
  }
  last_ = &found->second;
  last_call_ = call;
  return *last_;
}

Collective::Collective(const std::shared_ptr<CollectiveState>& state, Submission&& submission,
                       uint64_t sequence)
    : state_(state),
      group_(state->group.get()),
      given_(std::move(submission)),
      sequence_(sequence),
      number_(sequence - state->own_calls),
      executor_(*group_->peers, *group_->options.device, state->operands, state->hosts.get()) {
  owner_ = std::move(given_.owner);
  // A list's all_gather sends the same to everybody: its size is worth telling.
  if (has_parts() && given_.call.operation == Operation::all_gather)
    given_.call.elems = given_.send_parts[0].elems;
  is_brief_ = given_.call.elems * size_bytes(given_.call.dtype) <= kBriefBytes && !has_parts() &&
              given_.call.device == DeviceType::cpu;
  if (given_.call.device == DeviceType::cpu) return;
  copies_ = std::make_unique<DeviceCopies>(given_.device, given_.stream);
  const bool is_moved_only = group_->ranks() == 1 && !computes_alone(given_.call);
  if ((!state->rings || has_parts()) && !is_moved_only)
    host_tensors_ = std::make_unique<HostTensors>(*copies_, group_->options.progress->arena());
}

std::string Collective::description() const {
  std::string out = describe(given_.call, number_);
  if (!given_.label.empty()) out += " labelled '" + given_.label + "'";
  out += " in group " + group_->options.name;
  if (given_.site) out += ", called at " + given_.site->text;
  return out;
}

Poll Collective::advance() {
  if (!copies_) return go_on();
  try {
    return go_on();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::system || group_->is_failed()) throw;
    throw group_->of_copy(error, description());
  }
}

Poll Collective::go_on() {
  bool moved = false;
  if (phase_ == Phase::queued) {
    begin();
    phase_ = host_tensors_ ? Phase::bringing : Phase::preparing;
    moved = true;
  }
  if (phase_ == Phase::bringing) {
    if (!host_tensors_->bring(moved)) return moved ? Poll::moved : Poll::blocked;
    begin_steps();
    phase_ = Phase::preparing;
  }
  if (phase_ == Phase::preparing) {
    if (!run_steps(moved)) return moved ? Poll::moved : Poll::blocked;
    post();
    phase_ = Phase::meeting;
  }
  if (phase_ == Phase::meeting) {
    if (!all_posted()) return moved ? Poll::moved : Poll::blocked;
    next_ = 0;
    if (state_->hosts)
      agree_on_host();
    else
      agree_and_plan();
    moved = true;
  }
  if (phase_ == Phase::working && run_steps(moved)) {
    if (reads_peers_) check_peers();
    if (!copies_) return Poll::done;
    phase_ = Phase::returning;
  }
  if (phase_ == Phase::returning && end_copies(moved)) return Poll::done;
  // Told and heard to the end, so that all ranks raise in the same call.
  if (phase_ == Phase::disagreeing &&
      (state_->hosts->meet() || (group_->peers->poll() && state_->hosts->meet())))
    throw Error(ErrorKind::mismatch, state_->hosts->fault());
  return moved ? Poll::moved : Poll::blocked;
}

void Collective::order(void* stream) {
  if (!copies_ || !is_completed()) return;
  try {
    copies_->order(static_cast<cuda::CUstream>(stream));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::system) throw;
    throw group_->of_copy(error, description());
  }
}

// Whether the last copy to a device is queued.
bool Collective::end_copies(bool& moved) {
  if (host_tensors_ && !host_tensors_->give_back(moved)) return false;
  if (has_device_plan()) state_->rings->count_on(results_);
  copies_->end();
  return true;
}

bool Collective::run_steps(bool& moved) {
  if (has_device_plan()) state_->rings->poll();
  const size_t before = next_;
  bool done = executor_.run(*steps_, next_, given_.call, state_->memory);
  if (!done && state_->hosts && phase_ == Phase::working) done = run_on_with_hosts();
  moved |= next_ != before;
  return done;
}

void Collective::begin() {
  if (group_->is_over()) group_->check(description());
  if (host_tensors_)
    work_on_host();
  else
    begin_steps();
}

// The operation takes the host's copies for the tensors that were given.
void Collective::work_on_host() {
  const Call& call = given_.call;
  const uint64_t item_bytes = size_bytes(call.dtype);
  for (Part& part : given_.send_parts)
    part.buffer = host_tensors_->copy_of(part.buffer, part.elems * item_bytes, true, false);
  for (Part& part : given_.recv_parts)
    part.buffer = host_tensors_->copy_of(part.buffer, part.elems * item_bytes, false, true);
  if (has_parts()) return;
  const bool is_root = call.root == group_->rank();
  const uint64_t one = call.elems * item_bytes, all = one * group_->ranks();
  given_.send = host_tensors_->copy_of(given_.send, call.operation == Operation::reduce_scatter ? all : one,
                                       call.operation != Operation::broadcast || is_root, false);
  given_.recv = host_tensors_->copy_of(
      given_.recv, call.operation == Operation::all_gather ? all : one, false,
      call.operation == Operation::reduce ? is_root : call.operation != Operation::broadcast || !is_root);
}

// Finds the steps up to the meeting.
void Collective::begin_steps() {
  const Call& call = given_.call;
  const Seat seat{group_->rank(), group_->ranks()};
  Memory& memory = state_->memory;
  memory.send = static_cast<std::byte*>(const_cast<void*>(given_.send));
  memory.recv = static_cast<std::byte*>(given_.recv);
  memory.sequence = sequence_;
  memory.copies = host_tensors_ ? nullptr : copies_.get();
  if (state_->hosts) memory.landing = state_->hosts->landing();
  if (has_parts()) {
    memory.send_parts.clear();
    memory.recv_parts.clear();
    const uint64_t item_bytes = size_bytes(call.dtype);
    PostedPart* const row = group_->peers->own().parts[sequence_ % 2];
    for (uint32_t peer = 0; peer < seat.ranks; ++peer) {
      const Part &out = given_.send_parts[peer], &in = given_.recv_parts[peer];
      memory.send_parts.push_back(static_cast<std::byte*>(out.buffer));
      memory.recv_parts.push_back(static_cast<std::byte*>(in.buffer));
      row[peer] = {out.elems, in.elems, group_->peers->place(out.buffer, out.elems * item_bytes)};
    }
    if (state_->hosts) {
      own_steps_ = net_exchange_before(exchange_of_hosts(), memory.sizes);
    } else {
      exchange_ = {seat.ranks, item_bytes, std::vector<PostedPart>(seat.ranks * seat.ranks)};
      std::copy_n(row, seat.ranks, &exchange_.parts[seat.rank * seat.ranks]);
      own_steps_ = exchange_before(exchange_, seat, memory.sizes);
    }
  } else if (has_device_plan()) {
    state_->rings->use(given_.device);
    steps_ = &state_->plan(call, seat, Algorithm::device).before;
  } else if (seat.ranks > 1 && is_flat()) {
    steps_ = &state_->plan(call, seat, Algorithm::flat).before;
  }
}

bool Collective::is_flat() const {
  const SlotSizes& sizes = state_->memory.sizes;
  if (!state_->hosts) return photinus::is_flat(given_.call, group_->ranks(), sizes);
  return photinus::is_flat(given_.call, state_->hosts->levels_of(given_.call), sizes, state_->hosts->sizes());
}

void Collective::post() {
  const Call& call = given_.call;
  const uint64_t one = call.elems * size_bytes(call.dtype), all = one * group_->ranks();
  RankBlock& own = *group_->peers->own().block;
  const size_t side = sequence_ % 2;
  const uint32_t site = given_.site && given_.site->votes ? given_.site->hash : 0;
  if (given_.site && (!site || own.calls[side].site != site)) put(own.sites[side], given_.site->text);
  if (!given_.site && own.sites[side][0]) own.sites[side][0] = '\0';
  if (!given_.label.empty() || own.labels[side][0]) put(own.labels[side], given_.label);
  CallDescriptor& posted = own.calls[side];
  if (given_.shape.hash && posted.shape != given_.shape.hash) put(own.shapes[side], given_.shape.text());
  posted = CallDescriptor{};
  posted.shape = given_.shape.hash;
  posted.elems = call.elems;
  posted.operation = call.operation;
  posted.dtype = call.dtype;
  posted.device = call.device;
  posted.wire = call.wire.value_or(call.dtype);
  posted.reduction = has_reduction(call.operation) ? call.reduction : Reduction::sum;
  posted.has_parts = has_parts();
  posted.root = has_root(call.operation) ? static_cast<uint16_t>(call.root) : uint16_t{0};
  if (!is_flat()) {  // nobody reads a small tensor where it lies
    posted.send_offset =
        group_->peers->place(given_.send, call.operation == Operation::reduce_scatter ? all : one);
    posted.recv_offset =
        group_->peers->place(given_.recv, call.operation == Operation::all_gather ? all : one);
  }
  posted.label = given_.label.empty() ? 0 : fnv1a(given_.label);
  posted.strict_sites = group_->options.strict_sites;
  posted.site = site;
  posted.factor = given_.factor;
  posted.updates = given_.updates;
  group_->peers->advance(Counter::posted, sequence_);
}

// Begins to bring what a rank has posted to this core: its descriptor, and the beginning of its tensor if
// that lies in its flat slot. Otherwise one would come only after the other, and each takes a tenth of a
// microsecond.
void Collective::fetch(const PeerView& peer) const {
  const size_t side = sequence_ % 2;
  __builtin_prefetch(&peer.block->calls[side]);
  __builtin_prefetch(peer.slots + side * state_->memory.sizes.flat_bytes);
}

// One look in each poll: eight, with pauses between, take twice as long with four ranks on two cores, and 2 %
// less with a core for each.
bool Collective::all_posted() {
  const Peers& peers = *group_->peers;
  const std::vector<uint32_t>& ranks = peers.locals();
  while (met_ < ranks.size() && peers.value(ranks[met_], Counter::posted) >= sequence_)
    fetch(peers[ranks[met_++]]);
  return met_ == ranks.size();
}

void Collective::agree_and_plan() {
  const Peers& peers = *group_->peers;
  Memory& memory = state_->memory;
  const uint32_t ranks = peers.ranks();
  const size_t side = sequence_ % 2;
  memory.descriptors.resize(ranks);
  for (uint32_t rank = 0; rank < ranks; ++rank) memory.descriptors[rank] = peers[rank].block->calls[side];
  const bool alike = agree(memory.descriptors);
  const std::vector<int32_t> updates = state_->updates.unequal_updates(memory.descriptors);
  if (alike && !updates.empty())
    throw Error(
        ErrorKind::mismatch,
        updates_text(group_->options.name, number_,
                     {memory.descriptors[0], peers[0].block->sites[side], peers[0].block->labels[side], {}},
                     updates));
  const bool suspicious =
      alike && state_->sites.look_out_of_step(memory.descriptors, group_->options.strict_sites);
  if (!alike || suspicious) {
    std::vector<PostedCall> calls;
    for (uint32_t rank = 0; rank < ranks; ++rank)
      calls.push_back({memory.descriptors[rank], peers[rank].block->sites[side],
                       peers[rank].block->labels[side], RankSet::of(rank),
                       memory.descriptors[rank].shape ? peers[rank].block->shapes[side] : ""});
    if (!alike) throw Error(ErrorKind::mismatch, mismatch_text(group_->options.name, number_, calls));
    if (group_->options.strict_sites)
      throw Error(ErrorKind::mismatch, out_of_step_text(group_->options.name, number_, calls));
    if (group_->rank() == 0) say(suspicion_text(group_->options.name, number_, calls));
  }
  const Seat seat{group_->rank(), ranks};
  if (!has_parts()) {
    memory.factors.clear();
    for (const CallDescriptor& posted : memory.descriptors) memory.factors.push_back(posted.factor);
    const Algorithm algorithm = has_device_plan()
                                    ? Algorithm::device
                                    : choose(given_.call, memory.descriptors, memory.sizes).algorithm;
    reads_peers_ = algorithm == Algorithm::arena;
    if (reads_peers_) check_peers();
    const Plan& plan = state_->plan(given_.call, seat, algorithm);
    steps_ = &plan.after;
    results_ = plan.results;
  } else {
    for (uint32_t rank = 0; rank < ranks; ++rank)
      std::memcpy(&exchange_.parts[rank * ranks], peers[rank].parts[side], ranks * sizeof(PostedPart));
    if (auto wrong = find_disagreement(exchange_)) {
      auto at = [&](uint32_t rank) {
        const char* site = peers[rank].block->sites[side];
        return *site ? std::string(" at ") + site : std::string();
      };
      throw Error(
          ErrorKind::mismatch,
          text("%s: rank %u sends %llu elements to rank %u%s, which expects %llu%s; no output was written. "
               "Sizes must be equal on both sides.",
               describe(given_.call, number_).c_str(), wrong->from,
               static_cast<unsigned long long>(wrong->sent), wrong->to, at(wrong->from).c_str(),
               static_cast<unsigned long long>(wrong->expected), at(wrong->to).c_str()));
    }
    for (uint32_t rank = 0; rank < ranks; ++rank)
      reads_peers_ |= exchange_.way_of(rank, memory.sizes) == Algorithm::arena;
    if (reads_peers_) check_peers();
    own_steps_ = exchange_after(exchange_, seat, memory.sizes);
    steps_ = &own_steps_;
  }
  phase_ = Phase::working;
}

// Called before and after a rank touches others' tensors where they lie. A rank that gives up, or leaves in
// the middle, shows it before its caller gets its tensors back. Afterwards: what was read may have been
// changed meanwhile. Before: with `await_peers` no rank writes into a tensor that its owner has got back: who
// gives up shows it and then looks who has posted, who comes posts and then looks who has given up, so at
// least one of the two sees the other.
void Collective::check_peers() const {
  const Peers& peers = *group_->peers;
  for (uint32_t rank = 0; rank < peers.ranks(); ++rank)
    if (rank != peers.rank() && (peers.presence(rank) == Presence::failed ||
                                 peers[rank].block->withdrawn.load(std::memory_order_seq_cst) == sequence_))
      throw group_->given_up_by(rank, description());
}

// Waits a little for those who may be at work on this rank's tensors: all have posted, so they have begun.
// That a rank has given up does not say so: another of its threads may have.
void Collective::await_peers() const {
  const Peers& peers = *group_->peers;
  for (const uint32_t rank : peers.locals())
    if (peers.value(rank, Counter::posted) < sequence_) return;  // nobody has begun, and nobody will
  auto is_through = [&](uint32_t rank) {
    return rank == peers.rank() || peers.value(rank, Counter::finished) >= mark(sequence_, 1) ||
           peers.value(rank, Counter::posted) > sequence_ || peers.presence(rank) == Presence::left ||
           peers[rank].block->withdrawn.load(std::memory_order_seq_cst) == sequence_ || peers.is_lost(rank);
  };
  const Deadline deadline = Deadline::in(kAwaitPeers_s);
  for (const uint32_t rank : peers.locals())
    while (!is_through(rank) && !deadline.passed()) usleep(200);
}

void Collective::fail() {
  group_->keep_error();
  if (!executor_.copy().settle(kSettle_s)) Group::retire(state_->group);
  if (state_->hosts && phase_ >= Phase::working) state_->hosts->forget();
  if (copies_ && !copies_->settle(kSettle_s) && !host_tensors_) {
    Group::retire(state_->group);
    // It may still write into a ring that a later call would use.
    group_->fail(Error(ErrorKind::system, description() + ": a copy has not ended"));
  }
  if (host_tensors_) host_tensors_->give_up(group_->is_failed());
  if (phase_ == Phase::queued || !group_->is_failed()) return;
  group_->peers->own().block->withdrawn.store(sequence_, std::memory_order_seq_cst);
  await_peers();
  // Peers that are stopped may still write into tensors that lie in the arena, for ever: it is not used
  // again.
  const std::shared_ptr<Arena>& arena = group_->options.progress->arena();
  arena->retire(given_.recv);
  arena->retire(given_.send);
}

std::vector<uint32_t> Collective::missing() {
  if (phase_ == Phase::disagreeing) return state_->hosts->missing();
  if (phase_ == Phase::working) return executor_.missing((*steps_)[next_], state_->memory);
  std::vector<uint32_t> ranks;
  for (const uint32_t rank : group_->peers->locals())
    if (group_->peers->value(rank, Counter::posted) < sequence_) ranks.push_back(rank);
  return ranks;
}

// The ranks without which it cannot end, as it waits for a copy of its own.
std::vector<uint32_t> Collective::needed() {
  if (phase_ == Phase::working) {  // counters only grow: the last wait for others has to be met
    const auto wait = std::find_if(steps_->rbegin(), steps_->rend(), [this](const Step& step) {
      return step.kind == Step::Kind::wait ||
             (step.kind == Step::Kind::wait_room && step.rank != group_->rank());
    });
    return wait == steps_->rend() ? std::vector<uint32_t>{} : executor_.missing(*wait, state_->memory);
  }
  std::vector<uint32_t> others;  // all are to meet, but when the results are there
  for (uint32_t rank = 0; rank < group_->ranks() && phase_ != Phase::returning; ++rank)
    if (rank != group_->rank()) others.push_back(rank);
  return others;
}

double Collective::look(Alone caller) {
  const auto describe = [this] { return description(); };
  if (!wait_)
    wait_.emplace(begun_s(), given_.timeout_s > 0 ? given_.timeout_s : group_->options.limits.timeout_s);
  const Step* const step = has_device_plan() && phase_ == Phase::working ? &(*steps_)[next_] : nullptr;
  if (step && step->kind == Step::Kind::wait_room && step->rank == group_->rank())
    return state_->watchdog->look_at_copy(*wait_, state_->rings->nap_s(), {}, describe);
  const bool copies = phase_ == Phase::bringing || phase_ == Phase::returning ||
                      (step && step->kind == Step::Kind::wait_copied);
  if (copies)
    return state_->watchdog->look_at_copy(*wait_, copies_->nap_s(), [this] { return needed(); }, describe);
  if (executor_.copy().is_running())
    return state_->watchdog->look_at_copy(*wait_, executor_.copy().nap_s(), {}, describe);
  const double nap_s =
      state_->watchdog->look(*wait_, [this] { return missing(); }, describe, group_->id, caller);
  return has_device_plan() ? std::min(nap_s, state_->rings->nap_s()) : nap_s;
}

}  // namespace photinus
