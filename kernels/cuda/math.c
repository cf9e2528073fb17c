/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/math.h"

#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "kernels/cuda/kernels.h"
#include "kernels/runs.h"

enum {
    BLOCKS_EACH = 32, /* blocks of threads of one launch, for each multiprocessor */
    SUM_BATCH = 4096  /* partial sums that there is room for */
};

typedef struct cuda_math {
    zs_math base;
    zs_device *device;
    unsigned blocks;
    zs_mem partial; /* [SUM_BATCH] double */
    /* Behind the last use of partial, whatever the stream was. */
    cudaEvent_t partial_free;
    int partial_used;
} cuda_math;

/* The stream that work goes to, with its device as the thread's present one. */
static zs_status enter(const cuda_math *math, void *stream, cudaStream_t *out)
{
    ZS_CHECK(zs_cuda_enter(math->device));
    *out = stream ? stream : math->device->ops->stream_native(math->device, NULL);
    return ZS_OK;
}

/* ---- alignment ---- */

typedef struct array {
    const char *name;
    const void *ptr; /* NULL: there is none */
    size_t width;    /* bytes of an element */
} array;

/* Elements before the first that begins a group. */
static uint32_t lead_of(const array *a)
{
    const size_t past = (uintptr_t)a->ptr / a->width % ZS_CUDA_GROUP;
    return (uint32_t)((ZS_CUDA_GROUP - past) % ZS_CUDA_GROUP);
}

/* Groups can be accessed whole where all arrays begin equally far from one. */
static zs_status align_of(const char *what, const array *arrays, size_t count, zs_cuda_align *out)
{
    const uint32_t lead = lead_of(&arrays[0]);
    *out = (zs_cuda_align){.shift = (ZS_CUDA_GROUP - lead) % ZS_CUDA_GROUP, .vector = 1};
    for (size_t i = 0; i < count; i++) {
        if ((uintptr_t)arrays[i].ptr % arrays[i].width)
            return zs_fail(ZS_ERR_INTERNAL,
                           "%s: %s is at %p, not a multiple of its elements' %zu bytes", what,
                           arrays[i].name, arrays[i].ptr, arrays[i].width);
        if (arrays[i].ptr && lead_of(&arrays[i]) != lead)
            out->vector = 0;
    }
    return ZS_OK;
}

/* ---- adam ---- */

/* The place of coef in the table, which is given one when it has none; ZS_CUDA_COEFS: full. */
static uint32_t coef_index(zs_cuda_runs *table, const zs_adam_coef **coefs, uint32_t *count,
                           const zs_adam_coef *coef)
{
    for (uint32_t i = 0; i < *count; i++)
        if (coefs[i] == coef)
            return i;
    if (*count == ZS_CUDA_COEFS)
        return ZS_CUDA_COEFS;
    coefs[*count] = coef;
    table->coef[*count] = *coef;
    return (*count)++;
}

/* Fills a table from *next on, up to where it is full. */
static zs_status fill(zs_cuda_runs *table, zs_cuda_align align, const zs_adam_run *runs,
                      size_t run_count, size_t *next)
{
    const zs_adam_coef *coefs[ZS_CUDA_COEFS];
    uint32_t coef_count = 0;
    table->run_count = table->tiles = 0;
    for (; *next < run_count && table->run_count < ZS_CUDA_RUNS; ++*next) {
        const zs_adam_run *run = &runs[*next];
        if (!run->coef || !run->count)
            continue;
        const uint64_t groups = zs_div_up(run->first + run->count + align.shift, ZS_CUDA_GROUP) -
                                (run->first + align.shift) / ZS_CUDA_GROUP;
        const uint64_t tiles = zs_div_up(groups, ZS_CUDA_THREADS);
        if (tiles > UINT32_MAX - table->tiles) {
            if (table->run_count)
                break;
            return zs_fail(ZS_ERR_INTERNAL, "adam: run %zu has %llu elements, too many", *next,
                           (unsigned long long)run->count);
        }
        const uint32_t coef = coef_index(table, coefs, &coef_count, run->coef);
        if (coef == ZS_CUDA_COEFS)
            break;
        table->run[table->run_count++] =
            (zs_cuda_run){run->first, run->first + run->count, table->tiles, coef};
        table->tiles += (uint32_t)tiles;
    }
    return ZS_OK;
}

