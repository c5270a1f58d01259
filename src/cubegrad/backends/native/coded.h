/* The loops of a step on states in codes, over vectors of a block at one level of instructions. blocks.h
   includes this file. `step_root` and `step_point` make of codes the numbers after the step, which stay
   in the nearest cache. Once all of a block are known, and so its scales, `encode` makes codes of them.

   There are fewer instructions for `plain` steps: without coupled decay, maximize or a GradScaler, and
   with a momentum up to 0.9, but not 0. The arithmetic is the same. */

struct NAME(block) {
    /* After the step x without its part of the rounding error, x - z, and the root; the root before. */
    _Alignas(64) float y[BLOCK], ahead[BLOCK], root[BLOCK], r[BLOCK];
    /* Where a tensor has another dtype, lies apart, or ends within a vector. */
    float x_copy[BLOCK], g_copy[BLOCK], initial_copy[BLOCK];
    int8_t offset_copy[BLOCK];
    uint8_t root_copy[BLOCK];
    int16_t short_copy[BLOCK];
    char raw[BLOCK * sizeof(double)];
};

/* Of a block its index, its first number in the tensor and in its row, how many numbers, and that rounded
   up to QUAD. */
struct NAME(place) {
    int64_t q, at, from, n, wide;
};

/* The numbers of a step as vectors in memory. From numbers in registers the compiler made these vectors
   anew for every four that it stepped. */
struct NAME(wide) {
    VEC weight, fade, newest, c, reach, kept, held_reach, held_kept, momentum, mean_share, own_decay;
    VEC inverse_weight, weighted_eps, shrink, initial_shrink, eps, decay, sign;
};

TARGET INLINE struct NAME(wide) NAME(wide_of)(struct NAME(constants) h)
{
    return (struct NAME(wide)){
        .weight = NAME(all)(h.weight),
        .fade = NAME(all)(h.fade),
        .newest = NAME(all)(h.newest),
        .c = NAME(all)(h.c),
        .reach = NAME(all)(h.reach),
        .kept = NAME(all)(h.kept),
        .held_reach = NAME(all)(h.held_reach),
        .held_kept = NAME(all)(h.held_kept),
        .momentum = NAME(all)(h.momentum),
        .mean_share = NAME(all)(h.mean_share),
        .own_decay = NAME(all)(h.own_decay),
        .inverse_weight = NAME(all)(h.inverse_weight),
        .weighted_eps = NAME(all)(h.weighted_eps),
        .shrink = NAME(all)(h.shrink),
        .initial_shrink = NAME(all)(h.initial_shrink),
        .eps = NAME(all)(h.eps),
        .decay = NAME(all)(h.decay),
        .sign = NAME(all)(h.sign),
    };
}

/* What a step of a block reads: of the tensors themselves or of copies. */
struct NAME(source) {
    VEC offset_scale, shrunk_scale, initial_scale;
    const float_at *param, *grad;
    const int8_t *offset;
    const uint8_t *root;
    const short_at *initial;
    uint32_t root_base; /* the bits of a root whose code would be 0 */
    uint32_t random;    /* those of the first number; see codec.block_bits */
};

/* Of a block, lane by lane, as bits: the largest |z - x| and root, the smallest ν but 0, less 1. */
struct NAME(extremes) {
    WORDS offset, root, least;
};

/* Those of number i and what follows in its vector. */
TARGET INLINE WORDS NAME(random_words)(WORDS random, int64_t i)
{
    WORDS multiples;
    memcpy(&multiples, WEYL_MULTIPLES + i, sizeof multiples);
    return random + multiples;
}

TARGET INLINE VEC NAME(effective)(int plain, struct NAME(constants) h, const struct NAME(wide) *w,
                                  VEC g, VEC p)
{
    if (plain)
        return g;
    return h.decay != 0 ? g * w->sign + p * w->decay : g * w->sign;
}

/* Whether no denominator and no λ_k leads out of the range of floats, which allows for shorter ways to
   compute a step. MirrorMADGRAD's eps is 0 by default. */
TARGET INLINE int NAME(in_range)(struct rule rule, int plain, struct NAME(constants) h)
{
    if (rule.root == 3 && !rule.pulls)
        return 0;
    return plain || (h.eps > 2 * FLT_MIN && h.weight > 1e-18f && h.weight < 1e18f);
}

/* ν_{k+1} */
TARGET INLINE VEC NAME(square_of)(struct rule rule, int plain, struct NAME(constants) h,
                                  const struct NAME(wide) *w, VEC g, VEC v)
{
    if (rule.squares == WEIGHTED)
        return NAME(fuse)(g * w->weight, g, v);
    if (rule.squares == FADING)
        return NAME(fuse)(g, g, v * w->fade);
    if (NAME(in_range)(rule, plain, h))
        return NAME(fuse)(w->newest, NAME(fuse)(g, g, -v), v);
    return v * w->fade + g * w->newest * g;
}

