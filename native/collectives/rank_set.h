// A set of a group's ranks, of which there are at most 1,024: as bits, so that sets are joined and sent at
// once.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

namespace photinus {

class RankSet {
 public:
  static constexpr uint32_t kMostRanks = 1024;
  using Words = std::array<uint64_t, kMostRanks / 64>;

  static RankSet of(uint32_t rank) {
    RankSet set;
    set.insert(rank);
    return set;
  }

  void insert(uint32_t rank) { words[rank / 64] |= uint64_t{1} << rank % 64; }
  bool has(uint32_t rank) const { return words[rank / 64] >> rank % 64 & 1; }
  void insert(const RankSet& other) {
    for (size_t i = 0; i < words.size(); ++i) words[i] |= other.words[i];
  }
  bool meets(const RankSet& other) const {
    uint64_t both = 0;
    for (size_t i = 0; i < words.size(); ++i) both |= words[i] & other.words[i];
    return both != 0;
  }
  bool is_empty() const { return words == Words{}; }
  std::vector<uint32_t> list() const {
    std::vector<uint32_t> ranks;
    for (uint32_t i = 0; i < words.size(); ++i)
      for (uint64_t left = words[i]; left; left &= left - 1)
        ranks.push_back(i * 64 + static_cast<uint32_t>(std::countr_zero(left)));
    return ranks;
  }

  Words words{};
};

}  // namespace photinus
