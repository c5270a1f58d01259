/* Vectors of 4-byte numbers at one level of instructions, for the loops over codes: the compiler makes
   short vectors of loops that mix bytes and floats. Arithmetic on them is written with operators; here
   is what C has no operator for. kernels.h includes this file. */

typedef float NAME(vec) __attribute__((vector_size(VECTOR)));
typedef uint32_t NAME(words) __attribute__((vector_size(VECTOR)));
typedef int32_t NAME(ints) __attribute__((vector_size(VECTOR)));
typedef float NAME(vec_at) __attribute__((vector_size(VECTOR), aligned(1), may_alias));
#define VEC NAME(vec)
#define WORDS NAME(words)
#define INTS NAME(ints)
#define WIDTH_OF (VECTOR / 4) /* numbers in a vector */
#define QUAD (4 * WIDTH_OF)    /* and in four, whose codes are stored together */

TARGET INLINE VEC NAME(get)(const float_at *from) { return *(const NAME(vec_at) *)from; }

TARGET INLINE void NAME(put)(float_at *to, VEC x) { *(NAME(vec_at) *)to = x; }

TARGET INLINE VEC NAME(all)(float x) { return x - (VEC){0}; }

TARGET INLINE WORDS NAME(all_words)(uint32_t x) { return x - (WORDS){0}; }

TARGET INLINE VEC NAME(float_of)(INTS x) { return __builtin_convertvector(x, VEC); }

/* |x| */
TARGET INLINE VEC NAME(size)(VEC x) { return (VEC)((WORDS)x & 0x7fffffff); }

#if VECTOR == 64

#define MASK __mmask16
#define SHORTS __m512i /* 2-byte numbers */
#define SIMD(name) _mm512_##name
#define AND _mm512_and_si512
#define OR _mm512_or_si512
#define LOAD(from) _mm512_loadu_si512(from)
#define STORE(to, x) _mm512_storeu_si512(to, x)
#define NARROW(a, b) _mm512_packs_epi32((__m512i)(a), (__m512i)(b))
/* After two turns of packing, which stays within 16 bytes. */
#define IN_ORDER(x)                                                                                \
    _mm512_permutexvar_epi32(                                                                      \
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x)
/* The reverse, before two turns of unpacking. */
#define BY_LANE IN_ORDER

TARGET INLINE MASK NAME(below)(VEC a, VEC b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }

TARGET INLINE MASK NAME(equal)(VEC a, VEC b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }

/* a where the mask is set, else b. */
TARGET INLINE VEC NAME(choose)(MASK mask, VEC a, VEC b)
{
    return (VEC)_mm512_mask_blend_ps(mask, b, a);
}

/* x + y, or 0 where x is 0, of 2-byte numbers */
TARGET INLINE SHORTS NAME(add_unless_zero)(SHORTS x, SHORTS y)
{
    return _mm512_maskz_add_epi16(_mm512_test_epi16_mask(x, x), x, y);
}

/* The bits of the larger of a size and |x|. Those of a NaN are larger than all others, or do not count:
   an AVX-512 instruction leaves it out. */
TARGET INLINE WORDS NAME(larger_size)(WORDS a, VEC x)
{
    return (WORDS)_mm512_range_ps(x, (VEC)a, 0xb);
}

TARGET INLINE INTS NAME(wide_int8)(const void *from)
{
    return (INTS)_mm512_cvtepi8_epi32(_mm_loadu_si128(from));
}

TARGET INLINE WORDS NAME(wide_uint8)(const void *from)
{
    return (WORDS)_mm512_cvtepu8_epi32(_mm_loadu_si128(from));
}

TARGET INLINE INTS NAME(wide_int16)(const void *from)
{
    return (INTS)_mm512_cvtepi16_epi32(_mm256_loadu_si256(from));
}

TARGET INLINE VEC NAME(fuse)(VEC a, VEC b, VEC c) { return (VEC)_mm512_fmadd_ps(a, b, c); }

TARGET INLINE VEC NAME(sqrt_of)(VEC x) { return (VEC)_mm512_sqrt_ps(x); }

TARGET INLINE INTS NAME(nearest)(VEC x) { return (INTS)_mm512_cvtps_epi32(x); }

TARGET INLINE WORDS NAME(larger)(WORDS a, WORDS b)
{
    return (WORDS)_mm512_max_epu32((__m512i)a, (__m512i)b);
}

TARGET INLINE WORDS NAME(smaller)(WORDS a, WORDS b)
{
    return (WORDS)_mm512_min_epu32((__m512i)a, (__m512i)b);
}

TARGET INLINE uint32_t NAME(largest_of)(WORDS x)
{
    return (uint32_t)_mm512_reduce_max_epu32((__m512i)x);
}

#elif VECTOR == 32

#define MASK VEC
#define SHORTS __m256i
#define SIMD(name) _mm256_##name
#define AND _mm256_and_si256
#define OR _mm256_or_si256
#define LOAD(from) _mm256_loadu_si256((const void *)(from))
#define STORE(to, x) _mm256_storeu_si256((void *)(to), x)
#define NARROW(a, b) _mm256_packs_epi32((__m256i)(a), (__m256i)(b))
#define IN_ORDER(x) _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
#define BY_LANE(x) _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7))

TARGET INLINE MASK NAME(below)(VEC a, VEC b) { return (VEC)_mm256_cmp_ps(a, b, _CMP_LT_OQ); }

TARGET INLINE MASK NAME(equal)(VEC a, VEC b) { return (VEC)_mm256_cmp_ps(a, b, _CMP_EQ_OQ); }

TARGET INLINE VEC NAME(choose)(MASK mask, VEC a, VEC b)
{
    return (VEC)_mm256_blendv_ps(b, a, mask);
}

