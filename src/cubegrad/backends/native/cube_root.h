/* Roots that the compiler can vectorise, for one real type at one level of instructions.
   kernels.h includes this file for each. */

#define PASTE(name, type, level) name##_##type##_##level
#define EXPAND(name, type, level) PASTE(name, type, level)
#define NAME(name) EXPAND(name, REAL, LEVEL)

/* GUESS: a third of the exponent, with a constant that centres the error, which is within 4 %. */
#if WIDE
#define REAL double
#define BITS uint64_t
#define SMALLEST DBL_MIN
#define UP 0x1p54
#define ROOT_UP 0x1p18
#define TURNS 2
#define GUESS(bits) ((uint64_t)(1430186334 - (int32_t)((int32_t)((bits) >> 32) * (1 / 3.0))) << 32)
#else
#define REAL float
#define BITS uint32_t
#define SMALLEST FLT_MIN
#define UP 0x1p24f
#define ROOT_UP 0x1p8f
#define TURNS 1
#define GUESS(bits) (uint32_t)(1419900350 - (int32_t)((float)(int32_t)(bits) * (1 / 3.0f)))
#endif

/* Addresses need not be multiples of the size: a tensor may view the middle of a file. */
typedef REAL NAME(at) __attribute__((aligned(1), may_alias));

TARGET INLINE REAL NAME(from_bits)(BITS bits)
{
    REAL x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

TARGET INLINE BITS NAME(to_bits)(REAL x)
{
    BITS bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* a b + c, with the product unrounded where there is such an instruction. For cube roots, sums and
   states in codes only. */
TARGET INLINE REAL NAME(fused)(REAL a, REAL b, REAL c)
{
#if !FUSES
    return a * b + c;
#elif WIDE
    return __builtin_fma(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

TARGET INLINE REAL NAME(square_root)(REAL x)
{
#if WIDE
    return __builtin_sqrt(x);
#else
    return __builtin_sqrtf(x);
#endif
}

/* ∛x for x ≥ 0 within an ulp, with no division: p = 1/∛x from a guess through the exponent, then
   x p² and a last turn of Newton's rule on its residual. The order of the products keeps each
   within the range of exponents. */
TARGET INLINE REAL NAME(cbrt)(REAL x)
{
    const REAL third = (REAL)(1 / 3.0);
    REAL y = x < SMALLEST ? x * UP : x; /* a subnormal number has no exponent to guess by */
    REAL p = NAME(from_bits)(GUESS(NAME(to_bits)(y)));
    for (int turn = 0; turn < TURNS; turn++) {
        REAL lack = NAME(fused)(-(p * y * p), p, 1); /* this turn cubes it */
        p = NAME(fused)(p * lack, NAME(fused)(lack, (REAL)(2 / 9.0), third), p);
    }
    if (!WIDE) /* and this one squares it */
        p = NAME(fused)(p * third, NAME(fused)(-(p * y * p), p, 1), p);
    REAL root = p * y * p;
    root = NAME(fused)(NAME(fused)(-(root * root), root, y), p * p * third, root);
    root = x < SMALLEST ? root * (1 / ROOT_UP) : root;
    return x < (REAL)INFINITY ? root : x;
}
