/* Roots that the compiler can vectorise, for one real type at one level of instructions.
   kernels.h includes this file for each. */

#define PASTE(name, type, level) name##_##type##_##level
#define EXPAND(name, type, level) PASTE(name, type, level)
#define NAME(name) EXPAND(name, REAL, LEVEL)

/* GUESS: of 1/∛x, through a third of the exponent, with a constant that centres the error, which is
   within 4 %. */
#if WIDE
#define REAL double
#define BITS uint64_t
#define SMALLEST DBL_MIN
#define UP 0x1p54
#define ROOT_UP 0x1p18
#define GUESS(bits) ((uint64_t)(1430186334 - (int32_t)((int32_t)((bits) >> 32) * (1 / 3.0))) << 32)
#else
#define REAL float
#define BITS uint32_t
#define SMALLEST FLT_MIN
#define UP 0x1p24f
#define ROOT_UP 0x1p8f
#define GUESS(bits)                                                                                \
    (uint32_t)(int32_t)NAME(fused)((float)(int32_t)(bits), -1 / 3.0f, 1419900000.0f)
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

/* p² x for a p near 1/∛x, made into ∛x: with lack = 1 - x p³, that is p² x (1 - lack)^{-2/3}. The
   polynomial is that power within 2^-22 for |lack| < 0.1022. */
TARGET INLINE REAL NAME(corrected)(REAL root, REAL p)
{
    REAL lack = NAME(fused)(-root, p, 1);
    REAL q = NAME(fused)(lack, (REAL)0.42887821f, (REAL)0.45852091f);
    q = NAME(fused)(lack, q, (REAL)0.4937995f);
    q = NAME(fused)(lack, q, (REAL)0.55553666f);
    q = NAME(fused)(lack, q, (REAL)0.66666669f);
    return NAME(fused)(root * lack, q, root);
}

/* ∛x for x ≥ 0 within an ulp, with no division: by a guess of p = 1/∛x, and a last turn of Newton's
   rule on the residual of x p². The order of the products keeps each within the range of exponents. */
TARGET INLINE REAL NAME(cbrt)(REAL x)
{
    const REAL third = (REAL)(1 / 3.0);
    REAL y = x < SMALLEST ? x * UP : x; /* a subnormal number has no exponent to guess by */
    REAL p = NAME(from_bits)(GUESS(NAME(to_bits)(y)));
    for (int turn = 0; WIDE && turn < 2; turn++) {
        REAL lack = NAME(fused)(-(p * y * p), p, 1); /* this turn cubes it */
        p = NAME(fused)(p * lack, NAME(fused)(lack, (REAL)(2 / 9.0), third), p);
    }
    REAL root = p * y * p;
    root = WIDE ? root : NAME(corrected)(root, p);
    root = NAME(fused)(NAME(fused)(-(root * root), root, y), p * p * third, root);
    root = x < SMALLEST ? root * (1 / ROOT_UP) : root;
    return x < (REAL)INFINITY ? root : x;
}
