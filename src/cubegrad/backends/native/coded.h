/* The loops of a step on states in codes, over one block at one level of instructions. A block is
   decoded into buffers that stay in the nearest cache, stepped, and encoded. Every loop has numbers
   of one size, unless it reads or writes codes: the compiler makes short vectors of a loop that
   mixes them. blocks.h includes this file. */

struct NAME(block) {
    _Alignas(64) float x[BLOCK], g[BLOCK], m[BLOCK], r[BLOCK], x0[BLOCK], root[BLOCK];
    uint32_t bits[BLOCK];
    int32_t codes[BLOCK];
    char raw[BLOCK * sizeof(double)];
};

TARGET INLINE void NAME(decode_offsets)(float *restrict m, const int8_t *restrict codes,
                                        float scale, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        m[i] = (float)(codes[i] >> 1) * scale;
}

/* A root's lowest bit is that of the offset's code, if there are offsets. */
TARGET INLINE void NAME(decode_roots)(float *restrict r, const uint8_t *restrict codes,
                                      const int8_t *restrict offsets, float scale, int64_t n)
{
    uint32_t base = bits_of(scale) - BINADES;
    if (offsets)
        for (int64_t i = 0; i < n; i++) {
            uint32_t low = (uint32_t)(int32_t)offsets[i] & 1;
            r[i] = codes[i] ? single_of(((uint32_t)codes[i] << (CUT + 1)) + (low << CUT) + base) : 0;
        }
    else
        for (int64_t i = 0; i < n; i++)
            r[i] = codes[i] ? single_of(((uint32_t)codes[i] << (CUT + 1)) + base) : 0;
}

TARGET INLINE void NAME(decode_initial)(float *restrict x0, const char *restrict codes,
                                        enum kind param, float scale, int64_t n)
{
    const short_at *shorts = (const short_at *)codes;
    if (param == SINGLE) {
        for (int64_t i = 0; i < n; i++)
            x0[i] = (float)shorts[i] * scale;
        return;
    }
    NAME(load)(x0, codes, param, n);
    for (int64_t i = 0; i < n; i++)
        x0[i] *= scale;
}

/* ∛ν for a normal ν, or √ν. */
TARGET INLINE float NAME(short_root)(struct rule rule, float v)
{
    return rule.root == 3 ? NAME(short_cbrt)(v) : NAME(square_root)(v);
}

/* ν, whose root this is. */
TARGET INLINE float NAME(power)(struct rule rule, float r)
{
    return rule.root == 3 ? r * r * r : r * r;
}

/* ν_{k+1} */
TARGET INLINE float NAME(sq_sum)(struct rule rule, struct NAME(constants) h, float g, float r)
{
    float v = NAME(power)(rule, r);
    if (rule.squares == WEIGHTED)
        return NAME(fused)(g * h.weight, g, v);
    return v * h.fade + (rule.squares == FADING ? g : g * h.newest) * g;
}

/* r_{k+1}, and the random bits, whose integer arithmetic runs beside that of the roots. A ν that is
   infinite may get a NaN with a pull: then z is one either way. Returns the bits of the smallest ν
   but 0, less 1, and puts those of the largest into `most`. */
TARGET INLINE uint32_t NAME(new_roots)(struct rule rule, int plain, struct NAME(constants) h,
                                       int64_t n, const float_at *restrict param,
                                       const float_at *restrict grad, const float *restrict r,
                                       float *restrict root, uint32_t *restrict bits,
                                       uint32_t random, uint32_t *most)
{
    uint32_t least = UINT32_MAX, largest = 0;
    for (int64_t i = 0; i < n; i++) {
        float g = EFFECTIVE(grad[i], param[i]), v = NAME(sq_sum)(rule, h, g, r[i]);
        float new = NAME(short_root)(rule, v);
        uint32_t lower = bits_of(v) - 1;
        if (rule.root == 3)
            least = lower < least ? lower : least;
        largest = bits_of(v) > largest ? bits_of(v) : largest;
        bits[i] = random + (uint32_t)i * WEYL;
        if (rule.root == 3 && !rule.pulls)
            new = v < (float)INFINITY ? new : v;
        if (rule.squares == WEIGHTED) /* not changed by rounding alone */
            new = g * h.weight * g == 0 ? r[i] : new;
        root[i] = new;
    }
    *most = largest;
    return least;
}

/* The roots that `short_root` cannot take, those of subnormal numbers. */
TARGET static void NAME(small_roots)(struct rule rule, struct NAME(constants) h, int64_t n,
                                     const float_at *restrict param, const float_at *restrict grad,
                                     const float *restrict r, float *restrict root)
{
    const int plain = 0;
    for (int64_t i = 0; i < n; i++) {
        float g = EFFECTIVE(grad[i], param[i]), v = NAME(sq_sum)(rule, h, g, r[i]);
        if (v < FLT_MIN && (rule.squares != WEIGHTED || g * h.weight * g != 0))
            root[i] = NAME(root)(rule, v);
    }
}

