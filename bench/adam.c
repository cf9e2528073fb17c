/* SPDX-License-Identifier: Apache-2.0 */
/* Adam against its limit: the same loads and stores without the arithmetic, on the same pool, over
 * the same arrays, turn and turn about; once as a plain loop, and once with the help that ours
 * gives itself (prefetches, stores past the caches). Built as a program, and as a library for
 * adam.py, which adds the peers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/status.h"
#include "base/util.h"
#include "kernels/math.h"

typedef struct bench_adam {
    zs_pool *pool;
    zs_math *math;
} bench_adam;

/* What adam.py calls. */
ZS_API bench_adam *bench_adam_open(int threads);
ZS_API void bench_adam_close(bench_adam *b);
ZS_API double bench_adam_ours(bench_adam *b, uint64_t n, float *master, float *exp_avg,
                              float *exp_avg_sq, void *grad, void *working, uint64_t step);
ZS_API double bench_adam_limit(bench_adam *b, uint64_t n, float *master, float *exp_avg,
                               float *exp_avg_sq, void *grad, void *working, int helped);

typedef uint16_t v8h __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint32_t v8u __attribute__((vector_size(32), aligned(4), may_alias));

enum {
    LIMIT_BLOCK = 65536, /* elements, as in kernels/math_host.c */
    LIMIT_AHEAD = 512    /* elements; as far ahead as serves it best */
};

typedef struct limit_job {
    const zs_adam_arrays *arrays;
    uint64_t n;
    uint32_t zero; /* what the compiler does not know: no store may be left out */
} limit_job;

static inline void store_past_caches(v8h *to, v8h x)
{
#if defined(__x86_64__)
    _mm_stream_si128((__m128i *)(void *)to, (__m128i)x);
#else
    *to = x;
#endif
}

/* helped: with the prefetches and the streamed stores of kernels/avx2/adam.c. */
static inline __attribute__((always_inline)) void limit_range(const limit_job *job, uint64_t begin,
                                                              uint64_t end, int wide, int helped)
{
    const zs_adam_arrays a = *job->arrays;
    const v8u zero = {job->zero, job->zero, job->zero, job->zero,
                      job->zero, job->zero, job->zero, job->zero};
    const uint16_t half = (uint16_t)job->zero;
    const v8h zero_16 = {half, half, half, half, half, half, half, half};
    for (uint64_t first = begin; first + 32 <= end; first += 32) {
        uint64_t next = ZS_MIN(first + LIMIT_AHEAD, end - 32);
        if (helped)
            for (uint64_t i = next; i < next + 32; i += 16) {
                __builtin_prefetch(a.master + i);
                __builtin_prefetch(a.exp_avg + i);
                __builtin_prefetch(a.exp_avg_sq + i);
                if (wide || i == next)
                    __builtin_prefetch((const char *)a.grad + (wide ? 4 : 2) * i);
            }
        for (uint64_t i = first; i < first + 32; i += 8) {
            v8u *w = (void *)(a.master + i), *m = (void *)(a.exp_avg + i);
            v8u *v = (void *)(a.exp_avg_sq + i);
            v8u mask = zero;
            if (wide) {
                mask &= *(const v8u *)((const char *)a.grad + 4 * i);
            } else {
                v8h grad = *(const v8h *)((const char *)a.grad + 2 * i);
                v8h *to = (void *)((char *)a.working + 2 * i);
                if (helped)
                    store_past_caches(to, grad ^ zero_16);
                else
                    *to = grad ^ zero_16;
            }
            *w ^= mask;
            *m ^= mask;
            *v ^= mask;
        }
    }
}

#define LIMIT(name, wide, helped)                                                                  \
    static void limit_##name(void *arg, size_t index, int worker)                                  \
    {                                                                                              \
        const limit_job *job = arg;                                                                \
        uint64_t begin = (uint64_t)index * LIMIT_BLOCK;                                            \
        limit_range(job, begin, ZS_MIN(begin + LIMIT_BLOCK, job->n), wide, helped);                \
    }
LIMIT(fp32, 1, 0)
LIMIT(fp32_helped, 1, 1)
LIMIT(bf16, 0, 0)
LIMIT(bf16_helped, 0, 1)

void bench_adam_close(bench_adam *b)
{
    if (!b)
        return;
    zs_math_close(&b->math);
    zs_pool_close(&b->pool);
    free(b);
}

/* NULL: zs_last_error() says why. */
bench_adam *bench_adam_open(int threads)
{
    bench_adam *b = calloc(1, sizeof *b);
    if (!b)
        return NULL;
    if (zs_pool_open(threads, -1, &b->pool) != ZS_OK ||
        zs_math_open_host(b->pool, &b->math) != ZS_OK) {
        bench_adam_close(b);
        return NULL;
    }
    return b;
}

static zs_adam_arrays arrays_of(float *master, float *exp_avg, float *exp_avg_sq, void *grad,
                                void *working)
{
    zs_dtype dtype = working ? ZS_BF16 : ZS_FP32;
    return (zs_adam_arrays){.master = master,
                            .exp_avg = exp_avg,
                            .exp_avg_sq = exp_avg_sq,
                            .grad = grad,
                            .grad_dtype = dtype,
                            .working = working,
                            .working_dtype = dtype};
}

