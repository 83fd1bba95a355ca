#include "collectives/update_history.h"

#include <algorithm>
#include <cstdlib>

#include "base/error.h"

namespace photinus {

std::vector<int32_t> UpdateHistory::unequal_updates(const std::vector<CallDescriptor>& calls) {
  before_.resize(calls.size());
  bool told = true, equal = true;
  const int32_t first = std::abs(calls[0].updates) - before_[0];
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    told &= calls[rank].updates > 0 && before_[rank] > 0;
    equal &= std::abs(calls[rank].updates) - before_[rank] == first;
  }
  std::vector<int32_t> since;
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    const int32_t updates = std::abs(calls[rank].updates);
    if (told && !equal) since.push_back(updates - before_[rank]);
    before_[rank] = updates;
  }
  return since;
}

std::optional<UpdateRange> UpdateHistory::unequal_updates(const UpdateRange& now) {
  const UpdateRange before = range_before_;
  range_before_ = now;
  const UpdateRange since{now.least - before.least, now.most - before.most};
  if (!now.told || before.least <= 0 || since.least == since.most) return std::nullopt;
  return since;
}

void UpdateRange::add(int32_t updates) {
  merge({std::abs(updates), std::abs(updates), updates > 0});
}

void UpdateRange::merge(const UpdateRange& other) {
  least = std::min(least, other.least);
  most = std::max(most, other.most);
  told &= other.told;
}

namespace {

std::string steps(int32_t updates) {
  return text("%d optimizer step%s", updates, updates == 1 ? "" : "s");
}

std::string out_of_step(const std::string& group, uint64_t sequence, const PostedCall& call,
                        const std::string& updates) {
  return text("the ranks of group %s are out of step: all called %s as #%llu, but since the call before it ",
              group.c_str(), describe(call).c_str(), static_cast<unsigned long long>(sequence)) +
         updates +
         ". A rank left out an exchange of gradients or an optimizer step that others made, or made one more "
         "(no_sync(), or a forward and backward, on some ranks only): gradients of different steps would be "
         "averaged. No output was written. Let all ranks do the same.";
}

}  // namespace

std::string updates_text(const std::string& group, uint64_t sequence, const PostedCall& call,
                         const std::vector<int32_t>& updates) {
  std::string out;
  for (size_t rank = 0; rank < updates.size(); ++rank)
    out += text("%srank %zu made ", rank ? ", " : "", rank) + steps(updates[rank]);
  return out_of_step(group, sequence, call, out);
}

std::string updates_text(const std::string& group, uint64_t sequence, const PostedCall& call,
                         const UpdateRange& updates) {
  return out_of_step(group, sequence, call,
                     "some made " + steps(updates.least) + ", others " + steps(updates.most));
}

}  // namespace photinus
