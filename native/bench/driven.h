// The bench as one contestant among others: ranks that sleep in a read until a program tells them to run.
#pragma once

#include <cstdint>
#include <string>

namespace photinus::bench {

// Forks `ranks` ranks, each pinned to one of the usable cores in turn, and returns when all have ended; 0
// when all went well. Rank r reads commands from FOLDER/r.in and answers each with a line of JSON on
// FOLDER/r.out (benchmarks/contestant.py makes these pipes and speaks the other side):
//   prepare TYPE BYTES   frees the tensors and makes new ones, one in the arena and one in ordinary memory
//   run PATH CALLS       a tenth as many to warm up, then the mean of so many; PATH is arena, ordinary or
//                        moving
//   quit
int driven(uint32_t ranks, const std::string& folder);

// Pins this thread to the usable core whose turn it is.
void pin(uint32_t rank);

}  // namespace photinus::bench
