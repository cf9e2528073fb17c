/* SPDX-License-Identifier: Apache-2.0 */
/* Maths on flat arrays, one thread, host memory: the table of the best implementation for this CPU.
 * Every level gives the same bits: each element (or lane, see sum_squares) is computed by the same
 * operations in the same order, + - * / sqrt and explicit fma only, without contraction
 * (kernels/element.h). Arrays need no alignment and do not overlap unless said; NaNs may differ in
 * payload. Conversions round to nearest even and keep NaN a NaN. The caller's floating-point mode
 * must be the default one: kernels/fpmode.h sets it (zs_math does so by itself). */
#ifndef ZS_KERNELS_KERNELS_H
#define ZS_KERNELS_KERNELS_H

#include <stddef.h>

#include "zspill.h"

/* What one Adam update needs beside the arrays; made by zs_adam_coef_make in double and rounded to
 * float once. */
typedef struct zs_adam_coef {
    float grad_scale; /* unscale x clip factor, applied to the gradient first */
    float beta1, beta2;
    float one_minus_beta1, one_minus_beta2;
    float step_size;      /* lr / (1 - beta1^t) */
    float bias2_sqrt_inv; /* 1 / sqrt(1 - beta2^t) */
    float eps;
    float decay; /* decoupled: 1 - lr * weight_decay, multiplies the weight; else weight_decay,
                    times the weight added to the gradient */
    int decoupled;
} zs_adam_coef;

/* step >= 1: this parameter's count, the update in question included. */
void zs_adam_coef_make(zs_adam_coef *out, const zs_group_config *group, uint64_t step,
                       double grad_scale);

/* What a step does with its gradients: decided from the sum of their squares. */
typedef struct zs_clip_config {
    double unscale;     /* multiplies gradients before all else: 1 / loss scale */
    double clip_factor; /* above 0: clip by this */
    double max_norm;    /* else above 0: clip to this norm */
    int found_inf;      /* not 0: skip whatever the norm is */
} zs_clip_config;

typedef struct zs_clip {
    double norm;      /* of the unscaled gradients */
    double factor;    /* by which they are clipped; 1 when skipped */
    float grad_scale; /* unscale x factor, as zs_adam_coef has it */
    int skip;         /* found_inf, or the norm is not finite */
} zs_clip;

enum { ZS_DTYPES = 3, ZS_SUM_BLOCK = 65536 };

typedef struct zs_kernels {
    const char *name; /* "c", "avx2" */
    /* [grad dtype][working dtype]; working may be NULL: master only. */
    void (*adam[ZS_DTYPES][ZS_DTYPES])(size_t n, float *master, float *exp_avg, float *exp_avg_sq,
                                       const void *grad, void *working, const zs_adam_coef *coef);
    /* dst = src; [dst][src]. dst may be src when the dtypes are the same. */
    void (*cast[ZS_DTYPES][ZS_DTYPES])(size_t n, void *dst, const void *src);
    /* dst = dst + src, added in fp32, rounded once; [dst][src] */
    void (*add[ZS_DTYPES][ZS_DTYPES])(size_t n, void *dst, const void *src);
    /* dst[i] = src[0][i] + src[1][i] + ... in fp32 from left to right, rounded once; dst may be one
     * of src */
    void (*sum_sources[ZS_DTYPES])(size_t n, void *dst, const void *const *src, size_t sources);
    /* Sum of squares in double of at most ZS_SUM_BLOCK elements: lane j of 8 adds elements i = j
     * mod 8 in order, then the lanes are added as a tree: j and j + 4, j and j + 2, 0 and 1. NaN
     * and Inf come out as NaN or Inf. */
    double (*sum_squares[ZS_DTYPES])(size_t n, const void *x);
    /* 1 when any element is NaN or Inf */
    int (*nonfinite[ZS_DTYPES])(size_t n, const void *x);
} zs_kernels;

/* The best level of this CPU, at most what ZSPILL_ISA ("c", "avx2") allows; never NULL. Asks the
 * CPU each time, which is slow in a virtual machine: keep what it returns. */
const zs_kernels *zs_kernels_get(void);
/* A level by name, NULL when this build or CPU has not got it. For tests. */
const zs_kernels *zs_kernels_find(const char *name);
/* The table of levels, best first, ended by NULL. */
const char *const *zs_kernels_names(void);

#endif
