#include "engine/message.h"

#include <algorithm>
#include <cstring>

#include "hosts/words.h"

namespace photinus {
namespace {

// Bytes through which a tensor of ordinary memory flows; half of it is filled while the other half is
// drained.
constexpr uint64_t kRingBytes = 512 << 10;
constexpr uint64_t kPieceBytes = 128 << 10;

std::string describe(Operation operation, DeviceType device, Dtype dtype, uint64_t elems, const char* kind) {
  return text("%s of %s%s[%llu]%s%s", name(operation), device == DeviceType::cuda ? "CUDA " : "", name(dtype),
              static_cast<unsigned long long>(elems), *kind ? " that are " : "", kind);
}

std::string text_of(const CallSite* site) {
  return site ? site->text : "";
}

std::string at(const char* site) {
  return *site ? std::string(" at ") + site : "";
}

Error mismatch(const Offer& offer, const std::string& sender, const std::string& receiver) {
  return Error(
      ErrorKind::mismatch,
      sender + " called " +
          describe(Operation::send, offer.device, offer.dtype, offer.elems, offer.send_kind) +
          at(offer.send_site) + ", but " + receiver + " called " +
          describe(Operation::recv, offer.recv_device, offer.recv_dtype, offer.recv_elems, offer.recv_kind) +
          at(offer.recv_site) + text(" (tag %lld)", static_cast<long long>(offer.tag.load())) +
          "; nothing was received. Both must name the same size and type, on CPUs or on GPUs.");
}

}  // namespace

MessageWork::MessageWork(const std::shared_ptr<Group>& group, const std::shared_ptr<Watchdog>& watchdog,
                         const MessageCall& call)
    : group_(group), watchdog_(watchdog), call_(call), copy_(*group->options.device) {
  owner_ = std::move(call_.owner);
  if (!call.device) return;
  copies_ = std::make_unique<DeviceCopies>(call.device, call.stream);
  host_tensors_ = std::make_unique<HostTensors>(*copies_, group->options.progress->arena());
}

std::string MessageWork::description() const {
  std::string out = describe(call_.operation, device(), call_.dtype, call_.elems, call_.kind.c_str());
  out += call_.operation == Operation::send ? " to " : " from ";
  out += call_.peer == kAnyRank ? "any rank" : text("rank %u", call_.peer);
  out += text(" (tag %lld) in group ", static_cast<long long>(call_.tag)) + group_->options.name;
  if (call_.site) out += ", called at " + call_.site->text;
  return out;
}

void MessageWork::begin() {
  if (group_->is_over()) group_->check(description());
  wait_.emplace(begun_s(), call_.timeout_s > 0 ? call_.timeout_s : group_->options.limits.timeout_s);
  wait_->any_will_do = call_.peer == kAnyRank;
  wait_->is_message = true;
  if (!host_tensors_)
    phase_ = Phase::exchanging;
  else
    call_.buffer = host_tensors_->copy_of(call_.buffer, bytes(), call_.operation == Operation::send,
                                          call_.operation == Operation::recv);
}

Poll MessageWork::advance() {
  if (!wait_) begin();
  if (!host_tensors_) return exchange();
  try {
    return go_on();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::system || group_->is_failed()) throw;
    throw group_->of_copy(error, description());
  }
}

Poll MessageWork::go_on() {
  bool moved = false;
  if (phase_ == Phase::bringing) {
    if (!host_tensors_->bring(moved)) return moved ? Poll::moved : Poll::blocked;
    phase_ = Phase::exchanging;
  }
  if (phase_ == Phase::exchanging) {
    const Poll now = exchange();
    if (now != Poll::done) return moved ? Poll::moved : now;
    phase_ = Phase::returning;
  }
  if (host_tensors_->give_back(moved)) {
    copies_->end();
    return Poll::done;
  }
  return moved ? Poll::moved : Poll::blocked;
}

