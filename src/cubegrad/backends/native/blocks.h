/* A step on states in codes, at one level of instructions: block by block of one tensor. While a block is
   stepped, the one before it is encoded: its scales, which wait for its last number, hold up nothing.
   kernels.h includes this file. */

#include "coded.h"

/* Numbers that are not finite become 0. Returns the bits of the largest size. */
TARGET static uint32_t NAME(drop_not_finite)(float *values, int64_t n)
{
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t size = bits_of(values[i]) & 0x7fffffff;
        values[i] = size < 0x7f800000 ? values[i] : 0;
        most = size < 0x7f800000 && size > most ? size : most;
    }
    return most;
}

/* Copies between memory whose coordinates lie apart (fused.spacing) and `dense`. */
TARGET static void NAME(gather)(const struct coded_row *row, char *of_row, enum kind kind,
                                const struct NAME(block) *b, char *dense, int scatter)
{
    size_t width = (size_t)WIDTH[kind];
    int64_t channels = row->length / row->spacing;
    for (int64_t i = 0; i < b->n; i++) {
        int64_t j = b->from + i, place = j % row->spacing * channels + j / row->spacing;
        char *apart = of_row + place * (int64_t)width, *near = dense + i * (int64_t)width;
        memcpy(scatter ? apart : near, scatter ? near : apart, width);
    }
}

/* Numbers of a parameter or its gradient as floats: where they lie if they can be used there, else in
   `copy`, filled up with zeros. */
TARGET INLINE float_at *NAME(read)(const struct coded_row *row, char *tensor, enum kind kind,
                                   struct NAME(block) *b, float *copy)
{
    char *at = tensor + b->at * WIDTH[kind];
    if (row->spacing == 1 && kind == SINGLE && b->n == b->wide)
        return (float_at *)at;
    if (row->spacing != 1) {
        NAME(gather)(row, at - b->from * WIDTH[kind], kind, b, b->raw, 0);
        at = b->raw;
    }
    NAME(load)(copy, at, kind, b->n);
    memset(copy + b->n, 0, (size_t)(b->wide - b->n) * sizeof *copy);
    return copy;
}

TARGET INLINE void NAME(write)(const struct coded_row *row, enum kind kind, struct NAME(block) *b,
                               const float *from)
{
    char *at = (char *)row->param + b->at * WIDTH[kind];
    char *to = row->spacing == 1 ? at : b->raw;
    if (kind == SINGLE)
        memcpy(to, from, (size_t)b->n * sizeof *from);
    else
        NAME(store)(to, from, kind, b->n);
    if (row->spacing != 1)
        NAME(gather)(row, at - b->from * WIDTH[kind], kind, b, b->raw, 1);
}

TARGET INLINE struct NAME(source) NAME(source_of)(const struct job *job, const struct coded_row *row,
                                                  char *grads, enum kind kind, float shrink,
                                                  uint32_t seed, struct NAME(block) *b)
{
    struct NAME(source) from = {
        .param = NAME(read)(row, row->param, kind, b, b->x_copy),
        .grad = NAME(read)(row, grads, job->grad, b, b->g_copy),
        .root = row->root + b->at,
        .offset = row->offset ? row->offset + b->at : NULL,
        .root_base = bits_of(((float_at *)row->root_scale)[b->q]) - BINADES,
        .offset_scale = row->offset ? ((float_at *)row->offset_scale)[b->q] : 0,
        .random = NAME(mixed)(seed + (uint32_t)b->at),
    };
    from.shrunk_scale = from.offset_scale * shrink;
    size_t rest = (size_t)(b->wide - b->n);
    if (rest) {
        from.root = memcpy(b->root_copy, from.root, (size_t)b->n);
        memset(b->root_copy + b->n, 0, rest);
        if (from.offset)
            from.offset = memcpy(b->offset_copy, from.offset, (size_t)b->n);
        memset(b->offset_copy + b->n, 0, rest);
    }
    if (row->initial) {
        const char *codes = (const char *)row->initial + b->at * 2;
        from.initial = (const short_at *)codes;
        from.initial_scale = ((float_at *)row->initial_scale)[b->q];
        if (kind != SINGLE) {
            NAME(load)(b->initial_copy, codes, kind, b->n);
            memset(b->initial_copy + b->n, 0, rest * sizeof *b->initial_copy);
            for (int64_t i = 0; i < b->n; i++)
                b->initial_copy[i] *= from.initial_scale;
        } else if (rest) {
            from.initial = memcpy(b->short_copy, codes, (size_t)b->n * 2);
            memset(b->short_copy + b->n, 0, rest * 2);
        }
    }
    return from;
}

