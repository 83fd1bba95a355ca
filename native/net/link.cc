#include "net/link.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/process.h"

namespace photinus {
namespace {

constexpr uint64_t kCopiedLimit = 1 << 20;  // of control frames that the kernel has not taken
constexpr int kPieces = 64;                 // of one write
// Of a frame that is given up in the middle so much at most is copied for its rest.
constexpr uint64_t kRestLimit = 16 << 20;

}  // namespace

Link::Link(std::vector<std::unique_ptr<Stream>> streams, std::string own, std::string peer, Handler handler)
    : own_(std::move(own)), peer_(std::move(peer)), handler_(std::move(handler)), owner_(own_pid()) {
  if (streams.size() < 2)
    throw Error(ErrorKind::invalid_argument, "a link needs a stream for control and at least one for data");
  for (auto& stream : streams) {
    auto track = std::make_unique<Track>();
    track->readiness = stream->readiness();
    track->stream = std::move(stream);
    track->index = static_cast<uint32_t>(tracks_.size());
    tracks_.push_back(std::move(track));
  }
}

// In a forked child another thread may have held any of the locks.
Link::~Link() {
  if (owner_ == own_pid()) close();
}

std::string Link::name() const {
  return "the link of " + own_ + " to " + peer_;
}

void Link::check() const {
  if (owner_ != own_pid())
    throw Error(ErrorKind::aborted, name() + " belongs to the parent of this forked process");
  if (!has_failed()) return;
  std::lock_guard lock(state_mutex_);
  throw Error(error_kind_, error_);
}

// --- sending

void Link::send(uint32_t channel, uint64_t sequence, std::span<const iovec> pieces, Transfer& transfer,
                uint32_t stream, bool more) {
  check();
  if (leaving_.load()) throw Error(ErrorKind::aborted, name() + " was left: nothing more is sent");
  Outgoing frame;
  frame.header.channel = channel;
  frame.header.sequence = sequence;
  frame.pieces.reserve(pieces.size());
  for (const iovec& piece : pieces) {
    if (piece.iov_len == 0) continue;
    frame.pieces.push_back(piece);
    frame.header.bytes += piece.iov_len;
  }
  transfer.begin(frame.header.bytes);
  frame.transfer = &transfer;
  if (stream == kAnyStream) {
    const uint32_t first = turn_.fetch_add(1, std::memory_order_relaxed);
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < data_streams(); ++i) {
      const auto candidate = static_cast<uint32_t>((first + i) % data_streams());
      const uint64_t queued = tracks_[candidate + 1]->queued_bytes.load(std::memory_order_relaxed);
      if (queued < least) least = queued, stream = candidate;
    }
  }
  push(track_of(stream), std::move(frame), more);
}

Link::Track& Link::track_of(uint32_t stream) {
  if (stream >= data_streams())
    throw Error(ErrorKind::invalid_argument,
                text("stream %u was given; %s has %zu for data", stream, name().c_str(), data_streams()));
  return *tracks_[stream + 1];
}

void Link::send_control(uint32_t channel, uint64_t sequence, const void* payload, size_t bytes,
                        uint32_t stream, bool more) {
  check();
  if (leaving_.load()) throw Error(ErrorKind::aborted, name() + " was left: nothing more is sent");
  if (bytes > kControlBytes)
    throw Error(ErrorKind::invalid_argument,
                text("a control frame of %zu bytes was given; it may have %zu", bytes, kControlBytes));
  Outgoing frame;
  frame.header.kind = FrameKind::control;
  frame.header.channel = channel;
  frame.header.sequence = sequence;
  frame.header.bytes = bytes;
  if (bytes > 0) {
    frame.copied = std::make_unique<std::byte[]>(bytes);
    std::memcpy(frame.copied.get(), payload, bytes);
    frame.pieces.push_back({frame.copied.get(), bytes});
  }
  push(stream == kControlStream ? *tracks_[0] : track_of(stream), std::move(frame), more);
}

void Link::push(Track& track, Outgoing&& frame, bool more) {
  bool overflow = false;
  {
    std::lock_guard lock(track.sending);
    if (has_failed()) return;
    track.queued_bytes.fetch_add(sizeof(FrameHeader) + frame.header.bytes, std::memory_order_relaxed);
    if (frame.header.kind == FrameKind::control) track.copied_bytes += sizeof(Outgoing) + frame.header.bytes;
    overflow = track.copied_bytes > kCopiedLimit;
    track.queue.push_back(std::move(frame));
    // Behind others that the kernel has not taken it waits like them, for poll().
    if (!more && !overflow && track.stalled_since_s.load(std::memory_order_relaxed) == 0) write(track);
  }
  if (overflow)
    fail(ErrorKind::peer_lost,
         text("%s: it has not taken %llu bytes of control frames; it is stopped, or the network is cut",
              name().c_str(), static_cast<unsigned long long>(kCopiedLimit)));
}

