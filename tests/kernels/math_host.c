/* SPDX-License-Identifier: Apache-2.0 */
/* The pool's maths: same bits for any number of threads, and those of one kernel call. */
#include "kernels/math.h"

#include <fenv.h>

#include "base/status.h"
#include "check.h"
#include "kernels/fpmode.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

enum { N = 5 * 65536 + 4321, SMALL = 3000 };

static zs_math *math_with(int threads, zs_pool **pool)
{
    zs_math *math = NULL;
    if (zs_pool_open(threads, -1, pool) != ZS_OK || zs_math_open_host(*pool, &math) != ZS_OK) {
        printf("FAIL %s\n", zs_last_error());
        exit(1);
    }
    return math;
}

static void math_done(zs_math *math, zs_pool *pool)
{
    zs_math_close(&math);
    zs_pool_close(&pool);
    check_that(math == NULL, "math_host: close clears the handle");
}

/* ---- adam ---- */

typedef struct state {
    check_array master, exp_avg, exp_avg_sq, grad, working;
} state;

static state state_make(void)
{
    state s = {check_array_make(0, N * 4), check_array_make(0, N * 4), check_array_make(0, N * 4),
               check_array_make(0, N * 2), check_array_make(0, N * 2)};
    check_fill(&s.master, ZS_FP32, RANDOM, 1);
    check_fill(&s.exp_avg, ZS_FP32, RANDOM, 2);
    check_fill(&s.grad, ZS_BF16, RANDOM, 3);
    check_fill(&s.working, ZS_BF16, RANDOM, 4);
    memset(s.exp_avg_sq.data, 0, s.exp_avg_sq.bytes);
    return s;
}

static void state_free(state *s)
{
    free(s->master.base);
    free(s->exp_avg.base);
    free(s->exp_avg_sq.base);
    free(s->grad.base);
    free(s->working.base);
}

static void state_compare(const char *what, const state *got, const state *want)
{
    check_same(what, "master", ZS_FP32, &got->master, &want->master);
    check_same(what, "exp_avg", ZS_FP32, &got->exp_avg, &want->exp_avg);
    check_same(what, "exp_avg_sq", ZS_FP32, &got->exp_avg_sq, &want->exp_avg_sq);
    check_same(what, "grad", ZS_BF16, &got->grad, &want->grad);
    check_same(what, "working", ZS_BF16, &got->working, &want->working);
}

static void adam_any_threads(void)
{
    static const int threads[] = {1, 2, 3, 8};
    static zs_adam_run runs[SMALL];
    zs_adam_coef coef[2];
    zs_group_config group = {
        .lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .decoupled = 1};
    zs_adam_coef_make(&coef[0], &group, 1, 1.0);
    group.weight_decay = 0;
    zs_adam_coef_make(&coef[1], &group, 7, 0.5);
    size_t count = check_runs(runs, SMALL, N, coef, ZS_COUNT(coef));
    check_that(count > 100 && count < SMALL, "math_host: number of runs");

    state want = state_make();
    for (size_t r = 0; r < count; r++)
        for (uint64_t i = runs[r].first; runs[r].coef && i < runs[r].first + runs[r].count; i++)
            zs_kernels_find("c")->adam[ZS_BF16][ZS_BF16](
                1, (float *)want.master.data + i, (float *)want.exp_avg.data + i,
                (float *)want.exp_avg_sq.data + i, (uint16_t *)want.grad.data + i,
                (uint16_t *)want.working.data + i, runs[r].coef);

    for (size_t t = 0; t < ZS_COUNT(threads); t++) {
        zs_pool *pool;
        zs_math *math = math_with(threads[t], &pool);
        state got = state_make();
        zs_adam_arrays arrays = {.master = got.master.data,
                                 .exp_avg = got.exp_avg.data,
                                 .exp_avg_sq = got.exp_avg_sq.data,
                                 .grad = got.grad.data,
                                 .grad_dtype = ZS_BF16,
                                 .working = got.working.data,
                                 .working_dtype = ZS_BF16};
        char what[64];
        snprintf(what, sizeof what, "math_host adam, %d threads", threads[t]);
        check_that(math->ops->adam(math, NULL, &arrays, runs, count) == ZS_OK, what);
        state_compare(what, &got, &want);
        state_free(&got);
        math_done(math, pool);
    }
    state_free(&want);
}