void MessageWork::order(void* stream) {
  if (!copies_ || !is_completed()) return;
  try {
    copies_->order(static_cast<cuda::CUstream>(stream));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::system) throw;
    throw group_->of_copy(error, description());
  }
}

void MessageWork::fail() {
  group_->keep_error();
  if (!copy_.settle(kSettle_s)) Group::retire(group_);
  if (transfers_) group_->peers->forget(kMessages);  // after anything but a mismatch the group is over
  if (copies_) copies_->settle(kSettle_s);
  if (host_tensors_) host_tensors_->give_up(group_->is_failed());
}

double MessageWork::look(Alone caller) {
  const auto describe = [this] { return description(); };
  if (host_tensors_ && phase_ != Phase::exchanging) {
    std::function<std::vector<uint32_t>()> receiver;
    if (phase_ == Phase::bringing) receiver = [this] { return std::vector{call_.peer}; };
    return watchdog_->look_at_copy(*wait_, copies_->nap_s(), receiver, describe);
  }
  if (copy_.is_running()) return watchdog_->look_at_copy(*wait_, copy_.nap_s(), {}, describe);
  auto missing = [this] {
    std::vector<uint32_t> ranks;
    if (can_go_on()) return ranks;
    for (uint32_t rank = 0; rank < group_->ranks(); ++rank)
      if (call_.peer == kAnyRank ? rank != group_->rank() : rank == call_.peer) ranks.push_back(rank);
    return ranks;
  };
  // The sender's: both ends agree on it. Mixed after each part, so that no tag makes up for another sender.
  uint64_t lane = group_->id;
  for (const uint64_t part : {uint64_t{call_.operation == Operation::send ? group_->rank() : call_.peer},
                              static_cast<uint64_t>(call_.tag)}) {
    lane = (lane ^ part) * 0x9e3779b97f4a7c15;
    lane ^= lane >> 32;
  }
  lane |= 1;  // 0 is a thread that waits for nothing
  // Any rank may still answer a receive from any rank, so no cycle of waits goes through it.
  return watchdog_->look(*wait_, missing, describe, lane, call_.peer == kAnyRank ? Alone::no : caller);
}

// --- sending

Send::~Send() {
  // After a failure the receiver may still read it.
  if (ring_ && !group_->is_failed()) group_->options.progress->arena()->free(ring_);
}

bool Send::make_offer() {
  if (!group_->peers->is_local(call_.peer) && !group_->peers->link(call_.peer, LinkUse::send)) {
    group_->peers->poll();
    return false;
  }
  std::lock_guard lock(send_orders_->claiming);
  Offer* all = (*group_->peers)[call_.peer].sent;
  for (Offer* offer = all; offer < all + kOffers; ++offer) {
    if (offer->look().state != OfferState::free) continue;
    const std::shared_ptr<Arena>& arena = group_->options.progress->arena();
    const uint64_t place = group_->peers->place(call_.buffer, bytes());
    const bool is_local = group_->peers->is_local(call_.peer);
    if (is_local && place == kNowhere && bytes() > 0) ring_ = arena->allocate(std::min(bytes(), kRingBytes));
    offer->dtype = call_.dtype;
    offer->device = device();
    offer->tag.store(call_.tag, std::memory_order_relaxed);
    order_ = send_orders_->orders[call_.peer]++;
    offer->elems = call_.elems;
    offer->offset = ring_ ? *arena->offset(ring_, 1) : place;
    offer->ring_bytes = ring_ ? std::min(bytes(), kRingBytes) : 0;
    offer->filled.store(0, std::memory_order_relaxed);
    offer->drained.store(0, std::memory_order_relaxed);
    put(offer->send_kind, call_.kind);
    put(offer->send_site, text_of(call_.site));
    offer_ = offer;
    fill();
    offer->set({order_, OfferState::offered});
    group_->peers->show(call_.peer, *offer_);
    return true;
  }
  return false;
}

