/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels over large arrays: on the host cut into fixed blocks that a pool works through, on an
 * accelerator queued on a stream (ops->stream_native of its device; NULL: the device's first).
 * Same bits on both, whatever the number of threads.
 *
 * What a pointer names, results too, is on an accelerator device memory or memory of its host_alloc
 * (which it then reads and writes over the bus: zero copy), aligned to its elements; on the host
 * any memory. Results are there for later work of the same stream, and for the host once the stream
 * is synchronized. runs, coefs, configs and lists of sources are read before the call returns. */
#ifndef ZS_KERNELS_MATH_H
#define ZS_KERNELS_MATH_H

#include "base/pool.h"
#include "kernels/kernels.h"
#include "zspill.h"

/* Elements [first, first + count) of a chunk share coef; coef NULL: left alone. Runs ascend and do
 * not overlap. */
typedef struct zs_adam_run {
    uint64_t first, count;
    const zs_adam_coef *coef;
} zs_adam_run;

/* The arrays of one chunk, element 0 of each belonging together. */
typedef struct zs_adam_arrays {
    float *master, *exp_avg, *exp_avg_sq;
    const void *grad;
    zs_dtype grad_dtype;
    void *working; /* NULL: none */
    zs_dtype working_dtype;
    /* Both are read when the work is done, not when it is queued; the fields of a zs_clip. */
    const float *grad_scale; /* NULL: each coef's own */
    const int *skip;         /* NULL, or *skip not 0: nothing is changed */
} zs_adam_arrays;

typedef struct zs_math zs_math;
typedef struct zs_math_ops {
    zs_status (*adam)(zs_math *math, void *stream, const zs_adam_arrays *arrays,
                      const zs_adam_run *runs, size_t run_count);
    zs_status (*cast)(zs_math *math, void *stream, void *dst, zs_dtype dst_dtype, const void *src,
                      zs_dtype src_dtype, uint64_t n);
    zs_status (*add)(zs_math *math, void *stream, void *dst, zs_dtype dst_dtype, const void *src,
                     zs_dtype src_dtype, uint64_t n);
    zs_status (*sum_sources)(zs_math *math, void *stream, void *dst, zs_dtype dtype,
                             const void *const *src, size_t sources, uint64_t n);
    /* *out = sum over blocks of ZS_SUM_BLOCK elements counted from x, in order */
    zs_status (*sum_squares)(zs_math *math, void *stream, const void *x, zs_dtype dtype, uint64_t n,
                             double *out);
    /* *out = sums[0] + sums[1] + ... in order */
    zs_status (*sum_doubles)(zs_math *math, void *stream, const double *sums, size_t count,
                             double *out);
    /* *out from sums[0] + sums[1] + ... in order */
    zs_status (*clip)(zs_math *math, void *stream, const zs_clip_config *config, const double *sums,
                      size_t count, zs_clip *out);
    void (*close)(zs_math *math);
} zs_math_ops;

struct zs_math {
    const zs_math_ops *ops;
    /* backends extend this */
};

/* pool is borrowed. Refuses a ZSPILL_ISA that names no level. At most 64 sources in sum_sources. */
zs_status zs_math_open_host(zs_pool *pool, zs_math **out);
void zs_math_close(zs_math **math);

#endif
