// Addresses of TCP, IPv4 and IPv6.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

namespace photinus {

class SocketAddress {
 public:
  SocketAddress() = default;
  SocketAddress(const sockaddr* address, socklen_t bytes);

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t bytes() const { return bytes_; }
  int family() const { return storage_.ss_family; }
  uint16_t port() const;
  std::string host() const;  // "10.0.0.1", "fe80::1%eth0"
  std::string text() const;  // "10.0.0.1:4000", "[fe80::1%eth0]:4000"

 private:
  sockaddr_storage storage_{};
  socklen_t bytes_ = 0;
};

// An address in digits; asks nobody. Throws Error(invalid_argument).
SocketAddress numeric_address(const std::string& host, uint16_t port);

// The addresses of a host by name (or in digits). Asks the system's resolver, which may take seconds: all
// else here takes addresses in digits. Throws Error(invalid_argument) that names the host.
std::vector<SocketAddress> addresses_of(const std::string& host, uint16_t port);

}  // namespace photinus
