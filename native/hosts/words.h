// What ranks of different hosts tell each other beside their data: the payloads of control frames. They come
// from processes that have proved to know the group's secret; sizes and ranks are checked all the same.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "peers/offers.h"

namespace photinus {

// A frame's channel says what it is. Frames of data use those from kMessages on.
enum Channel : uint32_t {
  kTold,        // of a collective (its number is the frame's): for whoever compares calls
  kBeat,        // Beat, and a Sign for each of the host's ranks
  kEnded,       // Ended, and a text: how a rank went, or why
  kReason,      // a text: what is to be said of the sender if it goes away
  kWaits,       // Waits, and the texts of the call and of why the process gave up
  kOffer,       // OfferShown
  kMeasured,    // data of no meaning, while a group forms
  kMessages,    // data of messages; the frame's number is that of the offer
  kCollectives  // data of collectives, on the first of them that was not forgotten
};

// Streams of a link for data: messages have their own, for they wait for nobody's collective; then comes one
// for each network card, on which the frames of a collective take turns.
enum DataStream : uint32_t { kMessageStream, kCollectiveStreams };

struct Beat {
  uint32_t first = 0, count = 0;  // places in the sender's host's list of ranks; behind it so many signs
};
struct Sign {
  uint64_t heartbeat = 0, posted = 0;
};

struct Ended {
  uint32_t rank = 0, culprit = 0;
  Presence how = Presence::active;  // active: it went without a word
  uint32_t in_deadlock = 0, reserved = 0;
  uint64_t posted = 0;
};

struct Waits {
  uint64_t process = 0, version = 0, affirmed = 0, lane = 0;
  uint64_t waits_for[8] = {};
  uint64_t deadlocked[8][2] = {};     // process, version
  uint32_t text_bytes = 0, rank = 0;  // rank: of the sender's host
};

struct OfferShown {
  uint32_t index = 0;
  uint32_t by_receiver = 0;
  uint64_t word = 0;
  int64_t tag = 0;
  uint64_t elems = 0;
  Dtype dtype{};
  DeviceType device{};
  char kind[kKindBytes] = {};
  char site[RankBlock::kTextBytes] = {};
};

// Appends the bytes of a value, or of a text.
template <class T>
void put(std::vector<std::byte>& out, const T& value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  out.insert(out.end(), bytes, bytes + sizeof value);
}
inline void put_text(std::vector<std::byte>& out, const std::string& text, size_t limit) {
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  out.insert(out.end(), bytes, bytes + std::min(text.size(), limit));
}

// Reads from a payload; what is not there any more is not read.
class Reader {
 public:
  Reader(const std::byte* at, size_t bytes) : at_(at), left_(bytes) {}
  template <class T>
  std::optional<T> take() {
    if (left_ < sizeof(T)) return std::nullopt;
    T value;
    std::memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    left_ -= sizeof value;
    return value;
  }
  std::string take_text(size_t limit) {
    const size_t bytes = std::min(limit, left_);
    std::string text(reinterpret_cast<const char*>(at_), bytes);
    at_ += bytes;
    left_ -= bytes;
    return text;
  }

 private:
  const std::byte* at_;
  size_t left_;
};

}  // namespace photinus
