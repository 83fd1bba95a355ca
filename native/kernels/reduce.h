// Adding (and so on) the same piece of all ranks' tensors: sources in, one result to one or more
// destinations. The order of the arithmetic is a binary tree over the sources in the order given, fixed by
// their number: the left part of n has the largest power of two below n, the right part the rest. Up to three
// that is one after the other; six are ((a+b)+(c+d))+(e+f). So equal inputs give equal bits wherever and with
// whatever instruction set it runs, and sums of aligned parts of 2^k sources can be added elsewhere and
// combined later, with the same bits. Narrow floats are accumulated in float32 and rounded once at the end.
//
// The bits also depend on the compiler not fusing a multiplication and an addition (one rounding instead of
// two) where the instruction set could: the whole engine is compiled with -ffp-contract=off.
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
  // One per source, read by premul_sum alone, each rounded to the type of accumulation before it multiplies
  // anything; null means that all are 1.
  const double* factors = nullptr;
};

using ReduceFunction = void (*)(const ReduceCall&);

// baseline is what the compiler may take for granted: SSE2 on x86-64, NEON on aarch64 (and called so there).
enum class InstructionSet : uint8_t { baseline, avx2, avx512 };
inline constexpr InstructionSet kAllInstructionSets[] = {InstructionSet::baseline, InstructionSet::avx2,
                                                         InstructionSet::avx512};
const char* name(InstructionSet set);

// Whether this processor (and the system's saving of its registers) has the set.
bool has(InstructionSet set);

// The best that this processor has; or the wish, an instruction set's name, when there is one (neither null
// nor empty). Throws Error(invalid_argument) when the wish is unknown or this processor does not have it.
InstructionSet choose_instruction_set(const char* wish);

// The set that every collective of this process uses: the choice, made once, with PHOTINUS_INSTRUCTION_SET
// for the wish. Throws, again at each use, when the choice does.
InstructionSet best_instruction_set();

// The kernel for a type and reduction; null when there is none: avg and premul_sum of boolean, premul_sum of
// integers, bitwise reductions of floating types.
ReduceFunction find_reduce(Dtype dtype, Reduction reduction, InstructionSet set);

using ConvertFunction = void (*)(const void* from, void* to, uint64_t elems);

// From a 16-bit float to float32, or from an integer to the wider one that averages of it are summed in
// (wire_dtype in collectives/net.h), and back: floats rounded to nearest, ties to even; integers as they
// are. Null for any other pair.
ConvertFunction find_converter(Dtype from, Dtype to, InstructionSet set);

// The kernel, with sources of one type and results of another that find_converter knows; all arithmetic is
// done in the wider one. Sources and results do not overlap unless the types are equal.
void reduce_between(Dtype from, Dtype to, Reduction reduction, InstructionSet set, const ReduceCall& call);

}  // namespace photinus
