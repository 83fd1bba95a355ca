// The receiving half of links, and how they notice their end.
#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/process.h"
#include "net/link.h"

namespace photinus {
namespace {

constexpr uint64_t kTurnBytes = 4 << 20;  // that one stream may receive before others have a turn
// Of a frame that is coming so much at least is taken at a time. The kernel widens its window for it.
constexpr uint64_t kLowWaterBytes = 512 << 10;
// A stream ended without a word: for so long the peer's word may still be under way on the control stream.
constexpr double kWordUnderWay_s = 1;

}  // namespace

// --- receiving

void Link::expect(uint32_t channel, uint64_t sequence, void* at, uint64_t bytes, Transfer& transfer,
                  uint32_t stream) {
  check();
  transfer.begin(0);
  bool is_small = false;
  {
    std::lock_guard lock(places_mutex_);
    if (forgotten_.contains(channel))
      throw Error(ErrorKind::invalid_argument,
                  text("a place on channel %u, which %s has forgotten", channel, name().c_str()));
    const Place place{static_cast<std::byte*>(at), bytes, &transfer, stream};
    if (!places_.emplace(Key{channel, sequence}, place).second)
      throw Error(ErrorKind::invalid_argument,
                  text("channel %u, sequence %llu has a place already at %s", channel,
                       static_cast<unsigned long long>(sequence), name().c_str()));
    places_version_.fetch_add(1, std::memory_order_release);
    for (const auto& track : tracks_) is_small |= track->low_water > sizeof(FrameHeader) + bytes;
  }
  if (is_small) {
    for (auto& track : tracks_) {
      std::lock_guard lock(track->receiving);
      if (track->stream) lower_water(*track);
    }
  }
  place_waiting();
}

// Places have changed: goes on with frames that wait for theirs. No stream would report them again.
void Link::place_waiting() {
  for (auto& track : tracks_) {
    if (!track->waits.load(std::memory_order_seq_cst)) continue;
    std::lock_guard lock(track->receiving);
    if (track->stream && !has_failed()) receive(*track);
  }
}

// So many bytes will come at least before there is something to do: the rest of a frame, or the smallest of
// those that are expected on this stream. One that is smaller has no place yet, and waits until it has.
// Under track.receiving and places_mutex_.
uint64_t Link::awaited_bytes(const Track& track) const {
  if (track.in_payload) return std::clamp<uint64_t>(track.left, 1, kLowWaterBytes);
  if (track.index == 0 || track.has_header || track.end > track.begin) return 1;
  bool is_expected = false;
  uint64_t least = kLowWaterBytes;
  for (const auto& [key, place] : places_) {
    const bool here = place.stream == track.index - 1;
    if (here || place.stream == kAnyStream) least = std::min(least, sizeof(FrameHeader) + place.bytes);
    is_expected |= here;
  }
  return is_expected ? least : 1;
}

// Under track.receiving.
void Link::set_low_water(Track& track, uint64_t bytes) {
  if (bytes == track.low_water) return;
  track.low_water = bytes;
  track.stream->set_low_water(bytes);
}

// What is awaited has changed. Under track.receiving.
void Link::lower_water(Track& track) {
  if (track.low_water == 1) return;
  std::lock_guard lock(places_mutex_);
  set_low_water(track, std::min(track.low_water.load(), awaited_bytes(track)));
}

void Link::rest() {
  if (owner_ != own_pid()) return;
  for (auto& track : tracks_) {
    std::unique_lock lock(track->receiving, std::try_to_lock);
    if (!lock || !track->stream || track->waits) continue;
    std::lock_guard placing(places_mutex_);
    set_low_water(*track, awaited_bytes(*track));
  }
}

bool Link::receive(Track& track) {
  if (track.waits && track.places_seen == places_version_.load(std::memory_order_acquire)) return false;
  if (!track.waits && (track.ended.load(std::memory_order_relaxed) || !track.stream->may_read()))
    return false;
  bool moved = false;
  uint64_t got = 0;
  while (!has_failed()) {
    moved |= parse(track);
    if (has_failed() || track.waits || track.ended.load(std::memory_order_relaxed)) break;
    if (got >= kTurnBytes || !track.stream->may_read()) break;
    iovec pieces[2];
    int count = 0;
    const bool lands = track.in_payload && track.place.at;
    if (lands) pieces[count++] = {track.place.at, track.left};
    if (track.begin > 0) {  // so that a header or a control frame always has room
      std::memmove(track.buffer.get(), track.buffer.get() + track.begin, track.end - track.begin);
      track.end -= track.begin;
      track.begin = 0;
    }
    pieces[count++] = {track.buffer.get() + track.end, kBufferBytes - track.end};
    const Stream::Result result = track.stream->read(pieces, count);
    if (result.status == Stream::Status::blocked) break;
    if (result.status != Stream::Status::moved) {
      note_end(track, result.status == Stream::Status::broken ? track.stream->fault() : "");
      return true;
    }
    moved = true;
    got += result.bytes;
    track.received_bytes.fetch_add(result.bytes, std::memory_order_relaxed);
    const uint64_t landed = lands ? std::min<uint64_t>(result.bytes, track.left) : 0;
    if (lands) track.place.at += landed, track.left -= landed;
    track.end += result.bytes - landed;
  }
  if (!has_failed()) lower_water(track);
  return moved;
}

// Consumes what lies in the buffer, as far as it goes.
bool Link::parse(Track& track) {
  bool moved = false;
  while (true) {
    const size_t there = track.end - track.begin;
    if (track.in_payload) {
      const uint64_t taken = std::min<uint64_t>(track.left, there);
      if (track.place.at && taken > 0) {
        std::memcpy(track.place.at, track.buffer.get() + track.begin, taken);
        track.place.at += taken;
      }
      track.begin += taken;
      track.left -= taken;
      if (track.left > 0) return moved;
      end_payload(track);
      moved = true;
    } else if (!track.has_header) {
      if (there < sizeof(FrameHeader)) return moved;
      std::memcpy(&track.header, track.buffer.get() + track.begin, sizeof(FrameHeader));
      track.begin += sizeof(FrameHeader);
      if (!check_header(track)) return true;
      track.has_header = true;
    } else if (track.header.kind == FrameKind::data) {
      if (!begin_payload(track)) return moved;
    } else {
      if (there < track.header.bytes) return moved;
      const std::byte* payload = track.buffer.get() + track.begin;
      track.begin += track.header.bytes;
      track.has_header = false;
      track.received_frames.fetch_add(1, std::memory_order_relaxed);
      take_control(track, payload);
      moved = true;
      if (has_failed()) return true;
    }
  }
}

bool Link::check_header(Track& track) {
  const FrameHeader& header = track.header;
  std::string wrong;
  const bool small = header.kind == FrameKind::control || header.kind == FrameKind::goodbye ||
                     header.kind == FrameKind::fault;
  if (header.checksum != header.expected_checksum())
    wrong = text("whose checksum is %08x instead of %08x", header.checksum, header.expected_checksum());
  else if (header.number != track.expected_number)
    wrong = text("with number %u where %u comes", header.number, track.expected_number);
  else if (!small && header.kind != FrameKind::data)
    wrong = text("of unknown kind %u", static_cast<unsigned>(header.kind));
  else if (track.index == 0 ? !small : small && header.kind != FrameKind::control)
    wrong = text("of kind %u on a stream for %s", static_cast<unsigned>(header.kind),
                 track.index == 0 ? "control" : "data");
  else if (small && header.bytes > kControlBytes)
    wrong = text("of control with %llu bytes (at most %zu)", static_cast<unsigned long long>(header.bytes),
                 kControlBytes);
  ++track.expected_number;
  if (wrong.empty()) return true;
  fail(ErrorKind::peer_lost, name() + ": " + peer_ + " sent a frame " + wrong +
                                 "; the connection is damaged, or something else speaks on it");
  return false;
}

// Finds the place of the frame whose header has come; false when there is none yet.
bool Link::begin_payload(Track& track) {
  const FrameHeader& header = track.header;
  {
    std::lock_guard lock(places_mutex_);
    const auto found = places_.find({header.channel, header.sequence});
    track.place = {};
    if (found != places_.end()) {
      track.place = found->second;
      places_.erase(found);
    } else if (!forgotten_.contains(header.channel)) {
      track.places_seen = places_version_.load(std::memory_order_relaxed);
      if (!track.waits) track.waits_since_s = now_s();
      track.waits = true;
    } else {
      track.waits = false;
    }
    if (track.place.transfer) {
      if (track.waits)
        track.waited_s.store(track.waited_s.load() + (now_s() - track.waits_since_s),
                             std::memory_order_relaxed);
      track.waits = false;
    }
  }
  if (track.waits) return false;
  if (track.place.transfer && header.bytes != track.place.bytes) {
    fail(ErrorKind::peer_lost,
         text("%s: %s sent %llu bytes for channel %u, sequence %llu, where %llu were expected",
              name().c_str(), peer_.c_str(), static_cast<unsigned long long>(header.bytes), header.channel,
              static_cast<unsigned long long>(header.sequence),
              static_cast<unsigned long long>(track.place.bytes)));
    return false;
  }
  track.left = header.bytes;
  track.in_payload = true;
  track.has_header = false;
  return true;
}

void Link::end_payload(Track& track) {
  track.in_payload = false;
  track.received_frames.fetch_add(1, std::memory_order_relaxed);
  Transfer* const transfer = track.place.transfer;
  track.place = {};
  if (!transfer) return;
  transfer->bytes_ = track.header.bytes;
  if (transfer->end()) completions_.fetch_add(1, std::memory_order_relaxed);
}

void Link::take_control(Track& track, const std::byte* payload) {
  const FrameHeader& header = track.header;
  if (header.kind == FrameKind::goodbye) {
    goodbye_heard_.store(true);
  } else if (header.kind == FrameKind::fault) {
    std::string why(reinterpret_cast<const char*>(payload), header.bytes);
    std::replace_if(why.begin(), why.end(), [](char c) { return static_cast<unsigned char>(c) < ' '; }, ' ');
    fail(ErrorKind::peer_lost, name() + ": " + peer_ + " gave it up: " + why, false);
  } else {
    handler_(header.channel, header.sequence, payload, header.bytes);
  }
  completions_.fetch_add(1, std::memory_order_relaxed);
}

// --- ends

bool Link::poll() {
  if (has_failed() || owner_ != own_pid()) return false;
  bool moved = false;
  for (auto& track : tracks_) {
    if (track->queued_bytes.load(std::memory_order_relaxed) > 0 || leaving_.load(std::memory_order_relaxed)) {
      std::unique_lock lock(track->sending, std::try_to_lock);
      if (lock && !has_failed()) moved |= write(*track);
    }
    if (track->waits.load(std::memory_order_relaxed) || track->readiness->to_read.load()) {
      std::unique_lock lock(track->receiving, std::try_to_lock);
      if (lock && !has_failed()) moved |= receive(*track);
    }
    if (has_failed()) return true;
  }
  look_for_ends();
  return moved || has_failed();
}

// A stream will bring nothing more. Between frames that is in order, if the peer says goodbye.
void Link::note_end(Track& track, const std::string& how) {
  std::lock_guard lock(state_mutex_);
  track.end_of_peer = how.empty() || track.stream->is_fault_of_peer();
  track.torn = track.in_payload || track.has_header || track.end > track.begin;
  track.end_text = how.empty() ? "the connection was closed" : how;
  if (track.in_payload)
    track.end_text += text(" with %llu bytes of channel %u, sequence %llu still to come",
                           static_cast<unsigned long long>(track.left), track.header.channel,
                           static_cast<unsigned long long>(track.header.sequence));
  else if (how.empty())
    track.end_text +=
        track.torn ? " in the middle of a frame" : " without a goodbye; its process has ended, or gave up";
  if (first_end_s_ == 0) first_end_s_ = now_s();
  track.ended.store(true, std::memory_order_release);
}

// Decides whether streams that have ended are a failure; the word that explains it may come behind them.
void Link::look_for_ends() {
  std::string symptom;
  bool all_ended = true, of_peer = true;
  const bool goodbye = goodbye_heard_.load();
  const bool control_ended = tracks_[0]->ended.load(std::memory_order_acquire);
  for (const auto& track : tracks_) {
    if (track->ended.load(std::memory_order_acquire)) {
      std::lock_guard lock(state_mutex_);
      if (track->torn || (!goodbye && symptom.empty())) {
        symptom = track->end_text;
        of_peer = track->end_of_peer;
      }
    } else if (track->write_broken.load(std::memory_order_acquire)) {
      std::lock_guard lock(state_mutex_);
      if (!goodbye && symptom.empty()) {
        symptom = track->write_fault;
        of_peer = track->write_fault_of_peer;
      }
      if (first_end_s_ == 0) first_end_s_ = now_s();
      all_ended = false;
    } else {
      all_ended = false;
    }
  }
  if (symptom.empty()) {
    if (goodbye && all_ended && !peer_left_.exchange(true, std::memory_order_release))
      completions_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  double since_s;
  {
    std::lock_guard lock(state_mutex_);
    since_s = first_end_s_;
  }
  if (control_ended || now_s() - since_s > kWordUnderWay_s)
    fail(of_peer ? ErrorKind::peer_lost : ErrorKind::system, name() + ": " + symptom, false, of_peer);
}

}  // namespace photinus
