#include "net/ucx_stream.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/error.h"

namespace photinus {
namespace {

constexpr double kJoin_s = 20, kFlush_s = 1;
// What was sent over UCX before the socket closed may come so long after: where the other end has told how
// much it is, and where it went without a word.
constexpr double kLate_s = 1, kLateOfDead_s = 0.03;
constexpr double kOnlyUcx_s = 1;  // after it has failed the socket may end, too: then the process is gone
constexpr size_t kHelloBytes = 12, kMostAddressBytes = 16 << 10;

void put(std::string& to, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) to.push_back(static_cast<char>(value >> 8 * i));
}
uint64_t number_of(const void* at, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= uint64_t{static_cast<const uint8_t*>(at)[i]} << 8 * i;
  return value;
}
bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

}  // namespace

UcxStream::UcxStream(std::shared_ptr<UcxWorker> worker, PrivateDescriptor socket)
    : worker_(std::move(worker)),
      socket_(std::move(socket)),
      port_(worker_->add(readiness_)),
      began_s_(now_s()) {
  put(hello_, port_->key, 8);
  put(hello_, worker_->address().size(), 4);
  hello_ += worker_->address();
}

UcxStream::~UcxStream() {
  if (worker_->is_of_parent()) return;
  if (readiness_->ending.load()) hear_last_word();
  const bool is_gone = socket_ended_ && last_word_bytes_ < last_word_.size();
  worker_->remove(port_, finished_s_ > 0 && !is_gone ? finished_s_ + kFlush_s : 0);
}

// --- joining

UcxStream::State UcxStream::join() {
  if (state_ != State::joining) return state_;
  while (said_ < hello_.size()) {
    const ssize_t sent = send(socket_.get(), hello_.data() + said_, hello_.size() - said_, MSG_NOSIGNAL);
    if (sent < 0 && would_block()) break;
    if (sent < 0) {
      broken("the connection broke while UCX was being tried", true);
      return state_ = State::broken;
    }
    said_ += static_cast<size_t>(sent);
  }
  if (!port_->peer && !hear_hello()) return state_;
  if (has_ucx_failed()) {
    broken(worker_->text(port_->peer->fault.load()), false);
    return state_ = State::broken;
  }
  if (said_ == hello_.size() && port_->begun.load()) return state_ = State::joined;
  if (now_s() - began_s_ > kJoin_s) {
    broken(text("UCX %s has made no connection within %g s, though TCP has. Its ports may be closed by a "
                "firewall, or its devices wrong (UCX_NET_DEVICES and UCX_TLS choose them)",
                worker_->library().version.c_str(), kJoin_s),
           false);
    return state_ = State::broken;
  }
  return state_;
}

// Whether all of it has come, and UCX was told.
bool UcxStream::hear_hello() {
  while (true) {
    const size_t wanted =
        heard_.size() < kHelloBytes ? kHelloBytes : kHelloBytes + number_of(heard_.data() + 8, 4);
    if (heard_.size() == wanted) break;
    char room[1024];
    const ssize_t got = recv(socket_.get(), room, std::min(sizeof room, wanted - heard_.size()), 0);
    if (got < 0 && would_block()) {
      if (now_s() - began_s_ > kJoin_s) {
        broken(text("it has not said within %g s where UCX reaches it", kJoin_s), true);
        state_ = State::broken;
      }
      return false;
    }
    if (got > 0) heard_.append(room, static_cast<size_t>(got));
    const bool is_too_long =
        heard_.size() >= kHelloBytes && number_of(heard_.data() + 8, 4) > kMostAddressBytes;
    if (got <= 0 || is_too_long) {
      broken(is_too_long ? "it gave an address of UCX that is too long"
                         : "the connection was closed while UCX was being tried",
             true);
      state_ = State::broken;
      return false;
    }
  }
  try {
    worker_->connect(port_, heard_.substr(kHelloBytes), number_of(heard_.data(), 8));
  } catch (const Error& error) {
    broken(error.what(), false);
    state_ = State::broken;
    return false;
  }
  return true;
}

// --- afterwards

