#define PHOTINUS_KERNELS avx2
#define PHOTINUS_VECTOR_BYTES 32
#include "kernels/reduce_vector.h"
