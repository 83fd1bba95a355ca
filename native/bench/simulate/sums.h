// Sums as symbols: of some elements of a tensor, follows what each step makes of them, and tells whether in
// the end every rank's contribution is in the result once, in the order of the tree.
#pragma once

#include <map>
#include <unordered_map>
#include <vector>

#include "collectives/levels.h"
#include "collectives/plan.h"

namespace photinus::simulate {

class Sums {
 public:
  // Of an all_reduce in place; `elements` are those that are followed.
  Sums(const Levels& levels, const Call& call, std::vector<uint64_t> elements);

  void copy(const Region& to, const Region& from, uint64_t bytes);
  void reduce(const Step& step);
  // A frame, which is the `count`-th of a link.
  void send(uint64_t link, uint64_t count, const Region& from, uint64_t bytes);
  void receive(uint64_t link, uint64_t count, const Region& to, uint64_t bytes);
  // All ranks have done their plans, and begin the call anew. Throws Error(system) where a result is not what
  // it must be.
  void finish();

  uint64_t elements() const { return elements_.size(); }

 private:
  using Sum = uint32_t;  // of one rank, or `sums_` has the two of which it is made
  struct Cell {
    Place place;
    uint64_t offset;
    uint32_t element;  // index in elements_
    Sum sum;
  };
  std::vector<Cell> cells_in(const Region& region, uint64_t bytes) const;  // by their place in it
  void put(const Region& region, uint64_t bytes, const std::vector<Cell>& cells);
  Sum tree(const std::vector<Sum>& sums, size_t first, size_t last);
  std::string print(Sum sum) const;
  void begin();

  const Levels& levels_;
  const Call call_;
  const std::vector<uint64_t> elements_;
  std::vector<std::vector<Cell>> memory_;  // by rank
  std::vector<std::pair<Sum, Sum>> sums_;
  std::map<std::pair<Sum, Sum>, Sum> known_;
  std::unordered_map<uint64_t, std::map<uint64_t, std::vector<Cell>>> under_way_;
};

}  // namespace photinus::simulate
