/* SPDX-License-Identifier: Apache-2.0 */
/* Memory, batches and the embedding on a device, and how gradients reach the engine. */
#include "model/device.h"

#include <stdlib.h>

#include "base/status.h"
#include "base/util.h"
#include "device/cuda.h"

static const char activations[] = "activations";

/* ---- memory ---- */

static void *take_narrow(const zs_model_device *d, zs_bump *b, uint64_t count)
{
    return zs_take(b, count, d->narrow_size);
}

static void take_acts(const zs_model *m, zs_bump *b, uint64_t tokens, zs_device_acts *a)
{
    const zs_model_device *d = m->device;
    const zs_model_config *c = &m->config;
    uint64_t heads = (uint64_t)c->heads, kv_heads = (uint64_t)c->kv_heads;
    uint64_t q = heads * (uint64_t)c->head_dim, kv = kv_heads * (uint64_t)c->head_dim;
    a->q = take_narrow(d, b, tokens * q);
    a->k = take_narrow(d, b, tokens * kv);
    a->v = take_narrow(d, b, tokens * kv);
    if (c->qk_norm) {
        a->raw_q = take_narrow(d, b, tokens * q);
        a->raw_k = take_narrow(d, b, tokens * kv);
        a->rstd_q = zs_take_floats(b, tokens * heads);
        a->rstd_k = zs_take_floats(b, tokens * kv_heads);
    }
    a->attn = take_narrow(d, b, tokens * q);
    a->mid = zs_take_floats(b, tokens * (uint64_t)c->hidden);
    a->gate = take_narrow(d, b, tokens * (uint64_t)c->intermediate);
    a->up = take_narrow(d, b, tokens * (uint64_t)c->intermediate);
    a->rstd_attn = zs_take_floats(b, tokens);
    a->rstd_mlp = zs_take_floats(b, tokens);
    a->lse = zs_take_floats(b, tokens * heads);
}

static size_t attention_room(const zs_model *m)
{
    const zs_model_config *c = &m->config;
    return zs_nn_attention_room(m->options.rows, m->options.seq, c->heads, c->kv_heads, c->head_dim,
                                ZS_NN_TILE_MOST);
}

/* Elements of the largest gradient. */
static uint64_t largest_weight(const zs_model *m)
{
    uint64_t most = 0;
    for (size_t i = 0; i < m->count; i++)
        most = ZS_MAX(most, zs_weight_numel(&m->weights[i]));
    return most;
}

static int widest_vector(const zs_model *m)
{
    int64_t most = m->config.head_dim;
    for (size_t i = 0; i < m->count; i++)
        if (m->weights[i].ndim == 1)
            most = ZS_MAX(most, m->weights[i].shape[0]);
    return (int)most;
}

/* What only backward uses. */
static void lay_out_backward(zs_model *m, zs_bump *b, uint64_t tokens)
{
    zs_model_device *d = m->device;
    const zs_model_config *c = &m->config;
    uint64_t hidden = (uint64_t)c->hidden;
    uint64_t q = (uint64_t)(c->heads * c->head_dim), kv = (uint64_t)(c->kv_heads * c->head_dim);
    float **const residuals[] = {&d->dmid, &m->dx[0], &m->dx[1]};
    void **const narrows[] = {&d->dmid_narrow, &d->dx_narrow[0], &d->dx_narrow[1]};
    for (size_t i = 0; i < ZS_COUNT(residuals); i++) {
        *residuals[i] = zs_take_floats(b, tokens * hidden);
        *narrows[i] = d->narrow == ZS_FP32 ? *residuals[i] : take_narrow(d, b, tokens * hidden);
    }
    d->dattn = take_narrow(d, b, tokens * q);
    d->dout_heads = take_narrow(d, b, tokens * q);
    d->dk_narrow = take_narrow(d, b, tokens * kv);
    d->dv_narrow = take_narrow(d, b, tokens * kv);
    d->dnorm = zs_take_floats(b, tokens * hidden);
    d->delta = zs_take_floats(b, tokens * (uint64_t)c->heads);
    d->dq = zs_take_floats(b, tokens * q);
    d->dk = zs_take_floats(b, tokens * kv);
    d->dv = zs_take_floats(b, tokens * kv);
    if (m->options.grad_dtype != ZS_FP32)
        d->grad = zs_take_floats(b, largest_weight(m));
}

