/* SPDX-License-Identifier: Apache-2.0 */
/* The decoder on an accelerator: the same steps as on the host, each over the whole micro-batch,
 * queued on the caller's stream through kernels/nn_device.h, in order: what is used again needs no
 * event. "Narrow" is the weights' dtype. */
#ifndef ZS_MODEL_DEVICE_H
#define ZS_MODEL_DEVICE_H

#include "base/status.h"
#include "device/device.h"
#include "kernels/nn_device.h"
#include "model/internal.h"

/* What backward needs of one block beside its input: in place of zs_acts, whose number tells which
 * of these is meant. */
typedef struct zs_device_acts {
    void *q, *k, *v;              /* narrow, head-major, after norm and rope */
    void *raw_q, *raw_k;          /* narrow, before them; only with qk_norm */
    void *attn;                   /* narrow, before the output projection */
    float *mid;                   /* input + attention */
    void *gate, *up;              /* narrow; backward turns them into their gradients */
    float *rstd_attn, *rstd_mlp;  /* one a token */
    float *rstd_q, *rstd_k, *lse; /* one a token and head */
} zs_device_acts;

typedef struct zs_model_device {
    zs_device *device;
    zs_stream *stream; /* of all work here; NULL: the device's first */
    zs_nn_device *nn;
    zs_dtype narrow;
    size_t narrow_size;

    /* model->batch lies in staging, pinned, and in batch once it is copied. */
    void *staging;
    uint64_t staging_bytes;
    zs_batch_arrays batch;
    zs_event *batch_read; /* behind the copy: staging may be written again */

    float *frequencies; /* [head_dim / 2] */
    float *cos, *sin;   /* [tokens][head_dim / 2] */
    zs_device_acts *slots;
    void *raw, *act, *norm_attn, *norm_mlp, *dattn, *dout_heads, *dk_narrow,
        *dv_narrow; /* narrow */
    float *dmid, *dnorm, *delta, *dq, *dk, *dv, *rstd_head;
    void *dmid_narrow, *dx_narrow[2]; /* in fp32: dmid and model->dx themselves */
    float *attention_room;
    float *logits, *grad; /* grad: of any parameter, where gradients are not kept in fp32 */
    int ldl;              /* of logits */
    double *losses;
    void *room; /* of nn */

    double *loss, *loss_host; /* kept on the device; where it is read, pinned */
    int loss_more;            /* 1: it holds losses already */
    zs_event *loss_read;
} zs_model_device;

/* The memory of a weight of an acquired unit; NULL where the model has none. */
zs_status zs_device_weight(const zs_model *model, int unit, zs_weight_kind kind, const void **out);
/* Where a parameter's gradient goes, in fp32. */
typedef struct zs_device_sink {
    zs_param param;
    float *out;
    int add;
} zs_device_sink;
zs_status zs_device_sink_open(zs_model *model, zs_param param, zs_device_sink *out);
/* The gradient has been queued. */
zs_status zs_device_sink_ready(zs_model *model, const zs_device_sink *sink);
/* y = x w^T: [tokens][columns] -> [tokens][rows], narrow, or fp32 and added when residual. */
zs_status zs_device_linear(const zs_model *model, const void *w, int rows, int columns, int tokens,
                           const void *x, void *y, int residual);
/* dx = dy w (+ dx when add): narrow or fp32. */
zs_status zs_device_input_grad(const zs_model *model, const void *w, int rows, int columns,
                               int tokens, const void *dy, void *dx, zs_dtype dtype, int add);
/* sum of dy x^T, handed to the engine */
zs_status zs_device_matrix_grad(zs_model *model, zs_param param, int rows, int columns, int tokens,
                                const void *dy, const void *x);
/* Sums of columns, handed to the engine; see zs_nn_columns, whose out and add are filled in. */
zs_status zs_device_vector_grad(zs_model *model, zs_param param, const zs_nn_columns *columns);

/* ---- device_block.c ---- */
zs_status zs_device_forward(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                            float *out, zs_acts *acts);
zs_status zs_device_backward(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                             zs_acts *acts, const float *dout, float *dx);

/* ---- device_loss.c ---- */
zs_status zs_device_head(zs_model *model, const zs_tokens *tokens, const float *x, int predictions,
                         double scale, float *dx);
zs_status zs_device_logits(zs_model *model, const zs_tokens *tokens, const float *x, float *out);

#endif
