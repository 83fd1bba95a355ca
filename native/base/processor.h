// Which vector instructions this processor has.
#pragma once

namespace photinus {

struct VectorInstructions {
  bool avx = false;
  bool avx2 = false;    // with FMA and F16C
  bool avx512 = false;  // F, BW, VL and DQ
};

// All false on other processors than x86-64, and where the system does not save the registers.
const VectorInstructions& vector_instructions();

}  // namespace photinus
