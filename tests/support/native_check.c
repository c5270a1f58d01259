/* step.c by itself, for a sanitizer to watch: every kind, rule and level, sizes around a chunk and
   a piece, buffers of exactly the right size at odd addresses, and more threads than work. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "step.h"

static const size_t WIDTH[] = {2, 2, 4, 8};
static const int64_t SIZES[] = {0, 1, 15, 127, 128, 129, 1000, 70001};
static const int64_t ROW_LENGTHS[] = {1, 1, 15, 127, 128, 129, 100, 70001}, APART[] = {1, 1, 5, 1, 1, 1, 20, 1};
enum { ROWS = sizeof SIZES / sizeof *SIZES };

/* n numbers of a kind that are all 1, one byte past where they would be aligned. */
static char *ones(int64_t n, enum kind kind)
{
    const uint16_t half[] = {0x3c00, 0x3f80};
    const float single = 1;
    const double wide = 1;
    const void *from[] = {&half[0], &half[1], &single, &wide};
    char *room = malloc((size_t)n * WIDTH[kind] + 1);
    for (int64_t i = 0; i < n; i++)
        memcpy(room + 1 + (size_t)i * WIDTH[kind], from[kind], WIDTH[kind]);
    return room;
}

static int check(enum rule_index rule, int centred, enum kind param, enum kind grad, enum level level,
                 double shrink, int threads, int summing)
{
    int at_random = param < SINGLE && grad >= SINGLE;
    enum kind state = param == DOUBLE ? DOUBLE : SINGLE;
    struct row rows[ROWS];
    int64_t starts[ROWS + 1] = {0};
    char *made[ROWS][5];
    const void *grads[ROWS];
    float steps[ROWS] = {0};
    double sums[SUMS] = {0};
    int wrong = 0;
    for (int i = 0; i < ROWS; i++) {
        const enum kind kinds[] = {param, state, state, state, grad};
        for (int j = 0; j < 5; j++)
            made[i][j] = ones(SIZES[i], kinds[j]);
        rows[i] = (struct row){made[i][0] + 1, made[i][1] + 1, made[i][2] + 1,
                               centred ? made[i][3] + 1 : NULL, &steps[i], SIZES[i],
                               ROW_LENGTHS[i], 7, APART[i]};
        grads[i] = made[i][4] + 1;
        starts[i + 1] = starts[i] + SIZES[i];
    }
    struct job job = {rows, NULL, starts, grads, ROWS, {0.1, 0.9, shrink, 1e-6, 0, 1, 0.3},
                      rule, param, grad, state, at_random, level,
                      summing ? sums : NULL};
    wrong += run_job(&job, NULL, threads) != 0;
    if (summing) { /* x_0 - x_k is 0, or s / (∛ν + ε) */
        double total = (double)starts[ROWS], s = shrink + 0.1;
        wrong += fabs(sums[AGREEMENT] - (centred ? 0 : 0.1 / (1 + 1e-6) * total)) > 1e-6 * total;
        wrong += fabs(sums[PRODUCT] - s * s / (cbrt(1.1) + 1e-6) * total) > 1e-6 * total;
        wrong += fabs(sums[ROOTS] - cbrt(1.1) * total) > 1e-6 * total;
    }
    for (int i = 0; i < ROWS; i++) {
        wrong += steps[i] != 1;
        for (int64_t k = 1; k < SIZES[i]; k++) { /* all elements started alike */
            const char *first = made[i][0] + 1, *other = first + (size_t)k * WIDTH[param];
            uint16_t x, y;
            memcpy(&x, first, sizeof x), memcpy(&y, other, sizeof y);
            wrong += at_random ? abs(x - y) > 1 : memcmp(first, other, WIDTH[param]) != 0;
        }
        for (int j = 0; j < 5; j++)
            free(made[i][j]);
    }
    return wrong;
}

/* The same for states in codes: rows of a block and of several, whole and not, channels last. */
static const int64_t LENGTHS[] = {64, 147, 256, 300, 576}, SPACINGS[] = {1, 7, 1, 6, 9};
enum { CODED_ROWS = sizeof LENGTHS / sizeof *LENGTHS, EACH = 150 };

