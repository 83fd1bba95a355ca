// One connection, as links see it: bytes in order in both directions, and nothing ever blocks. Over TCP
// (net/tcp_stream.h), or made up by a test with torn reads, delays and cuts (tests/fake_streams.h).
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace photinus {

struct StreamCounts {
  uint64_t retransmissions = 0;  // packets that were sent again
  double round_trip_s = 0;       // smoothed; 0: not known
  double least_round_trip_s = 0;
  // For how long bytes were sent and not acknowledged, without the time in which the other end took none.
  double under_way_s = 0;
};

// Whether trying is worth a call. Whoever watches the connection sets it when something has changed; it may
// outlive the stream.
struct Readiness {
  std::atomic<bool> to_read{true}, to_write{true};
  std::atomic<bool> ending{
      false};  // the other end has finished writing, or all is over: no change will follow

  void set(bool read, bool write, bool end) {
    if (end) ending.store(true, std::memory_order_seq_cst);
    if (read || end) to_read.store(true, std::memory_order_seq_cst);
    if (write) to_write.store(true, std::memory_order_seq_cst);
  }
};

class Stream {
 public:
  enum class Status : uint8_t {
    moved,    // so many bytes, at least one
    blocked,  // none now; may_read() or may_write() will say when to try again
    ended,    // reading: the other end has finished writing; for ever
    broken,   // fault() says how; for ever
  };
  struct Result {
    Status status = Status::blocked;
    size_t bytes = 0;
  };

  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // One thread reads at a time, one writes. At least one byte is asked for, in at most 64 pieces.
  virtual Result read(const iovec* pieces, int count) = 0;
  virtual Result write(const iovec* pieces, int count) = 0;
  // So many bytes are needed at least: with fewer, may_read() need not say so. They are sure to come.
  virtual void set_low_water(size_t) {}
  // The network may be silent for so long without an end of the stream, as far as that can be had.
  virtual void endure(double) {}
  // Nothing more will be written; what was is delivered.
  virtual void finish_writing() = 0;
  // How it broke; only after a read or write said so, by the thread that heard it.
  virtual std::string fault() const = 0;
  // Whether that tells that the process at the other end is gone; else what carries the stream has failed.
  virtual bool is_fault_of_peer() const { return true; }
  virtual StreamCounts counts() const = 0;
  // Whether bytes have been sent and not been acknowledged yet; false where that is not known.
  virtual bool has_bytes_under_way() const { return false; }

  bool may_read() const { return readiness_->to_read.load(std::memory_order_seq_cst); }
  bool may_write() const { return readiness_->to_write.load(std::memory_order_seq_cst); }
  const std::shared_ptr<Readiness>& readiness() const { return readiness_; }

 protected:
  Stream() = default;
  // To be cleared before an attempt: what changes meanwhile sets it again.
  const std::shared_ptr<Readiness> readiness_ = std::make_shared<Readiness>();
};

}  // namespace photinus