static zs_status cuda_adam(zs_math *math, void *stream, const zs_adam_arrays *a,
                           const zs_adam_run *runs, size_t run_count)
{
    const cuda_math *m = (const cuda_math *)math;
    const array arrays[] = {{"master", a->master, sizeof(float)},
                            {"exp_avg", a->exp_avg, sizeof(float)},
                            {"exp_avg_sq", a->exp_avg_sq, sizeof(float)},
                            {"grad", a->grad, zs_dtype_size(a->grad_dtype)},
                            {"working", a->working, zs_dtype_size(a->working_dtype)}};
    zs_cuda_align align;
    zs_cuda_runs table;
    cudaStream_t native;
    ZS_CHECK(align_of("adam", arrays, ZS_COUNT(arrays), &align));
    ZS_CHECK(zs_adam_runs_check(runs, run_count));
    ZS_CHECK(enter(m, stream, &native));
    for (size_t next = 0; next < run_count;) {
        ZS_CHECK(fill(&table, align, runs, run_count, &next));
        if (table.tiles)
            ZS_CHECK(zs_cuda_adam(native, m->blocks, a, align, &table));
    }
    return ZS_OK;
}

/* ---- cast, add, sum_sources ---- */

static zs_status cuda_cast(zs_math *math, void *stream, void *dst, zs_dtype dst_dtype,
                           const void *src, zs_dtype src_dtype, uint64_t n)
{
    const cuda_math *m = (const cuda_math *)math;
    const array arrays[] = {{"dst", dst, zs_dtype_size(dst_dtype)},
                            {"src", src, zs_dtype_size(src_dtype)}};
    zs_cuda_align align;
    cudaStream_t native;
    if (!n || (dst == src && dst_dtype == src_dtype))
        return ZS_OK;
    ZS_CHECK(align_of("cast", arrays, ZS_COUNT(arrays), &align));
    ZS_CHECK(enter(m, stream, &native));
    if (dst_dtype == src_dtype)
        return zs_cuda_status(
            cudaMemcpyAsync(dst, src, n * zs_dtype_size(dst_dtype), cudaMemcpyDefault, native),
            "cast: queueing a copy");
    return zs_cuda_cast(native, m->blocks, dst, dst_dtype, src, src_dtype, n, align);
}

static zs_status cuda_add(zs_math *math, void *stream, void *dst, zs_dtype dst_dtype,
                          const void *src, zs_dtype src_dtype, uint64_t n)
{
    const cuda_math *m = (const cuda_math *)math;
    const array arrays[] = {{"dst", dst, zs_dtype_size(dst_dtype)},
                            {"src", src, zs_dtype_size(src_dtype)}};
    zs_cuda_align align;
    cudaStream_t native;
    if (!n)
        return ZS_OK;
    ZS_CHECK(align_of("add", arrays, ZS_COUNT(arrays), &align));
    ZS_CHECK(enter(m, stream, &native));
    return zs_cuda_add(native, m->blocks, dst, dst_dtype, src, src_dtype, n, align);
}

static zs_status cuda_sum_sources(zs_math *math, void *stream, void *dst, zs_dtype dtype,
                                  const void *const *src, size_t sources, uint64_t n)
{
    const cuda_math *m = (const cuda_math *)math;
    array arrays[1 + ZS_CUDA_SOURCES] = {{"dst", dst, zs_dtype_size(dtype)}};
    zs_cuda_sources table = {{NULL}};
    zs_cuda_align align;
    cudaStream_t native;
    if (sources > ZS_CUDA_SOURCES)
        return zs_fail(ZS_ERR_INTERNAL, "sum_sources: %zu sources, at most %d", sources,
                       (int)ZS_CUDA_SOURCES);
    if (!n)
        return ZS_OK;
    for (size_t s = 0; s < sources; s++) {
        table.at[s] = src[s];
        arrays[1 + s] = (array){"a source", src[s], zs_dtype_size(dtype)};
    }
    ZS_CHECK(align_of("sum_sources", arrays, 1 + sources, &align));
    ZS_CHECK(enter(m, stream, &native));
    if (!sources)
        return zs_cuda_status(cudaMemsetAsync(dst, 0, n * zs_dtype_size(dtype), native),
                              "sum_sources: queueing a fill with zeros");
    return zs_cuda_sum_sources(native, m->blocks, dst, dtype, &table, (unsigned)sources, n, align);
}

