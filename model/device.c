/* SPDX-License-Identifier: Apache-2.0 */
#include "model/device.h"

#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "device/cuda.h"

static const char activations[] = "activations";

/* ---- memory ---- */

/* Elements of the largest weight in a block. */
static uint64_t largest_weight(const zs_model *m)
{
    uint64_t most = 0;
    for (size_t i = 0; i < m->count; i++)
        if (m->weights[i].layer >= 0)
            most = ZS_MAX(most, zs_weight_numel(&m->weights[i]));
    return most;
}

static void lay_out(zs_model *m, zs_bump *b)
{
    zs_model_device *d = m->device;
    const zs_model_config *c = &m->config;
    const size_t width = zs_dtype_size(m->options.dtype);
    uint64_t tokens = zs_most_tokens(m), hidden = (uint64_t)c->hidden;
    uint64_t ffn = (uint64_t)c->intermediate, half = (uint64_t)c->head_dim / 2;
    uint64_t q = (uint64_t)(c->heads * c->head_dim), kv = (uint64_t)(c->kv_heads * c->head_dim);
    uint64_t scores = (uint64_t)c->heads * ZS_MIN((uint64_t)m->options.seq, ZS_QUERY_TILE) *
                      (uint64_t)m->options.seq;
    zs_take_shared(m, b);
    d->frequencies = zs_take_floats(b, half);
    d->cos = zs_take_floats(b, tokens * half);
    d->sin = zs_take_floats(b, tokens * half);
    d->norm_attn = zs_take(b, tokens * hidden, width);
    d->norm_mlp = zs_take(b, tokens * hidden, width);
    d->act = m->act;
    d->dlogits = m->logits;
    if (m->options.dtype != ZS_FP32) {
        d->act = zs_take(b, tokens * ffn, width);
        d->dgate = zs_take(b, tokens * ffn, width);
        d->dup = zs_take(b, tokens * ffn, width);
        d->dlogits = zs_take(b, (uint64_t)m->head_chunk * (uint64_t)c->vocab, width);
        d->narrow[0] = zs_take(b, tokens * ZS_MAX(hidden, q), width);
        d->narrow[1] = zs_take(b, tokens * q, width);
        d->narrow[2] = zs_take(b, tokens * kv, width);
    }
    d->dnorm = zs_take_floats(b, tokens * hidden);
    d->rstd_head = zs_take_floats(b, tokens);
    d->scores = zs_take_floats(b, scores);
    d->dscores = zs_take_floats(b, scores);
    d->partial = zs_take_floats(b, ZS_NN_SUM_TILES * ZS_MAX(ZS_MAX(hidden, ffn), q));
    if (m->options.grad_dtype != ZS_FP32 && m->options.dtype == ZS_FP32)
        d->wide = zs_take_floats(b, largest_weight(m));
    d->loss = zs_take(b, 1, sizeof(double));
    zs_take_batch(&d->batch, b, tokens, (uint64_t)c->vocab);
}

/* Pinned host memory: the batch, the loss, and the frequencies, once. */
static float *lay_out_staging(zs_model *m, zs_bump *b)
{
    zs_take_batch(&m->batch, b, zs_most_tokens(m), (uint64_t)m->config.vocab);
    m->device->loss_host = zs_take(b, 1, sizeof(double));
    return zs_take_floats(b, (uint64_t)m->config.head_dim / 2);
}

static zs_status copy(const zs_model *m, void *dst, const void *src, size_t bytes)
{
    const zs_model_device *d = m->device;
    return d->device->ops->copy(d->device, dst, src, bytes, d->stream);
}

static zs_status take_memory(zs_model *m)
{
    zs_model_device *d = m->device;
    const zs_device_ops *ops = d->device->ops;
    void *memory;
    zs_bump b = {NULL, 0};
    lay_out(m, &b);
    zs_status status = ops->alloc(d->device, b.used, &memory);
    if (status != ZS_OK) {
        char text[16];
        return zs_fail_prefix(status,
                              "model: activations of %d x %d tokens need %s of device memory; use "
                              "a smaller micro-batch, shorter rows or activation checkpointing: ",
                              m->options.rows, m->options.seq, zs_format_bytes(b.used, text));
    }
    m->memory = memory;
    m->memory_bytes = b.used;
    b = (zs_bump){memory, 0};
    lay_out(m, &b);
    ZS_CHECK(zs_memory_note(m->engine, ZS_TIER_DEVICE, activations, (int64_t)b.used));
    b = (zs_bump){NULL, 0};
    (void)lay_out_staging(m, &b);
    ZS_CHECK(ops->host_alloc(d->device, b.used, &d->staging));
    d->staging_bytes = b.used;
    b = (zs_bump){d->staging, 0};
    float *frequencies = lay_out_staging(m, &b);
    for (int i = 0; i < m->config.head_dim / 2; i++)
        frequencies[i] = zs_rope_frequency(&m->config, i);
    ZS_CHECK(copy(m, d->frequencies, frequencies,
                  (size_t)(m->config.head_dim / 2) * sizeof *frequencies));
    return zs_memory_note(m->engine, ZS_TIER_HOST, "token staging", (int64_t)b.used);
}

