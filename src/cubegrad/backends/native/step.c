#include "step.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 256
/* Of square roots, which one instruction takes: 8 to 13 % faster in such chunks. Cube roots are 4 %
   faster from memory with AVX-512, and slower with AVX2. */
#define SHORT_CHUNK 64
/* What lies this many elements ahead is prefetched: the arithmetic is long enough to keep the processor
   from running ahead to the next cache misses by itself. */
#define AHEAD 512
#define CODES_AHEAD 1024
/* A thread is worth waking for this many elements: 1 MB to move. */
#define GRAIN 32768
#define PIECE 16384
#define MOST_THREADS 256
/* Sums run side by side in as many lanes as the widest vector has. Every FOLD elements they are
   added to doubles, which costs a hundredth of a step. */
#define LANES 16
#define FOLD 1024
/* As in codec.py: numbers that share a scale, at most, the bits that a root loses, what lies between
   the smallest root of a block and the largest, and the least 1 - momentum at which z stays exact. */
#define BLOCK 256
#define CUT 17
#define BINADES (7 << 23)
#define LEAST_EXACT 0.099
#define WEYL 0x06099b33u /* as codec.WEYL */

#define FOUR(j) (j) * WEYL, ((j) + 1) * WEYL, ((j) + 2) * WEYL, ((j) + 3) * WEYL
#define SIXTEEN(j) FOUR(j), FOUR((j) + 4), FOUR((j) + 8), FOUR((j) + 12)
#define EACH_64(j) SIXTEEN(j), SIXTEEN((j) + 16), SIXTEEN((j) + 32), SIXTEEN((j) + 48)
static const _Alignas(64) uint32_t WEYL_MULTIPLES[BLOCK] = {EACH_64(0), EACH_64(64), EACH_64(128),
                                                            EACH_64(192)};

typedef uint16_t half_at __attribute__((aligned(1), may_alias));
typedef int16_t short_at __attribute__((aligned(1), may_alias));
typedef float float_at __attribute__((aligned(1), may_alias));
typedef double double_at __attribute__((aligned(1), may_alias));

static const int64_t WIDTH[] = {[HALF] = 2, [BFLOAT16] = 2, [SINGLE] = 4, [DOUBLE] = 8};

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

/* Whether the state can say what x_0 was. */
INLINE int keeps_start(struct rule rule) { return rule.pulls || rule.anchored; }

#include "half.h"

/* The sums of a piece. */
struct lanes {
    double of[SUMS][LANES];
};

INLINE void prefetch(const void *at, size_t bytes)
{
    for (size_t offset = 0; offset < bytes; offset += 64)
        __builtin_prefetch((const char *)at + offset);
}

#define LEVEL baseline
#define VECTOR 16
#define TARGET
#if defined(__aarch64__)
#define FUSES 1
#else
#define FUSES 0
#endif
#include "level.h"

#if defined(__x86_64__)

#define LEVEL avx2
#define VECTOR 32
#define TARGET __attribute__((target("avx2,fma")))
#define FUSES 1
#include "level.h"

#define LEVEL avx512
#define VECTOR 64
#define TARGET __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,fma")))
#define FUSES 1
#include "level.h"

#define AT_EACH_LEVEL(name) {name##_baseline, name##_avx2, name##_avx512}

enum level best_level(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
        return AVX512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? AVX2 : BASELINE;
}

#else

#define AT_EACH_LEVEL(name) {name##_baseline, name##_baseline, name##_baseline}

enum level best_level(void) { return BASELINE; }

#endif

typedef void row_function(const struct job *, int64_t, int64_t, int64_t, struct lanes *);

static row_function *const STEP_ROW[][LEVELS] = {
    [SINGLE] = AT_EACH_LEVEL(step_row_float),
    [DOUBLE] = AT_EACH_LEVEL(step_row_double),
    [CODES] = AT_EACH_LEVEL(step_blocks_float),
};

