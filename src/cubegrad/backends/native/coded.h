/* A step on states in codes, at one level of instructions. A block is decoded into buffers that stay
   in the nearest cache, stepped, and encoded. Each loop has numbers of one size where it can: the
   compiler makes shorter vectors of those that mix them. kernels.h includes this file. */

#include "codec.h"

struct NAME(block) {
    _Alignas(64) float x[BLOCK], g[BLOCK], m[BLOCK], r[BLOCK], x0[BLOCK], root[BLOCK];
    uint32_t bits[BLOCK];
    char raw[BLOCK * sizeof(double)];
};

TARGET INLINE void NAME(decode_offsets)(float *restrict m, const int8_t *restrict codes,
                                        float scale, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        m[i] = (float)codes[i] * scale;
}

TARGET INLINE void NAME(decode_roots)(float *restrict r, const uint8_t *restrict codes, float scale,
                                      int64_t n)
{
    uint32_t base = bits_of(scale) - BINADES;
    for (int64_t i = 0; i < n; i++)
        r[i] = codes[i] ? single_of(((uint32_t)codes[i] << CUT) + base) : 0;
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

/* r_{k+1}, and the random bits, whose integer arithmetic runs beside that of the roots. */
TARGET INLINE void NAME(new_roots)(enum method method, int plain, struct NAME(constants) h,
                                   int64_t n, const float_at *restrict param,
                                   const float_at *restrict grad, const float *restrict r,
                                   float *restrict root, uint32_t *restrict bits, uint32_t first)
{
    for (int64_t i = 0; i < n; i++) {
        float g = EFFECTIVE(grad[i], param[i]), weighted = g * h.weight, cube = r[i] * r[i] * r[i];
        bits[i] = NAME(mixed)(first + (uint32_t)i);
        if (method == MADGRAD) { /* ∛(r_k³ + λ_k g_k²), where a NaN may stand for an infinity */
            float new = NAME(short_cbrt)(NAME(fused)(weighted, g, cube));
            root[i] = weighted == 0 ? r[i] : new;
        } else {
            float sq_sum = cube * h.fade + g * g, new = NAME(short_cbrt)(sq_sum);
            root[i] = sq_sum < (float)INFINITY ? new : sq_sum;
        }
    }
}

/* x_{k+1} and m_{k+1} = z_{k+1} - x_{k+1}, as rule.madgrad_from_root and its mirror form have them. */
TARGET INLINE void NAME(from_root)(enum method method, enum kind kind, int plain,
                                   struct NAME(constants) h, int64_t n, float_at *restrict param,
                                   const float_at *restrict grad, float *restrict m,
                                   const float *restrict r, const float *restrict x0,
                                   const float *restrict root, const uint32_t *restrict bits,
                                   struct NAME(lanes) *restrict lanes)
{
    for (int64_t i = 0; i < n; i++) {
        float p = param[i], x = SHRUNK(p), offset = SHRUNK(m[i]);
        float weighted = EFFECTIVE(grad[i], p) * h.weight, move = weighted, away = 0;
        if (method == MADGRAD) {
            away = SHRUNK(x0[i]) - x - offset;
            away = r[i] == 0 ? 0 : away; /* d_k = x_0 - z_k */
            move = weighted - away * (root[i] - r[i]);
        }
        float inverse = 1 / (root[i] + h.eps);
        if (!plain || method == MIRROR_MADGRAD)
            inverse = inverse == (float)INFINITY ? 0 : inverse;
        move = move * inverse + 0;   /* z_k - z_{k+1} */
        float ahead = move - offset; /* x_k - z_{k+1} */
        float y = x - ahead * h.c;
        if (kind != SINGLE)
            y = kind == HALF ? NAME(round_half)(y, bits[i]) : NAME(round_bfloat16)(y, bits[i]);
        if (lanes) {
            float since = r[i] == 0 ? m[i] : x0[i] - p, u = away + move;
            NAME(add)(lanes, i, LOSS(grad[i]) * h.weight, since, (root[i] + h.eps) * u, u, root[i]);
        }
        param[i] = y;
        m[i] = x - y - ahead;
    }
}

/* n is a multiple of LANES, here and in what it calls. */
TARGET INLINE void NAME(step_block)(enum method method, enum kind kind, int plain,
                                    struct NAME(constants) h, int64_t n, float_at *x,
                                    const float_at *g, struct NAME(block) *b, uint32_t first,
                                    struct NAME(lanes) *lanes)
{
    NAME(new_roots)(method, plain, h, n & -LANES, x, g, b->r, b->root, b->bits, first);
    if (method == MADGRAD && lanes)
        for (int64_t i = 0; i < n; i += LANES)
            NAME(from_root)(method, kind, plain, h, LANES, x + i, g + i, b->m + i, b->r + i,
                            b->x0 + i, b->root + i, b->bits + i, lanes);
    else
        NAME(from_root)(method, kind, plain, h, n & -LANES, x, g, b->m, b->r, b->x0, b->root,
                        b->bits, NULL);
}

typedef void NAME(block_function)(struct NAME(constants), int64_t, float_at *, const float_at *,
                                  struct NAME(block) *, uint32_t, struct NAME(lanes) *);

/* The function for one method and kind, without and with `plain`. */
#define BLOCK_FUNCTION(name, method, kind, plain)                                                  \
    TARGET static void NAME(name)(struct NAME(constants) h, int64_t n, float_at *x,                \
                                  const float_at *g, struct NAME(block) *b, uint32_t first,        \
                                  struct NAME(lanes) *lanes)                                       \
    {                                                                                              \
        NAME(step_block)(method, kind, plain, h, n, x, g, b, first, lanes);                        \
    }
BLOCK_FUNCTION(madgrad_half, MADGRAD, HALF, 0)
BLOCK_FUNCTION(madgrad_half_plain, MADGRAD, HALF, 1)
BLOCK_FUNCTION(madgrad_bfloat16, MADGRAD, BFLOAT16, 0)
BLOCK_FUNCTION(madgrad_bfloat16_plain, MADGRAD, BFLOAT16, 1)
BLOCK_FUNCTION(madgrad_single, MADGRAD, SINGLE, 0)
BLOCK_FUNCTION(madgrad_single_plain, MADGRAD, SINGLE, 1)
BLOCK_FUNCTION(mirror_half, MIRROR_MADGRAD, HALF, 0)
BLOCK_FUNCTION(mirror_half_plain, MIRROR_MADGRAD, HALF, 1)
BLOCK_FUNCTION(mirror_bfloat16, MIRROR_MADGRAD, BFLOAT16, 0)
BLOCK_FUNCTION(mirror_bfloat16_plain, MIRROR_MADGRAD, BFLOAT16, 1)
BLOCK_FUNCTION(mirror_single, MIRROR_MADGRAD, SINGLE, 0)
BLOCK_FUNCTION(mirror_single_plain, MIRROR_MADGRAD, SINGLE, 1)
#undef BLOCK_FUNCTION

static NAME(block_function) *const NAME(STEP_BLOCK)[][3][2] = {
    [MADGRAD] = {[HALF] = {NAME(madgrad_half), NAME(madgrad_half_plain)},
                 [BFLOAT16] = {NAME(madgrad_bfloat16), NAME(madgrad_bfloat16_plain)},
                 [SINGLE] = {NAME(madgrad_single), NAME(madgrad_single_plain)}},
    [MIRROR_MADGRAD] = {[HALF] = {NAME(mirror_half), NAME(mirror_half_plain)},
                        [BFLOAT16] = {NAME(mirror_bfloat16), NAME(mirror_bfloat16_plain)},
                        [SINGLE] = {NAME(mirror_single), NAME(mirror_single_plain)}},
};

/* The bits of the largest size. A number that is not finite has larger ones than all others. */
TARGET INLINE uint32_t NAME(largest)(const float *restrict values, int64_t n)
{
    uint32_t most = 0;
    for (int64_t i = 0; i < (n & -LANES); i++) {
        uint32_t size = bits_of(values[i]) & 0x7fffffff;
        most = size > most ? size : most;
    }
    return most;
}

/* Numbers that are not finite become 0. */
TARGET INLINE float NAME(largest_finite)(float *restrict values, int64_t n)
{
    uint32_t most = NAME(largest)(values, n);
    if (most >= 0x7f800000) {
        for (int64_t i = 0; i < n; i++)
            values[i] = fabsf(values[i]) < (float)INFINITY ? values[i] : 0;
        most = NAME(largest)(values, n);
    }
    return single_of(most);
}

/* Returns the scale; `wide` is n rounded up to LANES. */
TARGET INLINE float NAME(encode_offsets)(float *restrict m, const uint32_t *restrict bits,
                                         int8_t *restrict codes, int64_t n, int64_t wide)
{
    float scale = NAME(largest_finite)(m, wide) * (1 / 127.0f), inverse = 1 / scale;
    inverse = inverse < (float)INFINITY ? inverse : 0;
    for (int64_t i = 0; i < n; i++)
        codes[i] = (int8_t)NAME(offset_code)(m[i], inverse, bits[i]);
    return scale;
}

TARGET INLINE float NAME(encode_roots)(float *restrict root, const uint32_t *restrict bits,
                                       uint8_t *restrict codes, float least, int64_t n,
                                       int64_t wide)
{
    uint32_t most = bits_of(NAME(largest_finite)(root, wide));
    float scale = single_of((most + ((1 << CUT) - 1)) & 0x7f800000);
    scale = scale > least ? scale : least;
    int32_t base = (int32_t)bits_of(scale) - BINADES - 4;
    for (int64_t i = 0; i < n; i++)
        codes[i] = (uint8_t)NAME(root_code)(root[i], base, bits[i]);
    return scale;
}

/* What is read of a tensor, or written to it: n coordinates of a row of it, from one on. */
struct NAME(part) {
    char *row;
    enum kind kind;
    int64_t length, spacing, from, n, wide;
};

/* Copies between memory whose coordinates lie apart (fused.spacing) and `dense`. */
TARGET static void NAME(gather)(const struct NAME(part) *part, char *dense, int scatter)
{
    size_t width = (size_t)WIDTH[part->kind];
    int64_t channels = part->length / part->spacing;
    for (int64_t i = 0; i < part->n; i++) {
        int64_t j = part->from + i, place = j % part->spacing * channels + j / part->spacing;
        char *apart = part->row + place * (int64_t)width, *near = dense + i * (int64_t)width;
        memcpy(scatter ? apart : near, scatter ? near : apart, width);
    }
}

/* The part as floats, where it lies if it can be used there, else in `to`, filled up with zeros. */
TARGET INLINE float_at *NAME(read)(const struct NAME(part) *part, float *to, char *raw)
{
    char *at = part->row + part->from * WIDTH[part->kind];
    if (part->spacing == 1 && part->kind == SINGLE && part->n == part->wide)
        return (float_at *)at;
    if (part->spacing != 1)
        NAME(gather)(part, raw, 0);
    NAME(load)(to, part->spacing == 1 ? at : raw, part->kind, part->n);
    memset(to + part->n, 0, (size_t)(part->wide - part->n) * sizeof *to);
    return to;
}

TARGET INLINE void NAME(write)(const struct NAME(part) *part, const float *from, char *raw)
{
    char *at = part->spacing == 1 ? part->row + part->from * WIDTH[part->kind] : raw;
    if (part->kind == SINGLE)
        memcpy(at, from, (size_t)part->n * sizeof *from);
    else
        NAME(store)(at, from, part->kind, part->n);
    if (part->spacing != 1)
        NAME(gather)(part, raw, 1);
}

TARGET INLINE void NAME(decode)(struct NAME(block) *restrict b, const struct coded_row *restrict row,
                                enum kind param, int64_t q, int64_t at, int64_t n, int64_t wide)
{
    size_t rest = (size_t)(wide - n) * sizeof(float);
    NAME(decode_roots)(b->r, row->root + at, ((float_at *)row->root_scale)[q], n);
    memset(b->r + n, 0, rest);
    if (row->offset) {
        NAME(decode_offsets)(b->m, row->offset + at, ((float_at *)row->offset_scale)[q], n);
        memset(b->m + n, 0, rest);
    } else {
        memset(b->m, 0, (size_t)wide * sizeof(float));
    }
    if (row->initial) {
        const char *codes = (const char *)row->initial + at * 2;
        NAME(decode_initial)(b->x0, codes, param, ((float_at *)row->initial_scale)[q], n);
        memset(b->x0 + n, 0, rest);
    }
}

TARGET INLINE void NAME(encode)(struct NAME(block) *restrict b, const struct coded_row *restrict row,
                                float shrink, int64_t q, int64_t at, int64_t n, int64_t wide)
{
    float_at *offset_scale = row->offset_scale, *root_scale = row->root_scale;
    float_at *initial_scale = row->initial_scale;
    if (row->offset)
        offset_scale[q] = NAME(encode_offsets)(b->m, b->bits, row->offset + at, n, wide);
    /* MADGRAD's roots never fall, so that a scale which falls could only be rounding. */
    float least = row->initial ? root_scale[q] : 0;
    root_scale[q] = NAME(encode_roots)(b->root, b->bits, row->root + at, least, n, wide);
    if (row->initial && shrink != 1)
        initial_scale[q] *= shrink;
}

/* The block two blocks ahead of the one at `at`. */
INLINE void NAME(prefetch_block)(const struct coded_row *row, const struct NAME(part) *x,
                                 const struct NAME(part) *g, int64_t at)
{
    int64_t width = WIDTH[x->kind], grad_width = WIDTH[g->kind], ahead = 2 * BLOCK;
    prefetch(x->row + (x->from + ahead) * width, (size_t)(x->n * width));
    prefetch(g->row + (g->from + ahead) * grad_width, (size_t)(g->n * grad_width));
    prefetch(row->root + at + ahead, (size_t)x->n);
    if (row->offset)
        prefetch(row->offset + at + ahead, (size_t)x->n);
    if (row->initial)
        prefetch((char *)row->initial + 2 * (at + ahead), (size_t)(2 * x->n));
}

/* Blocks begin..end of one tensor. */
TARGET static void NAME(step_blocks)(const struct job *job, int64_t index, int64_t begin,
                                     int64_t end, struct lanes *sums)
{
    const struct coded_row *row = &job->coded_rows[index];
    struct NAME(constants) h = NAME(constants_of)(job, *row->step);
    int plain = h.shrink == 1 && h.decay == 0 && h.sign == 1;
    /* With a larger eps every denominator can be inverted; MirrorMADGRAD's is 0 by default. */
    plain = plain && (job->method == MIRROR_MADGRAD || h.eps > 2 * FLT_MIN);
    NAME(block_function) *step = NAME(STEP_BLOCK)[job->method][job->param][plain];
    uint32_t seed = (uint32_t)row->first + NAME(mixed)((uint32_t)(int32_t)*row->step);
    int64_t each = (row->length + BLOCK - 1) / BLOCK, size = row->blocks / each * row->length;
    int64_t from = begin % each * BLOCK, at = begin / each * row->length + from, n;
    struct NAME(block) b;
    struct NAME(lanes) lanes = {0};
    for (int64_t q = begin; q < end; q++, at += n, from = from + n < row->length ? from + n : 0) {
        n = row->length - from < BLOCK ? row->length - from : BLOCK;
        int64_t wide = (n + LANES - 1) & -LANES, start = at - from;
        struct NAME(part) x = {(char *)row->param + start * WIDTH[job->param], job->param,
                               row->length, row->spacing, from, n, wide};
        struct NAME(part) g = x;
        g.kind = job->grad;
        g.row = (char *)job->grads[index] + start * WIDTH[job->grad];
        if (at + 3 * BLOCK <= size)
            NAME(prefetch_block)(row, &x, &g, at);
        float_at *param = NAME(read)(&x, b.x, b.raw), *grad = NAME(read)(&g, b.g, b.raw);
        NAME(decode)(&b, row, job->param, q, at, n, wide);
        step(h, wide, param, grad, &b, seed + (uint32_t)at, sums ? &lanes : NULL);
        if (param == b.x)
            NAME(write)(&x, b.x, b.raw);
        NAME(encode)(&b, row, h.shrink, q, at, n, wide);
        if (sums && (q + 1 == end || (q - begin) % (FOLD / BLOCK) == FOLD / BLOCK - 1))
            NAME(fold)(&lanes, sums);
    }
}