/* ---- the norm ---- */

static zs_status cuda_sum_squares(zs_math *math, void *stream, const void *x, zs_dtype dtype,
                                  uint64_t n, double *out)
{
    cuda_math *m = (cuda_math *)math;
    const array arrays[] = {{"x", x, zs_dtype_size(dtype)}, {"out", out, sizeof *out}};
    const uint64_t batch = (uint64_t)SUM_BATCH * ZS_SUM_BLOCK;
    zs_cuda_align align;
    cudaStream_t native;
    ZS_CHECK(align_of("sum_squares", arrays, ZS_COUNT(arrays), &align));
    ZS_CHECK(enter(m, stream, &native));
    if (m->partial_used)
        ZS_CHECK(zs_cuda_status(cudaStreamWaitEvent(native, m->partial_free, 0),
                                "sum_squares: waiting for the previous one"));
    for (uint64_t first = 0; first == 0 || first < n; first += batch) {
        const uint64_t count = ZS_MIN(n - first, batch);
        const uint64_t blocks = zs_div_up(count, ZS_SUM_BLOCK);
        if (blocks)
            ZS_CHECK(zs_cuda_sum_squares(native, (const char *)x + first * zs_dtype_size(dtype),
                                         dtype, count, m->partial.ptr));
        ZS_CHECK(zs_cuda_sum_doubles(native, m->partial.ptr, blocks, first > 0, out));
    }
    ZS_CHECK(
        zs_cuda_status(cudaEventRecord(m->partial_free, native), "sum_squares: recording its end"));
    m->partial_used = 1;
    return ZS_OK;
}

static zs_status cuda_sum_doubles(zs_math *math, void *stream, const double *sums, size_t count,
                                  double *out)
{
    cudaStream_t native;
    ZS_CHECK(enter((const cuda_math *)math, stream, &native));
    return zs_cuda_sum_doubles(native, sums, count, 0, out);
}

static zs_status cuda_clip(zs_math *math, void *stream, const zs_clip_config *config,
                           const double *sums, size_t count, zs_clip *out)
{
    cudaStream_t native;
    ZS_CHECK(enter((const cuda_math *)math, stream, &native));
    return zs_cuda_clip(native, config, sums, count, out);
}

/* ---- open and close ---- */

static void cuda_math_close(zs_math *math)
{
    cuda_math *m = (cuda_math *)math;
    if (m->partial_free && zs_cuda_enter(m->device) == ZS_OK)
        (void)cudaEventDestroy(m->partial_free);
    zs_cuda_host_table->mem_free(&m->partial);
    free(m);
}

static const zs_math_ops cuda_ops = {
    .adam = cuda_adam,
    .cast = cuda_cast,
    .add = cuda_add,
    .sum_sources = cuda_sum_sources,
    .sum_squares = cuda_sum_squares,
    .sum_doubles = cuda_sum_doubles,
    .clip = cuda_clip,
    .close = cuda_math_close,
};

zs_status zs_cuda_math_open(zs_device *device, zs_ledger *ledger, zs_math **out)
{
    zs_status status = ZS_OK;
    zs_cuda_info info;
    *out = NULL;
    cuda_math *m = calloc(1, sizeof *m);
    if (!m)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the CUDA device's maths");
    m->base.ops = &cuda_ops;
    m->device = device;
    ZS_TRY(zs_cuda_enter(device));
    ZS_TRY(zs_cuda_device_info(((const zs_cuda_device *)device)->ordinal, &info));
    m->blocks = (unsigned)info.multiprocessors * BLOCKS_EACH;
    ZS_TRY(zs_cuda_host_table->mem_alloc(device, ledger, ZS_TIER_DEVICE, "partial sums",
                                         SUM_BATCH * sizeof(double), &m->partial));
    ZS_TRY(zs_cuda_status(cudaEventCreateWithFlags(&m->partial_free, cudaEventDisableTiming),
                          "making a CUDA event"));
    ZS_TRY(zs_cuda_load_adam());
    ZS_TRY(zs_cuda_load_elementwise());
    ZS_TRY(zs_cuda_load_norm());
    *out = &m->base;
    return ZS_OK;
fail:
    cuda_math_close(&m->base);
    return status;
}