static void lay_out(zs_model *m, zs_bump *b)
{
    zs_model_device *d = m->device;
    const zs_model_config *c = &m->config;
    uint64_t tokens = zs_most_tokens(m);
    uint64_t hidden = (uint64_t)c->hidden, q = (uint64_t)(c->heads * c->head_dim);
    uint64_t half = (uint64_t)c->head_dim / 2;
    /* First, where an allocation begins: cuBLAS wants more than the others' 64 bytes. */
    d->room = zs_take(b, zs_nn_device_room(widest_vector(m)), 1);
    zs_take_batch(&d->batch, b, tokens, (uint64_t)c->vocab);
    d->frequencies = zs_take_floats(b, half);
    d->cos = zs_take_floats(b, tokens * half);
    d->sin = zs_take_floats(b, tokens * half);
    for (int i = 0; i <= c->layers; i++)
        m->inputs[i] = zs_take_floats(b, tokens * hidden);
    for (int i = 0; i < m->slot_count; i++)
        take_acts(m, b, tokens, &d->slots[i]);
    d->raw = take_narrow(d, b, tokens * q);
    d->act = take_narrow(d, b, tokens * (uint64_t)c->intermediate);
    d->norm_attn = take_narrow(d, b, tokens * hidden);
    d->norm_mlp = take_narrow(d, b, tokens * hidden);
    d->rstd_head = zs_take_floats(b, tokens);
    d->attention_room = zs_take_floats(b, attention_room(m));
    m->head_chunk = zs_head_chunk(c, (int)tokens);
    /* Rows begin where products are fast. */
    d->ldl = (int)zs_round_up((uint64_t)c->vocab, 8);
    d->logits = zs_take_floats(b, (uint64_t)m->head_chunk * (uint64_t)d->ldl);
    d->losses = zs_take(b, tokens, sizeof(double));
    d->loss = zs_take(b, 1, sizeof(double));
    if (!m->options.frozen)
        lay_out_backward(m, b, tokens);
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
    void *memory;
    zs_bump b = {NULL, 0};
    lay_out(m, &b);
    zs_status status = d->device->ops->alloc(d->device, b.used, &memory);
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
    return zs_memory_note(m->engine, ZS_TIER_DEVICE, activations, (int64_t)b.used);
}

static zs_status take_staging(zs_model *m)
{
    zs_model_device *d = m->device;
    const int half = m->config.head_dim / 2;
    zs_bump b = {NULL, 0};
    (void)lay_out_staging(m, &b);
    ZS_CHECK(d->device->ops->host_alloc(d->device, b.used, &d->staging));
    d->staging_bytes = b.used;
    b = (zs_bump){d->staging, 0};
    float *frequencies = lay_out_staging(m, &b);
    for (int i = 0; i < half; i++)
        frequencies[i] = zs_rope_frequency(&m->config, i);
    ZS_CHECK(copy(m, d->frequencies, frequencies, (size_t)half * sizeof *frequencies));
    return zs_memory_note(m->engine, ZS_TIER_HOST, "token staging", (int64_t)b.used);
}

static zs_status device_prepare(zs_model *m)
{
    zs_model_device *d = calloc(1, sizeof *d);
    if (!d)
        return zs_fail(ZS_ERR_NOMEM, "model: no memory for its part on the device");
    m->device = d;
    d->device = m->options.device;
    d->narrow = m->options.dtype;
    d->narrow_size = zs_dtype_size(d->narrow);
    d->slots = calloc((size_t)m->slot_count, sizeof *d->slots);
    if (!d->slots)
        return zs_fail(ZS_ERR_NOMEM, "model: no memory for the activations of %d layers",
                       m->config.layers);
    const zs_device_ops *ops = d->device->ops;
    if (m->options.stream)
        ZS_CHECK(ops->stream_wrap(d->device, m->options.stream, &d->stream));
    ZS_CHECK(ops->event_open(d->device, &d->batch_read));
    ZS_CHECK(ops->event_open(d->device, &d->loss_read));
    ZS_CHECK(take_memory(m));
    ZS_CHECK(take_staging(m));
    const zs_nn_device_config config = {.dtype = d->narrow,
                                        .stream = ops->stream_native(d->device, d->stream),
                                        .room = d->room,
                                        .widest = widest_vector(m)};
    return d->device->cuda->nn_open(d->device, &config, &d->nn);
}