static int check_codes(enum rule_index rule, int with_offset, enum kind param, enum kind grad,
                       enum level level, double shrink, int threads, int apart)
{
    struct coded_row rows[CODED_ROWS];
    int64_t starts[CODED_ROWS + 1] = {0};
    char *made[CODED_ROWS][8];
    const void *grads[CODED_ROWS];
    float steps[CODED_ROWS] = {0};
    double sums[SUMS] = {0};
    int wrong = 0, summing = RULES[rule].pulls && apart;
    for (int i = 0; i < CODED_ROWS; i++) {
        int64_t size = EACH * LENGTHS[i], blocks = EACH * ((LENGTHS[i] + 255) / 256);
        made[i][0] = ones(size, param);
        made[i][1] = ones(size, grad);
        made[i][2] = calloc((size_t)size, 1);
        made[i][3] = calloc((size_t)size, 1);
        made[i][4] = ones(size, param < SINGLE ? param : HALF); /* any int16 */
        for (int j = 5; j < 8; j++)
            made[i][j] = ones(blocks, SINGLE);
        int initial = RULES[rule].pulls;
        rows[i] = (struct coded_row){
            made[i][0] + 1,
            with_offset ? (int8_t *)made[i][2] : NULL,
            with_offset ? made[i][5] + 1 : NULL,
            (uint8_t *)made[i][3],
            made[i][6] + 1,
            initial ? made[i][4] + 1 : NULL,
            initial ? made[i][7] + 1 : NULL,
            &steps[i],
            blocks,
            LENGTHS[i],
            i,
            apart ? SPACINGS[i] : 1,
        };
        grads[i] = made[i][1] + 1;
        starts[i + 1] = starts[i] + blocks;
    }
    struct job job = {NULL, rows, starts, grads, CODED_ROWS,
                      {0.1, with_offset ? 0.9 : 0, shrink, 1e-6, 0, 1, 0.3},
                      rule, param, grad, CODES, 0, level, summing ? sums : NULL};
    wrong += run_job(&job, NULL, threads) != 0;
    for (int i = 0; i < CODED_ROWS; i++)
        for (int64_t k = 1; param == SINGLE && k < EACH * LENGTHS[i]; k++) {
            int64_t row = k / LENGTHS[i] * LENGTHS[i], j = k - row, s = rows[i].spacing;
            int64_t place = row + j % s * (LENGTHS[i] / s) + j / s;
            /* Codes are rounded at random, and x takes in the difference. */
            int alike = made[i][2][k] == made[i][2][0];
            wrong += alike && memcmp(made[i][0] + 1, made[i][0] + 1 + place * 4, 4) != 0;
        }
    wrong += run_job(&job, NULL, threads) != 0;
    for (int i = 0; i < CODED_ROWS; i++) {
        wrong += steps[i] != 2;
        for (int j = 0; j < 8; j++)
            free(made[i][j]);
    }
    return wrong;
}

int main(void)
{
    int wrong = 0;
    for (int level = 0; level <= (int)best_level(); level++)
        for (int param = HALF; param <= DOUBLE; param++)
            for (int grad = HALF; grad <= DOUBLE; grad++)
                for (int form = 0; form < 5; form++)
                    wrong += check(form == 4 ? MIRROR_MADGRAD : MADGRAD, form < 2, param, grad,
                                   level, grad == HALF ? 0.5 : 1, 1 + form, form % 2);
    for (int level = 0; level <= (int)best_level(); level++)
        for (int param = HALF; param <= SINGLE; param++)
            for (int grad = HALF; grad <= DOUBLE; grad++)
                for (int form = 0; form < 8; form++)
                    wrong += check_codes(form & 1, form >> 1 & 1, param, grad, level,
                                         grad == HALF ? 0.5 : 1, 1 + form, form >> 2);
    const float special[] = {0, -0.0f, INFINITY, NAN, 1e-45f, 3e38f};
    float roots[6];
    for (int level = 0; level <= (int)best_level(); level++)
        cube_roots(special, roots, 6, SINGLE, level);
    printf("%d wrong\n", wrong);
    return wrong != 0;
}
