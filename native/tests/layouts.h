// Ways in which a test's ranks lie on several hosts, with links over loopback between them.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hosts/net_peers.h"

namespace photinus::test {

// Unset: all ranks are on one host.
inline std::optional<std::string>& layout() {
  static std::optional<std::string> now;
  return now;
}
inline std::string host_of(uint32_t rank, uint32_t ranks) {
  if (*layout() == "apart") return std::to_string(rank);
  if (*layout() == "pairs") return std::to_string(rank / 2);
  if (*layout() == "uneven") return rank + 1 == ranks ? "small" : "large";
  if (*layout() == "robin") return std::to_string(rank % 2);
  std::fprintf(stderr, "layouts are apart, pairs, uneven and robin\n");
  std::exit(2);
}
inline std::vector<std::string> hosts_of(uint32_t ranks) {
  std::vector<std::string> hosts;
  for (uint32_t rank = 0; rank < ranks; ++rank) hosts.push_back(layout() ? host_of(rank, ranks) : "only");
  return hosts;
}

// For data, of a link between hosts that have one card each.
inline constexpr uint8_t kLinkStreams = kCollectiveStreams + 1;

// Where the ranks listen; none where all are on one host.
struct Listeners {
  std::vector<std::shared_ptr<Network>> networks;
  std::vector<HostPlace> places;
};
inline Listeners listeners_of(uint32_t ranks) {
  Listeners made;
  if (!layout()) return made;
  for (const std::string& host : hosts_of(ranks)) {
    made.networks.push_back(std::make_shared<Network>(std::vector{numeric_address("127.0.0.1", 0)}));
    made.places.push_back({host, "host-" + host, 0, made.networks.back()->connections().addresses()});
  }
  return made;
}

}  // namespace photinus::test
