/* The loops of a step, for one real type at one level of instructions. level.h includes this file
   for each type. Every level rounds alike except in the last bit of the cube root, since the
   compiler may not contract a product and a sum. Everything that a loop calls is INLINE: left to
   choose, the compiler made a call of a cube root, and no vectors. */

#include "cube_root.h"
#if !WIDE
#include "codec.h"
#endif

/* s / (∛ν + ε), 0 where the denominator cannot be inverted. */
TARGET INLINE REAL NAME(displacement)(REAL s, REAL root, REAL eps)
{
    REAL inverse = 1 / (root + eps);
    return s * (inverse == (REAL)INFINITY ? 0 : inverse);
}

struct NAME(constants) {
    REAL weight; /* λ_k; in the mirror form γ (k+1)^{1/3} */
    REAL fade;   /* in the mirror form √(k/(k+1)) */
    REAL c;      /* 1 - momentum */
    REAL shrink, eps, decay, sign;
};

/* Sums of up to FOLD elements, side by side: the compiler may not add in another order to make a
   vector of one sum. */
struct NAME(lanes) {
    REAL of[SUMS][LANES];
};

TARGET INLINE void NAME(add)(struct NAME(lanes) *lanes, int64_t i, REAL weighted, REAL away,
                             REAL s, REAL u, REAL root)
{
    /* A coordinate whose ν is not finite counts for nothing. */
    int finite = root < (REAL)INFINITY;
    lanes->of[AGREEMENT][i] += finite ? weighted * away : 0; /* λ_k ⟨g_k, x_0 - x_k⟩ */
    lanes->of[PRODUCT][i] += finite ? s * u : 0;             /* ⟨s_{k+1}, x_0 - z_{k+1}⟩ */
    lanes->of[ROOTS][i] += finite ? root : 0;                /* Σ ∛ν_{k+1} */
}

TARGET static void NAME(fold)(struct NAME(lanes) *restrict lanes, struct lanes *restrict sums)
{
    REAL *from = lanes->of[0];
    double *to = sums->of[0];
    for (int j = 0; j < SUMS * LANES; j++) {
        to[j] += from[j];
        from[j] = 0;
    }
}

/* Of gradient, parameter and state, what the step starts from. PLAIN: without decay, maximize or
   a GradScaler, which spares a tenth of the instructions. */
#define LOSS(g) (plain ? (g) : (g) * h.sign)
#define EFFECTIVE(g, p) (plain ? (g) : LOSS(g) + (h.decay != 0 ? (p) * h.decay : 0))
#define SHRUNK(x) (plain ? (x) : (x) * h.shrink)

TARGET INLINE void NAME(madgrad)(int plain, struct NAME(constants) h, int64_t n,
                                 NAME(at) *restrict param, const NAME(at) *restrict grad,
                                 NAME(at) *restrict grad_sum, NAME(at) *restrict grad_sq_sum,
                                 const NAME(at) *restrict initial_param,
                                 struct NAME(lanes) *restrict lanes)
{
    for (int64_t i = 0; i < n; i++) {
        REAL x = SHRUNK(param[i]), x0 = SHRUNK(initial_param[i]);
        REAL g = EFFECTIVE(grad[i], param[i]);
        REAL s = SHRUNK(grad_sum[i]) + g * h.weight; /* s_{k+1} = s_k + λ_k g_k */
        REAL v = grad_sq_sum[i] + g * h.weight * g;  /* ν_{k+1} = ν_k + λ_k g_k² */
        REAL root = NAME(cbrt)(v);
        REAL u = NAME(displacement)(s, root, h.eps);
        REAL z = x0 - u; /* z_{k+1} = x_0 - s_{k+1} / (∛ν_{k+1} + ε) */
        if (lanes)
            NAME(add)(lanes, i, LOSS(grad[i]) * h.weight, initial_param[i] - param[i], s, u, root);
        grad_sum[i] = s;
        grad_sq_sum[i] = v;
        param[i] = x - (x - z) * h.c; /* x_{k+1} = (1-c) x_k + c z_{k+1} */
    }
}