/* x_{k+1} and m_{k+1} = z_{k+1} - x_{k+1}, as rule.step_from_root has them. */
TARGET INLINE void NAME(from_root)(struct rule rule, enum kind kind, int plain, int asking,
                                   struct NAME(constants) h, int64_t n, float_at *restrict param,
                                   const float_at *restrict grad, float *restrict m,
                                   const float *restrict r, const float *restrict x0,
                                   const float *restrict root, const uint32_t *restrict bits,
                                   struct NAME(lanes) *restrict lanes)
{
    /* Of float32, x without its part of the rounding error yet: z if it takes in all. */
    float reach = kind == SINGLE ? 1 - (1 - h.share) * (1 - h.c) : h.c;
    float held_reach = kind == SINGLE ? h.share : 0; /* with a momentum of 1 */
    for (int64_t i = 0; i < n; i++) {
        float p = param[i], x = SHRUNK(p), offset = SHRUNK(m[i]);
        float g = EFFECTIVE(grad[i], p), weighted = g * h.weight, move = weighted, away = 0;
        if (rule.pulls) {
            away = SHRUNK(x0[i]) - x - offset;
            away = r[i] == 0 ? 0 : away; /* d_k = x_0 - z_k */
            move = weighted - away * (root[i] - r[i]);
        }
        float inverse = 1 / (root[i] + h.eps);
        if (!plain || !rule.pulls)
            inverse = inverse == (float)INFINITY ? 0 : inverse;
        move = move * inverse + 0;   /* z_k - z_{k+1} */
        float ahead = move - offset; /* x_k - z_{k+1} */
        int held = rule.holds && NAME(is_held)(h, ahead, g);
        float y = x - ahead * (held ? held_reach : reach);
        if (kind != SINGLE)
            y = kind == HALF ? NAME(round_half)(y, bits[i]) : NAME(round_bfloat16)(y, bits[i]);
        if (lanes) {
            float since = r[i] == 0 ? m[i] : x0[i] - p, u = away + move;
            float s = (root[i] + h.eps) * u;
            NAME(add)(asking, lanes, i, COUNTED(grad[i], p, since) * h.weight, since, s, u, root[i]);
        }
        param[i] = y;
        m[i] = kind == SINGLE ? ahead * (held ? -1 : h.c - 1) : x - y - ahead;
    }
}

/* n numbers of a block from one on; n is a multiple of LANES, here and in what it calls. */
TARGET INLINE void NAME(step_part)(struct rule rule, enum kind kind, int plain,
                                   struct NAME(constants) h, int64_t from, int64_t n, float_at *x,
                                   const float_at *g, struct NAME(block) *b, uint32_t random,
                                   struct NAME(lanes) *lanes)
{
    float *m = b->m + from, *r = b->r + from, *x0 = b->x0 + from, *root = b->root + from;
    uint32_t *bits = b->bits + from;
    x += from, g += from, random += (uint32_t)from * WEYL;
    uint32_t most, least = NAME(new_roots)(rule, plain, h, n, x, g, r, root, bits, random, &most);
    if (least < bits_of(FLT_MIN) - 1)
        NAME(small_roots)(rule, h, n, x, g, r, root);
    if (!rule.pulls || !lanes)
        NAME(from_root)(rule, kind, plain, 0, h, n, x, g, m, r, x0, root, bits, NULL);
    else if (most < bits_of(INFINITY))
        for (int64_t i = 0; i < n; i += LANES)
            NAME(from_root)(rule, kind, plain, 0, h, LANES, x + i, g + i, m + i, r + i, x0 + i,
                            root + i, bits + i, lanes);
    else
        for (int64_t i = 0; i < n; i += LANES)
            NAME(from_root)(rule, kind, plain, 1, h, LANES, x + i, g + i, m + i, r + i, x0 + i,
                            root + i, bits + i, lanes);
}

/* A whole block half by half, and here as in `step_blocks` with constants for the lengths: the
   loops are unrolled, and the next begins before the last has ended. It saves 7 % of a step. */
TARGET INLINE void NAME(step_block)(struct rule rule, enum kind kind, int plain,
                                    struct NAME(constants) h, int64_t n, float_at *x,
                                    const float_at *g, struct NAME(block) *b, uint32_t random,
                                    struct NAME(lanes) *lanes)
{
    if (plain && n == BLOCK && !lanes)
        for (int64_t i = 0; i < BLOCK; i += BLOCK / 2)
            NAME(step_part)(rule, kind, plain, h, i, BLOCK / 2, x, g, b, random, NULL);
    else
        NAME(step_part)(rule, kind, plain, h, 0, n & -LANES, x, g, b, random, lanes);
}

typedef void NAME(block_function)(struct NAME(constants), int64_t, float_at *, const float_at *,
                                  struct NAME(block) *, uint32_t, struct NAME(lanes) *);

#define FOR_CASE(name, kind, plain, ...)                                                           \
    TARGET static void NAME(name)(struct NAME(constants) h, int64_t n, float_at *x,                \
                                  const float_at *g, struct NAME(block) *b, uint32_t random,       \
                                  struct NAME(lanes) *lanes)                                       \
    {                                                                                              \
        const struct rule rule = {__VA_ARGS__};                                                    \
        NAME(step_block)(rule, kind, plain, h, n, x, g, b, random, lanes);                          \
    }
#define FOR_KIND(name, kind, ...)                                                                  \
    FOR_CASE(name##_##kind, kind, 0, __VA_ARGS__)                                                  \
    FOR_CASE(name##_##kind##_plain, kind, 1, __VA_ARGS__)
#define FOR_RULE(name, ...)                                                                        \
    FOR_KIND(codes_##name, HALF, __VA_ARGS__)                                                      \
    FOR_KIND(codes_##name, BFLOAT16, __VA_ARGS__)                                                  \
    FOR_KIND(codes_##name, SINGLE, __VA_ARGS__)
FOR_EACH_RULE(FOR_RULE)
#undef FOR_RULE
#undef FOR_KIND
#undef FOR_CASE

#define BOTH(name) {NAME(name), NAME(name##_plain)}
#define OF_RULE(name, ...)                                                                         \
    [name] = {BOTH(codes_##name##_HALF), BOTH(codes_##name##_BFLOAT16), BOTH(codes_##name##_SINGLE)},
static NAME(block_function) *const NAME(STEP_BLOCK)[][3][2] = {FOR_EACH_RULE(OF_RULE)};
#undef OF_RULE
#undef BOTH
