// Adding (and so on) the same piece of all ranks' tensors: sources in, in the order given, one result to one
// or more destinations. The order of the sources is the order of the arithmetic, so equal inputs give equal
// bits wherever and with whatever instruction set it runs. Narrow floats are accumulated in float32 and
// rounded once at the end.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace photinus {

struct ReduceCall {
  const void* const* sources;  // may equal destinations, not overlap them otherwise
  uint32_t source_count;       // at least 1
  void* const* destinations;
  uint32_t destination_count;
  uint64_t elems;
  uint32_t divisor;  // what avg divides by; read by avg alone
};

using ReduceFunction = void (*)(const ReduceCall&);

enum class InstructionSet : uint8_t { baseline, avx2, avx512 };
const char* name(InstructionSet set);

// Whether this processor (and the system's saving of its registers) has the set.
bool has(InstructionSet set);
InstructionSet best_instruction_set();

// The kernel for a type and reduction; null when there is none (avg of boolean).
ReduceFunction find_reduce(Dtype dtype, Reduction reduction, InstructionSet set);

}  // namespace photinus
