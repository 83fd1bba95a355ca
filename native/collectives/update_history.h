// Whether ranks exchange gradients of the same training step: a pure function of what they posted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "collectives/mismatch.h"

namespace photinus {

// How often some ranks have updated their parameters, at least and at most.
struct UpdateRange {
  int32_t least = INT32_MAX, most = 0;
  bool told = true;  // all of them, and that they should be equal

  void add(int32_t updates);  // CallDescriptor::updates of a rank
  void merge(const UpdateRange& other);
};

// Remembers how often each rank had updated its parameters when it made the call before. Gradients that are
// exchanged together belong together, so between two calls in a row the ranks update equally often. One that
// left out an exchange, or made one more, does not, though its calls look like the others' for ever.
class UpdateHistory {
 public:
  // For each rank the updates since the call before, where all ranks told and are not equal; else nothing.
  // Learns the calls.
  std::vector<int32_t> unequal_updates(const std::vector<CallDescriptor>& calls);
  // The same for the ranks of several hosts, of whom only a range is told, and all have the same one: by how
  // much the least and the most grew, where that differs. Finds all that happens while the range is narrow,
  // as it is where ranks have always been in step; ranks that were apart may hide each other.
  std::optional<UpdateRange> unequal_updates(const UpdateRange& now);

 private:
  std::vector<int32_t> before_;  // by rank; 0: it did not tell
  UpdateRange range_before_{0, 0, false};
};

// The error's text for such calls.
std::string updates_text(const std::string& group, uint64_t sequence, const PostedCall& call,
                         const std::vector<int32_t>& updates);
std::string updates_text(const std::string& group, uint64_t sequence, const PostedCall& call,
                         const UpdateRange& updates);

}  // namespace photinus
