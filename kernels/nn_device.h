/* SPDX-License-Identifier: Apache-2.0 */
/* The decoder's operations on an accelerator: kernels/nn.h over whole arrays, and the matrix
 * products. Everything is queued on one stream, in order, and returns at once. Pointers name device
 * memory; arrays are fp32, by rows and without gaps, unless said otherwise, and overlap only where
 * said. T is a dtype, fp32 or bf16, that the argument behind the pointer names. No result depends
 * on anything but the arguments: no sum uses atomics. */
#ifndef ZS_KERNELS_NN_DEVICE_H
#define ZS_KERNELS_NN_DEVICE_H

#include "zspill.h"

typedef struct zs_nn_device zs_nn_device;

/* c = alpha op(a) op(b) + beta c, matrices by rows: c is m x n, op(a) m x k, op(b) k x n. With beta
 * 0, c is only written. */
typedef struct zs_nn_gemm {
    int m, n, k;
    const void *a, *b;
    void *c;
    zs_dtype in, out;               /* of a and b; of c: in, or fp32 */
    int transpose_a, transpose_b;   /* 1: a is k x m in memory, b n x k */
    int lda, ldb, ldc;              /* elements from row to row */
    int batch;                      /* products: 1 or more */
    int64_t step_a, step_b, step_c; /* elements from one to the next */
    float alpha, beta;
    int tf32; /* 1: fp32 inputs may be rounded to TF32 (10 bits of mantissa) */
} zs_nn_gemm;

/* Scores of a tile of one row's queries, [heads][queries][keys]: query i is token first + i of the
 * row and sees the keys from its document's start up to itself; key j is token begin + j. */
typedef struct zs_nn_scores {
    int heads, queries, keys;
    int first, begin;
    const int32_t *starts; /* of the tile's queries: first token of the document, in the row */
    float *lse;            /* [queries][heads]: logarithm of the softmax' denominator */
} zs_nn_scores;

typedef struct zs_nn_device_ops {
    zs_status (*gemm)(zs_nn_device *nn, const zs_nn_gemm *gemm);
    /* out[t] = table[ids[t]]; table: [any][n] of T */
    zs_status (*lookup)(zs_nn_device *nn, int tokens, int n, const int32_t *ids, const void *table,
                        zs_dtype dtype, float *out);
    /* The table's gradient, [vocab][n] of T: row i gets (accumulate: is added) the rows of dx that
     * the chain first_use[i], next_use[that], ... names up to -1, in its order. */
    zs_status (*lookup_grad)(zs_nn_device *nn, int vocab, int n, const int32_t *first_use,
                             const int32_t *next_use, const float *dx, void *grad, zs_dtype dtype,
                             int accumulate);
    /* y[i] (of y_dtype) = x[r] * rstd[i] * w, rstd = 1 / sqrt(mean(x[r]^2) + eps), r = sources[i]
     * (NULL: i). w: [n] of w_dtype. */
    zs_status (*rms)(zs_nn_device *nn, int rows, int n, const float *x, const int32_t *sources,
                     const void *w, zs_dtype w_dtype, float eps, float *rstd, void *y,
                     zs_dtype y_dtype);
    /* dx[i] = base[i] (NULL: 0) + the gradient of x[i] for dy[r], r = slots[i] (NULL: i); r < 0: 0.
     * rstd[r] as rms left it. y, unless NULL, gets the forward result again, of w's T. dx may be
     * base, and without slots dy. */
    zs_status (*rms_grad)(zs_nn_device *nn, int rows, int n, const float *dy, const int32_t *slots,
                          const float *x, const void *w, zs_dtype dtype, const float *rstd,
                          const float *base, float *dx, void *y);
    /* grad [n] of grad_dtype gets (accumulate: is added) the sum over rows i of dy[i] (of dy_dtype)
     * when x is NULL, else of dy[i] * x[r] * rstd[i], r = sources[i] (NULL: i). partial: room for
     * ZS_NN_SUM_TILES * n floats. */
    zs_status (*column_sums)(zs_nn_device *nn, int rows, int n, const void *dy, zs_dtype dy_dtype,
                             const float *x, const int32_t *sources, const float *rstd,
                             float *partial, void *grad, zs_dtype grad_dtype, int accumulate);
    /* x[i] += b, b: [n] of T */
    zs_status (*add_bias)(zs_nn_device *nn, int rows, int n, float *x, const void *b,
                          zs_dtype dtype);
    /* Cosine and sine of positions[t] * frequencies[i], [tokens][half]. */
    zs_status (*angles)(zs_nn_device *nn, int tokens, int half, const int32_t *positions,
                        const float *frequencies, float *cos, float *sin);
    /* Rotates the pairs (x[t][h][i], x[t][h][i + half]), in place; inverse: back. */
    zs_status (*rope)(zs_nn_device *nn, int tokens, int heads, int half, float *x, const float *cos,
                      const float *sin, int inverse);
    /* y (of T) = gate * sigmoid(gate) * up */
    zs_status (*swiglu)(zs_nn_device *nn, uint64_t n, const float *gate, const float *up, void *y,
                        zs_dtype dtype);
    /* act = swiglu(gate, up), dgate and dup its gradients for dact; all three of T. In fp32 act may
     * be dact, dgate gate and dup up. */
    zs_status (*swiglu_grad)(zs_nn_device *nn, uint64_t n, const float *gate, const float *up,
                             const float *dact, void *act, void *dgate, void *dup, zs_dtype dtype);
    /* out[i] = a[i] . b[i] */
    zs_status (*dots)(zs_nn_device *nn, uint64_t rows, int n, const float *a, const float *b,
                      float *out);
    /* Scores become probabilities, 0 where a query does not see; lse is written. */
    zs_status (*softmax)(zs_nn_device *nn, const zs_nn_scores *scores, float *x);
    /* x, scores again, becomes the probabilities p; dp becomes p * (dp - delta). delta is shaped as
     * lse, which is read. */
    zs_status (*softmax_grad)(zs_nn_device *nn, const zs_nn_scores *scores, float *x, float *dp,
                              const float *delta);
    /* losses[i] = -log softmax(logits[i])[targets[i]]; grad, unless NULL, the gradient of the
     * logits for losses * scale, of T. In fp32 grad may be logits. */
    zs_status (*entropy)(zs_nn_device *nn, int rows, int vocab, float *logits,
                         const int32_t *targets, float scale, double *losses, void *grad,
                         zs_dtype dtype);
    /* *out = (more ? *out : 0) + losses[0] + losses[1] + ... in order */
    zs_status (*sum_losses)(zs_nn_device *nn, uint64_t count, const double *losses, int more,
                            double *out);
    /* dst (bf16) = src */
    zs_status (*narrow)(zs_nn_device *nn, uint64_t n, const float *src, void *dst);
    void (*close)(zs_nn_device *nn);
} zs_nn_device_ops;

enum { ZS_NN_SUM_TILES = 256 };

struct zs_nn_device {
    const zs_nn_device_ops *ops;
    size_t bytes; /* of device memory that it holds */
    /* backends extend this */
};

#endif