static zs_status device_prepare(zs_model *m)
{
    zs_model_device *d = calloc(1, sizeof *d);
    if (!d)
        return zs_fail(ZS_ERR_NOMEM, "model: no memory for its part on the device");
    m->device = d;
    d->device = m->options.device;
    const zs_device_ops *ops = d->device->ops;
    if (m->options.stream)
        ZS_CHECK(ops->stream_wrap(d->device, m->options.stream, &d->stream));
    ZS_CHECK(d->device->cuda->nn_open(d->device, ops->stream_native(d->device, d->stream), &d->nn));
    ZS_CHECK(zs_memory_note(m->engine, ZS_TIER_DEVICE, "matrix products", (int64_t)d->nn->bytes));
    ZS_CHECK(ops->event_open(d->device, &d->batch_read));
    ZS_CHECK(ops->event_open(d->device, &d->loss_read));
    return take_memory(m);
}

static void device_close(zs_model *m)
{
    zs_model_device *d = m->device;
    if (!d)
        return;
    const zs_device_ops *ops = d->device->ops;
    /* What is queued may still use all of it. */
    (void)ops->stream_sync(d->device, d->stream);
    if (d->nn) {
        (void)zs_memory_note(m->engine, ZS_TIER_DEVICE, "matrix products", -(int64_t)d->nn->bytes);
        d->nn->ops->close(d->nn);
    }
    ops->event_close(d->device, d->batch_read);
    ops->event_close(d->device, d->loss_read);
    if (m->memory) {
        ops->free(d->device, m->memory, m->memory_bytes);
        (void)zs_memory_note(m->engine, ZS_TIER_DEVICE, activations, -(int64_t)m->memory_bytes);
    }
    if (d->staging) {
        ops->host_free(d->device, d->staging, d->staging_bytes);
        (void)zs_memory_note(m->engine, ZS_TIER_HOST, "token staging", -(int64_t)d->staging_bytes);
    }
    ops->stream_close(d->device, d->stream);
    free(d);
}

/* ---- batch and loss ---- */

/* The host is ahead by one micro-batch at most: the copy is the first that is queued of one. */
static zs_status device_batch_begin(zs_model *m)
{
    return m->device->device->ops->event_sync(m->device->device, m->device->batch_read);
}

static zs_status device_batch_ready(zs_model *m, const zs_tokens *tokens, int last)
{
    zs_model_device *d = m->device;
    const int half = m->config.head_dim / 2;
    (void)last;
    /* Both sides have one layout, from ids on. */
    ZS_CHECK(copy(m, d->batch.ids, m->batch.ids,
                  (size_t)(m->batch.first_use + m->config.vocab - m->batch.ids) *
                      sizeof(*m->batch.ids)));
    ZS_CHECK(d->device->ops->event_record(d->device, d->batch_read, d->stream));
    return d->nn->ops->angles(d->nn, tokens->count, half, d->batch.positions, d->frequencies,
                              d->cos, d->sin);
}

static zs_status device_ask_loss(zs_model *m)
{
    zs_model_device *d = m->device;
    ZS_CHECK(copy(m, d->loss_host, d->loss, sizeof *d->loss));
    d->loss_more = 0;
    return d->device->ops->event_record(d->device, d->loss_read, d->stream);
}

static zs_status device_get_loss(zs_model *m, double *out)
{
    zs_model_device *d = m->device;
    ZS_CHECK(d->device->ops->event_sync(d->device, d->loss_read));
    *out = *d->loss_host;
    return ZS_OK;
}

/* ---- the embedding ---- */

static zs_status device_embed(zs_model *m, const zs_tokens *tokens)
{
    const zs_model_device *d = m->device;
    zs_view w;
    ZS_CHECK(zs_unit_matrix(m, 0, ZS_W_EMBED, &w));
    return d->nn->ops->lookup(d->nn, tokens->count, w.columns, d->batch.ids, w.data, w.dtype,
                              m->inputs[0]);
}

static zs_status device_embed_grad(zs_model *m, const zs_tokens *tokens, const float *dx)
{
    const zs_model_device *d = m->device;
    const zs_param param = m->params[m->index[0][ZS_W_EMBED]];
    void *grad;
    int accumulate;
    (void)tokens;
    ZS_CHECK(zs_grad_buffer(m->engine, param, &grad, &accumulate));
    ZS_CHECK(d->nn->ops->lookup_grad(d->nn, m->config.vocab, m->config.hidden, d->batch.first_use,
                                     d->batch.next_use, dx, grad, m->options.grad_dtype,
                                     accumulate));
    return zs_grad_ready(m->engine, param, grad, m->options.grad_dtype);
}

/* ---- weights ---- */

