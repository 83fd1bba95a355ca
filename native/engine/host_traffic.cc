#include "engine/host_traffic.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "hosts/words.h"

namespace photinus {
namespace {

Error unreadable(const std::string& who) {
  return {ErrorKind::system, who +
                                 " has told something of its call that cannot be read here: do all ranks "
                                 "run the same version of Photinus?"};
}

// Both ends count the same frames, so both know on which stream one goes.
uint32_t stream_of(const Link& link, uint64_t begun) {
  return static_cast<uint32_t>(kCollectiveStreams + begun % (link.data_streams() - kCollectiveStreams));
}

}  // namespace

HostTraffic::HostTraffic(Peers& peers, Levels levels, Levels rounding, const NetSizes& sizes)
    : peers_(peers),
      levels_(std::move(levels)),
      rounding_(std::move(rounding)),
      sizes_(sizes),
      landing_(new std::byte[sizes.landing_bytes]),
      channel_(kCollectives),
      sent_(peers.ranks()),
      received_(peers.ranks()) {
  for (size_t level = 0; level < levels_.sizes.size(); ++level)
    counterparts_.push_back(levels_.counterparts(peers.rank(), level));
}

void HostTraffic::begin(uint64_t sequence, const Call& call, HostPost post,
                        std::function<std::string(const HostPost&)> fault) {
  sequence_ = sequence;
  meets_apart_ = levels_of(call).sizes != levels_.sizes;
  post_ = std::move(post);
  fault_ = std::move(fault);
  fault_text_.clear();
  refused_ = !agrees(post_);
  told_ = heard_ = 0;
  for (auto* all : {&sent_, &received_})
    for (Frames& frames : *all) frames.begun = frames.moved = frames.in_tell = 0;
}

void HostTraffic::tell(size_t level) {
  if (!meets_apart_ || level == 0) tell_level(level);
}

void HostTraffic::tell_level(size_t level) {
  if (told_ > level) return;
  ++told_;
  untold_ = counterparts_[level];
}

// With the next frame to this rank, on this stream, if there are bytes of it: in what is told if there is
// room. Whether it went in that.
bool HostTraffic::tell(uint32_t rank, const std::byte* frame, uint64_t bytes, uint32_t stream) {
  const auto found = std::find(untold_.begin(), untold_.end(), rank);
  if (found == untold_.end()) return false;
  untold_.erase(found);
  std::byte told[kControlBytes];
  static_assert(sizeof told >= sizeof(TellHead) + HostPost::kMostBytes);
  TellHead head;
  head.post_bytes = static_cast<uint32_t>(encode(post_, told + sizeof head));
  size_t used = sizeof head + head.post_bytes;
  const bool goes_along = bytes > 0 && bytes <= sizeof told - used;
  if (goes_along) {
    head.frame = static_cast<uint32_t>(sent_[rank].begun + 1);
    std::memcpy(told + used, frame, bytes);
    used += bytes;
  }
  std::memcpy(told, &head, sizeof head);
  peers_.tell(rank, sequence_, {told, used}, goes_along ? Peers::kAtOnce : stream);
  return goes_along;
}

void HostTraffic::tell_rest() {
  while (!untold_.empty()) tell(untold_.back(), nullptr, 0, Peers::kAtOnce);
}

// Those that have not told may wait themselves for one that has not come: then it is that one that is
// missing.
std::vector<uint32_t> HostTraffic::missing() const {
  std::vector<uint32_t> silent, missing;
  if (heard_ == counterparts_.size()) return silent;
  for (const uint32_t rank : counterparts_[heard_])
    if (peers_.told(rank, sequence_).empty()) silent.push_back(rank);
  if (silent.empty()) return silent;
  for (uint32_t rank = 0; rank < peers_.ranks(); ++rank) {
    const bool is_over = peers_.is_lost(rank) || peers_.presence(rank) == Presence::failed;
    const bool is_silent = std::find(silent.begin(), silent.end(), rank) != silent.end();
    if (is_over ? is_silent : peers_.value(rank, Counter::posted) < sequence_) missing.push_back(rank);
  }
  return missing.empty() ? silent : missing;
}

bool HostTraffic::hear(size_t level) {
  return meets_apart_ ? meet() : hear_level(level);
}

bool HostTraffic::hear_level(size_t level) {
  if (heard_ > level) return true;
  tell_rest();
  for (const uint32_t rank : counterparts_[level])
    if (peers_.told(rank, sequence_).empty()) return false;
  learn(level);
  return true;
}

bool HostTraffic::meet() {
  tell_rest();
  while (heard_ < counterparts_.size()) {
    tell_level(heard_);
    if (!hear_level(heard_)) return false;
  }
  return true;
}

// What a rank has told, if it has told anything.
HostTraffic::Tell HostTraffic::told_by(uint32_t rank) const {
  const std::span<const std::byte> told = peers_.told(rank, sequence_);
  Tell tell;
  if (told.empty()) return tell;
  if (told.size() >= sizeof tell.head) std::memcpy(&tell.head, told.data(), sizeof tell.head);
  if (told.size() < sizeof tell.head + tell.head.post_bytes) throw unreadable(peers_.who(rank));
  tell.post = told.subspan(sizeof tell.head, tell.head.post_bytes);
  tell.frame = told.subspan(sizeof tell.head + tell.head.post_bytes);
  return tell;
}

void HostTraffic::learn(size_t level) {
  for (const uint32_t rank : counterparts_[level]) {
    const Tell told = told_by(rank);
    const auto heard = decode(told.post.data(), told.post.size());
    if (!heard) throw unreadable(peers_.who(rank));
    merge(post_, *heard);
  }
  ++heard_;
  refused_ = !agrees(post_);
  if (heard_ < counterparts_.size()) return;
  fault_text_ = fault_(post_);
  refused_ |= !fault_text_.empty();
}

Transfer& HostTraffic::next(Frames& frames) {
  if (frames.begun == frames.transfers.size()) frames.transfers.emplace_back();
  return frames.transfers[frames.begun];
}

bool HostTraffic::has_moved(Frames& frames, uint64_t count) {
  while (frames.moved < count &&
         (frames.moved + 1 == frames.in_tell || frames.transfers[frames.moved].is_done()))
    ++frames.moved;
  return frames.moved >= count;
}

// A link that fails here says that its peer is about to be known as lost: until then the rank waits.
bool HostTraffic::send(uint32_t rank, const std::byte* from, uint64_t bytes) {
  Link* const link = peers_.link(rank, LinkUse::collective);
  if (!link) return false;
  Frames& frames = sent_[rank];
  Transfer& transfer = next(frames);
  const uint32_t stream = stream_of(*link, frames.begun);
  if (tell(rank, from, bytes, stream)) {
    frames.in_tell = ++frames.begun;
    return true;
  }
  const iovec piece{const_cast<std::byte*>(from), bytes};
  try {
    link->send(channel_, mark(sequence_, frames.begun + 1), {&piece, 1}, transfer, stream);
  } catch (const Error&) {
    if (!link->has_failed() && !link->has_peer_left()) throw;
    return false;
  }
  ++frames.begun;
  return true;
}

bool HostTraffic::receive(uint32_t rank, std::byte* to, uint64_t bytes) {
  Frames& frames = received_[rank];
  Transfer& transfer = next(frames);
  // Whose frame came in its tell may have left already, and its link with it.
  const Tell told = told_by(rank);  // nothing by who is no counterpart
  if (told.head.frame == frames.begun + 1) {
    if (told.frame.size() != bytes)
      throw Error(ErrorKind::system,
                  text("%s sent %zu bytes with its call, where %llu were expected", peers_.who(rank).c_str(),
                       told.frame.size(), static_cast<unsigned long long>(bytes)));
    std::memcpy(to, told.frame.data(), bytes);
    frames.in_tell = ++frames.begun;
    return true;
  }
  Link* const link = peers_.link(rank, LinkUse::collective);
  if (!link) return false;
  try {
    link->expect(channel_, mark(sequence_, frames.begun + 1), to, bytes, transfer,
                 stream_of(*link, frames.begun));
  } catch (const Error&) {
    if (!link->has_failed()) throw;
    return false;
  }
  ++frames.begun;
  return true;
}

}  // namespace photinus
