/* SPDX-License-Identifier: Apache-2.0 */
/* The decoder's row kernels, one thread, host memory, fp32: what is left of a transformer when the
 * matrix products are taken out. As in kernels.h every level gives the same bits: reductions run in
 * 32 lanes (element i in lane i mod 32) that are added as a tree, exp is a polynomial of + and *.
 * n is a row's length; arrays need no alignment and overlap only where said. */
#ifndef ZS_KERNELS_NN_H
#define ZS_KERNELS_NN_H

#include <stddef.h>

typedef struct zs_nn {
    const char *name; /* "c", "avx2" */
    /* y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps), which is returned; y may be x. */
    float (*rms)(size_t n, float *y, const float *x, const float *w, float eps);
    /* Backward of rms for dy, into dx: base (NULL: zero) plus the gradient of x. dw += the gradient
     * of w. y, unless NULL, gets the forward result again. dx may be base or dy. */
    void (*rms_grad)(size_t n, float *dx, const float *base, const float *dy, const float *x,
                     const float *w, float rstd, float *dw, float *y);
    /* Rotates the pairs (x[i], x[i + half]) by the angles of cos and sin, in place; inverse: back.
     */
    void (*rope)(size_t half, float *x, const float *cos, const float *sin, int inverse);
    /* y = gate * sigmoid(gate) * up */
    void (*swiglu)(size_t n, float *y, const float *gate, const float *up);
    /* act = swiglu(gate, up); gate and up become their gradients for dact. act may be dact. */
    void (*swiglu_grad)(size_t n, float *act, float *gate, float *up, const float *dact);
    /* x = exp(x - max), in place; returns the sum, which is >= 1. n >= 1. */
    float (*softmax)(size_t n, float *x, float *max);
    /* p = exp(p - lse); dp = p * (dp - delta) */
    void (*softmax_grad)(size_t n, float *p, float *dp, float lse, float delta);
    /* dst += src */
    void (*add)(size_t n, float *dst, const float *src);
    void (*scale)(size_t n, float *x, float factor);
    float (*dot)(size_t n, const float *a, const float *b);
    /* dst = src, bf16 to fp32 */
    void (*widen)(size_t n, float *dst, const unsigned short *src);
} zs_nn;

/* The best level of this CPU, at most what ZSPILL_ISA ("c", "avx2") allows; never NULL. */
const zs_nn *zs_nn_get(void);
/* A level by name, NULL when this build or CPU has not got it. For tests. */
const zs_nn *zs_nn_find(const char *name);

#endif
