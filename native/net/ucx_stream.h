// A stream over UCX, beside an authenticated TCP connection. Over that connection both ends tell each other
// first where UCX reaches them, at last how many bytes they have sent; in between it is silent, and when it
// closes without that last word the process at the other end is gone, whatever UCX has noticed.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string>

#include "net/private_descriptor.h"
#include "net/stream.h"
#include "net/ucx_worker.h"

namespace photinus {

class UcxStream final : public Stream {
 public:
  // Over a connected socket that does not block, of which both ends know that they have UCX.
  UcxStream(std::shared_ptr<UcxWorker> worker, PrivateDescriptor socket);
  // Waits until what was sent has left this process, for at most a second from finish_writing() on.
  ~UcxStream() override;

  enum class State : uint8_t { joining, joined, broken };
  // To be called until it is joined, before anything else; within 20 s it is, or it is broken.
  State join();

  Result read(const iovec* pieces, int count) override;
  Result write(const iovec* pieces, int count) override;
  void finish_writing() override;
  std::string fault() const override;
  bool is_fault_of_peer() const override { return !is_own_fault_.load(); }
  StreamCounts counts() const override { return {}; }

  int number() const { return socket_.get(); }

 private:
  Result broken(const std::string& how, bool of_peer);
  bool hear_hello();
  void hear_last_word();
  bool has_ucx_failed();

  const std::shared_ptr<UcxWorker> worker_;
  PrivateDescriptor socket_;
  const std::shared_ptr<UcxPort> port_;

  // While it joins.
  State state_ = State::joining;
  const double began_s_;
  std::string hello_, heard_;
  size_t said_ = 0;

  // Of the thread that reads.
  std::array<uint8_t, 8> last_word_{};  // how many bytes the other end has sent, little endian
  size_t last_word_bytes_ = 0;
  int socket_error_ = 0;
  bool socket_ended_ = false;
  double quiet_since_s_ = 0;  // when the socket had ended and nothing came over UCX; 0: not so
  double failed_since_s_ = 0;

  double finished_s_ = 0;
  std::atomic<bool> is_own_fault_{false};
  mutable std::mutex fault_mutex_;  // guards
  std::string fault_;
};

}  // namespace photinus
