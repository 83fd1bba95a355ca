#define PHOTINUS_KERNELS baseline
#define PHOTINUS_VECTOR_BYTES 16
#include "kernels/reduce_vector.h"
