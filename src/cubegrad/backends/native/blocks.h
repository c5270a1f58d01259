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
                                struct NAME(place) b, char *dense, int scatter)
{
    size_t width = (size_t)WIDTH[kind];
    int64_t channels = row->length / row->spacing;
    for (int64_t i = 0; i < b.n; i++) {
        int64_t j = b.from + i, place = j % row->spacing * channels + j / row->spacing;
        char *apart = of_row + place * (int64_t)width, *near = dense + i * (int64_t)width;
        memcpy(scatter ? apart : near, scatter ? near : apart, width);
    }
}

/* Numbers of a parameter or its gradient as floats: where they lie if they can be used there, else in
   `copy`, filled up with zeros. */
TARGET INLINE float_at *NAME(read)(const struct coded_row *row, char *tensor, enum kind kind,
                                   struct NAME(place) b, char *raw, float *copy)
{
    char *at = tensor + b.at * WIDTH[kind];
    if (row->spacing == 1 && kind == SINGLE && b.n == b.wide)
        return (float_at *)at;
    if (row->spacing != 1) {
        NAME(gather)(row, at - b.from * WIDTH[kind], kind, b, raw, 0);
        at = raw;
    }
    NAME(load)(copy, at, kind, b.n);
    memset(copy + b.n, 0, (size_t)(b.wide - b.n) * sizeof *copy);
    return copy;
}

TARGET INLINE void NAME(write)(const struct coded_row *row, enum kind kind, struct NAME(place) b,
                               char *raw, const float *from)
{
    char *at = (char *)row->param + b.at * WIDTH[kind];
    char *to = row->spacing == 1 ? at : raw;
    if (kind == SINGLE)
        memcpy(to, from, (size_t)b.n * sizeof *from);
    else
        NAME(store)(to, from, kind, b.n);
    if (row->spacing != 1)
        NAME(gather)(row, at - b.from * WIDTH[kind], kind, b, raw, 1);
}

/* Blocks of `n` numbers each that follow one another. There is one if anything of it is copied. */
struct NAME(run) {
    const struct job *job;
    const struct coded_row *row;
    const void *grads;
    const struct NAME(constants) *h;
    const struct NAME(wide) *w;
    struct NAME(lanes) *lanes; /* NULL if no sums are wanted */
    struct lanes *sums;
    uint32_t seed;
    int64_t q, at, from, n, count; /* of the first: its index, its first number in tensor and row */
};

/* Where the codes of the first block lie: of the tensors themselves or of copies. */
TARGET INLINE struct NAME(source) NAME(source_of)(struct rule rule, int plain,
                                                  const struct NAME(run) *run, struct NAME(block) *b,
                                                  size_t rest)
{
    const struct coded_row *row = run->row;
    size_t n = (size_t)run->n;
    struct NAME(source) from = {.root = row->root + run->at};
    if (plain || row->offset)
        from.offset = row->offset + run->at;
    if (keeps_start(rule) && row->initial)
        from.initial = (const short_at *)row->initial + run->at;
    if (rest) {
        memset(b->root_copy + n, 0, rest);
        memset(b->offset_copy + n, 0, rest);
        memset(b->short_copy + n, 0, rest * 2);
        from.root = memcpy(b->root_copy, from.root, n);
        if (from.offset)
            from.offset = memcpy(b->offset_copy, from.offset, n);
        if (from.initial)
            from.initial = memcpy(b->short_copy, from.initial, n * 2);
    }
    return from;
}

/* What a block has beside its codes. */
TARGET INLINE void NAME(read_block)(struct rule rule, enum kind kind, int plain,
                                    const struct NAME(run) *run, float shrink,
                                    struct NAME(place) at, struct NAME(block) *b,
                                    struct NAME(source) *from)
{
    const struct coded_row *row = run->row;
    float scale = plain || row->offset ? ((float_at *)row->offset_scale)[at.q] : 0;
    from->offset_scale = NAME(all)(scale);
    from->shrunk_scale = NAME(all)(scale * shrink);
    from->root_base = bits_of(((float_at *)row->root_scale)[at.q]) - BINADES;
    from->random = NAME(mixed)(run->seed + (uint32_t)at.at);
    from->param = NAME(read)(row, row->param, kind, at, b->raw, b->x_copy);
    from->grad = NAME(read)(row, (char *)run->grads, run->job->grad, at, b->raw, b->g_copy);
    if (keeps_start(rule) && row->initial) {
        scale = ((float_at *)row->initial_scale)[at.q];
        from->initial_scale = NAME(all)(scale);
        if (kind != SINGLE) {
            NAME(load)(b->initial_copy, (const char *)row->initial + at.at * 2, kind, at.n);
            memset(b->initial_copy + at.n, 0, (size_t)(at.wide - at.n) * sizeof *b->initial_copy);
            for (int64_t i = 0; i < at.n; i++)
                b->initial_copy[i] *= scale;
        }
    }
}

