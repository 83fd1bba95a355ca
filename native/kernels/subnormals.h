// Numbers below the least normal one stay what they are while this lives, whatever the thread is set to
// (torch.set_flush_denormal sets the calling thread only). Ranks add by whichever thread is there, and all
// must get the same bits.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace photinus {

class KeepSubnormals {
 public:
  KeepSubnormals() : before_(state()) {
    if (before_ & kFlush) set(before_ & ~kFlush);
  }
  ~KeepSubnormals() {
    if (before_ & kFlush) set(before_);
  }
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlush = 1 << 15 | 1 << 6;  // MXCSR: results to zero, operands taken for zero
  static uint64_t state() { return _mm_getcsr(); }
  static void set(uint64_t state) { _mm_setcsr(static_cast<uint32_t>(state)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlush = 1 << 24 | 1 << 19;  // FPCR: of all but 16-bit floats, and of those
  static uint64_t state() {
    uint64_t state;
    asm volatile("mrs %0, fpcr" : "=r"(state));
    return state;
  }
  static void set(uint64_t state) { asm volatile("msr fpcr, %0" : : "r"(state)); }
#else
  static constexpr uint64_t kFlush = 0;
  static uint64_t state() { return 0; }
  static void set(uint64_t) {}
#endif

  const uint64_t before_;
};

}  // namespace photinus
