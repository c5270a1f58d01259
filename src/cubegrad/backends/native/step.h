/* One fused step over every tensor of a batch, on the CPU. Plain C: no Python, no torch. */
#ifndef CUBEGRAD_STEP_H
#define CUBEGRAD_STEP_H

#include <stddef.h>
#include <stdint.h>

/* CODES only of a state: with parameters of half or single precision. */
enum kind { HALF, BFLOAT16, SINGLE, DOUBLE, CODES };

/* The fields of rule.Rule that a step asks for. The loops get one as a constant; RULE lists those that
   there are loops for, each with its record. */
enum squares { WEIGHTED, FADING, AVERAGED };
struct rule {
    int root, growth_root; /* of λ_k; 0: it is γ_k */
    enum squares squares;
    int pulls, holds, relative, averages, anchored;
};
#define FOR_EACH_RULE(RULE)                                                                        \
    RULE(MADGRAD, 3, 2, WEIGHTED, 1, 0, 0, 0, 0)                                                   \
    RULE(MIRROR_MADGRAD, 3, 3, FADING, 0, 0, 0, 0, 0)                                              \
    RULE(MADGRADW, 2, 0, AVERAGED, 0, 1, 1, 0, 0)                                                  \
    RULE(SCHEDULE_FREE, 2, 0, AVERAGED, 0, 0, 1, 1, 0)                                             \
    RULE(MADGRADW_AUTO, 2, 0, AVERAGED, 0, 1, 1, 0, 1)                                             \
    RULE(SCHEDULE_FREE_AUTO, 2, 0, AVERAGED, 0, 0, 1, 1, 1)
#define INDEX(name, ...) name,
enum rule_index { FOR_EACH_RULE(INDEX) RULE_COUNT };
#undef INDEX
#define RECORD(name, ...) [name] = {__VA_ARGS__},
static const struct rule RULES[] = {FOR_EACH_RULE(RECORD)};
#undef RECORD

/* λ⟨g, x_0 - x⟩, ⟨s, x_0 - z⟩ and Σ∛ν, or of an anchored rule Σ√ν|x_0 - z| and Σ√ν: the sums of
   distance.step_sums. */
enum sum { AGREEMENT, PRODUCT, ROOTS, SUMS };
enum level { BASELINE, AVX2, AVX512, LEVELS };

/* The addresses of a tensor and its state, and its number of elements, as fused.addresses lists them.
   With a pull a is s, b is nu, c is x_0 or NULL; else a is nu, b is z,
   z - x or NULL, c is NULL, or x_0 of an anchored rule. */
struct row {
    void *param, *a, *b, *c;
    float *step;
    int64_t size, length, first, spacing; /* the last three for a job that rounds at random */
};

/* The addresses of a tensor and its codes, as fused.coded_addresses lists them; those of codes that
   are not kept are NULL. Of half-precision parameters `initial` has their own kind, else int16. */
struct coded_row {
    void *param;
    int8_t *offset;
    void *offset_scale;
    uint8_t *root;
    void *root_scale, *initial, *initial_scale;
    float *step;
    int64_t blocks, length, first, spacing;
};

/* The numbers of one step, the same for every tensor. */
struct numbers {
    double lr, momentum, shrink, eps, weight_decay, sign, mean_share;
};

struct job {
    const struct row *rows;
    const struct coded_row *coded_rows; /* instead of `rows`, if the state is CODES */
    /* Of each row in the sequence of all elements, or of all blocks of codes, and the end of the
       last. */
    const int64_t *starts;
    const void *const *grads;
    int64_t count;
    struct numbers numbers;
    enum rule_index rule;
    enum kind param, grad, state;
    int at_random; /* a parameter of half precision is; one with CODES always */
    enum level level;
    double *sums; /* NULL, or three numbers to which those of distance.step_sums are added, if x_0 is known */
};

typedef void range_function(int64_t begin, int64_t end, void *job);
/* torch's own parallel loop, as its stable C interface has it. */
typedef int32_t parallel_function(int64_t, int64_t, int64_t, range_function *, void *);

/* The best level that this machine has. */
enum level best_level(void);

/* Update everything and count the step. `parallel` may be NULL; then `threads` are made here.
   0, or -1 if there is no memory for the sums; then nothing has changed. */
int run_job(struct job *job, parallel_function *parallel, int threads);

/* Cube roots of `count` numbers of the kind SINGLE or DOUBLE, as a step takes them. */
void cube_roots(const void *from, void *to, int64_t count, enum kind kind, enum level level);

#endif
