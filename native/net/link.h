// The link between two processes: frames in order over one stream for control and some for data.
//
// Data. A frame of data goes straight into the place that the receiver has posted for its channel and
// sequence; no length from the wire is ever allocated. A frame whose place is not posted yet waits in the
// connection, and so does what comes behind it on the same stream. So a sender sends data only where it knows
// that the place is posted: because the receiver's post said so, or because places stand open ahead of time.
//
// Control. Small frames (at most kControlBytes) go to a handler at once. They have a stream of their own, so
// no data are ever ahead of them; or they go ahead of data on its stream, in the same system call.
//
// Frames of one stream arrive in order; nothing is promised between streams.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "net/frame.h"
#include "net/stream.h"

namespace photinus {

// A send or a receipt under way; used again for the next one. It must live, like the memory that it is about,
// until it is done, its channel is forgotten, or the link is closed.
class Transfer {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Sent: the kernel has all bytes. Received: they lie in their place. Never, when the link has failed.
  // The link counts the completions of those transfers only of which somebody has asked this in vain: a
  // thread that waits for one of many frames is not woken by each of the others.
  bool is_done() const {
    State now = state_.load(std::memory_order_seq_cst);
    if (now == State::under_way && state_.compare_exchange_strong(now, State::awaited)) return false;
    return now == State::done;
  }
  uint64_t bytes() const { return bytes_; }  // of the frame, once it is done

 private:
  friend class Link;
  enum class State : uint8_t { under_way, awaited, done };
  void begin(uint64_t bytes) {
    bytes_ = bytes;
    state_.store(State::under_way, std::memory_order_relaxed);
  }
  // Its owner may end it at once. Whether it was awaited.
  bool end() { return state_.exchange(State::done, std::memory_order_seq_cst) == State::awaited; }

  mutable std::atomic<State> state_{State::under_way};
  uint64_t bytes_ = 0;
};

struct LinkCounts {
  uint64_t sent_bytes = 0, received_bytes = 0;  // with headers
  uint64_t sent_frames = 0, received_frames = 0;
  double stalled_s = 0;  // time in which bytes lay here and the kernel took none, added over streams
  double waited_s = 0;   // time in which a frame had come and its place was not posted, added over streams
  uint64_t retransmissions = 0;
  double round_trip_s = 0;  // of the control stream; 0: not known
  double least_round_trip_s = 0;
  double under_way_s = 0;  // of bytes of data, added over streams; see StreamCounts
};

class Link {
 public:
  // A control frame: its payload lives until the handler returns. It runs within poll(), expect() or
  // forget(), one frame of a stream at a time; it may call send_control().
  using Handler =
      std::function<void(uint32_t channel, uint64_t sequence, const std::byte* payload, size_t bytes)>;

  // `streams`: for control, then at least one for data. `own` and `peer`: who is at the ends, in errors.
  // Bytes may lie here, and a frame that has begun to come may stand still, for ever: its user has other
  // means to tell.
  Link(std::vector<std::unique_ptr<Stream>> streams, std::string own, std::string peer, Handler handler);
  ~Link();

  static constexpr uint32_t kAnyStream = UINT32_MAX;  // the data stream with least to send
  static constexpr uint32_t kControlStream = UINT32_MAX - 1;

  // All methods may be called from any thread. The first four throw the link's error when it has failed.

  // Starts to send a frame of data, gathered from `pieces`. With `more`, nothing is given to the kernel
  // before the next frame of the stream, or poll(). `stream`: a data stream's index, from 0 on.
  void send(uint32_t channel, uint64_t sequence, std::span<const iovec> pieces, Transfer& transfer,
            uint32_t stream = kAnyStream, bool more = false);
  // Sends a control frame; the payload is copied. Throws Error(invalid_argument) when it is too long.
  void send_control(uint32_t channel, uint64_t sequence, const void* payload, size_t bytes,
                    uint32_t stream = kControlStream, bool more = false);
  // Posts the place for a frame of data, which must have `bytes` bytes. What has come already lands at once.
  // `stream`: on which it will come, if that is known, and if no control frame is awaited on that stream
  // before it: then the link is not woken for less than the frame.
  void expect(uint32_t channel, uint64_t sequence, void* at, uint64_t bytes, Transfer& transfer,
              uint32_t stream = kAnyStream);
  void check() const;

  // Does what can be done now. Whether something moved; if not, poll again when a stream is ready.
  bool poll();
  // How many awaited sends and receipts, control frames and ends there were: what a user may wait for.
  uint64_t completions() const { return completions_.load(std::memory_order_relaxed); }
  // Nobody polls until a stream is ready: of frames whose length is known it need not report each packet.
  void rest();

  // The network may be silent for so long, without an end of the link.
  void endure(double silence_s);

