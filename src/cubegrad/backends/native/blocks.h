/* A step on states in codes, at one level of instructions: block by block of one tensor. There is no
   prefetching: the arithmetic is the limit, and the processor's own keeps up with it. With it, a
   step took 15 % longer. kernels.h includes this file. */

#include "coded.h"

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

/* Returns the scale; `wide` is n rounded up to LANES. x, if it is not NULL, takes in this share of what
   rounding changes of the offset. The lowest bit is that of the root's code, if `low_bit` is 1. */
TARGET INLINE float NAME(encode_offsets)(float *restrict m, float_at *restrict x, float share,
                                         const uint32_t *restrict bits,
                                         const int32_t *restrict roots, uint32_t low_bit,
                                         int8_t *restrict codes, int64_t n, int64_t wide)
{
    float scale = NAME(largest_finite)(m, wide) * (1.000001f / 63.0f), inverse = 1 / scale;
    inverse = inverse < (float)INFINITY ? inverse : 0;
    share *= scale;
    if (x)
        for (int64_t i = 0; i < n; i++) {
            float sum = NAME(offset_code)(m[i], inverse, bits[i]);
            x[i] -= (sum - MIDDLE) * share;
            m[i] = sum;
        }
    else
        for (int64_t i = 0; i < n; i++)
            m[i] = NAME(offset_code)(m[i], inverse, bits[i]);
    for (int64_t i = 0; i < n; i++)
        codes[i] = (int8_t)(bits_of(m[i]) << 1 | ((uint32_t)roots[i] & low_bit));
    return scale;
}

/* `nine` are the codes with their lowest bit, `codes` those without. */
TARGET INLINE float NAME(encode_roots)(float *restrict root, const uint32_t *restrict bits,
                                       uint32_t low_bit, int32_t *restrict nine,
                                       uint8_t *restrict codes, float least, int64_t n,
                                       int64_t wide)
{
    uint32_t most = bits_of(NAME(largest_finite)(root, wide));
    uint32_t places = ((2 - low_bit) << CUT) - 1;
    float scale = single_of((most + places) & 0x7f800000);
    scale = scale > least ? scale : least;
    int32_t base = (int32_t)bits_of(scale) - BINADES;
    for (int64_t i = 0; i < n; i++)
        nine[i] = NAME(root_code)(root[i], base, bits[i], places);
    for (int64_t i = 0; i < n; i++)
        codes[i] = (uint8_t)(nine[i] >> 1);
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
    const int8_t *offsets = row->offset ? row->offset + at : NULL;
    NAME(decode_roots)(b->r, row->root + at, offsets, ((float_at *)row->root_scale)[q], n);
    memset(b->r + n, 0, rest);
    if (offsets) {
        NAME(decode_offsets)(b->m, offsets, ((float_at *)row->offset_scale)[q], n);
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
                                float_at *x, struct NAME(constants) h, int never_falls,
                                uint32_t low_bit, int64_t q, int64_t at, int64_t n, int64_t wide)
{
    float_at *offset_scale = row->offset_scale, *root_scale = row->root_scale;
    float_at *initial_scale = row->initial_scale;
    /* Where roots never fall, a scale which falls could only be rounding. */
    float least = never_falls ? root_scale[q] : 0;
    root_scale[q] =
        NAME(encode_roots)(b->root, b->bits, low_bit, b->codes, row->root + at, least, n, wide);
    if (row->offset)
        offset_scale[q] = NAME(encode_offsets)(b->m, x, h.share, b->bits, b->codes, low_bit,
                                               row->offset + at, n, wide);
    if (row->initial && h.shrink != 1)
        initial_scale[q] *= h.shrink;
}

/* Blocks begin..end of one tensor. */
TARGET static void NAME(step_blocks)(const struct job *job, int64_t index, int64_t begin,
                                     int64_t end, struct lanes *sums)
{
    const struct coded_row *row = &job->coded_rows[index];
    struct NAME(constants) h = NAME(constants_of)(job, *row->step);
    int plain = h.decay == 0 && h.sign == 1;
    struct rule rule = RULES[job->rule];
    int never_falls = rule.squares == WEIGHTED;
    /* With a larger eps every denominator can be inverted; MirrorMADGRAD's is 0 by default. */
    plain = plain && (!rule.pulls || h.eps > 2 * FLT_MIN);
    NAME(block_function) *step = NAME(STEP_BLOCK)[job->rule][job->param][plain];
    uint32_t seed = (uint32_t)row->first + NAME(mixed)((uint32_t)(int32_t)*row->step);
    int64_t each = (row->length + BLOCK - 1) / BLOCK;
    int64_t from = begin % each * BLOCK, at = begin / each * row->length + from, n;
    uint32_t low_bit = row->offset && job->numbers.momentum != 0;
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
        float_at *param = NAME(read)(&x, b.x, b.raw), *grad = NAME(read)(&g, b.g, b.raw);
        if (n == BLOCK)
            NAME(decode)(&b, row, job->param, q, at, BLOCK, BLOCK);
        else
            NAME(decode)(&b, row, job->param, q, at, n, wide);
        step(h, wide, param, grad, &b, NAME(mixed)(seed + (uint32_t)at), sums ? &lanes : NULL);
        float_at *taking = job->param == SINGLE ? param : NULL;
        if (n == BLOCK)
            NAME(encode)(&b, row, taking, h, never_falls, low_bit, q, at, BLOCK, BLOCK);
        else
            NAME(encode)(&b, row, taking, h, never_falls, low_bit, q, at, n, wide);
        if (param == b.x)
            NAME(write)(&x, b.x, b.raw);
        if (sums && (q + 1 == end || (q - begin) % (FOLD / BLOCK) == FOLD / BLOCK - 1))
            NAME(fold)(&lanes, sums);
    }
}
