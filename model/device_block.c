/* SPDX-License-Identifier: Apache-2.0 */
/* One decoder block on a device: block.c without its tiles. */
#include "base/util.h"
#include "model/device.h"

typedef struct block {
    zs_model *model;
    zs_model_device *device;
    const zs_nn_device_ops *ops;
    const zs_tokens *tokens;
    zs_device_unit unit;
    zs_acts *a;
    zs_dtype dtype; /* T */
    int count, hidden, ffn, width_q, width_kv;
} block;

static zs_status block_init(block *b, zs_model *m, const zs_tokens *tokens, int layer,
                            zs_acts *acts)
{
    const zs_model_config *c = &m->config;
    *b = (block){.model = m,
                 .device = m->device,
                 .ops = m->device->nn->ops,
                 .tokens = tokens,
                 .a = acts,
                 .dtype = m->options.dtype,
                 .count = tokens->count,
                 .hidden = c->hidden,
                 .ffn = c->intermediate,
                 .width_q = c->heads * c->head_dim,
                 .width_kv = c->kv_heads * c->head_dim};
    return zs_device_unit_open(m, 1 + layer, &b->unit);
}

static uint64_t numel(const block *b, int width)
{
    return (uint64_t)b->count * (uint64_t)width;
}

static zs_param param_of(const block *b, zs_weight_kind kind)
{
    return b->model->params[b->model->index[b->unit.number][kind]];
}

/* ---- forward ---- */

static zs_status norm(const block *b, zs_weight_kind kind, const float *x, float *rstd, void *y)
{
    return b->ops->rms(b->device->nn, b->count, b->hidden, x, NULL, b->unit.vector[kind], b->dtype,
                       (float)b->model->config.rms_eps, rstd, y, b->dtype);
}

static zs_status project(const block *b, zs_weight_kind kind, zs_weight_kind bias, const void *x,
                         float *y, int add)
{
    const zs_view *w = &b->unit.matrix[kind];
    ZS_CHECK(zs_device_linear(b->model, w, b->count, x, y, add));
    if (!b->unit.vector[bias])
        return ZS_OK;
    return b->ops->add_bias(b->device->nn, b->count, w->rows, y, b->unit.vector[bias], b->dtype);
}

/* Norm of each head when the model has it, then rope; raw NULL: x is rotated in place. */
static zs_status turn_heads(const block *b, int heads, zs_weight_kind kind, const float *raw,
                            float *rstd, float *x)
{
    const zs_model_device *d = b->device;
    const int dim = b->model->config.head_dim;
    if (raw)
        ZS_CHECK(b->ops->rms(d->nn, b->count * heads, dim, raw, NULL, b->unit.vector[kind],
                             b->dtype, (float)b->model->config.rms_eps, rstd, x, ZS_FP32));
    return b->ops->rope(d->nn, b->count, heads, dim / 2, x, d->cos, d->sin, 0);
}

static zs_status copy_rows(const block *b, float *dst, const float *src)
{
    zs_device *device = b->device->device;
    return device->ops->copy(device, dst, src, numel(b, b->hidden) * sizeof(float),
                             b->device->stream);
}