Stream::Result UcxStream::broken(const std::string& how, bool of_peer) {
  const std::lock_guard lock(fault_mutex_);
  // If the peer is gone, UCX has failed because of that.
  if (!fault_.empty() && !(of_peer && is_own_fault_.load())) return {Status::broken, 0};
  fault_ = of_peer ? how : how + "; PHOTINUS_TRANSPORT=tcp does without UCX";
  is_own_fault_.store(!of_peer);
  return {Status::broken, 0};
}

std::string UcxStream::fault() const {
  const std::lock_guard lock(fault_mutex_);
  return fault_;
}

bool UcxStream::has_ucx_failed() {
  return port_->peer->fault.load() != ucx::Status::ok;
}

Stream::Result UcxStream::read(const iovec* pieces, int count) {
  readiness_->to_read.store(false, std::memory_order_seq_cst);
  if (const size_t moved = worker_->receive(port_, pieces, count)) {
    quiet_since_s_ = 0;
    if (readiness_->ending.load() || has_ucx_failed() || port_->arrived.load() > port_->consumed.load())
      readiness_->to_read.store(true, std::memory_order_seq_cst);
    return {Status::moved, moved};
  }
  if (port_->damaged.load()) return broken("what came over UCX is no part of the stream", false);
  const double now = now_s();
  if (readiness_->ending.load(std::memory_order_seq_cst)) {
    hear_last_word();
    const bool has_word = last_word_bytes_ == last_word_.size();
    const uint64_t sent = number_of(last_word_.data(), 8), here = port_->consumed.load();
    if (has_word && here == sent) return {Status::ended, 0};
    if (socket_ended_ || has_word) {
      if (quiet_since_s_ == 0) quiet_since_s_ = now;
      const double until_s = quiet_since_s_ + (has_word ? kLate_s : kLateOfDead_s);
      if (now < until_s) {
        worker_->remind(readiness_, until_s);
        return {};
      }
      if (has_word)
        return broken(
            text("%llu of %llu bytes that were sent over UCX have not come",
                 static_cast<unsigned long long>(sent - here), static_cast<unsigned long long>(sent)),
            false);
      if (socket_error_ == ETIMEDOUT)
        return broken("the connection timed out: the network is cut, or the other host is gone", true);
      if (socket_error_ != 0)
        return broken("the connection was reset: the process at its other end has ended or closed it", true);
      return {Status::ended, 0};
    }
  }
  if (has_ucx_failed()) {
    if (failed_since_s_ == 0) failed_since_s_ = now;
    if (now - failed_since_s_ > kOnlyUcx_s) return broken(worker_->text(port_->peer->fault.load()), false);
    worker_->remind(readiness_, failed_since_s_ + kOnlyUcx_s);
  }
  return {};
}

void UcxStream::hear_last_word() {
  while (!socket_ended_ && last_word_bytes_ < last_word_.size()) {
    const ssize_t got =
        recv(socket_.get(), last_word_.data() + last_word_bytes_, last_word_.size() - last_word_bytes_, 0);
    if (got < 0 && would_block()) return;
    if (got > 0) last_word_bytes_ += static_cast<size_t>(got);
    if (got <= 0) socket_ended_ = true, socket_error_ = got < 0 ? errno : 0;
  }
}

Stream::Result UcxStream::write(const iovec* pieces, int count) {
  readiness_->to_write.store(false, std::memory_order_seq_cst);
  if (has_ucx_failed()) return broken(worker_->text(port_->peer->fault.load()), false);
  const size_t moved = worker_->send(port_, pieces, count);
  if (moved == 0) return {};
  readiness_->to_write.store(true, std::memory_order_seq_cst);
  return {Status::moved, moved};
}

void UcxStream::finish_writing() {
  if (finished_s_ > 0) return;
  finished_s_ = now_s();
  std::string word;
  put(word, port_->written.load(), 8);
  [[maybe_unused]] const ssize_t sent = send(socket_.get(), word.data(), word.size(), MSG_NOSIGNAL);
  shutdown(socket_.get(), SHUT_WR);
}

}  // namespace photinus
