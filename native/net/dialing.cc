#include "net/dialing.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/file_descriptor.h"

namespace photinus {
namespace {

constexpr double kConnect_s = 3;  // a packet that was lost is sent again after one and after three seconds
constexpr double kFirstPause_s = 0.002, kLongestPause_s = 0.2;

bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK;
}

std::string meaning(int error) {
  switch (error) {
    case ECONNREFUSED:
      return "nobody listens there (connection refused)";
    case EAFNOSUPPORT:
      return "this host knows no addresses of this kind (IPv6 switched off?)";
    case ENETUNREACH:
      return "there is no route to it from this host (network unreachable)";
    case EHOSTUNREACH:
      return "its host does not answer (no route to host)";
    case ETIMEDOUT:
      return "it does not answer: the host is down, or a firewall drops what is sent to it";
    default:
      return text("%s (errno %d)", std::strerror(error), error);
  }
}

}  // namespace

void Dialing::retry(double now, const std::string& why) {
  socket_.reset();
  phase_ = Phase::idle;
  pause_s_ = pause_s_ == 0 ? kFirstPause_s : std::min(2 * pause_s_, kLongestPause_s);
  due_s_ = now + pause_s_;
  why_ = where_ + ": " + why;
}

// Addresses are those of listeners: where nobody listens any more, the peer has ended.
void Dialing::fail_to_connect(double now, int error) {
  if (error != ECONNREFUSED || refused_since_s_ == 0) refused_since_s_ = error == ECONNREFUSED ? now : 0;
  retry(now, meaning(error));
  has_peer_gone_ = refused_since_s_ > 0 && now - refused_since_s_ > order_.gone_s;
  if (has_peer_gone_) state_ = State::failed;
}

// Something that is not the peer is there, or the peer does not know this process. (Silence, and a connection
// that breaks, may be the network's.)
void Dialing::retry_stranger(double now, const std::string& why) {
  if (stranger_since_s_ == 0) stranger_since_s_ = now;
  retry(now, why);
  if (now - stranger_since_s_ > order_.stranger_s) state_ = State::failed;
}

Dialing::State Dialing::work(Events& events, double now) {
  if (!has_moved_ && now < due_s_) return state_;
  has_moved_ = false;
  if (phase_ == Phase::idle && state_ == State::under_way && now >= due_s_) start(events, now);
  if (phase_ == Phase::connecting) {
    int error = 0;
    socklen_t bytes = sizeof error;
    sockaddr_storage peer;
    socklen_t peer_bytes = sizeof peer;
    if (getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) error = errno;
    if (error != 0) {
      fail_to_connect(now, error);
    } else if (getpeername(socket_.get(), reinterpret_cast<sockaddr*>(&peer), &peer_bytes) == 0) {
      phase_ = Phase::talking;
      refused_since_s_ = 0;
      due_s_ = now + order_.handshake_s;
    } else if (now >= due_s_) {
      retry(now, meaning(ETIMEDOUT));
    }
  }
  if (phase_ == Phase::talking) talk(now);
  return state_;
}

void Dialing::start(Events& events, double now) {
  const SocketAddress& address = order_.addresses[next_address_++ % order_.addresses.size()];
  where_ = address.text();
  socket_ = PrivateDescriptor::make(
      [&] { return socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!socket_.valid()) {
    const int error = errno;
    if (error == EAFNOSUPPORT) return retry(now, meaning(error));
    state_ = State::failed;
    why_ = "making a socket: " + meaning(error);
    if (error == EMFILE) try {
        need_descriptors(size_t{order_.streams} + 1, "a link to another process");
        state_ = State::under_way;  // there is room now
        retry(now, "making a socket: " + meaning(error));
      } catch (const Error& low) {
        why_ = low.what();
      }
    return;
  }
  challenge_bytes_ = claim_bytes_ = verdict_bytes_ = 0;
  try {
    set_options(socket_.get(), order_.tcp);
    events.watch(socket_.get(), id_);
  } catch (const Error& error) {
    state_ = State::failed;
    why_ = error.what();
    return;
  }
  if (connect(socket_.get(), address.get(), address.bytes()) != 0 && errno != EINPROGRESS && errno != EINTR) {
    fail_to_connect(now, errno);
    return;
  }
  phase_ = Phase::connecting;
  due_s_ = now + kConnect_s;
}

void Dialing::talk(double now) {
  hear(now);
  if (phase_ != Phase::talking || state_ != State::under_way || now < due_s_) return;
  retry(now, text("it accepts the connection and says nothing for %g s", order_.handshake_s));
}

void Dialing::hear(double now) {
  auto read_rest = [&](auto& message, size_t& there) {
    while (there < message.size()) {
      const ssize_t got = recv(socket_.get(), message.data() + there, message.size() - there, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && would_block()) return false;
      if (got <= 0) {
        retry(now, got == 0 ? "it closed the connection within the handshake" : meaning(errno));
        return false;
      }
      there += static_cast<size_t>(got);
    }
    return true;
  };
  if (claim_bytes_ == 0) {
    if (!read_rest(challenge_, challenge_bytes_)) return;
    const std::string fault = fault_of(challenge_, order_.dialect);
    if (!fault.empty()) return retry_stranger(now, fault);
    claim_ = make_claim(challenge_, order_.own, order_.peer, stream_, order_.streams, order_.token,
                        order_.dialect);
  }
  while (claim_bytes_ < claim_.size()) {
    const ssize_t sent =
        send(socket_.get(), claim_.data() + claim_bytes_, claim_.size() - claim_bytes_, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && would_block()) return;
    if (sent < 0) return retry(now, meaning(errno));
    claim_bytes_ += static_cast<size_t>(sent);
  }
  if (!read_rest(verdict_, verdict_bytes_)) return;
  const Heard heard = read(verdict_, claim_, challenge_, order_.own);
  if (!heard.is_photinus) return retry_stranger(now, "it breaks off the handshake");
  const std::string refusal = "it refuses this process: " + heard.reason;
  if (heard.is_proved && heard.answer == Answer::accepted) {
    peer_ = heard.from;
    why_.clear();
    state_ = State::done;
  } else if (heard.answer == Answer::not_yet) {
    stranger_since_s_ = 0;  // it is the peer
    retry(now, heard.reason);
  } else if (heard.is_proved) {
    state_ = State::failed;
    why_ = heard.from.who() + " at " + where_ + " refuses this process: " + heard.reason;
  } else if (heard.answer == Answer::accepted) {
    retry_stranger(now, "it accepts this process and cannot prove that it is of the group");
  } else {
    retry_stranger(now, refusal);
  }
}

}  // namespace photinus