/* Writes the scales of a block, and says what its codes are relative to. */
TARGET INLINE struct NAME(target) NAME(target_of)(struct rule rule, enum kind kind, int plain,
                                                  const struct NAME(run) *run,
                                                  struct NAME(constants) h, uint32_t random,
                                                  struct NAME(extremes) extremes,
                                                  struct NAME(place) at, struct NAME(block) *b)
{
    const struct coded_row *row = run->row;
    float_at *offset_scale = row->offset_scale, *root_scale = row->root_scale;
    uint32_t offset = NAME(largest_of)(extremes.offset), root = NAME(largest_of)(extremes.root);
    if (offset >= 0x7f800000)
        offset = NAME(drop_not_finite)(b->ahead, at.wide);
    if (root >= 0x7f800000)
        root = NAME(drop_not_finite)(b->root, at.wide);
    int low_bit = plain || (row->offset && h.c != 1), cut = CUT + 1 - low_bit;
    float scale = single_of((root + ((1u << cut) - 1)) & 0x7f800000);
    /* Where roots never fall, a scale which falls could only be rounding. */
    if (rule.squares == WEIGHTED)
        scale = scale > root_scale[at.q] ? scale : root_scale[at.q];
    root_scale[at.q] = scale;
    int32_t base = (int32_t)bits_of(scale) - BINADES;
    struct NAME(target) to = {
        .random = NAME(all_words)(random ^ 0x80000000u),
        .root_base = (base < 0 ? 0 : base) >> cut, /* below 0 no root is but 0 */
        .low_bit = low_bit,
    };
    if (plain || row->offset) {
        scale = single_of(offset) * (1.000001f / 63.0f);
        offset_scale[at.q] = scale;
        to.inverse = NAME(all)(1 / scale < (float)INFINITY ? -1 / scale : -0.0f);
        to.part = NAME(all)(kind == SINGLE ? -(scale * h.share) : 0);
    }
    if (keeps_start(rule) && row->initial && h.initial_shrink != 1)
        ((float_at *)row->initial_scale)[at.q] *= h.initial_shrink;
    return to;
}

