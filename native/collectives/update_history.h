// Whether ranks exchange gradients of the same training step: a pure function of what they posted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/mismatch.h"

namespace photinus {

// Remembers how often each rank had updated its parameters when it made the call before. Gradients that are
// exchanged together belong together, so between two calls in a row the ranks update equally often. One that
// left out an exchange, or made one more, does not, though its calls look like the others' for ever.
class UpdateHistory {
 public:
  // For each rank the updates since the call before, where all ranks told and are not equal; else nothing.
  // Learns the calls.
  std::vector<int32_t> unequal_updates(const std::vector<CallDescriptor>& calls);

 private:
  std::vector<int32_t> before_;  // by rank; 0: it did not tell
};

// The error's text for such calls.
std::string updates_text(const std::string& group, uint64_t sequence, const PostedCall& call,
                         const std::vector<int32_t>& updates);

}  // namespace photinus