TARGET INLINE SHORTS NAME(add_unless_zero)(SHORTS x, SHORTS y)
{
    return _mm256_sign_epi16(_mm256_add_epi16(x, y), x);
}

TARGET INLINE INTS NAME(wide_int8)(const void *from)
{
    return (INTS)_mm256_cvtepi8_epi32(_mm_loadl_epi64(from));
}

TARGET INLINE WORDS NAME(wide_uint8)(const void *from)
{
    return (WORDS)_mm256_cvtepu8_epi32(_mm_loadl_epi64(from));
}

TARGET INLINE INTS NAME(wide_int16)(const void *from)
{
    return (INTS)_mm256_cvtepi16_epi32(_mm_loadu_si128(from));
}

TARGET INLINE VEC NAME(fuse)(VEC a, VEC b, VEC c) { return (VEC)_mm256_fmadd_ps(a, b, c); }

TARGET INLINE VEC NAME(sqrt_of)(VEC x) { return (VEC)_mm256_sqrt_ps(x); }

TARGET INLINE INTS NAME(nearest)(VEC x) { return (INTS)_mm256_cvtps_epi32(x); }

TARGET INLINE WORDS NAME(larger)(WORDS a, WORDS b)
{
    return (WORDS)_mm256_max_epu32((__m256i)a, (__m256i)b);
}

TARGET INLINE WORDS NAME(smaller)(WORDS a, WORDS b)
{
    return (WORDS)_mm256_min_epu32((__m256i)a, (__m256i)b);
}

TARGET INLINE uint32_t NAME(largest_of)(WORDS x)
{
    __m128i low = _mm256_castsi256_si128((__m256i)x);
    low = _mm_max_epu32(low, _mm256_extracti128_si256((__m256i)x, 1));
    low = _mm_max_epu32(low, _mm_shuffle_epi32(low, 0x4e));
    low = _mm_max_epu32(low, _mm_shuffle_epi32(low, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(low);
}

TARGET INLINE WORDS NAME(larger_size)(WORDS a, VEC x)
{
    return NAME(larger)(a, (WORDS)NAME(size)(x));
}

#else

#define MASK INTS

TARGET INLINE MASK NAME(below)(VEC a, VEC b) { return a < b; }

TARGET INLINE MASK NAME(equal)(VEC a, VEC b) { return a == b; }

TARGET INLINE VEC NAME(choose)(MASK mask, VEC a, VEC b)
{
    return (VEC)(((INTS)a & mask) | ((INTS)b & ~mask));
}

TARGET INLINE INTS NAME(wide_int8)(const void *from)
{
    const int8_t *bytes = from;
    INTS x;
    for (int j = 0; j < WIDTH_OF; j++)
        x[j] = bytes[j];
    return x;
}

TARGET INLINE WORDS NAME(wide_uint8)(const void *from)
{
    const uint8_t *bytes = from;
    WORDS x;
    for (int j = 0; j < WIDTH_OF; j++)
        x[j] = bytes[j];
    return x;
}

TARGET INLINE INTS NAME(wide_int16)(const void *from)
{
    const short_at *shorts = from;
    INTS x;
    for (int j = 0; j < WIDTH_OF; j++)
        x[j] = shorts[j];
    return x;
}

TARGET INLINE VEC NAME(fuse)(VEC a, VEC b, VEC c)
{
#if FUSES
    VEC x;
    for (int j = 0; j < WIDTH_OF; j++)
        x[j] = __builtin_fmaf(a[j], b[j], c[j]);
    return x;
#else
    return a * b + c;
#endif
}

TARGET INLINE VEC NAME(sqrt_of)(VEC x)
{
    VEC root;
    for (int j = 0; j < WIDTH_OF; j++)
        root[j] = __builtin_sqrtf(x[j]);
    return root;
}

/* Of a size below 2^22: adding and subtracting this rounds to an integer, to even between two. */
TARGET INLINE INTS NAME(nearest)(VEC x)
{
    return (INTS)(x + 0x1.8p23f) - (INTS)NAME(all)(0x1.8p23f);
}

TARGET INLINE WORDS NAME(larger)(WORDS a, WORDS b)
{
    WORDS mask = (WORDS)(a > b);
    return (a & mask) | (b & ~mask);
}

TARGET INLINE WORDS NAME(smaller)(WORDS a, WORDS b)
{
    WORDS mask = (WORDS)(a < b);
    return (a & mask) | (b & ~mask);
}

TARGET INLINE uint32_t NAME(largest_of)(WORDS x)
{
    uint32_t most = 0;
    for (int j = 0; j < WIDTH_OF; j++)
        most = x[j] > most ? x[j] : most;
    return most;
}

TARGET INLINE WORDS NAME(larger_size)(WORDS a, VEC x)
{
    return NAME(larger)(a, (WORDS)NAME(size)(x));
}

#endif

TARGET INLINE uint32_t NAME(smallest_of)(WORDS x) { return ~NAME(largest_of)(~x); }

/* Whether x g > 0; with AVX2 whether it is at least the smallest normal number. */
TARGET INLINE MASK NAME(is_positive)(VEC x, VEC g)
{
#if VECTOR == 32
    return _mm256_fnmadd_ps(x, g, NAME(all)(FLT_MIN));
#elif VECTOR == 64 /* the compiler takes two instructions for these two */
    __m512i sign = _mm512_set1_epi32(INT32_MIN);
    return NAME(below)((VEC){0}, (VEC)_mm512_ternarylogic_epi32((__m512i)x, (__m512i)g, sign, 0x78));
#else
    return NAME(below)((VEC){0}, (VEC)((WORDS)x ^ ((WORDS)g & 0x80000000u)));
#endif
}
