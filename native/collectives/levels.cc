#include "collectives/levels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <numeric>

#include "base/error.h"

namespace photinus {

uint32_t Levels::ranks() const {
  size_t ranks = 0;
  for (const auto& host : hosts) ranks += host.size();
  return static_cast<uint32_t>(ranks);
}

uint32_t Levels::host_of(uint32_t rank) const {
  uint32_t host = 0;
  while (std::find(hosts[host].begin(), hosts[host].end(), rank) == hosts[host].end()) ++host;
  return host;
}

uint32_t Levels::local_index(uint32_t rank) const {
  const auto& ranks = hosts[host_of(rank)];
  return static_cast<uint32_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

uint32_t Levels::slices() const {
  size_t most = 0;
  for (const auto& ranks : hosts) most = std::max(most, ranks.size());
  return static_cast<uint32_t>(most);
}

uint32_t Levels::carrier(uint32_t host, uint32_t slice) const {
  return hosts[host][slice % hosts[host].size()];
}

uint32_t Levels::stride(size_t level) const {
  uint32_t stride = 1;
  for (size_t l = 0; l < level; ++l) stride *= sizes[l];
  return stride;
}

uint32_t Levels::peer(uint32_t host, size_t level, uint32_t member) const {
  const uint32_t step = stride(level);
  return host - member_of(host, level) * step + member * step;
}

std::vector<uint32_t> Levels::counterparts(uint32_t rank, size_t level) const {
  const uint32_t host = host_of(rank), own = member_of(host, level);
  std::vector<uint32_t> ranks;
  for (size_t slice = local_index(rank); slice < slices(); slice += hosts[host].size())
    for (uint32_t member = 0; member < sizes[level]; ++member)
      if (member != own) ranks.push_back(carrier(peer(host, level, member), static_cast<uint32_t>(slice)));
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

void check(const Levels& levels) {
  std::vector<uint32_t> ranks;
  for (const auto& host : levels.hosts) {
    if (host.empty()) throw Error(ErrorKind::invalid_argument, "a host of a placement has no rank");
    ranks.insert(ranks.end(), host.begin(), host.end());
  }
  std::sort(ranks.begin(), ranks.end());
  for (uint32_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank] != rank)
      throw Error(ErrorKind::invalid_argument,
                  text("a placement of %zu ranks must name each of 0 ... %zu once; rank %u is %s",
                       ranks.size(), ranks.size() - 1, std::min(rank, ranks[rank]),
                       ranks[rank] < rank ? "named twice" : "missing"));
  uint64_t product = 1;
  for (size_t level = 0; level < levels.sizes.size(); ++level) {
    const uint32_t size = levels.sizes[level];
    if (size < 2 || (level + 1 < levels.sizes.size() && !std::has_single_bit(size)))
      throw Error(ErrorKind::invalid_argument,
                  text("level %zu has groups of %u hosts; every level needs at least 2, and a power of two, "
                       "except for the last",
                       level + 1, size));
    product *= size;
  }
  if (product != levels.hosts.size())
    throw Error(ErrorKind::invalid_argument,
                text("the levels are for %llu hosts, and there are %zu",
                     static_cast<unsigned long long>(product), levels.hosts.size()));
}

std::vector<uint32_t> choose_levels(uint32_t hosts) {
  constexpr uint32_t kMostAtOnce = 8, kMostTwos = 3;
  if (hosts < 2) return {};
  if (hosts <= kMostAtOnce) return {hosts};
  const auto twos = static_cast<uint32_t>(std::countr_zero(hosts));
  auto in_rounds = [&](uint32_t rounds) {  // and one for the odd rest
    std::vector<uint32_t> sizes;
    for (uint32_t round = 0; round < rounds; ++round)
      sizes.push_back(1u << (twos / rounds + (round < twos % rounds)));
    if (hosts >> twos > 1) sizes.push_back(hosts >> twos);
    return sizes;
  };
  const uint32_t fewest = (twos + kMostTwos - 1) / kMostTwos;
  for (uint32_t rounds = fewest; rounds <= twos; ++rounds) {
    const std::vector<uint32_t> sizes = in_rounds(rounds);
    const uint64_t links = std::accumulate(sizes.begin(), sizes.end(), uint64_t{0}) - sizes.size();
    if (static_cast<double>(links) <= 4 + 2 * std::log2(hosts)) return sizes;
  }
  return in_rounds(fewest);
}

std::string print(const std::vector<uint32_t>& sizes) {
  std::string text;
  for (const uint32_t size : sizes) text += (text.empty() ? "" : ",") + std::to_string(size);
  return text.empty() ? "none" : text;
}

Levels levels_of(const std::vector<std::string>& host_of_rank) {
  Levels levels;
  std::map<std::string, size_t> found;
  for (uint32_t rank = 0; rank < host_of_rank.size(); ++rank) {
    const size_t host = found.try_emplace(host_of_rank[rank], levels.hosts.size()).first->second;
    if (host == levels.hosts.size()) levels.hosts.emplace_back();
    levels.hosts[host].push_back(rank);
  }
  levels.sizes = choose_levels(static_cast<uint32_t>(levels.hosts.size()));
  return levels;
}

}  // namespace photinus
