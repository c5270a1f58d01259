/* Both real types at one level of instructions: with LEVEL, TARGET, FUSES and VECTOR,
   the bytes of a vector, defined. */

#define WIDE 0
#include "kernels.h"
#undef WIDE
#define WIDE 1
#include "kernels.h"
#undef WIDE
#undef TARGET
#undef FUSES
#undef VECTOR
#undef LEVEL