// Gives the kernel what it takes, under track.sending. Whether it took something.
bool Link::write(Track& track) {
  bool moved = false;
  while (!track.queue.empty() && !track.write_broken.load(std::memory_order_relaxed) &&
         track.stream->may_write()) {
    iovec pieces[kPieces];
    int count = 0;
    uint64_t asked = 0;
    uint32_t number = track.next_number;
    for (Outgoing& frame : track.queue) {
      if (frame.sent == 0) {
        frame.header.number = number++;
        frame.header.checksum = frame.header.expected_checksum();
      }
      uint64_t skip = frame.sent;
      auto add = [&](void* at, uint64_t bytes) {
        if (skip >= bytes) {
          skip -= bytes;
          return;
        }
        if (count == kPieces) return;
        pieces[count++] = {static_cast<std::byte*>(at) + skip, bytes - skip};
        asked += bytes - skip;
        skip = 0;
      };
      add(&frame.header, sizeof frame.header);
      for (const iovec& piece : frame.pieces) add(piece.iov_base, piece.iov_len);
      if (count == kPieces) break;
    }
    const Stream::Result result = track.stream->write(pieces, count);
    if (result.status == Stream::Status::blocked) break;
    if (result.status != Stream::Status::moved) {
      track.write_fault = track.stream->fault();
      track.write_fault_of_peer = track.stream->is_fault_of_peer();
      track.write_broken.store(true, std::memory_order_release);
      break;
    }
    moved = true;
    advance(track, result.bytes);
    if (result.bytes < asked && !track.stream->may_write()) break;
  }
  const double since_s = track.stalled_since_s.load(std::memory_order_relaxed);
  if (moved && since_s > 0)
    track.stalled_s.store(track.stalled_s.load() + (now_s() - since_s), std::memory_order_relaxed);
  if (track.queue.empty()) {
    track.stalled_since_s.store(0, std::memory_order_relaxed);
    if (track.finishing && !track.finished_writing) {
      track.stream->finish_writing();
      track.finished_writing = true;
      moved = true;
    }
  } else if (moved || since_s == 0) {
    track.stalled_since_s.store(now_s(), std::memory_order_relaxed);
  }
  return moved;
}

void Link::advance(Track& track, uint64_t bytes) {
  track.sent_bytes.fetch_add(bytes, std::memory_order_relaxed);
  track.queued_bytes.fetch_sub(bytes, std::memory_order_relaxed);
  while (bytes > 0) {
    Outgoing& frame = track.queue.front();
    const uint64_t all = sizeof(FrameHeader) + frame.header.bytes;
    const uint64_t taken = std::min(bytes, all - frame.sent);
    if (frame.sent == 0) ++track.next_number;
    frame.sent += taken;
    bytes -= taken;
    if (frame.sent < all) return;
    if (frame.header.kind == FrameKind::control) track.copied_bytes -= sizeof(Outgoing) + frame.header.bytes;
    track.sent_frames.fetch_add(1, std::memory_order_relaxed);
    Transfer* const transfer = frame.transfer;
    track.queue.pop_front();
    if (!transfer || transfer->end()) completions_.fetch_add(1, std::memory_order_relaxed);
  }
}

// --- ends

void Link::endure(double silence_s) {
  for (auto& track : tracks_) {
    std::lock_guard lock(track->sending);
    if (track->stream) track->stream->endure(silence_s);
  }
}

bool Link::has_data_under_way() const {
  return std::any_of(tracks_.begin() + 1, tracks_.end(), [](const std::unique_ptr<Track>& track) {
    std::lock_guard lock(track->sending);
    return track->stream && track->stream->has_bytes_under_way();
  });
}

std::string Link::fault() const {
  std::lock_guard lock(state_mutex_);
  return is_end_of_peer_ ? "" : error_;
}

// Only the first failure counts. The peer is told where that is possible without waiting.
void Link::fail(ErrorKind kind, const std::string& what, bool tell, bool is_end_of_peer) {
  {
    std::lock_guard lock(state_mutex_);
    if (has_failed()) return;
    error_kind_ = kind;
    error_ = what;
    is_end_of_peer_ = is_end_of_peer;
    failed_.store(true, std::memory_order_release);
  }
  completions_.fetch_add(1, std::memory_order_relaxed);
  Track& control = *tracks_[0];
  if (tell) {
    std::lock_guard lock(control.sending);
    if (!control.stream) return;
    Outgoing frame;
    frame.header.kind = FrameKind::fault;
    frame.header.bytes = std::min(what.size(), kControlBytes);
    frame.copied = std::make_unique<std::byte[]>(frame.header.bytes);
    std::memcpy(frame.copied.get(), what.data(), frame.header.bytes);
    frame.pieces.push_back({frame.copied.get(), frame.header.bytes});
    control.queued_bytes.fetch_add(sizeof(FrameHeader) + frame.header.bytes, std::memory_order_relaxed);
    control.queue.push_back(std::move(frame));
    write(control);
  }
  for (auto& track : tracks_) {
    std::lock_guard lock(track->sending);
    if (track->stream) track->stream->finish_writing();
  }
}