/* Writes the scales of a block. */
TARGET INLINE struct NAME(target) NAME(target_of)(const struct job *job, const struct coded_row *row,
                                                  struct rule rule, enum kind kind,
                                                  struct NAME(constants) h, struct NAME(source) from,
                                                  struct NAME(extremes) extremes,
                                                  struct NAME(block) *b)
{
    float_at *offset_scale = row->offset_scale, *root_scale = row->root_scale;
    uint32_t offset = NAME(largest_of)(extremes.offset), root = NAME(largest_of)(extremes.root);
    if (offset >= 0x7f800000)
        offset = NAME(drop_not_finite)(b->ahead, b->wide);
    if (root >= 0x7f800000)
        root = NAME(drop_not_finite)(b->root, b->wide);
    int copies = b->wide != b->n;
    struct NAME(target) to = {
        .param = (float_at *)from.param,
        .offset = copies && from.offset ? b->offset_copy : (int8_t *)from.offset,
        .root = copies ? b->root_copy : (uint8_t *)from.root,
        .low_bit = row->offset && job->numbers.momentum != 0,
        .random = from.random,
    };
    uint32_t places = (1u << (CUT + 1 - to.low_bit)) - 1;
    float scale = single_of((root + places) & 0x7f800000);
    /* Where roots never fall, a scale which falls could only be rounding. */
    if (rule.squares == WEIGHTED)
        scale = scale > root_scale[b->q] ? scale : root_scale[b->q];
    root_scale[b->q] = scale;
    int32_t base = (int32_t)bits_of(scale) - BINADES;
    to.root_base = (base < 0 ? 0 : base) >> (CUT + 1 - to.low_bit); /* below 0 no root is but 0 */
    if (row->offset) {
        scale = single_of(offset) * (1.000001f / 63.0f);
        offset_scale[b->q] = scale;
        to.inverse = 1 / scale < (float)INFINITY ? 1 / scale : 0;
        to.part = kind == SINGLE ? scale * h.share : 0;
    }
    if (row->initial && h.shrink != 1)
        ((float_at *)row->initial_scale)[b->q] *= h.shrink;
    return to;
}

/* What was not written where it belongs. */
TARGET INLINE void NAME(finish)(const struct coded_row *row, enum kind kind, struct NAME(target) to,
                                struct NAME(block) *b)
{
    if (kind != SINGLE)
        NAME(write)(row, kind, b, b->y);
    else if (to.param == b->x_copy)
        NAME(write)(row, kind, b, b->x_copy);
    if (b->wide != b->n) {
        memcpy(row->root + b->at, b->root_copy, (size_t)b->n);
        if (row->offset)
            memcpy(row->offset + b->at, b->offset_copy, (size_t)b->n);
    }
}

TARGET INLINE void NAME(prefetch_codes)(struct NAME(source) from, int64_t i)
{
    prefetch(from.param + i + CODES_AHEAD, QUAD * sizeof(float));
    prefetch(from.grad + i + CODES_AHEAD, QUAD * sizeof(float));
    if (i % 64 == 0) {
        prefetch(from.root + i + CODES_AHEAD, 1);
        if (from.offset)
            prefetch(from.offset + i + CODES_AHEAD, 1);
        if (from.initial)
            prefetch(from.initial + i + CODES_AHEAD, 128);
    }
}

