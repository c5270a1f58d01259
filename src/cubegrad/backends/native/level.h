/* Both real types at one level of instructions: with LEVEL, TARGET and FUSES defined. */

#define WIDE 0
#include "kernels.h"
#undef WIDE
#define WIDE 1
#include "kernels.h"
#undef WIDE
#undef TARGET
#undef FUSES
#undef LEVEL