static void device_close(zs_model *m)
{
    zs_model_device *d = m->device;
    if (!d)
        return;
    const zs_device_ops *ops = d->device->ops;
    /* What is queued may still use all of it. */
    (void)ops->stream_sync(d->device, d->stream);
    if (d->nn)
        d->nn->ops->close(d->nn);
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
    free(d->slots);
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
    (void)last;
    /* Both sides have one layout, from ids on. */
    ZS_CHECK(copy(m, d->batch.ids, m->batch.ids,
                  (size_t)(m->batch.first_use + m->config.vocab - m->batch.ids) *
                      sizeof(*m->batch.ids)));
    ZS_CHECK(d->device->ops->event_record(d->device, d->batch_read, d->stream));
    return d->nn->ops->angles(d->nn, tokens->count, m->config.head_dim / 2, d->batch.positions,
                              d->frequencies, d->cos, d->sin);
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

/* ---- what blocks and the head share ---- */

zs_status zs_device_weight(const zs_model *model, int unit, zs_weight_kind kind, const void **out)
{
    const int32_t i = model->index[unit][kind];
    void *data;
    *out = NULL;
    if (i < 0)
        return ZS_OK;
    ZS_CHECK(zs_param_data(model->engine, model->params[i], &data));
    *out = data;
    return ZS_OK;
}

zs_status zs_device_sink_open(zs_model *model, zs_param param, zs_device_sink *out)
{
    void *buffer;
    *out = (zs_device_sink){.param = param, .out = model->device->grad};
    if (model->options.grad_dtype != ZS_FP32)
        return ZS_OK;
    ZS_CHECK(zs_grad_buffer(model->engine, param, &buffer, &out->add));
    out->out = buffer;
    return ZS_OK;
}

/* The engine's rounding of what is not its own buffer is queued on the same stream, before the
 * next gradient takes its place. */
zs_status zs_device_sink_ready(zs_model *model, const zs_device_sink *sink)
{
    return zs_grad_ready(model->engine, sink->param, sink->out, ZS_FP32);
}

zs_status zs_device_linear(const zs_model *model, const void *w, int rows, int columns, int tokens,
                           const void *x, void *y, int residual)
{
    const zs_model_device *d = model->device;
    const zs_gemm g = {.m = tokens,
                       .n = rows,
                       .k = columns,
                       .transpose_b = 1,
                       .a = x,
                       .b = w,
                       .dtype = d->narrow,
                       .lda = columns,
                       .ldb = columns,
                       .c = y,
                       .c_dtype = residual ? ZS_FP32 : d->narrow,
                       .ldc = rows,
                       .alpha = 1.0f,
                       .beta = residual ? 1.0f : 0.0f};
    return d->nn->ops->gemm(d->nn, &g);
}

zs_status zs_device_input_grad(const zs_model *model, const void *w, int rows, int columns,
                               int tokens, const void *dy, void *dx, zs_dtype dtype, int add)
{
    const zs_model_device *d = model->device;
    const zs_gemm g = {.m = tokens,
                       .n = columns,
                       .k = rows,
                       .a = dy,
                       .b = w,
                       .dtype = d->narrow,
                       .lda = rows,
                       .ldb = columns,
                       .c = dx,
                       .c_dtype = dtype,
                       .ldc = columns,
                       .alpha = 1.0f,
                       .beta = add ? 1.0f : 0.0f};
    return d->nn->ops->gemm(d->nn, &g);
}

zs_status zs_device_matrix_grad(zs_model *model, zs_param param, int rows, int columns, int tokens,
                                const void *dy, const void *x)
{
    const zs_model_device *d = model->device;
    zs_device_sink sink;
    ZS_CHECK(zs_device_sink_open(model, param, &sink));
    const zs_gemm g = {.m = rows,
                       .n = columns,
                       .k = tokens,
                       .transpose_a = 1,
                       .a = dy,
                       .b = x,
                       .dtype = d->narrow,
                       .lda = rows,
                       .ldb = columns,
                       .c = sink.out,
                       .c_dtype = ZS_FP32,
                       .ldc = columns,
                       .alpha = 1.0f,
                       .beta = sink.add ? 1.0f : 0.0f};
    ZS_CHECK(d->nn->ops->gemm(d->nn, &g));
    return zs_device_sink_ready(model, &sink);
}

zs_status zs_device_vector_grad(zs_model *model, zs_param param, const zs_nn_columns *columns)
{
    const zs_model_device *d = model->device;
    zs_nn_columns c = *columns;
    zs_device_sink sink;
    ZS_CHECK(zs_device_sink_open(model, param, &sink));
    c.out = sink.out;
    c.add = sink.add;
    ZS_CHECK(d->nn->ops->columns(d->nn, &c));
    return zs_device_sink_ready(model, &sink);
}

/* ---- the embedding ---- */

static zs_status device_embed(zs_model *m, const zs_tokens *tokens)
{
    const zs_model_device *d = m->device;
    const void *table;
    ZS_CHECK(zs_device_weight(m, 0, ZS_W_EMBED, &table));
    return d->nn->ops->embed(d->nn, tokens->count, m->config.hidden, d->batch.ids, table,
                             m->inputs[0]);
}

static zs_status device_embed_grad(zs_model *m, const zs_tokens *tokens, const float *dx)
{
    const zs_model_device *d = m->device;
    zs_device_sink sink;
    (void)tokens;
    ZS_CHECK(zs_device_sink_open(m, m->params[m->index[0][ZS_W_EMBED]], &sink));
    const zs_nn_embed_grad grad = {.vocab = m->config.vocab,
                                   .width = m->config.hidden,
                                   .first_use = d->batch.first_use,
                                   .next_use = d->batch.next_use,
                                   .dx = dx,
                                   .out = sink.out,
                                   .add = sink.add};
    ZS_CHECK(d->nn->ops->embed_grad(d->nn, &grad));
    return zs_device_sink_ready(m, &sink);
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
