/* The loops of a step, for one real type at one level of instructions. level.h includes this file
   for each type. Every level rounds alike except in the last bits of cube roots and sums, since the
   compiler may not contract a product and a sum. Everything that a loop calls is INLINE: left to
   choose, the compiler made a call of a cube root, and no vectors. */

#include "cube_root.h"
#if !WIDE
#include "vectors.h"
#include "codec.h"
#endif

/* s / (∛ν + ε), 0 where the denominator cannot be inverted. It always can if eps is `normal`. */
TARGET INLINE REAL NAME(displacement)(int normal, REAL s, REAL root, REAL eps)
{
    if (normal)
        return s / (root + eps);
    REAL inverse = 1 / (root + eps);
    return s * (inverse == (REAL)INFINITY ? 0 : inverse);
}

/* ∛ν, or √ν */
TARGET INLINE REAL NAME(root)(struct rule rule, REAL v)
{
    return rule.root == 3 ? NAME(cbrt)(v) : NAME(square_root)(v);
}

struct NAME(constants) {
    REAL weight; /* λ_k */
    REAL fade;   /* what is left of ν where g is 0, unless it is a sum */
    REAL newest; /* a_k, of a mean */
    REAL c;      /* 1 - momentum */
    REAL share;  /* of codes: codec.share */
    /* Of x - z, what x moves by and what is left of it, and the same where x is held. */
    REAL reach, kept, held_reach, held_kept;
    REAL momentum, mean_share, own_decay; /* of schedule-free runs, the last one of z alone */
    REAL inverse_weight, weighted_eps; /* 1 / λ_k and ε / λ_k */
    REAL shrink, initial_shrink, eps, decay, sign; /* the second of x_0 */
    int normal_eps; /* it is at least twice the smallest normal number */
};

/* Sums of up to FOLD elements, side by side: the compiler may not add in another order to make a
   vector of one sum. */
struct NAME(lanes) {
    REAL of[SUMS][LANES];
};

/* A coordinate whose ν is not finite counts for nothing. Where all are known to be finite, without
   `asking`, the sums cost half. */