  // An operation was given up: what of the channel was not begun is not sent, what comes is dropped, for
  // ever. Afterwards the link does not touch the memory and the transfers of this channel. A frame that was
  // begun is completed from a copy; one of which more than 16 MiB are left ends its stream, and so the link:
  // only who gives up all that goes over it has frames as long.
  void forget(uint32_t channel);
  // Nothing more will be sent: says goodbye behind what is on its way. Let poll() run until is_finished(), or
  // for as long as there is time; then close().
  void leave();
  // Both ends have left, and everything has been delivered.
  bool is_finished() const;
  // The peer has left, and all that it sent has come.
  bool has_peer_left() const { return peer_left_.load(std::memory_order_acquire); }
  bool has_failed() const { return failed_.load(std::memory_order_acquire); }
  // Why it has failed; empty where it has not, and where the peer just ended, of which the link knows no
  // more.
  std::string fault() const;
  // Control frames lie here that the kernel has not taken.
  bool is_behind() const { return tracks_[0]->queued_bytes.load(std::memory_order_relaxed) > 0; }
  // Ends it at once. Afterwards it touches no memory and no transfer of its users.
  void close();

  // Bytes of data that were sent are not acknowledged yet, as far as the streams know.
  bool has_data_under_way() const;

  LinkCounts counts() const;
  const std::string& own() const { return own_; }
  const std::string& peer() const { return peer_; }
  size_t data_streams() const { return tracks_.size() - 1; }

 private:
  struct Outgoing {
    FrameHeader header;
    std::vector<iovec> pieces;
    Transfer* transfer = nullptr;         // of data
    std::unique_ptr<std::byte[]> copied;  // what `pieces` point to, if it is the link's own
    uint64_t sent = 0;                    // with the header
  };
  struct Place {
    std::byte* at = nullptr;
    uint64_t bytes = 0;
    Transfer* transfer = nullptr;
    uint32_t stream = kAnyStream;
  };
  struct Key {
    uint32_t channel;
    uint64_t sequence;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return std::hash<uint64_t>()(key.sequence ^ uint64_t{key.channel} << 40);
    }
  };
  // For headers, control frames, the first bytes of data.
  static constexpr size_t kBufferBytes = 2 * (sizeof(FrameHeader) + kControlBytes);
  // A stream, with what is on its way in both directions.
  struct Track {
    std::unique_ptr<Stream> stream;
    std::shared_ptr<const Readiness> readiness;  // of the stream, also when that is closed
    uint32_t index = 0;                          // 0: control

    std::mutex sending;  // guards what follows
    std::deque<Outgoing> queue;
    uint32_t next_number = 0;  // of the first frame that is not begun
    uint64_t copied_bytes = 0;
    bool finishing = false;
    StreamCounts last_counts;  // once the stream is closed
    std::atomic<bool> finished_writing{false};
    std::atomic<uint64_t> queued_bytes{0};
    std::atomic<double> stalled_since_s{0};  // 0: it is not
    std::atomic<bool> write_broken{false};
    std::string write_fault;          // read after write_broken
    bool write_fault_of_peer = true;  // too; else what carries the stream has failed

    std::mutex receiving;  // guards what follows
    const std::unique_ptr<std::byte[]> buffer = std::make_unique<std::byte[]>(kBufferBytes);
    size_t begin = 0, end = 0;  // of what lies in it
    FrameHeader header;
    bool has_header = false, in_payload = false;
    Place place;        // of the payload that is coming; without an address it is dropped
    uint64_t left = 0;  // bytes of it
    uint32_t expected_number = 0;
    std::atomic<bool> waits{false};      // for a place; set under places_mutex_
    std::atomic<uint64_t> low_water{1};  // raised under places_mutex_ too
    uint64_t places_seen = 0;
    double waits_since_s = 0;
    std::atomic<bool> ended{false};
    bool torn = false;     // it ended in the middle of a frame (state_mutex_, like the text)
    std::string end_text;  // how
    bool end_of_peer = true;

    std::atomic<uint64_t> sent_bytes{0}, sent_frames{0}, received_bytes{0}, received_frames{0};
    std::atomic<double> stalled_s{0}, waited_s{0};
  };

  Track& track_of(uint32_t stream);
  void push(Track& track, Outgoing&& frame, bool more);
  bool write(Track& track);
  void advance(Track& track, uint64_t bytes);
  bool receive(Track& track);
  bool parse(Track& track);
  bool begin_payload(Track& track);
  void end_payload(Track& track);
  void take_control(Track& track, const std::byte* payload);
  void place_waiting();
  uint64_t awaited_bytes(const Track& track) const;
  void set_low_water(Track& track, uint64_t bytes);
  void lower_water(Track& track);
  bool check_header(Track& track);
  void note_end(Track& track, const std::string& how);
  void look_for_ends();
  void fail(ErrorKind kind, const std::string& what, bool tell = true, bool is_end_of_peer = false);
  std::string name() const;

  const std::string own_, peer_;
  const Handler handler_;
  const int owner_;  // the process: a forked child's copy does nothing
  std::vector<std::unique_ptr<Track>> tracks_;
  std::atomic<uint32_t> turn_{0};

  std::mutex places_mutex_;  // guards
  std::unordered_map<Key, Place, KeyHash> places_;
  std::unordered_set<uint32_t> forgotten_;
  std::atomic<uint64_t> places_version_{0};  // changes with both
  std::atomic<uint64_t> completions_{0};

  std::atomic<bool> failed_{false}, peer_left_{false}, goodbye_heard_{false}, leaving_{false};
  mutable std::mutex state_mutex_;  // guards
  ErrorKind error_kind_ = ErrorKind::peer_lost;
  std::string error_;
  bool is_end_of_peer_ = false;
  double first_end_s_ = 0;  // when the first stream ended; 0: none has
};

}  // namespace photinus