zs_status zs_device_unit_open(zs_model *m, int unit, zs_device_unit *out)
{
    *out = (zs_device_unit){.number = unit};
    for (int kind = 0; kind < ZS_WEIGHT_KINDS; kind++) {
        const int32_t i = m->index[unit][kind];
        void *data;
        if (i < 0)
            continue;
        if (m->weights[i].ndim == 2) {
            ZS_CHECK(zs_unit_matrix(m, unit, (zs_weight_kind)kind, &out->matrix[kind]));
            continue;
        }
        ZS_CHECK(zs_param_data(m->engine, m->params[i], &data));
        out->vector[kind] = data;
    }
    return ZS_OK;
}

zs_status zs_device_input(zs_model *m, int which, uint64_t n, const float *x, const void **out)
{
    const zs_model_device *d = m->device;
    *out = m->options.dtype == ZS_FP32 ? (const void *)x : d->narrow[which];
    return m->options.dtype == ZS_FP32 ? ZS_OK : d->nn->ops->narrow(d->nn, n, x, d->narrow[which]);
}

zs_status zs_device_linear(zs_model *m, const zs_view *w, int tokens, const void *x, float *y,
                           int add)
{
    return m->device->nn->ops->gemm(m->device->nn, &(zs_nn_gemm){.m = tokens,
                                                                 .n = w->rows,
                                                                 .k = w->columns,
                                                                 .a = x,
                                                                 .b = w->data,
                                                                 .c = y,
                                                                 .in = w->dtype,
                                                                 .out = ZS_FP32,
                                                                 .transpose_b = 1,
                                                                 .lda = w->columns,
                                                                 .ldb = w->columns,
                                                                 .ldc = w->rows,
                                                                 .batch = 1,
                                                                 .alpha = 1,
                                                                 .beta = add ? 1 : 0});
}

zs_status zs_device_linear_back(zs_model *m, const zs_view *w, int tokens, const void *dy,
                                float *dx, int add)
{
    return m->device->nn->ops->gemm(m->device->nn, &(zs_nn_gemm){.m = tokens,
                                                                 .n = w->columns,
                                                                 .k = w->rows,
                                                                 .a = dy,
                                                                 .b = w->data,
                                                                 .c = dx,
                                                                 .in = w->dtype,
                                                                 .out = ZS_FP32,
                                                                 .lda = w->rows,
                                                                 .ldb = w->columns,
                                                                 .ldc = w->columns,
                                                                 .batch = 1,
                                                                 .alpha = 1,
                                                                 .beta = add ? 1 : 0});
}

zs_status zs_device_weight_grad(zs_model *m, zs_param param, const zs_view *w, int tokens,
                                const void *dy, const void *x)
{
    zs_model_device *d = m->device;
    zs_dtype dtype = m->options.grad_dtype;
    void *grad = d->wide;
    int accumulate = 0;
    /* Products of fp32 are fp32: what is kept in bf16 is then rounded by the engine. */
    if (d->wide)
        dtype = ZS_FP32;
    else
        ZS_CHECK(zs_grad_buffer(m->engine, param, &grad, &accumulate));
    ZS_CHECK(d->nn->ops->gemm(d->nn, &(zs_nn_gemm){.m = w->rows,
                                                   .n = w->columns,
                                                   .k = tokens,
                                                   .a = dy,
                                                   .b = x,
                                                   .c = grad,
                                                   .in = w->dtype,
                                                   .out = dtype,
                                                   .transpose_a = 1,
                                                   .lda = w->rows,
                                                   .ldb = w->columns,
                                                   .ldc = w->columns,
                                                   .batch = 1,
                                                   .alpha = 1,
                                                   .beta = accumulate ? 1 : 0}));
    return zs_grad_ready(m->engine, param, grad, dtype);
}

zs_status zs_device_vector_grad(zs_model *m, zs_param param, int rows, int n, const void *dy,
                                zs_dtype dy_dtype, const float *x, const int32_t *sources,
                                const float *rstd)
{
    const zs_model_device *d = m->device;
    void *grad;
    int accumulate;
    ZS_CHECK(zs_grad_buffer(m->engine, param, &grad, &accumulate));
    ZS_CHECK(d->nn->ops->column_sums(d->nn, rows, n, dy, dy_dtype, x, sources, rstd, d->partial,
                                     grad, m->options.grad_dtype, accumulate));
    return zs_grad_ready(m->engine, param, grad, m->options.grad_dtype);
}

const zs_backend zs_backend_device = {
    .prepare = device_prepare,
    .close = device_close,
    .batch_begin = device_batch_begin,
    .batch_ready = device_batch_ready,
    .embed = device_embed,
    .embed_grad = device_embed_grad,
    .forward = zs_device_forward,
    .backward = zs_device_backward,
    .head = zs_device_head,
    .logits = zs_device_logits,
    .ask_loss = device_ask_loss,
    .get_loss = device_get_loss,
};
