// Several hosts, as the ranks of a group see them: who lies where (the placement), and in which groups hosts
// exchange (the levels). Pure arithmetic; all ranks have the same.
//
// A reduction is one binary tree (kernels/reduce.h): of each host's ranks, in the order of the placement,
// then of the hosts. With levels [r1, r2, ...] whose product is the number of hosts, r1 hosts that follow on
// each other add first, then r2 such groups, and so on. Every number but the last is a power of two, so
// levels only cut the tree of the hosts: all lists give the same bits, except for what is rounded on the way.
// And where every host has the same number of ranks that follow on each other, 2^k of them, it is the tree of
// all ranks of one host.
//
// The terms: a *level* is one exchange of one group of hosts; a *slice* is the part of a tensor that one rank
// of each host exchanges with its counterparts on the others; a *piece* is the part of a slice that one
// member of a level adds; a *link* carries bytes between two ranks, in order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace photinus {

struct Levels {
  std::vector<std::vector<uint32_t>> hosts;  // ranks, in the order in which they are added
  std::vector<uint32_t> sizes;               // r1, r2, ...; empty for one host

  uint32_t ranks() const;
  uint32_t host_of(uint32_t rank) const;
  uint32_t local_index(uint32_t rank) const;  // its place in its host's list
  // Into how many slices a tensor is cut: as many as the largest host has ranks. Slice s is that of rank
  // s modulo their number on each host.
  uint32_t slices() const;
  uint32_t carrier(uint32_t host, uint32_t slice) const;
  // Of the hosts that exchange with `host` in a level: how far apart they are, which of them it is, and the
  // one that is `member`.
  uint32_t stride(size_t level) const;
  uint32_t member_of(uint32_t host, size_t level) const { return host / stride(level) % sizes[level]; }
  uint32_t peer(uint32_t host, size_t level, uint32_t member) const;
  // The ranks that carry, on the other hosts of a level, what `rank` carries, each once, in their order. Two
  // ranks are each other's counterparts, in one level at most.
  std::vector<uint32_t> counterparts(uint32_t rank, size_t level) const;
};

// Throws Error(invalid_argument) unless every rank of 0 ... n-1 stands on one host, no host is empty, and the
// sizes are as said above.
void check(const Levels& levels);

// The levels for a number of hosts: none for one, one for up to 8. Beyond, groups of 2, 4 or 8 that are as
// few and as equal as can be, then the odd rest; so few rounds, and where the factors of `hosts` allow it, a
// rank has links to at most 4 + 2 log2(hosts) counterparts for each slice that it carries.
std::vector<uint32_t> choose_levels(uint32_t hosts);

// "2,2,3"; "none" for one host.
std::string print(const std::vector<uint32_t>& sizes);

// The placement of ranks of which each names its host as it likes: hosts in the order of their first ranks,
// the ranks of each in theirs.
Levels levels_of(const std::vector<std::string>& host_of_rank);

}  // namespace photinus
