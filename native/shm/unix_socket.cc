#include "shm/unix_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/process.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace photinus {
namespace {

constexpr size_t kFilesLimit = 8;
constexpr double kInFlightLimit_s = 10;
constexpr double kInterruptSlice_s = 0.1;

socklen_t fill(sockaddr_un& address, const std::string& abstract_name) {
  address = {};
  address.sun_family = AF_UNIX;
  if (abstract_name.size() + 1 > sizeof address.sun_path)
    throw Error(ErrorKind::invalid_argument, "a socket name may have at most 107 characters");
  std::memcpy(address.sun_path + 1, abstract_name.data(), abstract_name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + abstract_name.size());
}

FileDescriptor new_socket(int flags = 0) {
  FileDescriptor made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  if (!made.valid()) throw_errno("making a Unix socket (are there enough file descriptors, ulimit -n?)");
  return made;
}

}  // namespace

FileDescriptor listen_on(const std::string& abstract_name) {
  FileDescriptor listener = new_socket();
  sockaddr_un address;
  socklen_t length = fill(address, abstract_name);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0)
    throw_errno("listening on the Unix socket @" + abstract_name);
  if (listen(listener.get(), 256) != 0) throw_errno("listening on the Unix socket @" + abstract_name);
  return listener;
}

std::optional<FileDescriptor> connect_to(const std::string& abstract_name, const Deadline& deadline) {
  sockaddr_un address;
  socklen_t length = fill(address, abstract_name);
  useconds_t nap_us = 200;
  while (true) {
    FileDescriptor connection = new_socket(SOCK_NONBLOCK);  // a listener whose queue is full would block it
    if (connect(connection.get(), reinterpret_cast<sockaddr*>(&address), length) == 0) {
      fcntl(connection.get(), F_SETFL, 0);
      return connection;
    }
    if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR)
      throw_errno("connecting to the Unix socket @" + abstract_name);
    if (deadline.passed()) return std::nullopt;
    check_interrupt("the Unix socket @" + abstract_name);
    usleep(nap_us);
    nap_us = std::min<useconds_t>(nap_us * 2, 20000);
  }
}

Credentials credentials_of(const FileDescriptor& connection) {
  ucred facts{};
  socklen_t length = sizeof facts;
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &facts, &length) != 0)
    throw_errno("asking who is at the other end of a Unix socket");
  return {facts.uid, facts.pid};
}

FileDescriptor process_of(const FileDescriptor& connection) {
  int handle = -1;
  socklen_t length = sizeof handle;
  if (getsockopt(connection.get(), SOL_SOCKET, SO_PEERPIDFD, &handle, &length) == 0)
    return FileDescriptor(handle);
  int pid = credentials_of(connection).pid;
  return pid > 0 ? open_process(pid)
                 : FileDescriptor();  // 0: the peer lives in a pid namespace that we cannot see
}

bool send_message(const FileDescriptor& connection, const void* data, size_t bytes,
                  const std::vector<int>& files) {
  iovec part{const_cast<void*>(data), bytes};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(kFilesLimit * sizeof(int))] = {};
  if (!files.empty()) {
    if (files.size() > kFilesLimit)
      throw Error(ErrorKind::invalid_argument, "too many descriptors in one message");
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(files.size() * sizeof(int));
    cmsghdr* entry = CMSG_FIRSTHDR(&header);
    entry->cmsg_level = SOL_SOCKET;
    entry->cmsg_type = SCM_RIGHTS;
    entry->cmsg_len = CMSG_LEN(files.size() * sizeof(int));
    std::memcpy(CMSG_DATA(entry), files.data(), files.size() * sizeof(int));
  }
  ssize_t sent;
  // A user may have as many descriptors under way as a process may have open, until they are received.
  const Deadline room_by = Deadline::in(kInFlightLimit_s);
  while ((sent = sendmsg(connection.get(), &header, MSG_NOSIGNAL)) < 0) {
    if (errno == ETOOMANYREFS && !room_by.passed())
      usleep(1000);
    else if (errno != EINTR)
      break;
  }
  if (sent < 0 && errno != EPIPE && errno != ECONNRESET) throw_errno("sending on a Unix socket");
  return sent == static_cast<ssize_t>(bytes);
}

bool await_message(const FileDescriptor& connection, const Deadline& deadline) {
  while (true) {
    pollfd entry{connection.get(), POLLIN, 0};
    const double slice_s = std::min(deadline.left_s(), kInterruptSlice_s);
    const int ready = poll(&entry, 1, static_cast<int>(std::ceil(slice_s * 1000)));
    if (ready < 0 && errno != EINTR) throw_errno("waiting for a Unix socket");
    if (ready > 0) return true;
    if (deadline.passed()) return false;
    check_interrupt("a Unix socket");
  }
}

std::optional<Message> receive_message(const FileDescriptor& connection, size_t limit_bytes,
                                       const Deadline& deadline) {
  while (true) {
    if (!await_message(connection, deadline)) return std::nullopt;
    Message message;
    message.data.resize(limit_bytes);
    iovec part{message.data.data(), limit_bytes};
    alignas(cmsghdr) char control[CMSG_SPACE(kFilesLimit * sizeof(int))];
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    ssize_t got = recvmsg(connection.get(), &header, MSG_CMSG_CLOEXEC);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got < 0 && errno != ECONNRESET) throw_errno("receiving on a Unix socket");
    for (cmsghdr* c = got >= 0 ? CMSG_FIRSTHDR(&header) : nullptr; c; c = CMSG_NXTHDR(&header, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int file;
        std::memcpy(&file, CMSG_DATA(c) + i * sizeof(int), sizeof file);
        message.files.emplace_back(file);
      }
    }
    if (header.msg_flags &
        MSG_CTRUNC) {  // descriptors were lost: too many came, or this process may have no more
      FileDescriptor one_more(fcntl(connection.get(), F_DUPFD_CLOEXEC, 0));
      if (!one_more.valid()) throw_errno("taking in a rank's descriptors (are there enough, ulimit -n?)");
    }
    if (got <= 0 || (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) return std::nullopt;
    message.data.resize(static_cast<size_t>(got));
    return message;
  }
}

}  // namespace photinus