/* Blocks begin..end of one tensor. */
TARGET INLINE void NAME(step_blocks_of)(struct rule rule, enum kind kind, int plain,
                                        const struct job *job, int64_t index, int64_t begin,
                                        int64_t end, struct NAME(constants) h, struct lanes *sums)
{
    const struct coded_row *row = &job->coded_rows[index];
    char *grads = (char *)job->grads[index];
    uint32_t seed = (uint32_t)row->first + NAME(mixed)((uint32_t)(int32_t)*row->step);
    int64_t each = (row->length + BLOCK - 1) / BLOCK, from = begin % each * BLOCK;
    int64_t at = begin / each * row->length + from;
    struct NAME(block) blocks[2];
    blocks[0].n = blocks[1].n = 0;
    struct NAME(target) to = {0};
    struct NAME(lanes) lanes = {0}, before, *own = sums && rule.pulls ? &lanes : NULL;
    int64_t last = 0; /* the width of the block that is still to be encoded */
    for (int64_t q = begin; q < end; q++) {
        struct NAME(block) *b = &blocks[q & 1], *old = &blocks[~q & 1];
        b->q = q, b->at = at, b->from = from;
        b->n = row->length - from < BLOCK ? row->length - from : BLOCK;
        b->wide = (b->n + QUAD - 1) & -QUAD;
        at += b->n, from = from + b->n < row->length ? from + b->n : 0;
        struct NAME(source) source = NAME(source_of)(job, row, grads, kind, h.shrink, seed, b);
        struct NAME(extremes) extremes = {.least = NAME(all_words)(UINT32_MAX)};
        if (own && rule.root == 3)
            before = lanes;
        int64_t done = 0;
        for (int64_t i = 0; i <= b->wide; i += QUAD) {
            if (i < b->wide) {
                NAME(prefetch_codes)(source, i);
                for (int64_t j = i; j < i + QUAD; j += WIDTH_OF)
                    NAME(step_root)(rule, plain, 0, h, source, b, j, &extremes);
            }
            if (i > 0)
                for (int64_t j = i - QUAD; j < i; j += WIDTH_OF)
                    NAME(step_point)(rule, kind, plain, h, source, b, j, &extremes, own);
            if (i > 0 && done < last) { /* not at once, since the scales are still being computed */
                NAME(encode)(rule, kind, plain, to, old, done);
                done += QUAD;
            }
        }
        for (; done < last; done += QUAD)
            NAME(encode)(rule, kind, plain, to, old, done);
        if (last)
            NAME(finish)(row, kind, to, old);
        if (rule.root == 3 && NAME(smallest_of)(extremes.least) < bits_of(FLT_MIN) - 1) {
            if (own)
                lanes = before;
            extremes = (struct NAME(extremes)){.least = extremes.least};
            for (int64_t i = 0; i < b->wide; i += WIDTH_OF) {
                NAME(step_root)(rule, plain, 1, h, source, b, i, &extremes);
                NAME(step_point)(rule, kind, plain, h, source, b, i, &extremes, own);
            }
        }
        to = NAME(target_of)(job, row, rule, kind, h, source, extremes, b);
        last = b->wide;
        if (own && (q + 1 == end || (q - begin) % (FOLD / BLOCK) == FOLD / BLOCK - 1))
            NAME(fold)(&lanes, sums);
    }
    for (int64_t i = 0; i < last; i += QUAD)
        NAME(encode)(rule, kind, plain, to, &blocks[(end - 1) & 1], i);
    NAME(finish)(row, kind, to, &blocks[(end - 1) & 1]);
}

typedef void NAME(blocks_function)(const struct job *, int64_t, int64_t, int64_t,
                                   struct NAME(constants), struct lanes *);

#define FOR_CASE(name, kind, plain, ...)                                                           \
    TARGET static void NAME(name)(const struct job *job, int64_t index, int64_t begin,             \
                                  int64_t end, struct NAME(constants) h, struct lanes *sums)       \
    {                                                                                              \
        const struct rule rule = {__VA_ARGS__};                                                    \
        NAME(step_blocks_of)(rule, kind, plain, job, index, begin, end, h, sums);                  \
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
static NAME(blocks_function) *const NAME(STEP_BLOCKS)[][3][2] = {FOR_EACH_RULE(OF_RULE)};
#undef OF_RULE
#undef BOTH

TARGET static void NAME(step_blocks)(const struct job *job, int64_t index, int64_t begin,
                                     int64_t end, struct lanes *sums)
{
    struct NAME(constants) h = NAME(constants_of)(job, *job->coded_rows[index].step);
    struct rule rule = RULES[job->rule];
    int plain = h.decay == 0 && h.sign == 1 && job->coded_rows[index].offset && h.c != 1;
    plain = plain && (job->param != SINGLE || h.share == 1 || rule.averages);
    plain = plain && (NAME(in_range)(rule, 0, h) || (rule.root == 3 && !rule.pulls));
    NAME(STEP_BLOCKS)[job->rule][job->param][plain](job, index, begin, end, h, sums);
}
