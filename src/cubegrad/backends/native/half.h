/* Half-precision numbers from and to single ones, rounded to nearest even. */

INLINE float single_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float from_bfloat16(uint16_t half) { return single_of((uint32_t)half << 16); }

INLINE uint16_t to_bfloat16(float x)
{
    uint32_t bits = bits_of(x);
    uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1); /* to even */
    return (uint16_t)((x != x ? bits | 0x400000 : rounded) >> 16);
}

INLINE float from_half(uint16_t half)
{
    uint32_t shifted = (uint32_t)(half & 0x7fff) << 13;
    uint32_t scaled = bits_of(single_of(shifted) * 0x1p112f); /* the difference of the biases */
    uint32_t special = shifted >= 0x7c00u << 13 ? 0x7f800000 : 0;
    return single_of(scaled | special | (uint32_t)(half & 0x8000) << 16);
}

INLINE uint16_t to_half(float x)
{
    uint32_t sign = bits_of(x) >> 16 & 0x8000;
    uint32_t size = bits_of(x) & 0x7fffffff;
    uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13; /* to even */
    /* 0.5's last place is the last place of a subnormal half. */
    uint32_t subnormal = bits_of(single_of(size) + 0.5f) - bits_of(0.5f);
    uint32_t finite = size < 0x38800000 ? subnormal : normal;
    uint32_t special = size > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | (size >= 0x477ff000 ? special : finite)); /* 65520 rounds to inf */
}