/* What was not written where it belongs. */
TARGET INLINE void NAME(finish)(const struct coded_row *row, enum kind kind,
                                const float_at *param, struct NAME(place) at,
                                struct NAME(block) *b)
{
    if (kind != SINGLE)
        NAME(write)(row, kind, at, b->raw, b->y);
    else if (param == b->x_copy)
        NAME(write)(row, kind, at, b->raw, b->x_copy);
    if (at.wide != at.n) {
        memcpy(row->root + at.at, b->root_copy, (size_t)at.n);
        if (row->offset)
            memcpy(row->offset + at.at, b->offset_copy, (size_t)at.n);
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

/* A step of a block with subnormal ν, which the faster cube root does not know. */
TARGET INLINE struct NAME(extremes) NAME(exact_step)(struct rule rule, enum kind kind, int plain,
                                                     const struct NAME(run) *run,
                                                     struct NAME(source) from,
                                                     struct NAME(block) *b, int64_t wide)
{
    struct NAME(extremes) extremes = {0};
    for (int64_t i = 0; i < wide; i += QUAD) {
        NAME(step_roots)(rule, plain, 1, *run->h, run->w, from, b, i, &extremes);
        for (int64_t j = i; j < i + QUAD; j += WIDTH_OF)
            NAME(step_point)(rule, kind, plain, *run->h, run->w, from, b, j, &extremes, run->lanes);
    }
    return extremes;
}

typedef struct NAME(extremes) NAME(exact_function)(const struct NAME(run) *, struct NAME(source),
                                                   struct NAME(block) *, int64_t);

/* The last turn only encodes. */
TARGET INLINE void NAME(step_run)(struct rule rule, enum kind kind, int plain,
                                  NAME(exact_function) *exact, const struct NAME(run) *run)
{
    const struct NAME(constants) h = *run->h;
    const struct NAME(wide) w = *run->w; /* a copy, which no store can change */
    struct NAME(lanes) *lanes = run->lanes, before;
    struct NAME(block) blocks[2], *b = &blocks[0], *old = &blocks[1];
    int64_t wide = (run->n + QUAD - 1) & -QUAD;
    struct NAME(place) at = {run->q, run->at, run->from, run->n, wide}, last = at;
    struct NAME(source) from = NAME(source_of)(rule, plain, run, b, (size_t)(wide - at.n));
    struct NAME(target) to = {0};
    for (int64_t turn = 0; turn <= run->count; turn++) {
        struct NAME(extremes) extremes = {.least = NAME(all_words)(UINT32_MAX)};
        int steps = turn < run->count;
        if (steps) {
            NAME(read_block)(rule, kind, plain, run, h.shrink, at, b, &from);
            if (lanes && rule.root == 3)
                before = *lanes;
            NAME(step_roots)(rule, plain, 0, h, &w, from, b, 0, &extremes);
        }
        for (int64_t i = 0; i < wide; i += QUAD) { /* roots first: what follows waits for them */
            if (steps) {
                NAME(prefetch_codes)(from, i);
                if (i + QUAD < wide)
                    NAME(step_roots)(rule, plain, 0, h, &w, from, b, i + QUAD, &extremes);
                for (int64_t j = i; j < i + QUAD; j += WIDTH_OF)
                    NAME(step_point)(rule, kind, plain, h, &w, from, b, j, &extremes, lanes);
            }
            if (turn)
                NAME(encode)(rule, kind, plain, to, old, i);
        }
        if (turn)
            NAME(finish)(run->row, kind, to.param, last, old);
        if (!steps)
            break;
        if (rule.root == 3 && NAME(smallest_of)(extremes.least) < bits_of(FLT_MIN) - 1) {
            if (lanes)
                *lanes = before;
            extremes = exact(run, from, b, wide);
        }
        to = NAME(target_of)(rule, kind, plain, run, h, from.random, extremes, at, b);
        to.param = (float_at *)from.param;
        to.root = (uint8_t *)from.root, to.offset = (int8_t *)from.offset;
        if (lanes && (turn + 1 == run->count || turn % (FOLD / BLOCK) == FOLD / BLOCK - 1))
            NAME(fold)(lanes, run->sums);
        from.root += at.n, from.offset += plain || from.offset ? at.n : 0;
        from.initial += keeps_start(rule) && from.initial ? at.n : 0;
        last = at;
        at.q++, at.at += at.n, at.from += at.n;
        struct NAME(block) *swapped = b;
        b = old, old = swapped;
    }
}

typedef void NAME(run_function)(const struct NAME(run) *);

#define FOR_CASE(name, kind, plain, ...)                                                           \
    TARGET NOINLINE static struct NAME(extremes) NAME(name##_exact)(                               \
        const struct NAME(run) *run, struct NAME(source) from, struct NAME(block) *b,              \
        int64_t wide)                                                                              \
    {                                                                                              \
        return NAME(exact_step)((struct rule){__VA_ARGS__}, kind, plain, run, from, b, wide);      \
    }                                                                                              \
    TARGET static void NAME(name)(const struct NAME(run) *run)                                     \
    {                                                                                              \
        NAME(step_run)((struct rule){__VA_ARGS__}, kind, plain, NAME(name##_exact), run);          \
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
static NAME(run_function) *const NAME(STEP_RUN)[][3][2] = {FOR_EACH_RULE(OF_RULE)};
#undef OF_RULE
#undef BOTH

/* Blocks begin..end of one tensor. */
TARGET static void NAME(step_blocks)(const struct job *job, int64_t index, int64_t begin,
                                     int64_t end, struct lanes *sums)
{
    const struct coded_row *row = &job->coded_rows[index];
    const struct NAME(constants) h = NAME(constants_of)(job, *row->step);
    const struct NAME(wide) w = NAME(wide_of)(h);
    struct rule rule = RULES[job->rule];
    int plain = h.decay == 0 && h.sign == 1 && row->offset && h.c != 1;
    plain = plain && (job->param != SINGLE || h.share == 1 || rule.averages);
    plain = plain && (NAME(in_range)(rule, 0, h) || (rule.root == 3 && !rule.pulls));
    int64_t each = (row->length + BLOCK - 1) / BLOCK;
    struct NAME(lanes) lanes = {0};
    struct NAME(run) run = {
        .job = job,
        .row = row,
        .grads = job->grads[index],
        .h = &h,
        .w = &w,
        .lanes = sums && keeps_start(rule) ? &lanes : NULL,
        .sums = sums,
        .seed = (uint32_t)row->first + NAME(mixed)((uint32_t)(int32_t)*row->step),
    };
    for (int64_t q = begin; q < end; q += run.count) {
        run.q = q, run.from = q % each * BLOCK, run.at = q / each * row->length + run.from;
        int64_t left = row->length - run.from, most = end - q;
        run.n = left < BLOCK ? left : BLOCK;
        run.count = left / BLOCK < most ? left / BLOCK : most;
        if (row->length % (each == 1 ? QUAD : BLOCK) == 0) /* then all blocks are alike */
            run.count = most;
        if (run.count == 0 || row->spacing != 1)
            run.count = 1;
        NAME(STEP_RUN)[job->rule][job->param][plain](&run);
    }
}
