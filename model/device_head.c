/* SPDX-License-Identifier: Apache-2.0 */
/* Final norm, head and cross-entropy on a device, as loss.c. */
#include <string.h>

#include "base/util.h"
#include "model/device.h"

typedef struct head {
    zs_model *model;
    zs_model_device *device;
    const zs_nn_device_ops *ops;
    zs_device_unit unit;
    zs_view w;
    zs_dtype dtype; /* T */
    int predictions;
    void *norm;   /* T, of the predictions */
    float *dnorm; /* [predictions][hidden] */
    float *grad;  /* of w */
    int grad_add;
} head;

static zs_status head_open(head *h, zs_model *m, const float *x, int predictions)
{
    const int unit = m->config.layers + 1;
    *h = (head){.model = m,
                .device = m->device,
                .ops = m->device->nn->ops,
                .dtype = m->options.dtype,
                .predictions = predictions,
                .norm = m->device->norm_attn,
                .dnorm = m->device->dnorm,
                .grad = m->head_grad};
    ZS_CHECK(zs_device_unit_open(m, unit, &h->unit));
    h->w = h->unit.matrix[ZS_W_HEAD];
    if (m->config.tied)
        ZS_CHECK(zs_unit_matrix(m, 0, ZS_W_EMBED, &h->w));
    return h->ops->rms(h->device->nn, predictions, m->config.hidden, x, h->device->batch.sources,
                       h->unit.vector[ZS_W_FINAL_NORM], h->dtype, (float)m->config.rms_eps,
                       h->device->rstd_head, h->norm, h->dtype);
}

static const void *norm_at(const head *h, int first)
{
    return (const char *)h->norm + (size_t)first * (size_t)h->w.columns * zs_dtype_size(h->dtype);
}

/* Predictions [first, first + n): their losses and, when train, the gradients. */
static zs_status chunk(head *h, int first, int n, float scale, int train)
{
    zs_model *m = h->model;
    const zs_model_device *d = h->device;
    ZS_CHECK(zs_device_linear(m, &h->w, n, norm_at(h, first), m->logits, 0));
    ZS_CHECK(h->ops->entropy(d->nn, n, h->w.rows, m->logits, d->batch.targets + first, scale,
                             m->losses + first, train ? d->dlogits : NULL, h->dtype));
    if (!train)
        return ZS_OK;
    ZS_CHECK(zs_device_linear_back(m, &h->w, n, d->dlogits,
                                   h->dnorm + (size_t)first * (size_t)h->w.columns, 0));
    const zs_nn_gemm grad = {.m = h->w.rows,
                             .n = h->w.columns,
                             .k = n,
                             .a = d->dlogits,
                             .b = norm_at(h, first),
                             .c = h->grad,
                             .in = h->dtype,
                             .out = ZS_FP32,
                             .transpose_a = 1,
                             .lda = h->w.rows,
                             .ldb = h->w.columns,
                             .ldc = h->w.columns,
                             .batch = 1,
                             .alpha = 1,
                             .beta = h->grad_add ? 1 : 0};
    h->grad_add = 1;
    return h->ops->gemm(d->nn, &grad);
}

/* The head's and the final norm's gradients for the engine, and that of x. */
static zs_status finish(head *h, const zs_tokens *tokens, const float *x, float *dx)
{
    zs_model *m = h->model;
    const zs_model_device *d = h->device;
    const zs_param norm = m->params[m->index[h->unit.number][ZS_W_FINAL_NORM]];
    if (!h->grad_add) /* nothing was counted */
        ZS_CHECK(d->device->ops->zero(d->device, h->grad,
                                      (size_t)h->w.rows * (size_t)h->w.columns * sizeof(float),
                                      d->stream));
    ZS_CHECK(zs_grad_ready(m->engine, zs_head_param(m), h->grad, ZS_FP32));
    ZS_CHECK(zs_device_vector_grad(m, norm, h->predictions, h->w.columns, h->dnorm, ZS_FP32, x,
                                   d->batch.sources, d->rstd_head));
    return h->ops->rms_grad(d->nn, tokens->count, h->w.columns, h->dnorm, d->batch.slot_of, x,
                            h->unit.vector[ZS_W_FINAL_NORM], h->dtype, d->rstd_head, NULL, dx,
                            NULL);
}

zs_status zs_device_head(zs_model *m, const zs_tokens *tokens, const float *x, int predictions,
                         double scale, float *dx)
{
    zs_model_device *d = m->device;
    head h;
    ZS_CHECK(head_open(&h, m, x, predictions));
    if (dx && !h.grad) {
        void *buffer;
        ZS_CHECK(zs_grad_buffer(m->engine, zs_head_param(m), &buffer, &h.grad_add));
        h.grad = buffer;
    }
    for (int first = 0; first < predictions; first += m->head_chunk)
        ZS_CHECK(
            chunk(&h, first, ZS_MIN(m->head_chunk, predictions - first), (float)scale, dx != NULL));
    ZS_CHECK(h.ops->sum_losses(d->nn, (uint64_t)predictions, m->losses, d->loss_more, d->loss));
    d->loss_more = 1;
    return dx ? finish(&h, tokens, x, dx) : ZS_OK;
}

zs_status zs_device_logits(zs_model *m, const zs_tokens *tokens, const float *x, float *out)
{
    zs_model_device *d = m->device;
    const zs_device_ops *ops = d->device->ops;
    const size_t row_bytes = (size_t)m->config.vocab * sizeof(float);
    const size_t bytes = (size_t)m->head_chunk * row_bytes;
    zs_status status;
    void *staging;
    head h;
    ZS_CHECK(head_open(&h, m, x, tokens->rows));
    ZS_CHECK(ops->host_alloc(d->device, bytes, &staging));
    for (int first = 0; first < tokens->rows; first += m->head_chunk) {
        const int n = ZS_MIN(m->head_chunk, tokens->rows - first);
        const size_t part = (size_t)n * row_bytes;
        ZS_TRY(zs_device_linear(m, &h.w, n, norm_at(&h, first), m->logits, 0));
        ZS_TRY(ops->copy(d->device, staging, m->logits, part, d->stream));
        ZS_TRY(ops->stream_sync(d->device, d->stream));
        memcpy(out + (size_t)first * (size_t)m->config.vocab, staging, part);
    }
    status = ZS_OK;
fail:
    ops->host_free(d->device, staging, bytes);
    return status;
}