/* Without momentum x is z, which moves by the change of the displacement. */
TARGET INLINE void NAME(without_momentum)(int plain, struct NAME(constants) h, int64_t n,
                                          NAME(at) *restrict param, const NAME(at) *restrict grad,
                                          NAME(at) *restrict grad_sum,
                                          NAME(at) *restrict grad_sq_sum,
                                          struct NAME(lanes) *restrict lanes)
{
    for (int64_t i = 0; i < n; i++) {
        REAL x = SHRUNK(param[i]);
        REAL g = EFFECTIVE(grad[i], param[i]);
        REAL s = SHRUNK(grad_sum[i]) + g * h.weight;
        REAL v = grad_sq_sum[i] + g * h.weight * g;
        REAL old = NAME(displacement)(grad_sum[i], NAME(cbrt)(grad_sq_sum[i]), h.eps);
        REAL root = NAME(cbrt)(v);
        REAL u = NAME(displacement)(s, root, h.eps);
        REAL move = u - SHRUNK(old);
        if (lanes) /* old is x_0 - x_k */
            NAME(add)(lanes, i, LOSS(grad[i]) * h.weight, old, s, u, root);
        grad_sum[i] = s;
        grad_sq_sum[i] = v;
        param[i] = x - move; /* x_{k+1} = z_{k+1} */
    }
}

TARGET INLINE void NAME(mirror_madgrad)(int plain, struct NAME(constants) h, int64_t n,
                                        NAME(at) *restrict param, const NAME(at) *restrict grad,
                                        NAME(at) *restrict grad_sq_sum, NAME(at) *restrict dual)
{
    for (int64_t i = 0; i < n; i++) {
        REAL x = SHRUNK(param[i]);
        REAL g = EFFECTIVE(grad[i], param[i]);
        REAL v = grad_sq_sum[i] * h.fade + g * g; /* ν_{k+1} = √(k/(k+1)) ν_k + g_k² */
        REAL move = NAME(displacement)(g * h.weight, NAME(cbrt)(v), h.eps);
        REAL z = SHRUNK(dual[i]) - (move + 0); /* z_{k+1} = z_k - γ (k+1)^{1/3} g_k / (∛ν + ε) */
        grad_sq_sum[i] = v;
        dual[i] = z;
        param[i] = x - (x - z) * h.c;
    }
}

/* n elements of one tensor. */
TARGET INLINE void NAME(update)(int plain, const struct job *job, struct NAME(constants) h,
                                int64_t n, NAME(at) *param, const NAME(at) *grad, NAME(at) *a,
                                NAME(at) *b, NAME(at) *c)
{
    if (job->method == MIRROR_MADGRAD)
        NAME(mirror_madgrad)(plain, h, n, param, grad, a, b);
    else if (c == NULL)
        NAME(without_momentum)(plain, h, n, param, grad, a, b, NULL);
    else
        NAME(madgrad)(plain, h, n, param, grad, a, b, c, NULL);
}

/* The same, MADGRAD only, in strips as wide as the lanes. */
TARGET INLINE void NAME(update_and_add)(int plain, struct NAME(constants) h, int64_t n,
                                        NAME(at) *param, const NAME(at) *grad, NAME(at) *a,
                                        NAME(at) *b, NAME(at) *c, struct NAME(lanes) *lanes)
{
    int64_t i = 0, rest = n % LANES;
    if (c == NULL) {
        for (; i < n - rest; i += LANES)
            NAME(without_momentum)(plain, h, LANES, param + i, grad + i, a + i, b + i, lanes);
        NAME(without_momentum)(plain, h, rest, param + i, grad + i, a + i, b + i, lanes);
    } else {
        for (; i < n - rest; i += LANES)
            NAME(madgrad)(plain, h, LANES, param + i, grad + i, a + i, b + i, c + i, lanes);
        NAME(madgrad)(plain, h, rest, param + i, grad + i, a + i, b + i, c + i, lanes);
    }
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
    uint32_t first = (uint32_t)row->first + NAME(mixed)(k), bits[CHUNK];
    if (row->spacing == 1)
        for (int64_t i = 0; i < n; i++)
            bits[i] = NAME(mixed)(first + (uint32_t)at + (uint32_t)i);
    else
        for (int64_t i = 0; i < n; i++) { /* the inverse of what fused.spacing says */
            int64_t channels = row->length / row->spacing, j = (at + i) % row->length;
            int64_t index = at + i - j + j % channels * row->spacing + j / channels;
            bits[i] = NAME(mixed)(first + (uint32_t)index);
        }
    if (job->param == HALF)
        for (int64_t i = 0; i < n; i++)
            x[i] = NAME(round_half)(x[i], bits[i]);
    else
        for (int64_t i = 0; i < n; i++)
            x[i] = NAME(round_bfloat16)(x[i], bits[i]);
}
#endif