zs_status zs_device_forward(zs_model *m, const zs_tokens *tokens, int layer, const float *x,
                            float *out, zs_acts *a)
{
    zs_model_device *d = m->device;
    const zs_model_config *c = &m->config;
    const void *attn;
    block b;
    ZS_CHECK(block_init(&b, m, tokens, layer, a));
    ZS_CHECK(norm(&b, ZS_W_ATTN_NORM, x, a->rstd_attn, d->norm_attn));
    ZS_CHECK(project(&b, ZS_W_Q, ZS_W_Q_BIAS, d->norm_attn, a->raw_q ? a->raw_q : a->q, 0));
    ZS_CHECK(project(&b, ZS_W_K, ZS_W_K_BIAS, d->norm_attn, a->raw_k ? a->raw_k : a->k, 0));
    ZS_CHECK(project(&b, ZS_W_V, ZS_W_V_BIAS, d->norm_attn, a->v, 0));
    ZS_CHECK(turn_heads(&b, c->heads, ZS_W_Q_NORM, a->raw_q, a->rstd_q, a->q));
    ZS_CHECK(turn_heads(&b, c->kv_heads, ZS_W_K_NORM, a->raw_k, a->rstd_k, a->k));
    ZS_CHECK(zs_device_attention(m, tokens, a));
    ZS_CHECK(zs_device_input(m, 0, numel(&b, b.width_q), a->attn, &attn));
    ZS_CHECK(copy_rows(&b, a->mid, x));
    ZS_CHECK(project(&b, ZS_W_O, ZS_W_O_BIAS, attn, a->mid, 1));
    ZS_CHECK(norm(&b, ZS_W_MLP_NORM, a->mid, a->rstd_mlp, d->norm_mlp));
    ZS_CHECK(project(&b, ZS_W_GATE, ZS_W_GATE_BIAS, d->norm_mlp, a->gate, 0));
    ZS_CHECK(project(&b, ZS_W_UP, ZS_W_UP_BIAS, d->norm_mlp, a->up, 0));
    if (!out)
        return ZS_OK;
    ZS_CHECK(b.ops->swiglu(d->nn, numel(&b, b.ffn), a->gate, a->up, d->act, b.dtype));
    ZS_CHECK(copy_rows(&b, out, a->mid));
    return project(&b, ZS_W_DOWN, ZS_W_DOWN_BIAS, d->act, out, 1);
}

/* ---- backward ---- */

/* Gradients of a matrix and its bias, from what went in and what came back. */
static zs_status product_grad(const block *b, zs_weight_kind kind, zs_weight_kind bias,
                              const void *dy, const void *x)
{
    const zs_view *w = &b->unit.matrix[kind];
    ZS_CHECK(zs_device_weight_grad(b->model, param_of(b, kind), w, b->count, dy, x));
    if (!b->unit.vector[bias])
        return ZS_OK;
    return zs_device_vector_grad(b->model, param_of(b, bias), b->count, w->rows, dy, b->dtype, NULL,
                                 NULL, NULL);
}

/* Through the norm of x: its weight's gradient; dx = base + what comes of dnorm; y: the norm again.
 */
static zs_status norm_back(const block *b, zs_weight_kind kind, const float *x, const float *rstd,
                           const float *base, float *dx, void *y)
{
    const zs_model_device *d = b->device;
    ZS_CHECK(zs_device_vector_grad(b->model, param_of(b, kind), b->count, b->hidden, d->dnorm,
                                   ZS_FP32, x, NULL, rstd));
    return b->ops->rms_grad(d->nn, b->count, b->hidden, d->dnorm, NULL, x, b->unit.vector[kind],
                            b->dtype, rstd, base, dx, y);
}

/* The way back of turn_heads, in place over dx. */
static zs_status turn_heads_back(const block *b, int heads, zs_weight_kind kind, const float *raw,
                                 const float *rstd, float *dx)
{
    const zs_model_device *d = b->device;
    const int dim = b->model->config.head_dim;
    ZS_CHECK(b->ops->rope(d->nn, b->count, heads, dim / 2, dx, d->cos, d->sin, 1));
    if (!raw)
        return ZS_OK;
    ZS_CHECK(zs_device_vector_grad(b->model, param_of(b, kind), b->count * heads, dim, dx, ZS_FP32,
                                   raw, NULL, rstd));
    return b->ops->rms_grad(d->nn, b->count * heads, dim, dx, NULL, raw, b->unit.vector[kind],
                            b->dtype, rstd, NULL, dx, NULL);
}