/* ∛ν_{k+1} or √ν_{k+1}. Unless `exact`, ν has to be 0 or a normal number. A ν that is infinite may get a
   NaN with a pull: then z is one either way. */
TARGET INLINE VEC NAME(root_of)(struct rule rule, int exact, VEC v)
{
    if (rule.root == 2)
        return NAME(sqrt_of)(v);
    if (exact) {
        VEC root;
        for (int j = 0; j < WIDTH_OF; j++)
            root[j] = NAME(cbrt)(v[j]);
        return root;
    }
    VEC root = NAME(short_cbrt)(v);
    return rule.pulls ? root : NAME(choose)(NAME(below)(v, NAME(all)(INFINITY)), root, v);
}

/* To the sums of distance.py; `since` is x_0 - x_k, `u` x_0 - z_{k+1}. A coordinate whose ν is not finite
   counts for nothing, and decay only where it makes the first product smaller. */
TARGET INLINE void NAME(add_vector)(struct rule rule, int plain, struct NAME(constants) h,
                                    const struct NAME(wide) *w, struct NAME(lanes) *lanes, int64_t i,
                                    VEC g, VEC p, VEC since, VEC u, VEC root)
{
    VEC loss = plain ? g : g * w->sign;
    VEC counted = NAME(choose)(NAME(is_positive)(p, -since), NAME(effective)(plain, h, w, g, p), loss);
    VEC zero = {0}, length = (root + w->eps) * (rule.anchored ? NAME(size)(u) : u * u);
    MASK finite = NAME(below)(root, NAME(all)(INFINITY));
    float *agreement = &lanes->of[AGREEMENT][i % LANES], *product = &lanes->of[PRODUCT][i % LANES];
    float *roots = &lanes->of[ROOTS][i % LANES];
    NAME(put)(agreement, NAME(get)(agreement) + NAME(choose)(finite, counted * w->weight * since, zero));
    NAME(put)(product, NAME(get)(product) + NAME(choose)(finite, length, zero));
    NAME(put)(roots, NAME(get)(roots) + NAME(choose)(finite, root, zero));
}

/* The roots of four vectors, from i on. */
TARGET INLINE void NAME(decode)(int plain, struct NAME(source) from, int64_t i, VEC *r)
{
#if VECTOR > 16
    SHORTS zero = {0}, roots = BY_LANE(LOAD(from.root + i)), low = zero;
    SHORTS base = SIMD(set1_epi16)((short)(from.root_base >> 16));
    if (plain || from.offset)
        low = AND(BY_LANE(LOAD(from.offset + i)), SIMD(set1_epi8)(1));
    /* 4 times the byte and 2 times the lowest bit: the upper half of what is added to the base, whose
       lower half is 0. */
    SHORTS weights = SIMD(set1_epi16)(0x0402);
    SHORTS first = SIMD(maddubs_epi16)(SIMD(unpacklo_epi8)(low, roots), weights);
    SHORTS last = SIMD(maddubs_epi16)(SIMD(unpackhi_epi8)(low, roots), weights);
    first = NAME(add_unless_zero)(first, base);
    last = NAME(add_unless_zero)(last, base);
    r[0] = (VEC)SIMD(unpacklo_epi16)(zero, first);
    r[1] = (VEC)SIMD(unpackhi_epi16)(zero, first);
    r[2] = (VEC)SIMD(unpacklo_epi16)(zero, last);
    r[3] = (VEC)SIMD(unpackhi_epi16)(zero, last);
#else
    for (int v = 0; v < 4; v++, i += WIDTH_OF) {
        WORDS code = NAME(wide_uint8)(from.root + i) << 1;
        if (plain || from.offset)
            code |= (WORDS)NAME(wide_int8)(from.offset + i) & 1;
        r[v] = (VEC)(((code << CUT) + from.root_base) & (WORDS)(code != 0));
    }
#endif
}

/* r_{k+1} of r_k */
TARGET INLINE void NAME(step_root)(struct rule rule, int plain, int exact, struct NAME(constants) h,
                                   const struct NAME(wide) *w, struct NAME(source) from,
                                   struct NAME(block) *restrict b, int64_t i, VEC r,
                                   struct NAME(extremes) *extremes)
{
    VEC g = NAME(get)(from.grad + i);
    if (!plain)
        g = NAME(effective)(plain, h, w, g, NAME(get)(from.param + i));
    VEC old = rule.root == 3 ? r * r * r : r * r, v = NAME(square_of)(rule, plain, h, w, g, old);
    VEC root = NAME(root_of)(rule, exact, v);
    if (rule.squares == WEIGHTED) /* not changed by rounding alone */
        root = NAME(choose)(NAME(equal)(v, old), r, root);
    if (rule.root == 3)
        extremes->least = NAME(smaller)(extremes->least, (WORDS)v - 1);
    extremes->root = NAME(larger)(extremes->root, (WORDS)root);
    NAME(put)(b->root + i, root);
    if (keeps_start(rule))
        NAME(put)(b->r + i, r);
}