TARGET INLINE struct NAME(constants) NAME(constants_of)(const struct job *job, double k)
{
    const struct numbers *n = &job->numbers;
    return (struct NAME(constants)){
        .c = (REAL)(1 - n->momentum),
        .shrink = (REAL)n->shrink,
        .eps = (REAL)n->eps,
        .decay = (REAL)n->weight_decay,
        .sign = (REAL)n->sign,
        .weight = (REAL)(n->lr * (job->method == MADGRAD ? sqrt(k + 1) : cbrt(k + 1))),
        .fade = (REAL)sqrt(k / (k + 1)),
    };
}

/* Elements begin..end of one tensor. */
TARGET static void NAME(step_row)(const struct job *job, int64_t index, int64_t begin, int64_t end,
                                  struct lanes *sums)
{
    const struct row *row = &job->rows[index];
    struct NAME(constants) h = NAME(constants_of)(job, *row->step);
    int plain = h.shrink == 1 && h.decay == 0 && h.sign == 1;
    REAL x[CHUNK], g[CHUNK];
    struct NAME(lanes) lanes = {0};
    for (int64_t at = begin; at < end; at += CHUNK) {
        int64_t count = at + CHUNK < end ? CHUNK : end - at;
        char *param = (char *)row->param + at * WIDTH[job->param];
        const char *grad = (const char *)job->grads[index] + at * WIDTH[job->grad];
        NAME(at) *a = (NAME(at) *)row->a + at;
        NAME(at) *b = (NAME(at) *)row->b + at;
        NAME(at) *c = row->c ? (NAME(at) *)row->c + at : NULL;
        if (at + AHEAD + CHUNK <= row->size) {
            prefetch(param + AHEAD * WIDTH[job->param], CHUNK * WIDTH[job->param]);
            prefetch(grad + AHEAD * WIDTH[job->grad], CHUNK * WIDTH[job->grad]);
            prefetch(a + AHEAD, CHUNK * sizeof(REAL));
            prefetch(b + AHEAD, CHUNK * sizeof(REAL));
            if (c)
                prefetch(c + AHEAD, CHUNK * sizeof(REAL));
        }
        NAME(at) *p = (NAME(at) *)param;
        const NAME(at) *gradient = (const NAME(at) *)grad;
        if (job->param != job->state) {
            NAME(load)(x, param, job->param, count);
            p = x;
        }
        if (job->grad != job->state) {
            NAME(load)(g, grad, job->grad, count);
            gradient = g;
        }
        if (plain && sums)
            NAME(update_and_add)(1, h, count, p, gradient, a, b, c, &lanes);
        else if (plain)
            NAME(update)(1, job, h, count, p, gradient, a, b, c);
        else if (sums)
            NAME(update_and_add)(0, h, count, p, gradient, a, b, c, &lanes);
        else
            NAME(update)(0, job, h, count, p, gradient, a, b, c);
        for (int64_t i = 0; c && i < count && h.shrink != 1; i++)
            c[i] *= h.shrink;
#if !WIDE
        if (job->at_random)
            NAME(round_at_random)(job, row, at, x, count);
#endif
        if (job->param != job->state)
            NAME(store)(param, x, job->param, count);
        if (sums && (at + CHUNK >= end || (at - begin) % FOLD == FOLD - CHUNK))
            NAME(fold)(&lanes, sums);
    }
}

TARGET static void NAME(roots)(const REAL *from, REAL *to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = NAME(cbrt)(from[i]);
}

#if !WIDE
#include "blocks.h"
#endif

#undef LOSS
#undef EFFECTIVE
#undef SHRUNK
#undef PASTE
#undef EXPAND
#undef NAME
#undef REAL
#undef BITS
#undef SMALLEST
#undef UP
#undef ROOT_UP
#undef TURNS
#undef GUESS