void Link::forget(uint32_t channel) {
  if (owner_ != own_pid()) return;
  {
    std::lock_guard lock(places_mutex_);
    forgotten_.insert(channel);
    std::erase_if(places_, [&](const auto& entry) { return entry.first.channel == channel; });
    places_version_.fetch_add(1, std::memory_order_release);
  }
  for (auto& track : tracks_) {
    {
      std::lock_guard lock(track->receiving);
      if (track->in_payload && track->header.channel == channel) track->place = {};
      if (track->stream) lower_water(*track);
    }
    std::lock_guard lock(track->sending);
    auto is_dropped = [&](const Outgoing& frame) {
      return frame.transfer && frame.header.channel == channel && frame.sent == 0;
    };
    bool is_cut = false;
    for (Outgoing& frame : track->queue) {
      if (!frame.transfer || frame.header.channel != channel) continue;
      if (is_dropped(frame)) {
        track->queued_bytes.fetch_sub(sizeof(FrameHeader) + frame.header.bytes, std::memory_order_relaxed);
        continue;
      }
      uint64_t gone = frame.sent - std::min(frame.sent, uint64_t{sizeof(FrameHeader)}), at = 0;
      const uint64_t left = frame.header.bytes - gone;
      is_cut = left > kRestLimit;
      if (is_cut) break;
      // The peer waits for the rest of it, so it is copied out of its owner's memory.
      frame.copied = std::make_unique<std::byte[]>(left);
      const iovec sent{nullptr, gone};
      for (const iovec& piece : frame.pieces) {
        const uint64_t skip = std::min<uint64_t>(gone, piece.iov_len), bytes = piece.iov_len - skip;
        std::memcpy(frame.copied.get() + at, static_cast<std::byte*>(piece.iov_base) + skip, bytes);
        gone -= skip;
        at += bytes;
      }
      frame.pieces = {sent, {frame.copied.get(), left}};
      frame.transfer = nullptr;
    }
    if (is_cut) {
      track->queue.clear();
      track->queued_bytes.store(0, std::memory_order_relaxed);
      track->copied_bytes = 0;
      track->finishing = true;
      if (track->stream && !has_failed()) write(*track);
      continue;
    }
    std::erase_if(track->queue, is_dropped);
  }
  place_waiting();
}

void Link::leave() {
  if (has_failed() || owner_ != own_pid() || leaving_.exchange(true)) return;
  for (auto& track : tracks_) {
    std::lock_guard lock(track->sending);
    if (!track->stream) return;
    if (track->index == 0) {
      Outgoing frame;
      frame.header.kind = FrameKind::goodbye;
      track->queued_bytes.fetch_add(sizeof(FrameHeader), std::memory_order_relaxed);
      track->queue.push_back(std::move(frame));
    }
    track->finishing = true;
    write(*track);
  }
}

bool Link::is_finished() const {
  return has_peer_left() && std::all_of(tracks_.begin(), tracks_.end(),
                                        [](const auto& track) { return track->finished_writing.load(); });
}

void Link::close() {
  if (owner_ != own_pid()) return;
  {
    std::lock_guard lock(state_mutex_);
    if (!has_failed()) {
      error_kind_ = ErrorKind::aborted;
      error_ = name() + " was closed here";
      failed_.store(true, std::memory_order_release);
    }
  }
  for (auto& track : tracks_) {
    std::lock_guard receiving(track->receiving);
    std::lock_guard sending(track->sending);
    if (track->stream) track->last_counts = track->stream->counts();
    track->stream.reset();
    track->queue.clear();
  }
}

LinkCounts Link::counts() const {
  LinkCounts all;
  for (const auto& track : tracks_) {
    all.sent_bytes += track->sent_bytes.load(std::memory_order_relaxed);
    all.received_bytes += track->received_bytes.load(std::memory_order_relaxed);
    all.sent_frames += track->sent_frames.load(std::memory_order_relaxed);
    all.received_frames += track->received_frames.load(std::memory_order_relaxed);
    all.stalled_s += track->stalled_s.load(std::memory_order_relaxed);
    all.waited_s += track->waited_s.load(std::memory_order_relaxed);
    std::lock_guard lock(track->sending);
    const StreamCounts counts = track->stream ? track->stream->counts() : track->last_counts;
    all.retransmissions += counts.retransmissions;
    if (track->index > 0) {
      all.under_way_s += counts.under_way_s;
    } else {
      all.round_trip_s = counts.round_trip_s;
      all.least_round_trip_s = counts.least_round_trip_s;
    }
  }
  return all;
}

}  // namespace photinus
