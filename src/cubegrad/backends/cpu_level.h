/* Both real types at one level of instructions: with LEVEL, TARGET and FUSES defined. */

#define WIDE 0
#include "cpu_kernels.h"
#undef WIDE
#define WIDE 1
#include "cpu_kernels.h"
#undef WIDE
#undef TARGET
#undef FUSES
#undef LEVEL
