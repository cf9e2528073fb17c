/* SPDX-License-Identifier: Apache-2.0 */
/* The decoder on an accelerator: the same steps as on the host, each over the whole micro-batch,
 * queued on the caller's stream through kernels/nn_device.h. Arrays are fp32 in device memory but
 * for the inputs of matrix products with weights, which have the weights' dtype: T below. */
#ifndef ZS_MODEL_DEVICE_H
#define ZS_MODEL_DEVICE_H

#include "base/status.h"
#include "device/device.h"
#include "kernels/nn_device.h"
#include "model/internal.h"

typedef struct zs_model_device {
    zs_device *device;
    zs_stream *stream; /* of all work here; NULL: the device's first */
    zs_nn_device *nn;

    /* model->batch lies in staging, pinned, and in batch once it is copied. */
    void *staging;
    uint64_t staging_bytes;
    zs_batch_arrays batch;
    zs_event *batch_read; /* behind the copy: staging may be written again */

    float *frequencies;         /* [head_dim / 2] */
    float *cos, *sin;           /* [tokens][head_dim / 2] */
    void *norm_attn, *norm_mlp; /* T: what norms gave */
    void *act, *dgate, *dup;    /* T; in fp32 model->act, and the gate and up that they replace */
    void *dlogits;              /* T [head_chunk][vocab]; in fp32 model->logits */
    void *narrow[3];            /* T: inputs of products that are fp32 elsewhere; fp32: unused */
    float *dnorm;               /* [tokens][hidden]: gradient of what a norm gave */
    float *rstd_head;           /* [tokens] */
    float *scores, *dscores;    /* [heads][ZS_QUERY_TILE][seq] */
    float *partial;             /* for column_sums */
    float *wide;                /* a block's largest weight: fp32 gradients that are kept in bf16 */

    double *loss, *loss_host; /* kept on the device; where it is read, pinned */
    int loss_more;            /* 1: it holds losses already */
    zs_event *loss_read;
} zs_model_device;

/* What a unit has: matrices, and vectors of T. Absent: data NULL. */
typedef struct zs_device_unit {
    int number;
    zs_view matrix[ZS_WEIGHT_KINDS];
    const void *vector[ZS_WEIGHT_KINDS];
} zs_device_unit;

zs_status zs_device_unit_open(zs_model *model, int unit, zs_device_unit *out);
/* x as an input of products: itself in fp32, else in narrow[which]. */
zs_status zs_device_input(zs_model *model, int which, uint64_t n, const float *x, const void **out);
/* y = x W^T (+ y when add); x: [tokens] of T */
zs_status zs_device_linear(zs_model *model, const zs_view *w, int tokens, const void *x, float *y,
                           int add);
/* dx = dy W (+ dx when add); dy: [tokens] of T */
zs_status zs_device_linear_back(zs_model *model, const zs_view *w, int tokens, const void *dy,
                                float *dx, int add);
/* The weight's gradient, dy^T x, for the engine; both [tokens] of T. */
zs_status zs_device_weight_grad(zs_model *model, zs_param param, const zs_view *w, int tokens,
                                const void *dy, const void *x);
/* That of a vector of n, for the engine: column_sums. */
zs_status zs_device_vector_grad(zs_model *model, zs_param param, int rows, int n, const void *dy,
                                zs_dtype dy_dtype, const float *x, const int32_t *sources,
                                const float *rstd);

/* ---- device_attention.c ---- */
zs_status zs_device_attention(zs_model *model, const zs_tokens *tokens, const zs_acts *acts);
/* dattn becomes the gradient of q. */
zs_status zs_device_attention_grad(zs_model *model, const zs_tokens *tokens, const zs_acts *acts);

/* ---- device_block.c ---- */
zs_status zs_device_forward(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                            float *out, zs_acts *acts);
zs_status zs_device_backward(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                             zs_acts *acts, const float *dout, float *dx);

/* ---- device_head.c ---- */
zs_status zs_device_head(zs_model *model, const zs_tokens *tokens, const float *x, int predictions,
                         double scale, float *dx);
zs_status zs_device_logits(zs_model *model, const zs_tokens *tokens, const float *x, float *out);

#endif
