/* A step on states that are not in codes: elements of one tensor, chunk by chunk, for one real type at
   one level of instructions. kernels.h includes this file. */

/* What the loops read and write. What lies AHEAD is prefetched a little with every vector: a whole chunk
   at once is more than the processor can wait for at a time, and made a step 20 % longer. */
struct NAME(chunk) {
    NAME(at) *param, *a, *b, *c;
    const NAME(at) *grad;
    const char *next_param, *next_grad; /* in memory, where their kind may be another */
    int64_t param_width, grad_width;
    int prefetches;
};

TARGET INLINE void NAME(prefetch)(struct NAME(chunk) t, int64_t i)
{
    if (!t.prefetches)
        return;
    prefetch(t.next_param + i * t.param_width, LANES * sizeof(REAL));
    prefetch(t.next_grad + i * t.grad_width, LANES * sizeof(REAL));
    prefetch(t.a + AHEAD + i, LANES * sizeof(REAL));
    if (t.b)
        prefetch(t.b + AHEAD + i, LANES * sizeof(REAL));
    if (t.c)
        prefetch(t.c + AHEAD + i, LANES * sizeof(REAL));
}

/* What follows from the roots. */
TARGET INLINE void NAME(from_roots)(int plain, int asking, struct rule rule, struct NAME(constants) h,
                                    int64_t i, int64_t n, struct NAME(chunk) t,
                                    const REAL *root, struct NAME(lanes) *lanes)
{
    if (rule.pulls && h.shrink != 1)
        NAME(pull)(plain, asking, 1, h, n, t.param + i, t.grad + i, t.a + i, root + i, t.c + i,
                   lanes);
    else if (rule.pulls)
        NAME(pull)(plain, asking, 0, h, n, t.param + i, t.grad + i, t.a + i, root + i, t.c + i,
                   lanes);
    else if (t.b)
        NAME(move)(plain, 1, asking, rule, h, n, t.param + i, t.grad + i, root + i, t.b + i,
                   rule.anchored ? t.c + i : NULL, lanes);
    else
        NAME(move)(plain, 0, 0, rule, h, n, t.param + i, t.grad + i, root + i, NULL, NULL, NULL);
}

TARGET INLINE void NAME(update)(int plain, int asking, struct rule rule, struct NAME(constants) h,
                                int64_t n, struct NAME(chunk) t, const REAL *root,
                                struct NAME(lanes) *lanes)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        NAME(from_roots)(plain, asking, rule, h, i, LANES, t, root, lanes);
    NAME(from_roots)(plain, asking, rule, h, i, n - i, t, root, lanes);
}

TARGET INLINE void NAME(update_chunk)(int plain, struct rule rule, struct NAME(constants) h,
                                      int64_t n, struct NAME(chunk) t, struct NAME(lanes) *lanes)
{
    REAL root[CHUNK];
    BITS most[LANES] = {0}, *own = lanes ? most : NULL, largest = 0;
    NAME(at) *squares = rule.pulls ? t.b : t.a;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        NAME(prefetch)(t, i);
        NAME(add_squares)(plain, rule, h, LANES, t.param + i, t.grad + i, squares + i, root + i, own);
    }
    NAME(add_squares)(plain, rule, h, n - i, t.param + i, t.grad + i, squares + i, root + i, own);
    for (int j = 0; j < LANES; j++)
        largest = most[j] > largest ? most[j] : largest;
    if (lanes && largest >= NAME(to_bits)((REAL)INFINITY))
        NAME(update)(plain, 1, rule, h, n, t, root, lanes);
    else
        NAME(update)(plain, 0, rule, h, n, t, root, lanes);
}

/* With a pull, but without x_0, which only momentum needs. */
TARGET INLINE void NAME(update_without_start)(int plain, struct rule rule, struct NAME(constants) h,
                                              int64_t n, struct NAME(chunk) t,
                                              struct NAME(lanes) *lanes)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        NAME(prefetch)(t, i);
        NAME(pull_without_start)(plain, rule, h, LANES, t.param + i, t.grad + i, t.a + i, t.b + i,
                                 lanes);
    }
    NAME(pull_without_start)(plain, rule, h, n - i, t.param + i, t.grad + i, t.a + i, t.b + i, lanes);
}

TARGET INLINE void NAME(step_chunk)(int plain, struct rule rule, struct NAME(constants) h,
                                    int64_t n, struct NAME(chunk) t, struct NAME(lanes) *lanes)
{
    if (rule.pulls && t.c == NULL)
        NAME(update_without_start)(plain, rule, h, n, t, lanes);
    else
        NAME(update_chunk)(plain, rule, h, n, t, lanes);
}

TARGET static void NAME(load)(REAL *restrict to, const char *restrict from, enum kind kind,
                              int64_t n)
{
    const half_at *halves = (const half_at *)from;
    const float_at *singles = (const float_at *)from;
    const double_at *doubles = (const double_at *)from;
    switch (kind) {
    case HALF:
        for (int64_t i = 0; i < n; i++)
            to[i] = (REAL)from_half(halves[i]);
        break;
    case BFLOAT16:
        for (int64_t i = 0; i < n; i++)
            to[i] = (REAL)from_bfloat16(halves[i]);
        break;
    case SINGLE:
        for (int64_t i = 0; i < n; i++)
            to[i] = (REAL)singles[i];
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            to[i] = (REAL)doubles[i];
    }
}