/* dout -> dmid. */
static zs_status feed_back(const block *b, const float *dout)
{
    zs_model *m = b->model;
    const zs_model_device *d = b->device;
    const zs_acts *a = b->a;
    const zs_view *w = b->unit.matrix;
    const void *dy;
    /* In fp32 gate and up become their gradients. */
    void *dgate = b->dtype == ZS_FP32 ? a->gate : d->dgate;
    void *dup = b->dtype == ZS_FP32 ? a->up : d->dup;
    ZS_CHECK(zs_device_input(m, 0, numel(b, b->hidden), dout, &dy));
    ZS_CHECK(zs_device_linear_back(m, &w[ZS_W_DOWN], b->count, dy, m->act, 0));
    ZS_CHECK(b->ops->swiglu_grad(d->nn, numel(b, b->ffn), a->gate, a->up, m->act, d->act, dgate,
                                 dup, b->dtype));
    ZS_CHECK(product_grad(b, ZS_W_DOWN, ZS_W_DOWN_BIAS, dy, d->act));
    ZS_CHECK(zs_device_linear_back(m, &w[ZS_W_GATE], b->count, dgate, d->dnorm, 0));
    ZS_CHECK(zs_device_linear_back(m, &w[ZS_W_UP], b->count, dup, d->dnorm, 1));
    ZS_CHECK(norm_back(b, ZS_W_MLP_NORM, a->mid, a->rstd_mlp, dout, m->dmid, d->norm_mlp));
    ZS_CHECK(product_grad(b, ZS_W_GATE, ZS_W_GATE_BIAS, dgate, d->norm_mlp));
    return product_grad(b, ZS_W_UP, ZS_W_UP_BIAS, dup, d->norm_mlp);
}

/* dmid -> gradients of q (in dattn), k and v. */
static zs_status attend_back(const block *b)
{
    zs_model *m = b->model;
    const zs_model_config *c = &m->config;
    const zs_acts *a = b->a;
    const void *dy, *attn;
    ZS_CHECK(zs_device_input(m, 0, numel(b, b->hidden), m->dmid, &dy));
    ZS_CHECK(zs_device_input(m, 1, numel(b, b->width_q), a->attn, &attn));
    ZS_CHECK(zs_device_linear_back(m, &b->unit.matrix[ZS_W_O], b->count, dy, m->dattn, 0));
    ZS_CHECK(product_grad(b, ZS_W_O, ZS_W_O_BIAS, dy, attn));
    ZS_CHECK(
        b->ops->dots(b->device->nn, numel(b, c->heads), c->head_dim, m->dattn, a->attn, m->delta));
    ZS_CHECK(zs_device_attention_grad(m, b->tokens, a));
    ZS_CHECK(turn_heads_back(b, c->heads, ZS_W_Q_NORM, a->raw_q, a->rstd_q, m->dattn));
    return turn_heads_back(b, c->kv_heads, ZS_W_K_NORM, a->raw_k, a->rstd_k, m->dk);
}

/* Those and dmid -> dx. */
static zs_status project_back(const block *b, const float *x, float *dx)
{
    zs_model *m = b->model;
    const zs_model_device *d = b->device;
    const zs_view *w = b->unit.matrix;
    const void *dq, *dk, *dv;
    ZS_CHECK(zs_device_input(m, 0, numel(b, b->width_q), m->dattn, &dq));
    ZS_CHECK(zs_device_input(m, 1, numel(b, b->width_kv), m->dk, &dk));
    ZS_CHECK(zs_device_linear_back(m, &w[ZS_W_Q], b->count, dq, d->dnorm, 0));
    ZS_CHECK(zs_device_linear_back(m, &w[ZS_W_K], b->count, dk, d->dnorm, 1));
    ZS_CHECK(zs_device_input(m, 2, numel(b, b->width_kv), m->dv, &dv));
    ZS_CHECK(zs_device_linear_back(m, &w[ZS_W_V], b->count, dv, d->dnorm, 1));
    ZS_CHECK(norm_back(b, ZS_W_ATTN_NORM, x, b->a->rstd_attn, m->dmid, dx, d->norm_attn));
    ZS_CHECK(product_grad(b, ZS_W_Q, ZS_W_Q_BIAS, dq, d->norm_attn));
    ZS_CHECK(product_grad(b, ZS_W_K, ZS_W_K_BIAS, dk, d->norm_attn));
    return product_grad(b, ZS_W_V, ZS_W_V_BIAS, dv, d->norm_attn);
}

zs_status zs_device_backward(zs_model *m, const zs_tokens *tokens, int layer, const float *x,
                             zs_acts *acts, const float *dout, float *dx)
{
    block b;
    ZS_CHECK(block_init(&b, m, tokens, layer, acts));
    ZS_CHECK(feed_back(&b, dout));
    ZS_CHECK(attend_back(&b));
    return project_back(&b, x, dx);
}
