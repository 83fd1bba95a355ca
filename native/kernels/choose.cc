// Which instruction set runs, decided once from what the processor says.
#include "kernels/reduce.h"

namespace photinus {

namespace baseline {
ReduceFunction find(Dtype dtype, Reduction reduction);
}
#if defined(__x86_64__)
namespace avx2 {
ReduceFunction find(Dtype dtype, Reduction reduction);
}
namespace avx512 {
ReduceFunction find(Dtype dtype, Reduction reduction);
}
#endif

const char* name(InstructionSet set) {
  switch (set) {
    case InstructionSet::baseline:
      return "baseline";
    case InstructionSet::avx2:
      return "avx2";
    case InstructionSet::avx512:
      return "avx512";
  }
  return "?";
}

bool has(InstructionSet set) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  switch (set) {
    case InstructionSet::baseline:
      return true;
    case InstructionSet::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case InstructionSet::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             has(InstructionSet::avx2);
  }
  return false;
#else
  return set == InstructionSet::baseline;  // 128-bit vectors: NEON where the compiler's baseline has it
#endif
}

InstructionSet best_instruction_set() {
  static const InstructionSet best = has(InstructionSet::avx512) ? InstructionSet::avx512
                                     : has(InstructionSet::avx2) ? InstructionSet::avx2
                                                                 : InstructionSet::baseline;
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

}  // namespace photinus
