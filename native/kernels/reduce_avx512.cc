#define PHOTINUS_KERNELS avx512
#define PHOTINUS_VECTOR_BYTES 64
#include "kernels/reduce_vector.h"
