/* codec.py for a vector of numbers, at one level of instructions. kernels.h includes this file. */

TARGET INLINE uint32_t NAME(mixed)(uint32_t x)
{
    x *= 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

/* ∛x within 2^-22 of it, for x = 0 and normal numbers. A root is stored with 6 bits, so that this is
   enough, and it takes 13 instructions where `cbrt` takes 25. With a guess p of 1/∛x and
   lack = 1 - x p³, ∛x is x p² (1 - lack)^{-2/3}; the polynomial is that power for |lack| < 0.1022. */
TARGET INLINE VEC NAME(short_cbrt)(VEC x)
{
    VEC third = NAME(all)(-1 / 3.0f), bias = NAME(all)(1419900000.0f);
    VEC p = (VEC)__builtin_convertvector(NAME(fuse)(NAME(float_of)((INTS)x), third, bias), INTS);
    VEC a = p * x * p, lack = NAME(fuse)(-a, p, NAME(all)(1));
    VEC q = NAME(fuse)(lack, NAME(all)(0.42887821f), NAME(all)(0.45852091f));
    q = NAME(fuse)(lack, q, NAME(all)(0.4937995f));
    q = NAME(fuse)(lack, q, NAME(all)(0.55553666f));
    q = NAME(fuse)(lack, q, NAME(all)(0.66666669f));
    return NAME(fuse)(a * lack, q, a);
}

/* codec.dither. The highest bit is flipped, which makes a signed integer of the upper 13. */
TARGET INLINE VEC NAME(dither)(WORDS flipped)
{
    VEC upper = NAME(float_of)((INTS)(flipped & 0xfff80000u));
    return NAME(fuse)(upper, NAME(all)(0x1p-32f), NAME(all)(0x1p-14f));
}

/* x rounded at random to a number that bfloat16 has, or float16. */
TARGET INLINE VEC NAME(round_bfloat16)(VEC x, WORDS bits)
{
    WORDS low = bits * 0x9e3779b1u >> 16;
    VEC rounded = (VEC)(((WORDS)x + low) & 0xffff0000u);
    return NAME(choose)(NAME(below)(NAME(size)(x), NAME(all)(INFINITY)), rounded, x);
}

TARGET INLINE VEC NAME(round_half)(VEC x, WORDS bits)
{
    bits *= 0x9e3779b1u;
    VEC normal = (VEC)(((WORDS)x + (bits >> 19)) & 0xffffe000u);
    VEC fraction = (VEC)((bits >> 9 & 0x7ff800) | 0x3f800400) - 1.5f;
    VEC places = x * 0x1p24f + fraction;
    VEC whole = NAME(float_of)(NAME(nearest)(places));
    whole = (VEC)((WORDS)whole | ((WORDS)places & 0x80000000u)); /* -0.3 rounds to -0 */
    VEC size = NAME(size)(x), zero = {0};
    VEC rounded = NAME(choose)(NAME(below)(size, NAME(all)(0x1p-14f)), whole * 0x1p-24f, normal);
    rounded = NAME(choose)(NAME(below)(size, NAME(all)(65504)), rounded, x);
    return NAME(choose)(NAME(equal)(x, zero), x, rounded);
}
