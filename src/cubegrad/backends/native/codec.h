/* codec.py for one number, at one level of instructions: the same operations in the same order.
   kernels.h includes this file. */

TARGET INLINE uint32_t NAME(mixed)(uint32_t x)
{
    x *= 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

/* ∛x within 2^-22 of it, for x = 0 and normal numbers. A root is stored with 6 bits, so that this is
   enough, and it takes 13 instructions where `cbrt` takes 25. With a guess p of 1/∛x and
   lack = 1 - x p³, ∛x is x p² (1 - lack)^{-2/3}; the polynomial is that power for |lack| < 0.1022. */
TARGET INLINE float NAME(short_cbrt)(float x)
{
    float guess = NAME(fused)((float)(int32_t)bits_of(x), -1 / 3.0f, 1419900000.0f);
    float p = single_of((uint32_t)(int32_t)guess);
    float a = p * x * p, lack = NAME(fused)(-a, p, 1);
    float q = NAME(fused)(lack, 0.42887821f, 0.45852091f);
    q = NAME(fused)(lack, q, 0.4937995f);
    q = NAME(fused)(lack, q, 0.55553666f);
    q = NAME(fused)(lack, q, 0.66666669f);
    return NAME(fused)(a * lack, q, a);
}

/* Adding and subtracting it rounds to an integer, to even between two. In between the integer is in
   the low bits. */
#define MIDDLE 0x1.8p23f

TARGET INLINE float NAME(round_bfloat16)(float x, uint32_t bits)
{
    uint32_t low = bits * 0x9e3779b1u >> 16;
    float rounded = single_of((bits_of(x) + low) & 0xffff0000u);
    return fabsf(x) < (float)INFINITY ? rounded : x;
}

TARGET INLINE float NAME(round_half)(float x, uint32_t bits)
{
    bits *= 0x9e3779b1u;
    float normal = single_of((bits_of(x) + (bits >> 19)) & 0xffffe000u);
    float fraction = single_of(0x3f800400 | (bits >> 9 & 0x7ff800)) - 1.5f;
    float places = x * 0x1p24f + fraction;
    float whole = places + MIDDLE - MIDDLE;
    whole = single_of(bits_of(whole) | (bits_of(places) & 0x80000000u)); /* -0.3 rounds to -0 */
    float rounded = fabsf(x) < 0x1p-14f ? whole * 0x1p-24f : normal;
    rounded = fabsf(x) < 65504 ? rounded : x;
    return x != 0 ? rounded : x;
}

/* The code is in the lowest 7 bits. */
TARGET INLINE float NAME(offset_code)(float offset, float inverse, uint32_t bits)
{
    float dither = single_of((bits >> 9 & 0x7ffc00) | 0x3f800200) - 1.5f;
    return offset * inverse + dither + MIDDLE;
}

/* `base` is the bits of a root whose code would be 0, `places` those that are rounded away. No code
   exceeds its 9 bits: the scale has room for the block's largest root rounded up. */
TARGET INLINE int32_t NAME(root_code)(float root, int32_t base, uint32_t bits, uint32_t places)
{
    int32_t code = ((int32_t)(bits_of(root) + (bits & places)) - base) >> CUT;
    code = code < 2 ? 2 : code;
    return bits_of(root) ? code : 0;
}
