#include "simulate/sums.h"

#include <algorithm>
#include <bit>

#include "base/error.h"

namespace photinus::simulate {
namespace {

// In place: a rank's output is its input.
Place same(Place place) {
  return place == Place::recv ? Place::send : place;
}

}  // namespace

Sums::Sums(const Levels& levels, const Call& call, std::vector<uint64_t> elements)
    : levels_(levels), call_(call), elements_(std::move(elements)), memory_(levels.ranks()) {
  begin();
}

void Sums::begin() {
  for (uint32_t rank = 0; rank < memory_.size(); ++rank) {
    memory_[rank].clear();
    for (uint32_t element = 0; element < elements_.size(); ++element)
      memory_[rank].push_back({Place::send, elements_[element] * size_bytes(call_.dtype), element, rank});
  }
}

std::vector<Sums::Cell> Sums::cells_in(const Region& region, uint64_t bytes) const {
  std::vector<Cell> cells;
  for (const Cell& cell : memory_[region.rank])
    if (cell.place == same(region.place) && cell.offset - region.offset_bytes < bytes) {
      cells.push_back(cell);
      cells.back().offset -= region.offset_bytes;
    }
  return cells;
}

void Sums::put(const Region& region, uint64_t bytes, const std::vector<Cell>& cells) {
  auto& memory = memory_[region.rank];
  std::erase_if(memory, [&](const Cell& cell) {
    return cell.place == same(region.place) && cell.offset - region.offset_bytes < bytes;
  });
  for (Cell cell : cells) {
    cell.place = same(region.place);
    cell.offset += region.offset_bytes;
    memory.push_back(cell);
  }
}

void Sums::copy(const Region& to, const Region& from, uint64_t bytes) {
  put(to, bytes, cells_in(from, bytes));
}

void Sums::reduce(const Step& step) {
  const uint64_t from = size_bytes(step.kernel ? step.kernel->from : call_.dtype);
  const uint64_t to = size_bytes(step.kernel ? step.kernel->to : call_.dtype);
  std::vector<Cell> results = cells_in(step.sources[0], step.bytes);
  std::vector<std::vector<Sum>> parts;
  for (const Cell& cell : results) parts.push_back({cell.sum});
  for (size_t source = 1; source < step.sources.size(); ++source)
    for (const Cell& cell : cells_in(step.sources[source], step.bytes)) {
      const auto first = std::find_if(results.begin(), results.end(), [&](const Cell& other) {
        return other.offset == cell.offset && other.element == cell.element;
      });
      if (first != results.end()) parts[static_cast<size_t>(first - results.begin())].push_back(cell.sum);
    }
  for (size_t result = 0; result < results.size(); ++result) {
    if (parts[result].size() != step.sources.size())
      throw Error(ErrorKind::system, text("element %llu is in %zu of the %zu tensors that are added",
                                          static_cast<unsigned long long>(elements_[results[result].element]),
                                          parts[result].size(), step.sources.size()));
    results[result].sum = tree(parts[result], 0, parts[result].size());
    results[result].offset = results[result].offset / from * to;
  }
  for (const Region& region : step.results) put(region, step.bytes / from * to, results);
}

void Sums::send(uint64_t link, uint64_t count, const Region& from, uint64_t bytes) {
  if (auto cells = cells_in(from, bytes); !cells.empty()) under_way_[link][count] = std::move(cells);
}

void Sums::receive(uint64_t link, uint64_t count, const Region& to, uint64_t bytes) {
  const auto found = under_way_.find(link);
  if (found == under_way_.end() || !found->second.contains(count)) return put(to, bytes, {});
  put(to, bytes, found->second[count]);
  found->second.erase(count);
  if (found->second.empty()) under_way_.erase(found);
}

void Sums::finish() {
  std::vector<Sum> hosts;
  for (const auto& ranks : levels_.hosts)
    hosts.push_back(tree(std::vector<Sum>(ranks.begin(), ranks.end()), 0, ranks.size()));
  const Sum expected = tree(hosts, 0, hosts.size());
  for (uint32_t rank = 0; rank < memory_.size(); ++rank)
    for (uint32_t element = 0; element < elements_.size(); ++element) {
      const auto cells = cells_in({Place::recv, rank, elements_[element] * size_bytes(call_.dtype)},
                                  size_bytes(call_.dtype));
      if (cells.size() == 1 && cells[0].element == element && cells[0].sum == expected) continue;
      throw Error(ErrorKind::system,
                  text("rank %u has of element %llu %s; %s expected", rank,
                       static_cast<unsigned long long>(elements_[element]),
                       cells.empty() ? "nothing" : print(cells[0].sum).c_str(), print(expected).c_str()));
    }
  begin();
}

// As kernels/reduce.h adds.
Sums::Sum Sums::tree(const std::vector<Sum>& sums, size_t first, size_t last) {
  if (last - first == 1) return sums[first];
  const size_t left = std::bit_floor(last - first - 1);
  const std::pair<Sum, Sum> both{tree(sums, first, first + left), tree(sums, first + left, last)};
  const auto [found, is_new] = known_.try_emplace(both, static_cast<Sum>(memory_.size() + sums_.size()));
  if (is_new) sums_.push_back(both);
  return found->second;
}

std::string Sums::print(Sum sum) const {
  if (sum < memory_.size()) return std::to_string(sum);
  const auto [left, right] = sums_[sum - memory_.size()];
  const std::string text = "(" + print(left) + "+" + print(right) + ")";
  return text.size() > 200 ? text.substr(0, 200) + "..." : text;
}

}  // namespace photinus::simulate