/* Of four vectors, from i on. */
TARGET INLINE void NAME(step_roots)(struct rule rule, int plain, int exact, struct NAME(constants) h,
                                    const struct NAME(wide) *w, struct NAME(source) from,
                                    struct NAME(block) *restrict b, int64_t i,
                                    struct NAME(extremes) *extremes)
{
    VEC r[4];
    NAME(decode)(plain, from, i, r);
    for (int v = 0; v < 4; v++)
        NAME(step_root)(rule, plain, exact, h, w, from, b, i + v * WIDTH_OF, r[v], extremes);
}

/* x_{k+1} and x_{k+1} - z_{k+1}, as rule.step_from_root has them. */
TARGET INLINE void NAME(step_point)(struct rule rule, enum kind kind, int plain,
                                    struct NAME(constants) h, const struct NAME(wide) *w,
                                    struct NAME(source) from, struct NAME(block) *restrict b, int64_t i,
                                    struct NAME(extremes) *extremes, struct NAME(lanes) *lanes)
{
    VEC zero = {0}, p = NAME(get)(from.param + i), raw = NAME(get)(from.grad + i), code = zero;
    VEC g = NAME(effective)(plain, h, w, raw, p), root = NAME(get)(b->root + i);
    if (plain || from.offset)
        code = NAME(float_of)(NAME(wide_int8)(from.offset + i) >> 1);
    VEC weighted = NAME(fuse)(g, w->weight, zero); /* which makes 0 of -0 */
    VEC force = weighted, away = zero, since = zero, move;
    if (keeps_start(rule)) {
        VEC r = NAME(get)(b->r + i), fresh = code * from.shrunk_scale, apart;
        if (kind == SINGLE) {
            /* x_0 is rounded, as in codec.py: where x has hardly moved, its last place matters. */
            apart = NAME(float_of)(NAME(wide_int16)(from.initial + i)) * from.initial_scale - p;
        } else {
            apart = NAME(get)(b->initial_copy + i) - p;
        }
        MASK unmoved = NAME(equal)(r, zero);
        away = NAME(fuse)(apart, w->shrink, -fresh); /* d_k = x_0 - z_k */
        if (rule.averages) /* where x_0 shrinks and y does not: (x_0 - y) s - y (1 - s) */
            away = NAME(fuse)(apart, w->initial_shrink, NAME(fuse)(-p, w->own_decay, -fresh));
        away = NAME(choose)(unmoved, zero, away);
        since = NAME(choose)(unmoved, code * from.offset_scale, apart);
        if (rule.pulls)
            force = NAME(fuse)(r - root, away, weighted);
    }
    if (NAME(in_range)(rule, plain, h) && rule.root == 2) { /* both times 1 / λ_k */
        move = g / NAME(fuse)(root, w->inverse_weight, w->weighted_eps);
    } else if (NAME(in_range)(rule, plain, h)) {
        move = force / (root + w->eps);
    } else {
        VEC inverse = 1 / (root + w->eps);
        inverse = NAME(choose)(NAME(equal)(inverse, NAME(all)(INFINITY)), zero, inverse);
        move = NAME(fuse)(force, inverse, zero); /* z_k - z_{k+1} */
    }
    if (rule.averages && h.own_decay != 0)
        move = NAME(fuse)(p, w->own_decay, move);
    if ((keeps_start(rule)) && lanes)
        NAME(add_vector)(rule, plain, h, w, lanes, i, raw, p, since, away + move, root);
    VEC way = rule.averages ? move * w->momentum : move;
    VEC ahead = NAME(fuse)(code, -from.shrunk_scale, way); /* x_k - z_{k+1} */
    int all_the_way = plain && kind == SINGLE && !rule.averages;
    VEC left = ahead * w->kept;
    way = all_the_way ? ahead : ahead * w->reach;
    if (rule.holds) { /* where z lies uphill by the newest gradient, or that is 0 */
        MASK follows = NAME(is_positive)(g, ahead);
        left = NAME(choose)(follows, left, plain ? ahead : ahead * w->held_kept);
        if (!all_the_way)
            way = NAME(choose)(follows, way, ahead * w->held_reach);
    }
    VEC y = NAME(fuse)(p, w->shrink, rule.averages ? move * -w->c : -way);
    if (rule.averages) /* a reach below 0 would make 0 of -0 */
        y = NAME(choose)(NAME(equal)(ahead, zero), y, y - way);
    if (kind == SINGLE || rule.averages)
        ahead = left;
    if (kind != SINGLE) {
        VEC before = rule.averages ? y : p * w->shrink;
        WORDS random = NAME(random_words)(NAME(all_words)(from.random), i);
        y = kind == HALF ? NAME(round_half)(y, random) : NAME(round_bfloat16)(y, random);
        ahead -= before - y;
    }
    extremes->offset = NAME(larger_size)(extremes->offset, ahead);
    NAME(put)(b->y + i, y);
    NAME(put)(b->ahead + i, ahead);
}