static void adam_bad_runs(void)
{
    zs_pool *pool;
    zs_math *math = math_with(2, &pool);
    float x[8] = {0};
    zs_adam_arrays arrays = {.master = x, .exp_avg = x, .exp_avg_sq = x, .grad = x};
    zs_adam_run runs[2] = {{4, 4, NULL}, {3, 1, NULL}}, empty = {3, 0, NULL};
    check_that(math->ops->adam(math, NULL, &arrays, runs, 2) == ZS_ERR_INTERNAL,
               "math_host adam: runs that descend are refused");
    check_that(strstr(zs_last_error(), "run 1 starts at element 3") != NULL,
               "math_host adam: message names the run");
    check_that(math->ops->adam(math, NULL, &arrays, NULL, 0) == ZS_OK, "math_host adam: no runs");
    check_that(math->ops->adam(math, NULL, &arrays, &empty, 1) == ZS_OK,
               "math_host adam: an empty run");
    math_done(math, pool);
}

/* Scale and verdict that are known only when the work is done. */
static void adam_scale_and_skip(void)
{
    zs_pool *pool;
    zs_math *math = math_with(2, &pool);
    zs_adam_coef coef;
    zs_group_config group = {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    zs_adam_coef_make(&coef, &group, 1, 99);
    const zs_adam_run run = {0, N, &coef};
    state got = state_make(), want = state_make();
    float scale = 0.25f;
    int skip = 1;
    zs_adam_arrays arrays = {.master = got.master.data,
                             .exp_avg = got.exp_avg.data,
                             .exp_avg_sq = got.exp_avg_sq.data,
                             .grad = got.grad.data,
                             .grad_dtype = ZS_BF16,
                             .working = got.working.data,
                             .working_dtype = ZS_BF16,
                             .grad_scale = &scale,
                             .skip = &skip};
    check_that(math->ops->adam(math, NULL, &arrays, &run, 1) == ZS_OK, "adam");
    state_compare("math_host adam: skipped", &got, &want);
    skip = 0;
    check_that(math->ops->adam(math, NULL, &arrays, &run, 1) == ZS_OK, "adam");
    coef.grad_scale = scale;
    zs_kernels_find("c")->adam[ZS_BF16][ZS_BF16](N, want.master.data, want.exp_avg.data,
                                                 want.exp_avg_sq.data, want.grad.data,
                                                 want.working.data, &coef);
    state_compare("math_host adam: scale from memory", &got, &want);
    state_free(&got);
    state_free(&want);
    math_done(math, pool);
}

static void clip_decides(void)
{
    static const struct {
        const char *what;
        zs_clip_config config;
        double sums[2];
        zs_clip want;
    } cases[] = {
        {"no clipping", {.unscale = 0.5}, {9, 16}, {2.5, 1, 0.5f, 0}},
        {"norm below the limit", {.unscale = 0.5, .max_norm = 3}, {9, 16}, {2.5, 1, 0.5f, 0}},
        {"norm above the limit",
         {.unscale = 1, .max_norm = 2},
         {9, 16},
         {5, 2 / (5 + 1e-6), (float)(2 / (5 + 1e-6)), 0}},
        {"a given factor", {.unscale = 2, .clip_factor = 4, .max_norm = 1}, {9, 16}, {10, 4, 8, 0}},
        {"found_inf", {.unscale = 2, .max_norm = 1, .found_inf = 1}, {9, 16}, {10, 1, 2, 1}},
        {"overflow", {.unscale = 1, .max_norm = 1}, {9, INFINITY}, {INFINITY, 1, 1, 1}},
    };
    zs_pool *pool;
    zs_math *math = math_with(1, &pool);
    for (size_t i = 0; i < ZS_COUNT(cases); i++) {
        zs_clip got;
        check_that(math->ops->clip(math, NULL, &cases[i].config, cases[i].sums, 2, &got) == ZS_OK,
                   cases[i].what);
        check_that(got.norm == cases[i].want.norm && got.factor == cases[i].want.factor &&
                       got.grad_scale == cases[i].want.grad_scale && got.skip == cases[i].want.skip,
                   cases[i].what);
    }
    math_done(math, pool);
}

/* ---- the others ---- */

static void plain_any_threads(void)
{
    static const int threads[] = {1, 2, 3, 8};
    const zs_kernels *c = zs_kernels_find("c");
    check_array x = check_array_make(4, N * 4), y = check_array_make(8, N * 4);
    check_array half = check_array_make(2, N * 2), sum = check_array_make(0, N * 4);
    check_fill(&x, ZS_FP32, RANDOM, 5);
    check_fill(&y, ZS_FP32, RANDOM, 6);
    check_array add = check_array_copy(&y);
    const void *sources[] = {x.data, y.data, x.data};
    c->cast[ZS_BF16][ZS_FP32](N, half.data, x.data);
    c->add[ZS_FP32][ZS_BF16](N, add.data, half.data);
    c->sum_sources[ZS_FP32](N, sum.data, sources, 3);
    double squares = 0;
    for (size_t i = 0; i < N; i += ZS_SUM_BLOCK)
        squares += c->sum_squares[ZS_FP32](ZS_MIN(N - i, (size_t)ZS_SUM_BLOCK),
                                           (const char *)x.data + 4 * i);

    for (size_t t = 0; t < ZS_COUNT(threads); t++) {
        zs_pool *pool;
        zs_math *math = math_with(threads[t], &pool);
        check_array got_half = check_array_make(6, N * 2), got_sum = check_array_make(4, N * 4);
        check_array got_add = check_array_copy(&y);
        double got = -1;
        char what[64];
        snprintf(what, sizeof what, "math_host, %d threads", threads[t]);
        check_that(math->ops->cast(math, NULL, got_half.data, ZS_BF16, x.data, ZS_FP32, N) == ZS_OK,
                   what);
        check_same(what, "cast", ZS_BF16, &got_half, &half);
        check_that(math->ops->add(math, NULL, got_add.data, ZS_FP32, half.data, ZS_BF16, N) ==
                       ZS_OK,
                   what);
        check_same(what, "add", ZS_FP32, &got_add, &add);
        check_that(math->ops->sum_sources(math, NULL, got_sum.data, ZS_FP32, sources, 3, N) ==
                       ZS_OK,
                   what);
        check_same(what, "sum_sources", ZS_FP32, &got_sum, &sum);
        check_that(math->ops->sum_squares(math, NULL, x.data, ZS_FP32, N, &got) == ZS_OK, what);
        check_that(got == squares, "math_host: sum_squares adds the blocks in order");
        check_that(math->ops->sum_squares(math, NULL, x.data, ZS_FP32, 0, &got) == ZS_OK, what);
        check_that(got == 0, "math_host: sum_squares of nothing");
        free(got_half.base);
        free(got_sum.base);
        free(got_add.base);
        math_done(math, pool);
    }
    zs_pool *pool;
    zs_math *math = math_with(1, &pool);
    check_that(math->ops->sum_sources(math, NULL, sum.data, ZS_FP32, sources, 65, 1) ==
                       ZS_ERR_INTERNAL &&
                   strstr(zs_last_error(), "65 sources, at most 64") != NULL,
               "math_host: too many sources are refused");
    math_done(math, pool);
    free(x.base);
    free(y.base);
    free(half.base);
    free(sum.base);
    free(add.base);
}

/* A caller that flushes denormals and rounds upwards gets the same bits, and its mode back. */
static void callers_mode(void)
{
    zs_pool *pool;
    zs_math *math = math_with(1, &pool);
    float tiny = 0x1p-140f, sum[2] = {0x1p-141f, 1};
    const float addend[2] = {tiny, 0x1p-30f};
#if defined(__SSE__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
#endif
    fesetround(FE_UPWARD);
    check_that(math->ops->add(math, NULL, sum, ZS_FP32, addend, ZS_FP32, 2) == ZS_OK, "add");
    int rounding = fegetround();
    fesetround(FE_TONEAREST);
#if defined(__SSE__)
    check_that((_mm_getcsr() & 0x8040) == 0x8040, "math_host: the caller's mode is back");
    _mm_setcsr(before);
#endif
    check_that(rounding == FE_UPWARD, "math_host: the caller's rounding is back");
    check_that(sum[0] == 0x1.8p-140f && sum[1] == 1, "math_host: kernels run in the default mode");
    math_done(math, pool);
}

static void mask(void)
{
    zs_pool *pool;
    zs_math *math = NULL;
    setenv("ZSPILL_ISA", "c", 1);
    check_that(strcmp(zs_kernels_get()->name, "c") == 0, "ZSPILL_ISA=c forces plain C");
    setenv("ZSPILL_ISA", "sse9", 1);
    check_that(zs_pool_open(1, -1, &pool) == ZS_OK, "pool");
    check_that(zs_math_open_host(pool, &math) == ZS_ERR_ARG && math == NULL,
               "an unknown ZSPILL_ISA is refused");
    check_that(strstr(zs_last_error(), "ZSPILL_ISA is 'sse9'") != NULL,
               "the message names ZSPILL_ISA");
    zs_pool_close(&pool);
    unsetenv("ZSPILL_ISA");
    check_that(zs_kernels_find("sse9") == NULL, "an unknown level is not found");
    const char *const *names = zs_kernels_names();
    while (*names && !zs_kernels_find(*names))
        names++;
    check_that(*names && strcmp(zs_kernels_get()->name, *names) == 0,
               "without ZSPILL_ISA the first level of this CPU is chosen");
}

int main(void)
{
    adam_any_threads();
    adam_bad_runs();
    adam_scale_and_skip();
    clip_decides();
    plain_any_threads();
    callers_mode();
    mask();
    return check_finish();
}
