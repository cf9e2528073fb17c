/* SPDX-License-Identifier: Apache-2.0 */
/* The decoder's kernels on an accelerator: queued on a stream (ops->stream_native of its device),
 * pointers are device memory. What goes into and comes out of matrix products is of one dtype, fp32
 * or bf16, here called narrow; sums and what they run over (the residual, its gradient, statistics)
 * are fp32. Sums have an order that the shapes alone decide; nothing is added by atomics.
 *
 * Token-major: [tokens][heads x dim]. Head-major: [row][kv head][seq][group][dim] with group =
 * heads / kv heads, so that what attends to the same keys lies together. */
#ifndef ZS_KERNELS_NN_DEVICE_H
#define ZS_KERNELS_NN_DEVICE_H

#include "zspill.h"

enum {
    ZS_NN_TILE_MOST = 512,    /* queries, keys of a tile of attention */
    ZS_NN_HEAD_DIM_MOST = 256 /* and even */
};

/* c = alpha op(a) op(b) + beta c by rows: c is m x n, op(a) m x k, op(b) k x n. */
typedef struct zs_gemm {
    int m, n, k;
    int transpose_a, transpose_b;
    const void *a, *b;
    zs_dtype dtype; /* of a and b */
    int lda, ldb;
    void *c;
    zs_dtype c_dtype; /* dtype, or fp32 */
    int ldc;
    float alpha, beta;                    /* beta 0: what c holds is not read */
    int batch;                            /* products; 0: one */
    int64_t stride_a, stride_b, stride_c; /* elements from one to the next */
} zs_gemm;

/* y = x * rstd * w of each of count rows of width; rstd = 1 / sqrt(mean(x^2) + eps) is kept. */
typedef struct zs_nn_rms {
    int count, width;
    const float *x;
    const int32_t *rows; /* row of x that each is made from; NULL: its own */
    const void *w;       /* narrow */
    float eps;
    float *rstd; /* [count] */
    void *y;     /* narrow [count][width] */
} zs_nn_rms;

typedef struct zs_nn_rms_grad {
    int count, width;
    const float *base;   /* NULL: zero */
    const float *dy, *x; /* x: [count][width] */
    const int32_t *slot; /* row of dy and rstd that belongs to each of x, -1: none; NULL: its own */
    const void *w;
    const float *rstd;
    float *dx;       /* base plus the gradient of x; may be base or dy */
    void *dx_narrow; /* the same, narrow; NULL: not wanted */
    void *y;         /* the forward result again; NULL: not wanted */
} zs_nn_rms_grad;

/* out[c] = (add ? out[c] : 0) + sum over rows of dy[row][c], or of dy[row][c] * x[from][c] *
 * rstd[row], from = rows ? rows[row] : row: gradients of biases and of norms. */
typedef struct zs_nn_columns {
    int count, width;
    const void *dy; /* [count][width] */
    zs_dtype dtype; /* of dy */
    const float *x; /* [...][width]; NULL: sums of dy */
    const int32_t *rows;
    const float *rstd;
    float *out;
    int add;
} zs_nn_columns;

/* What turns a projection's result into q or k: each head's norm if there is one, then rope; or v,
 * which only moves to its place. */
typedef struct zs_nn_heads {
    int rows, seq, heads, kv_heads, dim; /* heads: of this array, kv_heads or a multiple of it */
    const float *cos, *sin;              /* [tokens][dim / 2]; NULL: no rope */
    const void *norm;                    /* narrow [dim]; NULL: none */
    float eps;
    float *rstd;     /* [tokens][heads], with norm */
    const void *raw; /* narrow, token-major; backward needs it with norm */
    void *out;       /* forward: narrow, head-major */
    /* Backward: */
    const float *d; /* head-major, of out */
    void *draw;     /* narrow, token-major */
    float *dnorm;   /* [dim], with norm */
    int add;        /* 1: dnorm is added to */
} zs_nn_heads;

/* Causal attention within documents. */
typedef struct zs_nn_attention {
    int rows, seq, heads, kv_heads, dim;
    int tile;                   /* <= ZS_NN_TILE_MOST */
    const int32_t *starts;      /* [tokens]: in-row index at which each one's document starts */
    const int32_t *host_starts; /* the same in the host's memory, read before the call returns */
    const void *q, *k, *v;      /* narrow, head-major */
    void *out;                  /* narrow, token-major; backward reads it */
    float *lse;                 /* [row][kv head][seq][group] */
    float *room;                /* zs_nn_attention_room elements */
    /* Backward: */
    const void *dout;    /* narrow, token-major */
    void *dout_heads;    /* narrow, head-major: room for it */
    float *delta;        /* as lse: room for it */
    float *dq, *dk, *dv; /* head-major */
} zs_nn_attention;