TARGET static void NAME(store)(char *restrict to, const REAL *restrict from, enum kind kind,
                               int64_t n)
{
    half_at *halves = (half_at *)to;
    for (int64_t i = 0; i < n; i++)
        halves[i] = kind == HALF ? to_half((float)from[i]) : to_bfloat16((float)from[i]);
}

#if !WIDE
/* Elements of a parameter, `at` being the first, become numbers of half precision at random, by
   codec.round_param. Every loop has numbers of one size. */
TARGET static void NAME(round_at_random)(const struct job *job, const struct row *row, int64_t at,
                                         float *restrict x, int64_t n)
{
    uint32_t k = job->numbers.momentum == 0 ? 0 : (uint32_t)(int32_t)*row->step;
    uint32_t first = (uint32_t)row->first + NAME(mixed)(k), bits[CHUNK] = {0};
    if (row->spacing == 1)
        for (int64_t i = 0; i < n; i++)
            bits[i] = NAME(mixed)(first + (uint32_t)at + (uint32_t)i);
    else
        for (int64_t i = 0; i < n; i++) { /* the inverse of what fused.spacing says */
            int64_t channels = row->length / row->spacing, j = (at + i) % row->length;
            int64_t index = at + i - j + j % channels * row->spacing + j / channels;
            bits[i] = NAME(mixed)(first + (uint32_t)index);
        }
    for (int64_t i = 0; i < n; i += WIDTH_OF) { /* the last may end beyond n, but within a chunk */
        VEC y = NAME(get)(x + i);
        WORDS random;
        memcpy(&random, bits + i, sizeof random);
        y = job->param == HALF ? NAME(round_half)(y, random) : NAME(round_bfloat16)(y, random);
        NAME(put)(x + i, y);
    }
}
#endif

/* Elements begin..end of one tensor. */
TARGET static void NAME(step_row)(const struct job *job, int64_t index, int64_t begin, int64_t end,
                                  struct lanes *sums)
{
    const struct row *row = &job->rows[index];
    struct NAME(constants) h = NAME(constants_of)(job, *row->step);
    struct rule method = RULES[job->rule];
    int plain = h.decay == 0 && h.sign == 1 && (h.normal_eps || (method.root == 3 && !method.pulls));
    int64_t param_width = WIDTH[job->param], grad_width = WIDTH[job->grad];
    REAL x[CHUNK] = {0}, g[CHUNK];
    struct NAME(lanes) lanes = {0};
    int64_t most = method.root == 2 || VECTOR == 64 ? SHORT_CHUNK : CHUNK;
    for (int64_t at = begin; at < end; at += most) {
        int64_t n = at + most < end ? most : end - at;
        char *param = (char *)row->param + at * param_width;
        const char *grad = (const char *)job->grads[index] + at * grad_width;
        struct NAME(chunk) t = {
            .param = (NAME(at) *)param,
            .grad = (const NAME(at) *)grad,
            .a = (NAME(at) *)row->a + at,
            .b = row->b ? (NAME(at) *)row->b + at : NULL,
            .c = row->c ? (NAME(at) *)row->c + at : NULL,
            .next_param = param + AHEAD * param_width,
            .next_grad = grad + AHEAD * grad_width,
            .param_width = param_width,
            .grad_width = grad_width,
            .prefetches = at + AHEAD + CHUNK <= row->size,
        };
        if (job->param != job->state) {
            NAME(load)(x, param, job->param, n);
            t.param = x;
        }
        if (job->grad != job->state) {
            NAME(load)(g, grad, job->grad, n);
            t.grad = g;
        }
#define UPDATE(name, ...)                                                                          \
    if (job->rule == name) {                                                                       \
        const struct rule rule = {__VA_ARGS__};                                                    \
        int adds = (sums && rule.pulls) || rule.anchored;                                          \
        if (plain && adds)                                                                         \
            NAME(step_chunk)(1, rule, h, n, t, &lanes);                                          \
        else if (plain)                                                                            \
            NAME(step_chunk)(1, rule, h, n, t, NULL);                                            \
        else if (adds)                                                                             \
            NAME(step_chunk)(0, rule, h, n, t, &lanes);                                          \
        else                                                                                       \
            NAME(step_chunk)(0, rule, h, n, t, NULL);                                            \
    }
        FOR_EACH_RULE(UPDATE)
#undef UPDATE
        REAL exact[CHUNK]; /* of x, if z is kept as z - x */
        int takes = method.relative && t.b && job->param != job->state;
        if (takes)
            memcpy(exact, x, (size_t)n * sizeof *x);
#if !WIDE
        if (job->at_random)
            NAME(round_at_random)(job, row, at, x, n);
#endif
        if (job->param != job->state)
            NAME(store)(param, x, job->param, n);
        if (takes)
            NAME(load)(x, param, job->param, n);
        for (int64_t i = 0; takes && i < n; i++)
            t.b[i] += exact[i] - x[i];
        if (sums && (at + CHUNK >= end || (at - begin) % FOLD == FOLD - CHUNK))
            NAME(fold)(&lanes, sums);
    }
}