/* Where a block's codes go, and what they are relative to. */
struct NAME(target) {
    VEC inverse, part; /* of the offset's scale; of a rounding error, what x takes in; both negative */
    WORDS random; /* as that of the source, with the highest bit flipped for `dither` */
    float_at *param;
    int8_t *offset;
    uint8_t *root;
    int32_t root_base; /* as that of the source, without the places that are cut */
    int low_bit;       /* whether the offset's code has the root's lowest bit */
};

/* The codes of four vectors, from the integers that the offsets were rounded to and what is left of the
   bits of roots. A root that is not 0 gets no code below the smallest. */
TARGET INLINE void NAME(put_codes)(int plain, struct NAME(target) to, int64_t i, const INTS *offset,
                                   const WORDS *root)
{
#if VECTOR > 16
    SHORTS base = SIMD(set1_epi16)((short)to.root_base), low = SIMD(set1_epi16)((short)to.low_bit);
    SHORTS least = SIMD(set1_epi16)((short)(1 + to.low_bit)), bytes[2], both[2];
    __m128i places = _mm_cvtsi32_si128(to.low_bit);
    for (int j = 0; j < 2; j++) {
        SHORTS code = NARROW(root[2 * j], root[2 * j + 1]);
        code = SIMD(max_epi16)(SIMD(sub_epi16)(code, base), SIMD(min_epi16)(code, least));
        bytes[j] = SIMD(srl_epi16)(code, places);
        both[j] = NARROW(offset[2 * j], offset[2 * j + 1]);
        both[j] = OR(SIMD(add_epi16)(both[j], both[j]), AND(code, low));
    }
    STORE(to.root + i, IN_ORDER(SIMD(packus_epi16)(bytes[0], bytes[1])));
    if (plain || to.offset)
        STORE(to.offset + i, IN_ORDER(SIMD(packs_epi16)(both[0], both[1])));
#else
    for (int v = 0; v < 4; v++)
        for (int j = 0; j < WIDTH_OF; j++) {
            int32_t bits = (int32_t)root[v][j], code = bits - to.root_base;
            int32_t least = bits < 1 + to.low_bit ? bits : 1 + to.low_bit;
            code = code > least ? code : least;
            to.root[i + v * WIDTH_OF + j] = (uint8_t)(code >> to.low_bit);
            if (plain || to.offset)
                to.offset[i + v * WIDTH_OF + j] = (int8_t)(2 * offset[v][j] | (code & to.low_bit));
        }
#endif
}

/* Four vectors, from i on. */
TARGET INLINE void NAME(encode)(struct rule rule, enum kind kind, int plain, struct NAME(target) to,
                                const struct NAME(block) *restrict b, int64_t i)
{
    if (plain)
        to.low_bit = 1;
    int cut = CUT + 1 - to.low_bit;
    uint32_t places = (1u << cut) - 1;
    INTS offset[4] = {0};
    WORDS root[4];
    for (int v = 0; v < 4; v++) {
        int64_t j = i + v * WIDTH_OF;
        WORDS random = NAME(random_words)(to.random, j);
        root[v] = ((WORDS)NAME(get)(b->root + j) + (random & places)) >> cut;
        if (plain || to.offset) {
            VEC ahead = NAME(get)(b->ahead + j), low = NAME(dither)(random);
            offset[v] = NAME(nearest)(NAME(fuse)(ahead, to.inverse, low));
        }
        if (kind == SINGLE) {
            VEC error = NAME(float_of)(offset[v]), y = NAME(get)(b->y + j), zero = {0};
            VEC x = NAME(fuse)(error, to.part, y);
            if (rule.averages) /* whose part is below 0, and would make 0 of -0 */
                x = NAME(choose)(NAME(equal)(error, zero), y, x);
            NAME(put)(to.param + j, x);
        }
    }
    NAME(put_codes)(plain, to, i, offset, root);
}
