// Which instruction set runs, decided once from what the processor says.
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "base/processor.h"
#include "kernels/reduce.h"

namespace photinus {

namespace baseline {
ReduceFunction find(Dtype dtype, Reduction reduction);
ConvertFunction find_converter(Dtype from, Dtype to);
}  // namespace baseline
#if defined(__x86_64__)
namespace avx2 {
ReduceFunction find(Dtype dtype, Reduction reduction);
ConvertFunction find_converter(Dtype from, Dtype to);
}  // namespace avx2
namespace avx512 {
ReduceFunction find(Dtype dtype, Reduction reduction);
ConvertFunction find_converter(Dtype from, Dtype to);
}  // namespace avx512
#endif

const char* name(InstructionSet set) {
  switch (set) {
    case InstructionSet::baseline:
#if defined(__aarch64__)
      return "neon";
#else
      return "baseline";
#endif
    case InstructionSet::avx2:
      return "avx2";
    case InstructionSet::avx512:
      return "avx512";
  }
  return "?";
}

bool has(InstructionSet set) {
  switch (set) {
    case InstructionSet::baseline:
      return true;
    case InstructionSet::avx2:
      return vector_instructions().avx2;
    case InstructionSet::avx512:
      return vector_instructions().avx512;
  }
  return false;
}

InstructionSet choose_instruction_set(const char* wish) {
  InstructionSet best = InstructionSet::baseline;
  std::string names;
  for (InstructionSet set : kAllInstructionSets) {
    if (!has(set)) continue;
    best = set;
    if (wish && std::string(wish) == name(set)) return set;
    names += (names.empty() ? "" : ", ") + std::string(name(set));
  }
  if (!wish || !*wish) return best;
  throw Error(
      ErrorKind::invalid_argument,
      text("PHOTINUS_INSTRUCTION_SET=%s: this processor has no such instruction set; the choices are %s",
           wish, names.c_str()));
}

InstructionSet best_instruction_set() {
  static const InstructionSet best = choose_instruction_set(std::getenv("PHOTINUS_INSTRUCTION_SET"));
  return best;
}

ReduceFunction find_reduce(Dtype dtype, Reduction reduction, InstructionSet set) {
#if defined(__x86_64__)
  if (set == InstructionSet::avx512) return avx512::find(dtype, reduction);
  if (set == InstructionSet::avx2) return avx2::find(dtype, reduction);
#endif
  (void)set;
  return baseline::find(dtype, reduction);
}

ConvertFunction find_converter(Dtype from, Dtype to, InstructionSet set) {
#if defined(__x86_64__)
  if (set == InstructionSet::avx512) return avx512::find_converter(from, to);
  if (set == InstructionSet::avx2) return avx2::find_converter(from, to);
#endif
  (void)set;
  return baseline::find_converter(from, to);
}

}  // namespace photinus
