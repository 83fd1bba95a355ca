#include "engine/host_traffic.h"

#include <algorithm>

#include "base/error.h"
#include "hosts/words.h"

namespace photinus {

HostTraffic::HostTraffic(Peers& peers, Levels levels, const NetSizes& sizes)
    : peers_(peers),
      levels_(std::move(levels)),
      sizes_(sizes),
      landing_(new std::byte[sizes.landing_bytes]),
      channel_(kCollectives),
      sent_(peers.ranks()),
      received_(peers.ranks()) {
  for (size_t level = 0; level < levels_.sizes.size(); ++level)
    counterparts_.push_back(levels_.counterparts(peers.rank(), level));
}

void HostTraffic::begin(uint64_t sequence, HostPost post, std::function<std::string(const HostPost&)> fault) {
  sequence_ = sequence;
  post_ = std::move(post);
  fault_ = std::move(fault);
  fault_text_.clear();
  refused_ = !agrees(post_);
  told_ = heard_ = 0;
  for (auto* all : {&sent_, &received_})
    for (Frames& frames : *all) frames.begun = frames.moved = 0;
}

void HostTraffic::tell(size_t level) {
  if (told_ > level) return;
  ++told_;
  std::byte bytes[HostPost::kMostBytes];
  const size_t used = encode(post_, bytes);
  for (const uint32_t rank : counterparts_[level]) peers_.tell(rank, sequence_, {bytes, used});
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
  if (heard_ > level) return true;
  for (const uint32_t rank : counterparts_[level])
    if (peers_.told(rank, sequence_).empty()) return false;
  learn(level);
  return true;
}

bool HostTraffic::meet() {
  while (heard_ < counterparts_.size()) {
    tell(heard_);
    if (!hear(heard_)) return false;
  }
  return true;
}

void HostTraffic::learn(size_t level) {
  for (const uint32_t rank : counterparts_[level]) {
    const auto told = peers_.told(rank, sequence_);
    const auto heard = decode(told.data(), told.size());
    if (!heard)
      throw Error(ErrorKind::system,
                  peers_.who(rank) +
                      " has told something of its call that cannot be read here: do all ranks "
                      "run the same version of Photinus?");
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
  while (frames.moved < count && frames.transfers[frames.moved].is_done()) ++frames.moved;
  return frames.moved >= count;
}

// A link that fails here says that its peer is about to be known as lost: until then the rank waits.
bool HostTraffic::send(uint32_t rank, const std::byte* from, uint64_t bytes) {
  Link* const link = peers_.link(rank, LinkUse::collective);
  if (!link) return false;
  Frames& frames = sent_[rank];
  Transfer& transfer = next(frames);
  const iovec piece{const_cast<std::byte*>(from), bytes};
  try {
    const auto stream = kCollectiveStreams + frames.begun % (link->data_streams() - kCollectiveStreams);
    link->send(channel_, mark(sequence_, frames.begun + 1), {&piece, 1}, transfer,
               static_cast<uint32_t>(stream));
  } catch (const Error&) {
    if (!link->has_failed()) throw;
    return false;
  }
  ++frames.begun;
  return true;
}

bool HostTraffic::receive(uint32_t rank, std::byte* to, uint64_t bytes) {
  Link* const link = peers_.link(rank, LinkUse::collective);
  if (!link) return false;
  Frames& frames = received_[rank];
  Transfer& transfer = next(frames);
  try {
    link->expect(channel_, mark(sequence_, frames.begun + 1), to, bytes, transfer);
  } catch (const Error&) {
    if (!link->has_failed()) throw;
    return false;
  }
  ++frames.begun;
  return true;
}

}  // namespace photinus
