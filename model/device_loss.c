/* SPDX-License-Identifier: Apache-2.0 */
/* Final norm, head and cross-entropy on a device: model/loss.c's steps. */
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "model/device.h"

typedef struct head {
    zs_model *model;
    zs_model_device *d;
    const zs_nn_device_ops *ops;
    const float *x;
    const void *w, *norm; /* weights */
} head;

static int head_unit(const zs_model *model)
{
    return model->config.layers + 1;
}

static zs_status head_init(head *h, zs_model *model, const float *x)
{
    zs_model_device *d = model->device;
    *h = (head){.model = model, .d = d, .ops = d->nn->ops, .x = x};
    ZS_CHECK(zs_device_weight(model, head_unit(model), ZS_W_FINAL_NORM, &h->norm));
    return model->config.tied ? zs_device_weight(model, 0, ZS_W_EMBED, &h->w)
                              : zs_device_weight(model, head_unit(model), ZS_W_HEAD, &h->w);
}

/* d->norm_attn = the norm of the predictions' tokens */
static zs_status norm(const head *h, int predictions)
{
    const zs_nn_rms rms = {.count = predictions,
                           .width = h->model->config.hidden,
                           .x = h->x,
                           .rows = h->d->batch.sources,
                           .w = h->norm,
                           .eps = (float)h->model->config.rms_eps,
                           .rstd = h->d->rstd_head,
                           .y = h->d->norm_attn};
    return h->ops->rms(h->d->nn, &rms);
}

static const void *normed(const head *h, int prediction)
{
    return (const char *)h->d->norm_attn +
           (size_t)prediction * (size_t)h->model->config.hidden * h->d->narrow_size;
}

static zs_status logits(const head *h, int first, int n)
{
    const int hidden = h->model->config.hidden;
    const zs_gemm g = {.m = n,
                       .n = h->model->config.vocab,
                       .k = hidden,
                       .transpose_b = 1,
                       .a = normed(h, first),
                       .b = h->w,
                       .dtype = h->d->narrow,
                       .lda = hidden,
                       .ldb = hidden,
                       .c = h->d->logits,
                       .c_dtype = ZS_FP32,
                       .ldc = h->d->ldl,
                       .alpha = 1.0f};
    return h->ops->gemm(h->d->nn, &g);
}

/* From the logits' gradient: that of the norm's result, and the head's share. */
static zs_status chunk_back(const head *h, int first, int n, const zs_device_sink *sink, int add)
{
    const int hidden = h->model->config.hidden, vocab = h->model->config.vocab;
    const int ld = h->d->ldl * (int)(sizeof(float) / h->d->narrow_size);
    const zs_gemm input = {.m = n,
                           .n = hidden,
                           .k = vocab,
                           .a = h->d->logits,
                           .b = h->w,
                           .dtype = h->d->narrow,
                           .lda = ld,
                           .ldb = hidden,
                           .c = h->d->dnorm + (size_t)first * (size_t)hidden,
                           .c_dtype = ZS_FP32,
                           .ldc = hidden,
                           .alpha = 1.0f};
    const zs_gemm weight = {.m = vocab,
                            .n = hidden,
                            .k = n,
                            .transpose_a = 1,
                            .a = h->d->logits,
                            .b = normed(h, first),
                            .dtype = h->d->narrow,
                            .lda = ld,
                            .ldb = hidden,
                            .c = sink->out,
                            .c_dtype = ZS_FP32,
                            .ldc = hidden,
                            .alpha = 1.0f,
                            .beta = add ? 1.0f : 0.0f};
    ZS_CHECK(h->ops->gemm(h->d->nn, &input));
    return h->ops->gemm(h->d->nn, &weight);
}

/* What goes back from the norm, and both weights' gradients to the engine. */
static zs_status finish_back(const head *h, const zs_tokens *tokens, int predictions,
                             const zs_device_sink *sink, float *dx)
{
    zs_model *model = h->model;
    const zs_model_device *d = h->d;
    const int hidden = model->config.hidden;
    const zs_nn_rms_grad grad = {
        .count = tokens->count,
        .width = hidden,
        .dy = d->dnorm,
        .x = h->x,
        .slot = d->batch.slot_of,
        .w = h->norm,
        .rstd = d->rstd_head,
        .dx = dx,
        .dx_narrow = d->narrow == ZS_FP32 ? NULL : d->dx_narrow[dx == model->dx[1]]};
    const zs_nn_columns sums = {.count = predictions,
                                .width = hidden,
                                .dy = d->dnorm,
                                .dtype = ZS_FP32,
                                .x = h->x,
                                .rows = d->batch.sources,
                                .rstd = d->rstd_head};
    const int32_t param = model->index[head_unit(model)][ZS_W_FINAL_NORM];
    if (!predictions && !sink->add)
        ZS_CHECK(d->device->ops->zero(
            d->device, sink->out, (size_t)model->config.vocab * (size_t)hidden * sizeof *sink->out,
            NULL));
    ZS_CHECK(zs_device_sink_ready(model, sink));
    ZS_CHECK(h->ops->rms_grad(d->nn, &grad));
    return zs_device_vector_grad(model, model->params[param], &sums);
}

zs_status zs_device_head(zs_model *model, const zs_tokens *tokens, const float *x, int predictions,
                         double scale, float *dx)
{
    zs_model_device *d = model->device;
    zs_device_sink sink = {0};
    head h;
    ZS_CHECK(head_init(&h, model, x));
    if (dx)
        ZS_CHECK(zs_device_sink_open(model, zs_head_param(model), &sink));
    ZS_CHECK(norm(&h, predictions));
    for (int first = 0, n; first < predictions; first += n) {
        n = ZS_MIN(model->head_chunk, predictions - first);
        const zs_nn_entropy entropy = {.count = n,
                                       .vocab = model->config.vocab,
                                       .logits = d->logits,
                                       .ld = d->ldl,
                                       .targets = d->batch.targets + first,
                                       .losses = d->losses + first,
                                       .grad = dx != NULL,
                                       .scale = (float)scale};
        ZS_CHECK(logits(&h, first, n));
        ZS_CHECK(h.ops->entropy(d->nn, &entropy));
        if (dx)
            ZS_CHECK(chunk_back(&h, first, n, &sink, first || sink.add));
    }
    ZS_CHECK(h.ops->sum_losses(d->nn, (uint64_t)predictions, d->losses, d->loss_more, d->loss));
    d->loss_more = 1;
    return dx ? finish_back(&h, tokens, predictions, &sink, dx) : ZS_OK;
}

/* Rarely, and in pieces: there is no room for all logits at once. */
zs_status zs_device_logits(zs_model *model, const zs_tokens *tokens, const float *x, float *out)
{
    zs_model_device *d = model->device;
    const zs_device_ops *device = d->device->ops;
    const size_t vocab = (size_t)model->config.vocab, bytes = vocab * sizeof *out;
    void *pinned;
    zs_status status = ZS_OK;
    head h;
    ZS_CHECK(device->host_alloc(d->device, bytes, &pinned));
    ZS_TRY(head_init(&h, model, x));
    ZS_TRY(norm(&h, tokens->rows));
    for (int row = 0; row < tokens->rows; row++) {
        ZS_TRY(logits(&h, row, 1));
        ZS_TRY(device->copy(d->device, pinned, d->logits, bytes, d->stream));
        ZS_TRY(device->stream_sync(d->device, d->stream));
        memcpy(out + (size_t)row * vocab, pinned, bytes);
    }
fail:
    device->host_free(d->device, pinned, bytes);
    return status;
}
