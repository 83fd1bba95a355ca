#include "base/processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace photinus {
namespace {

// By cpuid itself: __builtin_cpu_supports of Clang 14 does not know F16C, and Zig's is false for everything.
VectorInstructions look() {
  VectorInstructions found;
#if defined(__x86_64__)
  constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  unsigned eax, ebx, ecx, edx, saved, high;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE)) return found;
  asm("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  found.avx = (ecx & bit_AVX) && (saved & 0x06) == 0x06;
  const bool has_fma_and_f16c = (ecx & bit_FMA) && (ecx & bit_F16C);
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return found;
  found.avx2 = found.avx && has_fma_and_f16c && (ebx & bit_AVX2);
  found.avx512 = found.avx2 && (ebx & kAvx512) == kAvx512 && (saved & 0xe0) == 0xe0;
#endif
  return found;
}

}  // namespace

const VectorInstructions& vector_instructions() {
  static const VectorInstructions found = look();
  return found;
}

}  // namespace photinus
