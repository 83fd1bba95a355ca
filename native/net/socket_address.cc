#include "net/socket_address.h"

#include <netdb.h>
#include <netinet/in.h>

#include <cstring>

#include "base/error.h"
#include "base/process.h"

namespace photinus {
namespace {

// getaddrinfo for TCP; the code of its error, or 0.
int look_up(const std::string& host, uint16_t port, int flags, std::vector<SocketAddress>& found) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) return error;
  for (const addrinfo* entry = list; entry; entry = entry->ai_next)
    if (entry->ai_family == AF_INET || entry->ai_family == AF_INET6)
      found.emplace_back(entry->ai_addr, entry->ai_addrlen);
  freeaddrinfo(list);
  return found.empty() ? EAI_NONAME : 0;
}

}  // namespace

SocketAddress::SocketAddress(const sockaddr* address, socklen_t bytes) : bytes_(bytes) {
  std::memcpy(&storage_, address, bytes);
}

uint16_t SocketAddress::port() const {
  if (family() == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in*>(&storage_)->sin_port);
}

std::string SocketAddress::host() const {
  char name[NI_MAXHOST] = "?";
  getnameinfo(get(), bytes_, name, sizeof name, nullptr, 0, NI_NUMERICHOST);
  return name;
}

std::string SocketAddress::text() const {
  const bool brackets = family() == AF_INET6;
  return (brackets ? "[" : "") + host() + (brackets ? "]:" : ":") + std::to_string(port());
}

SocketAddress numeric_address(const std::string& host, uint16_t port) {
  std::vector<SocketAddress> found;
  if (host.empty() || look_up(host, port, AI_NUMERICHOST, found) != 0)
    throw Error(ErrorKind::invalid_argument,
                "'" + host + "' is no address: give one like 10.0.0.1, fd00::1 or fe80::1%eth0");
  return found.front();
}

std::vector<SocketAddress> addresses_of(const std::string& host, uint16_t port) {
  std::vector<SocketAddress> found;
  const int error = host.empty() ? EAI_NONAME : look_up(host, port, 0, found);
  if (error != 0)
    throw Error(ErrorKind::invalid_argument,
                text("the host name '%s' has no address on %s: %s; is it in DNS or /etc/hosts here?",
                     host.c_str(), host_name().c_str(), gai_strerror(error)));
  return found;
}

}  // namespace photinus