// Lets more of the tensor flow into the ring; whether it moved anything.
bool Send::fill() {
  uint64_t filled = offer_->filled.load(std::memory_order_relaxed);
  const uint64_t start = filled;
  const bool refused = offer_->look().state == OfferState::refused;
  while (ring_ && filled < bytes() && (!refused || copy_.is_running())) {
    const uint64_t free = offer_->ring_bytes - (filled - offer_->drained.load(std::memory_order_acquire));
    const uint64_t at = filled % offer_->ring_bytes;
    if (!copy_.is_running())
      piece_ = std::min({free, offer_->ring_bytes - at, bytes() - filled, kPieceBytes});
    if (piece_ == 0 || !copy_.run(ring_ + at, static_cast<std::byte*>(call_.buffer) + filled, piece_)) break;
    filled += piece_;
    offer_->filled.store(filled, std::memory_order_seq_cst);
    group_->peers->show(call_.peer, *offer_);
  }
  return filled != start;
}

// Gives the data to the link once the receiver has a place for them; whether it did so now.
bool Send::send_frame() {
  const OfferState state = offer_->look().state;
  if (transfers_ || bytes() == 0 || (state != OfferState::taken && state != OfferState::done)) return false;
  Link* const link = group_->peers->link(call_.peer, LinkUse::send);
  if (!link) return false;
  const iovec piece{call_.buffer, bytes()};
  transfers_ = true;
  try {
    link->send(kMessages, order_, {&piece, 1}, transfer_, kMessageStream);
  } catch (const Error&) {
    if (!link->has_failed() && !link->has_peer_left()) throw;  // how it ended is about to be known
  }
  return true;
}

bool Send::can_go_on() const {
  if (!offer_) {
    if (!group_->peers->is_local(call_.peer) && !group_->peers->link(call_.peer, LinkUse::send)) return false;
    Offer* all = (*group_->peers)[call_.peer].sent;
    return std::any_of(all, all + kOffers,
                       [](const Offer& offer) { return offer.look().state == OfferState::free; });
  }
  const uint64_t filled = offer_->filled.load();
  return offer_->look().state >= OfferState::done ||
         (ring_ && filled < bytes() && filled - offer_->drained.load() < offer_->ring_bytes);
}

Poll Send::exchange() {
  bool moved = false;
  if (!offer_) {
    if (!make_offer()) return Poll::blocked;
    moved = true;
  }
  if (group_->peers->is_local(call_.peer)) {
    moved |= fill();
  } else {
    group_->peers->poll();
    moved |= send_frame();
  }
  if (copy_.is_running()) return moved ? Poll::moved : Poll::blocked;
  const OfferState state = offer_->look().state;
  if (state == OfferState::done) {
    offer_->set({order_, OfferState::free});
    return Poll::done;
  }
  if (state == OfferState::refused) {
    const Error error = mismatch(*offer_, group_->peers->who(group_->rank()), group_->peers->who(call_.peer));
    offer_->set({order_, OfferState::free});
    throw error;
  }
  return moved ? Poll::moved : Poll::blocked;
}

// --- receiving

// The oldest offer with the tag that waits at a sender's; its word as it was seen.
Offer* Receive::find_offer(uint32_t from, OfferWord& seen) const {
  Offer* all = (*group_->peers)[from].received;
  Offer* oldest = nullptr;
  for (Offer* offer = all; offer < all + kOffers; ++offer) {
    const OfferWord word = offer->look();
    if (word.state != OfferState::offered || offer->tag.load(std::memory_order_relaxed) != call_.tag)
      continue;
    if (oldest && word.order > seen.order) continue;
    oldest = offer;
    seen = word;
  }
  return oldest;
}

bool Receive::take_offer() {
  const bool any = call_.peer == kAnyRank;
  for (uint32_t from = any ? 0 : call_.peer; from < (any ? group_->ranks() : call_.peer + 1); ++from) {
    if (from == group_->rank()) continue;
    OfferWord seen;
    Offer* oldest = find_offer(from, seen);
    if (!oldest) continue;
    // A receive from any rank and one from this rank may both want it.
    uint64_t expected = seen.packed();
    order_ = seen.order;
    if (!oldest->word.compare_exchange_strong(expected, OfferWord{order_, OfferState::taken}.packed()))
      continue;
    offer_ = oldest;
    source_ = call_.peer = from;
    return true;
  }
  return false;
}