TARGET INLINE void NAME(add)(int asking, struct NAME(lanes) *lanes, int64_t i, REAL weighted,
                             REAL away, REAL s, REAL u, REAL root)
{
    REAL *agreement = &lanes->of[AGREEMENT][i], *product = &lanes->of[PRODUCT][i];
    int finite = !asking || root < (REAL)INFINITY;
    if (asking) {
        *agreement += finite ? weighted * away : 0;
        *product += finite ? s * u : 0;
    } else {
        *agreement = NAME(fused)(weighted, away, *agreement); /* λ_k ⟨g_k, x_0 - x_k⟩ */
        *product = NAME(fused)(s, u, *product);               /* ⟨s_{k+1}, x_0 - z_{k+1}⟩ */
    }
    lanes->of[ROOTS][i] += finite ? root : 0; /* Σ ∛ν_{k+1} */
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

/* Of gradient, parameter and state, what the step starts from. `plain`: without coupled decay,
   maximize or a GradScaler, which spares a tenth of the instructions. */
#define LOSS(g) (plain ? (g) : (g) * h.sign)
#define EFFECTIVE(g, p) (plain ? (g) : LOSS(g) + (h.decay != 0 ? (p) * h.decay : 0))
#define SHRUNK(x) ((x) * h.shrink)
#define NORMAL_EPS (plain || h.normal_eps)
/* In λ_k ⟨g_k, x_0 - x_k⟩ decay counts only where it makes the product smaller. */
#define COUNTED(g, p, away) (!plain && (p) * (away) < 0 ? EFFECTIVE(g, p) : LOSS(g))

/* ν_{k+1} */
TARGET INLINE REAL NAME(add_square)(struct rule rule, struct NAME(constants) h, REAL v, REAL g)
{
    if (rule.squares == WEIGHTED)
        return v + g * h.weight * g;
    return v * h.fade + (rule.squares == FADING ? g : g * h.newest) * g;
}

/* ν_{k+1} and its roots. They are a loop of their own, since what follows waits for them: the processor
   overlaps more elements of two short loops than of a long one, which saved 6 to 20 % of a step.
   In `most` are the bits of the largest ν in each lane; one that is not finite has larger ones than all
   others. */
TARGET INLINE void NAME(add_squares)(int plain, struct rule rule, struct NAME(constants) h, int64_t n,
                                     const NAME(at) *restrict param, const NAME(at) *restrict grad,
                                     NAME(at) *restrict grad_sq_sum, REAL *restrict root,
                                     BITS *restrict most)
{
#pragma GCC unroll 1 /* else short loops are unrolled and get no vectors */
    for (int64_t i = 0; i < n; i++) {
        REAL g = EFFECTIVE(grad[i], param[i]);
        REAL v = NAME(add_square)(rule, h, grad_sq_sum[i], g);
        BITS bits = NAME(to_bits)(v);
        if (most)
            most[i] = bits > most[i] ? bits : most[i];
        grad_sq_sum[i] = v;
        root[i] = NAME(root)(rule, v);
    }
}

/* Whether x stays: z lies uphill by the newest gradient, or that is 0. Without momentum x is z. */
TARGET INLINE int NAME(is_held)(struct NAME(constants) h, REAL ahead, REAL g)
{
    BITS differ = NAME(to_bits)(ahead) ^ NAME(to_bits)(g);
    return (h.c != 1) & ((differ >> (8 * sizeof differ - 1) != 0) | (g == 0));
}

TARGET INLINE void NAME(pull)(int plain, int asking, int decays, struct NAME(constants) h, int64_t n,
                              NAME(at) *restrict param, const NAME(at) *restrict grad,
                              NAME(at) *restrict grad_sum, const REAL *restrict root,
                              NAME(at) *restrict initial_param,
                              struct NAME(lanes) *restrict lanes)
{
    if (!decays)
        h.shrink = 1; /* then the compiler leaves the products out */
    for (int64_t i = 0; i < n; i++) {
        REAL start = initial_param[i], x = SHRUNK(param[i]), x0 = SHRUNK(start);
        REAL g = EFFECTIVE(grad[i], param[i]);
        REAL s = SHRUNK(grad_sum[i]) + g * h.weight; /* s_{k+1} = s_k + λ_k g_k */
        REAL u = NAME(displacement)(NORMAL_EPS, s, root[i], h.eps);
        REAL z = x0 - u; /* z_{k+1} = x_0 - s_{k+1} / (∛ν_{k+1} + ε) */
        if (lanes) {
            REAL away = start - param[i];
            NAME(add)(asking, lanes, i, COUNTED(grad[i], param[i], away) * h.weight, away, s, u,
                      root[i]);
        }
        grad_sum[i] = s;
        if (decays)
            initial_param[i] = x0;
        param[i] = x - (x - z) * h.c; /* x_{k+1} = (1-c) x_k + c z_{k+1} */
    }
}

/* Without momentum x is z, which moves by the change of the displacement. */
TARGET INLINE void NAME(pull_without_start)(int plain, struct rule rule, struct NAME(constants) h, int64_t n,
                                          NAME(at) *restrict param, const NAME(at) *restrict grad,
                                          NAME(at) *restrict grad_sum,
                                          NAME(at) *restrict grad_sq_sum,
                                          struct NAME(lanes) *restrict lanes)
{
    for (int64_t i = 0; i < n; i++) {
        REAL x = SHRUNK(param[i]);
        REAL g = EFFECTIVE(grad[i], param[i]);
        REAL s = SHRUNK(grad_sum[i]) + g * h.weight;
        REAL v = NAME(add_square)(rule, h, grad_sq_sum[i], g);
        REAL old = NAME(displacement)(NORMAL_EPS, grad_sum[i], NAME(root)(rule, grad_sq_sum[i]), h.eps);
        REAL root = NAME(root)(rule, v);
        REAL u = NAME(displacement)(NORMAL_EPS, s, root, h.eps);
        REAL move = u - SHRUNK(old);
        if (lanes) /* old is x_0 - x_k */
            NAME(add)(1, lanes, i, COUNTED(grad[i], param[i], old) * h.weight, old, s, u, root);
        grad_sum[i] = s;
        grad_sq_sum[i] = v;
        param[i] = x - move; /* x_{k+1} = z_{k+1} */
    }
}

/* Mirror descent. Without momentum x is z, and `dual` is NULL. Only an anchored rule has an
   `initial_param` and sums. */
TARGET INLINE void NAME(move)(int plain, int has_dual, int asking, struct rule rule,
                              struct NAME(constants) h, int64_t n, NAME(at) *restrict param,
                              const NAME(at) *restrict grad, const REAL *restrict root,
                              NAME(at) *restrict dual, NAME(at) *restrict initial_param,
                              struct NAME(lanes) *restrict lanes)
{
    int normal = (plain && rule.root == 2) || h.normal_eps; /* MirrorMADGRAD's is 0 by default */
#pragma GCC unroll 1
    for (int64_t i = 0; i < n; i++) {
        REAL x = SHRUNK(param[i]);
        REAL g = EFFECTIVE(grad[i], param[i]);
        REAL move = NAME(displacement)(normal, g * h.weight, root[i], h.eps) + 0;
        REAL weighted = 0, away = 0, start = 0;
        if (rule.anchored) {
            start = initial_param[i];
            away = start - param[i]; /* x_0 - x_k */
            weighted = COUNTED(grad[i], param[i], away) * h.weight;
            start *= h.initial_shrink;
            initial_param[i] = start;
        }
        if (has_dual) {
            REAL point = SHRUNK(dual[i]), z = point - move;
            if (rule.averages) {
                move += h.own_decay != 0 ? param[i] * h.own_decay : 0; /* 0 times a NaN is not 0 */
                REAL ahead = move * h.momentum - point; /* β (x_k - z_{k+1}) */
                param[i] = x - move * h.c - ahead * h.mean_share;
                dual[i] = ahead * (h.mean_share - 1);
            } else {
                REAL ahead = rule.relative ? move - point : x - z; /* x_k - z_{k+1} */
                REAL c = rule.holds && NAME(is_held)(h, ahead, g) ? 0 : h.c;
                REAL y = x - ahead * c;
                dual[i] = rule.relative ? x - y - ahead : z;
                param[i] = y;
            }
            if (rule.anchored) {
                REAL u = start - param[i] - dual[i];
                NAME(add)(asking, lanes, i, weighted, away, root[i] + h.eps, u < 0 ? -u : u,
                          root[i]); /* √ν |x_0 - z_{k+1}| */
            }
        } else {
            param[i] = x - move;
        }
    }
}

TARGET INLINE struct NAME(constants) NAME(constants_of)(const struct job *job, double k)
{
    const struct numbers *n = &job->numbers;
    struct rule rule = RULES[job->rule];
    double c = 1 - n->momentum, part = c / LEAST_EXACT * (c / LEAST_EXACT);
    double growth = rule.growth_root == 2 ? sqrt(k + 1) : rule.growth_root == 3 ? cbrt(k + 1) : 1;
    part = part < 1 ? part : 1;
    /* Of float32 in codes, x without its part of the rounding error yet: z if it takes in all. */
    int takes = job->state == CODES && job->param == SINGLE;
    double reach = takes ? 1 - (1 - part) * (1 - c) : c, kept = n->momentum;
    if (rule.averages) { /* y for x, and β (x - z) for x - z */
        part = 1 - 1 / n->momentum;
        reach = takes ? part + (1 - part) * n->mean_share : n->mean_share;
        kept = 1 - n->mean_share;
    }
    return (struct NAME(constants)){
        .c = (REAL)c,
        .share = (REAL)part,
        .reach = (REAL)reach,
        .held_reach = (REAL)(n->momentum == 0 ? reach : takes ? part : 0),
        .kept = (REAL)kept,
        .momentum = (REAL)n->momentum,
        .mean_share = (REAL)n->mean_share,
        .held_kept = (REAL)(n->momentum != 0),
        .shrink = rule.averages ? 1 : (REAL)n->shrink,
        .initial_shrink = (REAL)n->shrink,
        .own_decay = (REAL)(1 - n->shrink),
        .eps = (REAL)n->eps,
        .normal_eps = (REAL)n->eps >= 2 * SMALLEST,
        .decay = (REAL)n->weight_decay,
        .sign = (REAL)n->sign,
        .weight = (REAL)(n->lr * growth),
        .inverse_weight = (REAL)(1 / (n->lr * growth)),
        .weighted_eps = (REAL)(n->eps / (n->lr * growth)),
        .fade = (REAL)(rule.squares == AVERAGED ? k / (k + 1.5) : sqrt(k / (k + 1))),
        .newest = (REAL)(1.5 / (k + 1.5)),
    };
}

TARGET static void NAME(roots)(const REAL *from, REAL *to, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        to[i] = NAME(cbrt)(from[i]);
}

#include "rows.h"
#if !WIDE
#include "blocks.h"
#endif

#if !WIDE
#undef VEC
#undef WORDS
#undef INTS
#undef WIDTH_OF
#undef QUAD
#undef MASK
#undef SHORTS
#undef SIMD
#undef AND
#undef OR
#undef LOAD
#undef STORE
#undef NARROW
#undef IN_ORDER
#undef BY_LANE
#endif
#undef LOSS
#undef EFFECTIVE
#undef SHRUNK
#undef NORMAL_EPS
#undef COUNTED
#undef PASTE
#undef EXPAND
#undef NAME
#undef REAL
#undef BITS
#undef SMALLEST
#undef UP
#undef ROOT_UP
#undef GUESS