/* The row in which an element of the sequence lies: the last one that starts at or before it. */
static int64_t row_at(const struct job *job, int64_t element)
{
    int64_t low = 0, high = job->count;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (job->starts[middle] <= element)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void step_range(const struct job *job, int64_t begin, int64_t end, struct lanes *sums)
{
    for (int64_t row = row_at(job, begin); begin < end; row++) {
        int64_t start = job->starts[row];
        int64_t stop = job->starts[row + 1] < end ? job->starts[row + 1] : end;
        STEP_ROW[job->state][job->level](job, row, begin - start, stop - start, sums);
        begin = stop;
    }
}

struct sums {
    double of[SUMS];
};

/* Each worker has the same share at every step, so that memory stays near the core that uses it. A
   worker that is done takes pieces from the others: cores are seldom equally free. */
struct work {
    struct job *job;
    struct sums *sums; /* of each piece, or NULL */
    int64_t workers, length, total, piece, pieces;
    atomic_llong next[MOST_THREADS]; /* in each share, the first element that nobody has taken */
};

static void step_piece(struct work *work, int64_t begin, int64_t end)
{
    if (work->sums == NULL) {
        step_range(work->job, begin, end, NULL);
        return;
    }
    struct lanes lanes = {0};
    struct sums sums = {0};
    step_range(work->job, begin, end, &lanes);
    for (int sum = 0; sum < SUMS; sum++)
        for (int j = 0; j < LANES; j++)
            sums.of[sum] += lanes.of[sum][j];
    work->sums[begin / work->piece] = sums;
}

static void work_through(struct work *work, int64_t worker)
{
    for (int64_t i = 0; i < work->workers; i++) {
        int64_t share = (worker + i) % work->workers;
        int64_t end = (share + 1) * work->length;
        end = end < work->total ? end : work->total;
        int64_t at;
        while ((at = atomic_fetch_add(&work->next[share], work->piece)) < end)
            step_piece(work, at, at + work->piece < end ? at + work->piece : end);
    }
}

static void work_range(int64_t begin, int64_t end, void *work)
{
    for (int64_t worker = begin; worker < end; worker++)
        work_through(work, worker);
}

struct helper {
    pthread_t thread;
    struct work *work;
    int64_t worker;
};

static void *help(void *context)
{
    struct helper *helper = context;
    work_through(helper->work, helper->worker);
    return NULL;
}

/* Threads for this step only: a child process has none of torch's threads. */
static void work_in_own_threads(struct work *work)
{
    struct helper helpers[MOST_THREADS];
    int64_t made = 0;
    while (made + 1 < work->workers) {
        helpers[made] = (struct helper){.work = work, .worker = made + 1};
        if (pthread_create(&helpers[made].thread, NULL, help, &helpers[made]) != 0)
            break; /* the threads we have do the work of those we could not start */
        made++;
    }
    work_through(work, 0);
    for (int64_t i = 0; i < made; i++)
        pthread_join(helpers[i].thread, NULL);
}

/* The pieces depend only on the number of elements, so that the sums do too. They are smaller in a
   small step, so that all threads end together. Allocates the sums of each piece. */
static int cut_for_sums(struct work *work, int64_t each)
{
    int64_t chunk = CHUNK / each > 1 ? CHUNK / each : 1;
    int64_t fair = work->total / 64 / chunk * chunk, least = PIECE / each / 4;
    fair = fair < least ? least : fair;
    work->piece = fair < work->piece && work->total > GRAIN / each ? fair : work->piece;
    work->length = (work->length + work->piece - 1) / work->piece * work->piece;
    work->pieces = (work->total + work->piece - 1) / work->piece;
    work->sums = malloc((size_t)(work->pieces + 1) * sizeof *work->sums);
    return work->sums == NULL ? -1 : 0;
}

/* In the order of the pieces, whichever thread took them. */
static void add_sums(const struct work *work, double *sums)
{
    for (int64_t piece = 0; piece < work->pieces; piece++)
        for (int sum = 0; sum < SUMS; sum++)
            sums[sum] += work->sums[piece].of[sum];
}

int run_job(struct job *job, parallel_function *parallel, int threads)
{
    int64_t each = job->state == CODES ? BLOCK : 1; /* elements in one of what is counted */
    int64_t grain = GRAIN / each;
    struct work work = {.job = job, .piece = PIECE / each, .total = job->starts[job->count]};
    int64_t useful = (work.total + grain - 1) / grain;
    work.workers = threads < useful ? threads : useful;
    work.workers = work.workers < MOST_THREADS ? work.workers : MOST_THREADS;
    work.workers = work.workers < 1 ? 1 : work.workers;
    work.length = (work.total + work.workers - 1) / work.workers;
    if (job->sums != NULL && cut_for_sums(&work, each) != 0)
        return -1;
    for (int64_t share = 0; share < work.workers; share++)
        atomic_init(&work.next[share], share * work.length);
    if (work.workers == 1 && job->sums == NULL)
        step_range(job, 0, work.total, NULL);
    else if (work.workers == 1)
        work_through(&work, 0);
    else if (parallel == NULL || parallel(0, work.workers, 1, work_range, &work) != 0)
        work_in_own_threads(&work);
    for (int64_t row = 0; row < job->count; row++)
        *(job->state == CODES ? job->coded_rows[row].step : job->rows[row].step) += 1;
    if (job->sums != NULL)
        add_sums(&work, job->sums);
    free(work.sums);
    return 0;
}

void cube_roots(const void *from, void *to, int64_t count, enum kind kind, enum level level)
{
    static void (*const single[])(const float *, float *, int64_t) = AT_EACH_LEVEL(roots_float);
    static void (*const wide[])(const double *, double *, int64_t) = AT_EACH_LEVEL(roots_double);
    if (kind == SINGLE)
        single[level](from, to, count);
    else
        wide[level](from, to, count);
}