/* Cross-entropy of count rows of logits. */
typedef struct zs_nn_entropy {
    int count, vocab;
    float *logits; /* [count][ld] */
    int ld;
    const int32_t *targets;
    double *losses; /* [count] */
    int grad;       /* 1: logits become their gradient times scale, narrow: [count][ld] in fp32,
                       [count][2 ld] in bf16 */
    float scale;
} zs_nn_entropy;

/* The gradient of an embedding: row i of out gets (add: is added) the rows of dx that the chain
 * first_use[i], next_use[that], ... names up to -1, in its order. */
typedef struct zs_nn_embed_grad {
    int vocab, width;
    const int32_t *first_use, *next_use; /* [vocab], [tokens] */
    const float *dx;
    float *out; /* [vocab][width] */
    int add;
} zs_nn_embed_grad;

typedef struct zs_nn_device zs_nn_device;

/* dtype: narrow's. */
typedef struct zs_nn_device_ops {
    zs_status (*gemm)(zs_nn_device *nn, const zs_gemm *gemm);
    /* out[t] = row ids[t] of the narrow table [...][width], in fp32 */
    zs_status (*embed)(zs_nn_device *nn, int tokens, int width, const int32_t *ids,
                       const void *table, float *out);
    zs_status (*embed_grad)(zs_nn_device *nn, const zs_nn_embed_grad *grad);
    zs_status (*rms)(zs_nn_device *nn, const zs_nn_rms *rms);
    zs_status (*rms_grad)(zs_nn_device *nn, const zs_nn_rms_grad *grad);
    zs_status (*columns)(zs_nn_device *nn, const zs_nn_columns *columns);
    /* Cosine and sine of positions[t] * frequencies[i], [tokens][half]. */
    zs_status (*angles)(zs_nn_device *nn, int tokens, int half, const int32_t *positions,
                        const float *frequencies, float *cos, float *sin);
    zs_status (*heads)(zs_nn_device *nn, const zs_nn_heads *heads);
    zs_status (*heads_grad)(zs_nn_device *nn, const zs_nn_heads *heads);
    /* y[count][width] += narrow bias[width]; y is narrow or fp32 */
    zs_status (*bias)(zs_nn_device *nn, int count, int width, zs_dtype dtype, void *y,
                      const void *bias);
    /* act = gate * sigmoid(gate) * up, all narrow */
    zs_status (*swiglu)(zs_nn_device *nn, uint64_t n, void *act, const void *gate, const void *up);
    /* act = the same; gate and up become their gradients for dact; act may be dact */
    zs_status (*swiglu_grad)(zs_nn_device *nn, uint64_t n, void *act, void *gate, void *up,
                             const void *dact);
    zs_status (*attention)(zs_nn_device *nn, const zs_nn_attention *attention);
    zs_status (*attention_grad)(zs_nn_device *nn, const zs_nn_attention *attention);
    zs_status (*entropy)(zs_nn_device *nn, const zs_nn_entropy *entropy);
    /* *out = (more ? *out : 0) + losses[0] + losses[1] + ... in order */
    zs_status (*sum_losses)(zs_nn_device *nn, uint64_t count, const double *losses, int more,
                            double *out);
    void (*close)(zs_nn_device *nn);
} zs_nn_device_ops;

struct zs_nn_device {
    const zs_nn_device_ops *ops;
    /* backends extend this */
};

typedef struct zs_nn_device_config {
    zs_dtype dtype; /* narrow: fp32 or bf16 */
    void *stream;   /* native; where everything is queued */
    void *room; /* device memory of zs_nn_device_room bytes from a multiple of 256 on, borrowed */
    int widest; /* most columns of zs_nn_columns */
} zs_nn_device_config;

/* Bytes of zs_nn_device_config.room: the products' workspace and partial sums. */
size_t zs_nn_device_room(int widest);
/* Elements of zs_nn_attention.room. */
size_t zs_nn_attention_room(int rows, int seq, int heads, int kv_heads, int dim, int tile);

#endif
