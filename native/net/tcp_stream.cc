#include "net/tcp_stream.h"

#include <linux/sockios.h>
#include <linux/tcp.h>  // which has more of tcp_info than netinet/tcp.h
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/error.h"

#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

namespace photinus {
namespace {

// The kernel moves no more than 2 GiB less a page (of at most 64 KiB) in one call: a call that moved so much
// is no sign that there was no more to move.
constexpr size_t kSureBytes = 0x7fff0000;

// The kernel would give a connection up after 15 retransmissions (tcp_retries2), which with bounded pauses is
// after 27 s in place of a quarter of an hour. How long a host may be silent is its group's to say. A day,
// for a peer that takes nothing for so long is given up, too; times 1000 it is less than 2^31 modulo 2^32,
// since kernels that count microseconds let it overflow.
constexpr int kUserTimeout_ms = 24 * 3600 * 1000;
// Where nothing is under way, as when a peer took no more or the own card is down, nothing changes the number
// of attempts. With pauses of an eighth of the time they last for it.
constexpr double kAttempts = 8;
constexpr double kLeastPause_s = 2, kMostPause_s = 120;  // the kernel's own

bool is_short(ssize_t moved, const iovec* pieces, int count) {
  size_t asked = 0;
  for (int i = 0; i < count; ++i) asked += pieces[i].iov_len;
  return static_cast<size_t>(moved) < std::min(asked, kSureBytes);
}

std::string congestion_controls() {
  char line[512] = "";
  if (FILE* file = std::fopen("/proc/sys/net/ipv4/tcp_available_congestion_control", "re")) {
    if (!std::fgets(line, sizeof line, file)) line[0] = '\0';
    std::fclose(file);
  }
  line[std::strcspn(line, "\n")] = '\0';
  return line;
}

void set_number(int socket, int level, int name, int value, const char* what) {
  if (setsockopt(socket, level, name, &value, sizeof value) != 0) throw_errno(text("setting %s", what));
}

}  // namespace

void set_options(int socket, const TcpOptions& options) {
  set_number(socket, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY");
  if (options.send_buffer_bytes > 0)
    set_number(socket, SOL_SOCKET, SO_SNDBUF, options.send_buffer_bytes, "SO_SNDBUF");
  if (options.receive_buffer_bytes > 0)
    set_number(socket, SOL_SOCKET, SO_RCVBUF, options.receive_buffer_bytes, "SO_RCVBUF");
  if (options.longest_retransmission_ms > 0)
    setsockopt(socket, IPPROTO_TCP, TCP_RTO_MAX_MS, &options.longest_retransmission_ms,
               sizeof options.longest_retransmission_ms);
  set_number(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeout_ms, "TCP_USER_TIMEOUT");
  const std::string& control = options.congestion_control;
  if (!control.empty() &&
      setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, control.data(), static_cast<socklen_t>(control.size())))
    throw Error(ErrorKind::invalid_argument,
                text("the congestion control '%s' was asked for: %s; here there are: %s", control.c_str(),
                     std::strerror(errno), congestion_controls().c_str()));
}

Stream::Result TcpStream::failed(int error) {
  error_.store(error);
  return {Status::broken, 0};
}

Stream::Result TcpStream::read(const iovec* pieces, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces);
  message.msg_iovlen = static_cast<size_t>(count);
  readiness_->to_read.store(false, std::memory_order_seq_cst);
  ssize_t got;
  do {
    got = recvmsg(socket_.get(), &message, 0);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Result{} : failed(errno);
  if (got == 0) return {Status::ended, 0};
  // A short read has emptied it: what comes later is a new event (epoll(7)), but for an end that came with
  // it.
  if (!is_short(got, pieces, count) || readiness_->ending.load(std::memory_order_seq_cst))
    readiness_->to_read.store(true, std::memory_order_seq_cst);
  return {Status::moved, static_cast<size_t>(got)};
}

Stream::Result TcpStream::write(const iovec* pieces, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces);
  message.msg_iovlen = static_cast<size_t>(count);
  readiness_->to_write.store(false, std::memory_order_seq_cst);
  ssize_t sent;
  do {
    sent = sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Result{} : failed(errno);
  // A short write has filled it: room is a new event (epoll(7)).
  if (!is_short(sent, pieces, count)) readiness_->to_write.store(true, std::memory_order_seq_cst);
  return {Status::moved, static_cast<size_t>(sent)};
}

// The kernel reports at once what is enough already.
void TcpStream::set_low_water(size_t bytes) {
  const int least = static_cast<int>(bytes);
  setsockopt(socket_.get(), SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least);
}

void TcpStream::endure(double silence_s) {
  const int pause_ms = static_cast<int>(1e3 * std::clamp(silence_s / kAttempts, kLeastPause_s, kMostPause_s));
  setsockopt(socket_.get(), IPPROTO_TCP, TCP_RTO_MAX_MS, &pause_ms, sizeof pause_ms);
}

void TcpStream::finish_writing() {
  shutdown(socket_.get(), SHUT_WR);
}

std::string TcpStream::fault() const {
  const int error = error_.load();
  if (error == ECONNRESET || error == EPIPE)
    return "the connection was reset: the process at its other end has ended or closed it";
  if (error == ETIMEDOUT) return "the connection timed out: the network is cut, or the other host is gone";
  return text("the connection broke: %s (errno %d)", std::strerror(error), error);
}

bool TcpStream::is_fault_of_peer() const {
  const int error = error_.load();
  return error == ECONNRESET || error == EPIPE;
}

bool TcpStream::has_bytes_under_way() const {
  int queued = 0, unsent = 0;  // what the peer has no room for is not sent
  return ioctl(socket_.get(), SIOCOUTQ, &queued) == 0 && ioctl(socket_.get(), SIOCOUTQNSD, &unsent) == 0 &&
         queued > unsent;
}

StreamCounts TcpStream::counts() const {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
  const double least = info.tcpi_min_rtt == UINT32_MAX ? 0 : info.tcpi_min_rtt * 1e-6;
  const auto busy_us = static_cast<double>(info.tcpi_busy_time - info.tcpi_rwnd_limited);
  return {info.tcpi_total_retrans, info.tcpi_rtt * 1e-6, least, busy_us * 1e-6};
}

}  // namespace photinus