/* Seconds of one step. working NULL: fp32 gradients; else bf16 gradients and working copy. */
double bench_adam_ours(bench_adam *b, uint64_t n, float *master, float *exp_avg, float *exp_avg_sq,
                       void *grad, void *working, uint64_t step)
{
    zs_adam_arrays arrays = arrays_of(master, exp_avg, exp_avg_sq, grad, working);
    zs_group_config group = {.lr = 1e-3,
                             .beta1 = 0.9,
                             .beta2 = 0.999,
                             .eps = 1e-8,
                             .weight_decay = 0.01,
                             .decoupled = 1};
    zs_adam_coef coef;
    zs_adam_run run = {0, n, &coef};
    double start = zs_now();
    zs_adam_coef_make(&coef, &group, step, 1.0);
    if (b->math->ops->adam(b->math, NULL, &arrays, &run, 1) != ZS_OK)
        return -1;
    return zs_now() - start;
}

/* The same for the loads and stores alone; weights and moments keep their values. working is
 * 16-byte aligned. */
double bench_adam_limit(bench_adam *b, uint64_t n, float *master, float *exp_avg, float *exp_avg_sq,
                        void *grad, void *working, int helped)
{
    static const volatile uint32_t nothing = 0;
    zs_adam_arrays arrays = arrays_of(master, exp_avg, exp_avg_sq, grad, working);
    limit_job job = {&arrays, n, nothing};
    void (*fn)(void *, size_t, int) = working  ? helped ? limit_bf16_helped : limit_bf16
                                      : helped ? limit_fp32_helped
                                               : limit_fp32;
    double start = zs_now();
    zs_pool_run(b->pool, fn, &job, zs_div_up(n, LIMIT_BLOCK));
    return zs_now() - start;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

enum { ROUNDS_MAX = 999, CONTENDERS = 3 };
static const char *const contenders[CONTENDERS] = {"ours", "limit", "limit, helped"};

static void print_row(const char *what, double values[], int rounds, double scale, const char *unit)
{
    qsort(values, (size_t)rounds, sizeof values[0], by_value);
    printf("  %-26s %8.3f%s (%.3f to %.3f)\n", what, scale * values[rounds / 2], unit,
           scale * values[rounds / 10], scale * values[rounds - 1 - rounds / 10]);
}

static void compare(bench_adam *b, uint64_t n, int rounds, float *arrays[3], void *grad,
                    void *working)
{
    static double seconds[CONTENDERS][ROUNDS_MAX], ratio[CONTENDERS][ROUNDS_MAX];
    for (int r = -2; r < rounds; r++) {
        double t[CONTENDERS];
        for (int i = 0; i < CONTENDERS; i++) { /* who goes first changes each round */
            int which = (i + r + 2) % CONTENDERS;
            t[which] = which ? bench_adam_limit(b, n, arrays[0], arrays[1], arrays[2], grad,
                                                working, which == 2)
                             : bench_adam_ours(b, n, arrays[0], arrays[1], arrays[2], grad, working,
                                               (uint64_t)(r + 3));
        }
        for (int i = 0; i < CONTENDERS && r >= 0; i++) {
            seconds[i][r] = t[i];
            ratio[i][r] = t[i] / t[0];
        }
    }
    printf("%s\n", working ? "fp32 master, bf16 gradients and weights" : "fp32");
    for (int i = 0; i < CONTENDERS; i++)
        print_row(contenders[i], seconds[i], rounds, 1e3, " ms");
    print_row("limit / ours", ratio[1], rounds, 1, "");
    print_row("limit, helped / ours", ratio[2], rounds, 1, "");
}

static void *map(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        fprintf(stderr, "adam: no memory for %llu bytes: take fewer parameters\n",
                (unsigned long long)bytes);
        exit(1);
    }
    madvise(p, bytes, MADV_HUGEPAGE);
    memset(p, 0, bytes);
    return p;
}

int main(int argc, char **argv)
{
    uint64_t n = argc > 1 ? strtoull(argv[1], NULL, 10) : 50000000;
    int threads = argc > 2 ? atoi(argv[2]) : 2, rounds = argc > 3 ? atoi(argv[3]) : 21;
    if (argc > 4 || n == 0 || rounds < 1 || rounds > ROUNDS_MAX) {
        fprintf(stderr, "usage: adam [parameters [threads [rounds (1..%d)]]]\n", ROUNDS_MAX);
        return 2;
    }
    bench_adam *b = bench_adam_open(threads);
    if (!b) {
        fprintf(stderr, "adam: %s\n", zs_last_error());
        return 1;
    }
    float *arrays[3] = {map(n * 4), map(n * 4), map(n * 4)}, *grad = map(n * 4);
    void *half = map(n * 2), *working = map(n * 2);
    for (uint64_t i = 0; i < n; i++) {
        arrays[0][i] = 1.0f / (float)(1 + i % 1000);
        grad[i] = 0.01f * (float)((int)(i % 17) - 8);
    }
    zs_kernels_get()->cast[ZS_BF16][ZS_FP32](n, half, grad);
    printf("%llu parameters, %d threads, level %s, %d rounds: median (10th to 90th percentile)\n",
           (unsigned long long)n, zs_pool_threads(b->pool), zs_kernels_get()->name, rounds);
    compare(b, n, rounds, arrays, grad, NULL);
    compare(b, n, rounds, arrays, half, working);
    bench_adam_close(b);
    return 0;
}