bool Receive::can_go_on() const {
  if (offer_ && !group_->peers->is_local(source_)) return transfer_.is_done();
  if (offer_) return offer_->filled.load() > offer_->drained.load();
  for (uint32_t from = 0; from < group_->ranks(); ++from)
    if (OfferWord seen; from != group_->rank() && (call_.peer == kAnyRank || call_.peer == from))
      if (find_offer(from, seen)) return true;
  return false;
}

// Gives the link the place for the data and says so; whether they have come.
bool Receive::receive_frame() {
  Link* const link = group_->peers->link(source_, LinkUse::receive);
  if (!transfers_ && link) {
    transfers_ = true;
    try {
      link->expect(kMessages, order_, call_.buffer, bytes(), transfer_);
    } catch (const Error&) {
      if (group_->is_over()) group_->check(description());  // a receipt beside this one has found out
      if (!link->has_failed()) throw;                       // how it ended is about to be known
    }
    group_->peers->show(source_, *offer_);
  }
  group_->peers->poll();
  return transfer_.is_done();
}

Poll Receive::exchange() {
  bool moved = false;
  if (!offer_) {
    if (!take_offer() && !(group_->peers->poll() && take_offer())) return Poll::blocked;
    moved = true;
    if (offer_->dtype != call_.dtype || offer_->device != device() || offer_->elems != call_.elems ||
        offer_->send_kind != call_.kind.substr(0, kKindBytes - 1)) {
      offer_->recv_dtype = call_.dtype;
      offer_->recv_device = device();
      offer_->recv_elems = call_.elems;
      put(offer_->recv_kind, call_.kind);
      put(offer_->recv_site, text_of(call_.site));
      const Error error = mismatch(*offer_, group_->peers->who(source_), group_->peers->who(group_->rank()));
      offer_->set({order_, OfferState::refused});
      group_->peers->show(source_, *offer_);
      throw error;
    }
  }
  auto* to = static_cast<std::byte*>(call_.buffer);
  if (!group_->peers->is_local(source_)) {
    if (bytes() > 0 && !receive_frame()) return moved ? Poll::moved : Poll::blocked;
  } else if (offer_->ring_bytes == 0) {
    if (bytes() > 0 && !copy_.run(to, (*group_->peers)[source_].memory + offer_->offset, bytes()))
      return moved ? Poll::moved : Poll::blocked;
  } else {
    const std::byte* from = (*group_->peers)[source_].memory + offer_->offset;
    uint64_t drained = offer_->drained.load(std::memory_order_relaxed);
    while (drained < bytes()) {
      const uint64_t at = drained % offer_->ring_bytes;
      const uint64_t there = offer_->filled.load(std::memory_order_seq_cst) - drained;
      if (!copy_.is_running()) piece_ = std::min({there, offer_->ring_bytes - at, kPieceBytes});
      if (piece_ == 0 || !copy_.run(to + drained, from + at, piece_))
        return moved ? Poll::moved : Poll::blocked;
      drained += piece_;
      moved = true;
      offer_->drained.store(drained, std::memory_order_seq_cst);
      group_->peers->show(source_, *offer_);
    }
  }
  // A sender that gave up, or left in the middle, may have changed its tensor meanwhile; it shows that before
  // its caller has it back.
  const Presence sender = group_->peers->presence(source_);
  const bool read_in_place = group_->peers->is_local(source_) && offer_->ring_bytes == 0 && bytes() > 0;
  if (sender == Presence::failed || (sender == Presence::left && read_in_place))
    throw group_->given_up_by(source_, description());
  offer_->set({order_, OfferState::done});
  group_->peers->show(source_, *offer_);
  return Poll::done;
}

}  // namespace photinus
