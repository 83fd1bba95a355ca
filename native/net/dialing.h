// Making one connection to a peer: dialling, again and again until it is there, and the caller's side of the
// handshake. A state machine that never blocks.
#pragma once

#include <string>
#include <vector>

#include "base/clock.h"
#include "net/events.h"
#include "net/handshake.h"
#include "net/private_descriptor.h"
#include "net/socket_address.h"
#include "net/tcp_stream.h"

namespace photinus {

class Dialing {
 public:
  struct Order {
    // Of the peer. Data stream k tries the k-th first, so that streams spread over its network cards; then
    // the others, in turn.
    std::vector<SocketAddress> addresses;
    Membership own;
    uint32_t peer = 0;
    uint8_t streams = 1;  // for data
    Token token{};
    TcpOptions tcp;
    Dialect dialect;
    double handshake_s = 2;
    double stranger_s = 1.5;
    double gone_s = 3;
  };
  enum class State : uint8_t { under_way, done, failed };

  // `id`: names its socket among the events.
  Dialing(const Order& order, uint8_t stream, uint64_t id)
      : order_(order), stream_(stream), id_(id), next_address_(stream == 0 ? 0 : stream - 1u) {}

  // Its socket may go on.
  void note() { has_moved_ = true; }
  // Does what can be done now.
  State work(Events& events, double now);
  double due_s() const { return due_s_; }
  uint64_t id() const { return id_; }
  // Once it is done.
  PrivateDescriptor take_socket() { return std::move(socket_); }
  const Membership& peer() const { return peer_; }
  // Of one that failed: whether nobody listens at the peer's addresses any more.
  bool has_peer_gone() const { return has_peer_gone_; }
  // Why it failed; or why it has not been done yet, for whoever gives up waiting.
  const std::string& why() const { return why_; }

 private:
  enum class Phase : uint8_t { idle, connecting, talking };

  void start(Events& events, double now);
  void talk(double now);
  void hear(double now);
  void retry(double now, const std::string& why);
  void fail_to_connect(double now, int error);
  void retry_stranger(double now, const std::string& why);

  const Order& order_;
  const uint8_t stream_;
  const uint64_t id_;
  size_t next_address_;
  bool has_moved_ = true;
  Phase phase_ = Phase::idle;
  State state_ = State::under_way;
  PrivateDescriptor socket_;
  std::string where_;
  double due_s_ = 0;  // when the current phase is over
  double pause_s_ = 0;
  double stranger_since_s_ = 0, refused_since_s_ = 0;
  bool has_peer_gone_ = false;
  Challenge challenge_{};
  Claim claim_{};
  Verdict verdict_{};
  size_t challenge_bytes_ = 0, claim_bytes_ = 0, verdict_bytes_ = 0;
  Membership peer_;
  std::string why_;
};

}  // namespace photinus
