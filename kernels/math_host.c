/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/math.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "kernels/element.h"
#include "kernels/fpmode.h"
#include "kernels/runs.h"

enum {
    BLOCK = 65536,   /* elements; smaller ones of Adam lose 2 % to the cold start of each */
    SUM_BATCH = 512, /* partial sums kept on the stack at once */
    MAX_SOURCES = 64 /* the largest world */
};

typedef struct host_math {
    zs_math base;
    const zs_kernels *kernels;
    zs_pool *pool;
} host_math;

/* Element first of an array, NULL staying NULL. */
static const void *at(const void *array, zs_dtype dtype, uint64_t first)
{
    return array ? (const char *)array + first * zs_dtype_size(dtype) : NULL;
}

static void *at_mutable(void *array, zs_dtype dtype, uint64_t first)
{
    return array ? (char *)array + first * zs_dtype_size(dtype) : NULL;
}

/* ---- adam: a grid of blocks over all runs, so that many small runs cost no more than one ---- */

typedef struct adam_job {
    const zs_kernels *kernels;
    const zs_adam_arrays *arrays;
    const zs_adam_run *runs;
    size_t run_count;
} adam_job;

/* The first run that ends after element. */
static size_t run_find(const adam_job *job, uint64_t element)
{
    size_t low = 0, high = job->run_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (job->runs[middle].first + job->runs[middle].count > element)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static void adam_block(void *arg, size_t index, int worker)
{
    const adam_job *job = arg;
    const zs_adam_arrays *a = job->arrays;
    uint64_t begin = job->runs[0].first + (uint64_t)index * BLOCK, end = begin + BLOCK;
    zs_adam_coef coef;
    zs_fpmode mode = zs_fpmode_enter();
    for (size_t r = run_find(job, begin); r < job->run_count && job->runs[r].first < end; r++) {
        const zs_adam_run *run = &job->runs[r];
        if (!run->coef)
            continue;
        uint64_t first = ZS_MAX(run->first, begin);
        uint64_t n = ZS_MIN(run->first + run->count, end) - first;
        coef = *run->coef;
        if (a->grad_scale)
            coef.grad_scale = *a->grad_scale;
        job->kernels->adam[a->grad_dtype][a->working_dtype](
            n, a->master + first, a->exp_avg + first, a->exp_avg_sq + first,
            at(a->grad, a->grad_dtype, first), at_mutable(a->working, a->working_dtype, first),
            &coef);
    }
    zs_fpmode_leave(mode);
}

static zs_status host_adam(zs_math *math, void *stream, const zs_adam_arrays *arrays,
                           const zs_adam_run *runs, size_t run_count)
{
    const host_math *host = (const host_math *)math;
    ZS_CHECK(zs_adam_runs_check(runs, run_count));
    if (run_count == 0 || (arrays->skip && *arrays->skip))
        return ZS_OK;
    const zs_adam_run *last = &runs[run_count - 1];
    const uint64_t count = last->first + last->count - runs[0].first;
    adam_job job = {host->kernels, arrays, runs, run_count};
    zs_pool_run(host->pool, adam_block, &job, zs_div_up(count, BLOCK));
    return ZS_OK;
}

/* ---- cast, add, sum_sources ---- */

typedef struct plain_job {
    void (*kernel)(size_t n, void *dst, const void *src);
    void (*sum)(size_t n, void *dst, const void *const *src, size_t sources);
    void *dst;
    zs_dtype dst_dtype;
    const void *const *src;
    size_t sources;
    zs_dtype src_dtype;
    uint64_t n;
} plain_job;

static void plain_block(void *arg, size_t index, int worker)
{
    const plain_job *job = arg;
    uint64_t first = (uint64_t)index * BLOCK;
    uint64_t n = ZS_MIN(job->n - first, (uint64_t)BLOCK);
    void *dst = at_mutable(job->dst, job->dst_dtype, first);
    zs_fpmode mode = zs_fpmode_enter();
    if (job->kernel) {
        job->kernel(n, dst, at(job->src[0], job->src_dtype, first));
    } else {
        const void *src[MAX_SOURCES];
        for (size_t s = 0; s < job->sources; s++)
            src[s] = at(job->src[s], job->src_dtype, first);
        job->sum(n, dst, src, job->sources);
    }
    zs_fpmode_leave(mode);
}

static void plain_run(const host_math *host, plain_job *job)
{
    zs_pool_run(host->pool, plain_block, job, zs_div_up(job->n, BLOCK));
}

static zs_status run_pair(zs_math *math, void (*kernel)(size_t n, void *dst, const void *src),
                          void *dst, zs_dtype dst_dtype, const void *src, zs_dtype src_dtype,
                          uint64_t n)
{
    plain_job job = {.kernel = kernel,
                     .dst = dst,
                     .dst_dtype = dst_dtype,
                     .src = &src,
                     .src_dtype = src_dtype,
                     .n = n};
    plain_run((const host_math *)math, &job);
    return ZS_OK;
}

static zs_status host_cast(zs_math *math, void *stream, void *dst, zs_dtype dst_dtype,
                           const void *src, zs_dtype src_dtype, uint64_t n)
{
    const zs_kernels *kernels = ((const host_math *)math)->kernels;
    return run_pair(math, kernels->cast[dst_dtype][src_dtype], dst, dst_dtype, src, src_dtype, n);
}

static zs_status host_add(zs_math *math, void *stream, void *dst, zs_dtype dst_dtype,
                          const void *src, zs_dtype src_dtype, uint64_t n)
{
    const zs_kernels *kernels = ((const host_math *)math)->kernels;
    return run_pair(math, kernels->add[dst_dtype][src_dtype], dst, dst_dtype, src, src_dtype, n);
}

static zs_status host_sum_sources(zs_math *math, void *stream, void *dst, zs_dtype dtype,
                                  const void *const *src, size_t sources, uint64_t n)
{
    const host_math *host = (const host_math *)math;
    if (sources > MAX_SOURCES)
        return zs_fail(ZS_ERR_INTERNAL, "sum_sources: %zu sources, at most %d", sources,
                       MAX_SOURCES);
    plain_job job = {.sum = host->kernels->sum_sources[dtype],
                     .dst = dst,
                     .dst_dtype = dtype,
                     .src = src,
                     .sources = sources,
                     .src_dtype = dtype,
                     .n = n};
    plain_run(host, &job);
    return ZS_OK;
}

/* ---- sum_squares ---- */

typedef struct squares_job {
    double (*kernel)(size_t n, const void *x);
    const void *x;
    zs_dtype dtype;
    uint64_t n;
    double partial[SUM_BATCH];
} squares_job;

static void squares_block(void *arg, size_t index, int worker)
{
    squares_job *job = arg;
    uint64_t first = (uint64_t)index * ZS_SUM_BLOCK;
    zs_fpmode mode = zs_fpmode_enter();
    job->partial[index] =
        job->kernel(ZS_MIN(job->n - first, (uint64_t)ZS_SUM_BLOCK), at(job->x, job->dtype, first));
    zs_fpmode_leave(mode);
}

static zs_status host_sum_squares(zs_math *math, void *stream, const void *x, zs_dtype dtype,
                                  uint64_t n, double *out)
{
    const host_math *host = (const host_math *)math;
    squares_job job = {.kernel = host->kernels->sum_squares[dtype], .dtype = dtype};
    double sum = 0;
    for (uint64_t first = 0; first < n; first += job.n) {
        job.x = at(x, dtype, first);
        job.n = ZS_MIN(n - first, (uint64_t)SUM_BATCH * ZS_SUM_BLOCK);
        size_t blocks = zs_div_up(job.n, ZS_SUM_BLOCK);
        zs_pool_run(host->pool, squares_block, &job, blocks);
        for (size_t b = 0; b < blocks; b++)
            sum += job.partial[b];
    }
    *out = sum;
    return ZS_OK;
}

static zs_status host_sum_doubles(zs_math *math, void *stream, const double *sums, size_t count,
                                  double *out)
{
    double sum = 0;
    zs_fpmode mode = zs_fpmode_enter();
    for (size_t i = 0; i < count; i++)
        sum += sums[i];
    zs_fpmode_leave(mode);
    *out = sum;
    return ZS_OK;
}

static zs_status host_clip(zs_math *math, void *stream, const zs_clip_config *config,
                           const double *sums, size_t count, zs_clip *out)
{
    double sum;
    ZS_CHECK(host_sum_doubles(math, stream, sums, count, &sum));
    zs_fpmode mode = zs_fpmode_enter();
    *out = zs_clip_element(config, sum);
    zs_fpmode_leave(mode);
    return ZS_OK;
}

/* ---- open and close ---- */

static void host_close(zs_math *math)
{
    free(math);
}

static const zs_math_ops host_ops = {
    .adam = host_adam,
    .cast = host_cast,
    .add = host_add,
    .sum_sources = host_sum_sources,
    .sum_squares = host_sum_squares,
    .sum_doubles = host_sum_doubles,
    .clip = host_clip,
    .close = host_close,
};

static zs_status check_mask(void)
{
    const char *mask = getenv("ZSPILL_ISA");
    if (!mask)
        return ZS_OK;
    for (const char *const *name = zs_kernels_names(); *name; name++)
        if (strcmp(*name, mask) == 0)
            return ZS_OK;
    return zs_fail(ZS_ERR_ARG,
                   "environment variable ZSPILL_ISA is '%s', a level this build has not got: unset "
                   "it, or set it to '%s' for the best or 'c' for plain C",
                   mask, zs_kernels_names()[0]);
}

zs_status zs_math_open_host(zs_pool *pool, zs_math **out)
{
    *out = NULL;
    ZS_CHECK(check_mask());
    host_math *host = malloc(sizeof *host);
    if (!host)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the host's maths");
    *host = (host_math){{&host_ops}, zs_kernels_get(), pool};
    *out = &host->base;
    return ZS_OK;
}

void zs_math_close(zs_math **math)
{
    if (*math)
        (*math)->ops->close(*math);
    *math = NULL;
}
