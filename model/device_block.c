/* SPDX-License-Identifier: Apache-2.0 */
/* One decoder block on a device: model/block.c's steps, each for all tokens at once. */
#include "base/status.h"
#include "base/util.h"
#include "model/device.h"

typedef struct block {
    zs_model *model;
    zs_model_device *d;
    const zs_nn_device_ops *ops;
    const zs_tokens *tokens;
    const float *x;
    zs_device_acts *a;
    int layer, hidden, ffn, width_q, width_kv;
    const void *w[ZS_WEIGHT_KINDS];
} block;

static zs_status block_init(block *b, zs_model *model, const zs_tokens *tokens, int layer,
                            const float *x, const zs_acts *acts)
{
    const zs_model_config *c = &model->config;
    zs_model_device *d = model->device;
    *b = (block){.model = model,
                 .d = d,
                 .ops = d->nn->ops,
                 .tokens = tokens,
                 .x = x,
                 .a = &d->slots[acts - model->slots],
                 .layer = layer,
                 .hidden = c->hidden,
                 .ffn = c->intermediate,
                 .width_q = c->heads * c->head_dim,
                 .width_kv = c->kv_heads * c->head_dim};
    for (int kind = 0; kind < ZS_WEIGHT_KINDS; kind++)
        ZS_CHECK(zs_device_weight(model, 1 + layer, (zs_weight_kind)kind, &b->w[kind]));
    return ZS_OK;
}

static zs_param param_of(const block *b, zs_weight_kind kind)
{
    return b->model->params[b->model->index[1 + b->layer][kind]];
}

/* ---- forward ---- */

static zs_status norm(const block *b, const float *x, zs_weight_kind kind, float *rstd, void *y)
{
    const zs_nn_rms rms = {.count = b->tokens->count,
                           .width = b->hidden,
                           .x = x,
                           .w = b->w[kind],
                           .eps = (float)b->model->config.rms_eps,
                           .rstd = rstd,
                           .y = y};
    return b->ops->rms(b->d->nn, &rms);
}

/* y = x w^T + bias, or y + that when residual. */
static zs_status project(const block *b, zs_weight_kind kind, zs_weight_kind bias, int rows,
                         int columns, const void *x, void *y, int residual)
{
    ZS_CHECK(
        zs_device_linear(b->model, b->w[kind], rows, columns, b->tokens->count, x, y, residual));
    if (!b->w[bias])
        return ZS_OK;
    return b->ops->bias(b->d->nn, b->tokens->count, rows, residual ? ZS_FP32 : b->d->narrow, y,
                        b->w[bias]);
}

typedef enum part { Q, K, V } part;

/* Where the projection's result goes, before norm and rope. */
static void *raw_of(const block *b, part which)
{
    if (which == Q && b->w[ZS_W_Q_NORM])
        return b->a->raw_q;
    return which == K && b->w[ZS_W_K_NORM] ? b->a->raw_k : b->d->raw;
}

/* What is done to the heads of q, k or v. */
static zs_nn_heads heads_of(const block *b, part which)
{
    const zs_model_config *c = &b->model->config;
    const zs_model_device *d = b->d;
    const zs_device_acts *a = b->a;
    zs_nn_heads h = {.rows = b->tokens->rows,
                     .seq = b->tokens->seq,
                     .heads = which == Q ? c->heads : c->kv_heads,
                     .kv_heads = c->kv_heads,
                     .dim = c->head_dim,
                     .eps = (float)c->rms_eps,
                     .raw = raw_of(b, which)};
    if (which != V) {
        h.cos = d->cos;
        h.sin = d->sin;
        h.norm = b->w[which == Q ? ZS_W_Q_NORM : ZS_W_K_NORM];
        h.rstd = which == Q ? a->rstd_q : a->rstd_k;
    }
    h.out = which == Q ? a->q : which == K ? a->k : a->v;
    return h;
}

static zs_status project_heads(const block *b, part which)
{
    static const zs_weight_kind kinds[] = {ZS_W_Q, ZS_W_K, ZS_W_V};
    static const zs_weight_kind biases[] = {ZS_W_Q_BIAS, ZS_W_K_BIAS, ZS_W_V_BIAS};
    const zs_nn_heads h = heads_of(b, which);
    ZS_CHECK(project(b, kinds[which], biases[which], which == Q ? b->width_q : b->width_kv,
                     b->hidden, b->d->norm_attn, raw_of(b, which), 0));
    return b->ops->heads(b->d->nn, &h);
}

static zs_nn_attention attention_of(const block *b)
{
    const zs_model_config *c = &b->model->config;
    const zs_model_device *d = b->d;
    const zs_device_acts *a = b->a;
    return (zs_nn_attention){.rows = b->tokens->rows,
                             .seq = b->tokens->seq,
                             .heads = c->heads,
                             .kv_heads = c->kv_heads,
                             .dim = c->head_dim,
                             .tile = ZS_NN_TILE_MOST,
                             .starts = d->batch.starts,
                             .host_starts = b->tokens->starts,
                             .q = a->q,
                             .k = a->k,
                             .v = a->v,
                             .out = a->attn,
                             .lse = a->lse,
                             .room = d->attention_room,
                             .dout = d->dattn,
                             .dout_heads = d->dout_heads,
                             .delta = d->delta,
                             .dq = d->dq,
                             .dk = d->dk,
                             .dv = d->dv};
}

/* to = from, what a projection is then added to */
static zs_status carry(const block *b, float *to, const float *from)
{
    const size_t numel = (size_t)b->tokens->count * (size_t)b->hidden;
    return b->d->device->ops->copy(b->d->device, to, from, numel * sizeof *to, b->d->stream);
}

zs_status zs_device_forward(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                            float *out, zs_acts *acts)
{
    block b;
    ZS_CHECK(block_init(&b, model, tokens, layer, x, acts));
    const zs_model_device *d = b.d;
    const zs_device_acts *a = b.a;
    ZS_CHECK(norm(&b, x, ZS_W_ATTN_NORM, a->rstd_attn, d->norm_attn));
    for (part i = Q; i <= V; i++)
        ZS_CHECK(project_heads(&b, i));
    const zs_nn_attention attention = attention_of(&b);
    ZS_CHECK(b.ops->attention(d->nn, &attention));
    ZS_CHECK(carry(&b, a->mid, x));
    ZS_CHECK(project(&b, ZS_W_O, ZS_W_O_BIAS, b.hidden, b.width_q, a->attn, a->mid, 1));
    ZS_CHECK(norm(&b, a->mid, ZS_W_MLP_NORM, a->rstd_mlp, d->norm_mlp));
    ZS_CHECK(project(&b, ZS_W_GATE, ZS_W_GATE_BIAS, b.ffn, b.hidden, d->norm_mlp, a->gate, 0));
    ZS_CHECK(project(&b, ZS_W_UP, ZS_W_UP_BIAS, b.ffn, b.hidden, d->norm_mlp, a->up, 0));
    if (!out)
        return ZS_OK;
    const uint64_t numel = (uint64_t)tokens->count * (uint64_t)b.ffn;
    ZS_CHECK(b.ops->swiglu(d->nn, numel, d->act, a->gate, a->up));
    ZS_CHECK(carry(&b, out, a->mid));
    return project(&b, ZS_W_DOWN, ZS_W_DOWN_BIAS, b.hidden, b.ffn, d->act, out, 1);
}

/* ---- backward ---- */

/* Gradients of a matrix and its bias. */
static zs_status weight_grads(const block *b, zs_weight_kind kind, zs_weight_kind bias, int rows,
                              int columns, const void *dy, const void *x)
{
    ZS_CHECK(
        zs_device_matrix_grad(b->model, param_of(b, kind), rows, columns, b->tokens->count, dy, x));
    if (!b->w[bias])
        return ZS_OK;
    const zs_nn_columns sums = {
        .count = b->tokens->count, .width = rows, .dy = dy, .dtype = b->d->narrow};
    return zs_device_vector_grad(b->model, param_of(b, bias), &sums);
}

/* From d->dnorm: the residual's gradient, the norm's, and the norm's result again. */
static zs_status norm_back(const block *b, zs_weight_kind kind, const float *base, const float *x,
                           const float *rstd, float *dx, void *dx_narrow, void *y)
{
    const zs_nn_columns sums = {.count = b->tokens->count,
                                .width = b->hidden,
                                .dy = b->d->dnorm,
                                .dtype = ZS_FP32,
                                .x = x,
                                .rstd = rstd};
    const zs_nn_rms_grad grad = {.count = b->tokens->count,
                                 .width = b->hidden,
                                 .base = base,
                                 .dy = b->d->dnorm,
                                 .x = x,
                                 .w = b->w[kind],
                                 .rstd = rstd,
                                 .dx = dx,
                                 .dx_narrow = dx_narrow == (void *)dx ? NULL : dx_narrow,
                                 .y = y};
    ZS_CHECK(zs_device_vector_grad(b->model, param_of(b, kind), &sums));
    return b->ops->rms_grad(b->d->nn, &grad);
}

static zs_status feed_back(const block *b, const float *dout, const void *dout_narrow)
{
    zs_model_device *d = b->d;
    const zs_device_acts *a = b->a;
    const int tokens = b->tokens->count;
    ZS_CHECK(zs_device_input_grad(b->model, b->w[ZS_W_DOWN], b->hidden, b->ffn, tokens, dout_narrow,
                                  d->act, d->narrow, 0));
    ZS_CHECK(b->ops->swiglu_grad(d->nn, (uint64_t)tokens * (uint64_t)b->ffn, d->act, a->gate, a->up,
                                 d->act));
    ZS_CHECK(weight_grads(b, ZS_W_DOWN, ZS_W_DOWN_BIAS, b->hidden, b->ffn, dout_narrow, d->act));
    ZS_CHECK(zs_device_input_grad(b->model, b->w[ZS_W_GATE], b->ffn, b->hidden, tokens, a->gate,
                                  d->dnorm, ZS_FP32, 0));
    ZS_CHECK(zs_device_input_grad(b->model, b->w[ZS_W_UP], b->ffn, b->hidden, tokens, a->up,
                                  d->dnorm, ZS_FP32, 1));
    ZS_CHECK(norm_back(b, ZS_W_MLP_NORM, dout, a->mid, a->rstd_mlp, d->dmid, d->dmid_narrow,
                       d->norm_mlp));
    ZS_CHECK(weight_grads(b, ZS_W_GATE, ZS_W_GATE_BIAS, b->ffn, b->hidden, a->gate, d->norm_mlp));
    return weight_grads(b, ZS_W_UP, ZS_W_UP_BIAS, b->ffn, b->hidden, a->up, d->norm_mlp);
}

/* d: head-major; draw: token-major, narrow. */
static zs_status heads_back(const block *b, part which, zs_weight_kind norm, const float *dheads,
                            void *draw)
{
    zs_nn_heads h = heads_of(b, which);
    zs_device_sink sink = {0};
    h.d = dheads;
    h.draw = draw;
    if (h.norm) {
        ZS_CHECK(zs_device_sink_open(b->model, param_of(b, norm), &sink));
        h.dnorm = sink.out;
        h.add = sink.add;
    }
    ZS_CHECK(b->ops->heads_grad(b->d->nn, &h));
    return h.norm ? zs_device_sink_ready(b->model, &sink) : ZS_OK;
}

static zs_status attend_back(const block *b)
{
    const zs_model_device *d = b->d;
    const zs_nn_attention attention = attention_of(b);
    ZS_CHECK(zs_device_input_grad(b->model, b->w[ZS_W_O], b->hidden, b->width_q, b->tokens->count,
                                  d->dmid_narrow, d->dattn, d->narrow, 0));
    ZS_CHECK(
        weight_grads(b, ZS_W_O, ZS_W_O_BIAS, b->hidden, b->width_q, d->dmid_narrow, b->a->attn));
    ZS_CHECK(b->ops->attention_grad(d->nn, &attention));
    /* dattn has been read: it becomes the gradient of q. */
    ZS_CHECK(heads_back(b, Q, ZS_W_Q_NORM, d->dq, d->dattn));
    ZS_CHECK(heads_back(b, K, ZS_W_K_NORM, d->dk, d->dk_narrow));
    return heads_back(b, V, ZS_W_V, d->dv, d->dv_narrow);
}

static zs_status project_back(const block *b, float *dx, void *dx_narrow)
{
    const struct {
        zs_weight_kind weight, bias;
        const void *dy;
        int rows;
    } products[] = {{ZS_W_Q, ZS_W_Q_BIAS, b->d->dattn, b->width_q},
                    {ZS_W_K, ZS_W_K_BIAS, b->d->dk_narrow, b->width_kv},
                    {ZS_W_V, ZS_W_V_BIAS, b->d->dv_narrow, b->width_kv}};
    for (size_t i = 0; i < ZS_COUNT(products); i++)
        ZS_CHECK(zs_device_input_grad(b->model, b->w[products[i].weight], products[i].rows,
                                      b->hidden, b->tokens->count, products[i].dy, b->d->dnorm,
                                      ZS_FP32, i > 0));
    ZS_CHECK(norm_back(b, ZS_W_ATTN_NORM, b->d->dmid, b->x, b->a->rstd_attn, dx, dx_narrow,
                       b->d->norm_attn));
    for (size_t i = 0; i < ZS_COUNT(products); i++)
        ZS_CHECK(weight_grads(b, products[i].weight, products[i].bias, products[i].rows, b->hidden,
                              products[i].dy, b->d->norm_attn));
    return ZS_OK;
}

zs_status zs_device_backward(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                             zs_acts *acts, const float *dout, float *dx)
{
    block b;
    ZS_CHECK(block_init(&b, model, tokens, layer, x, acts));
    const int at = dout == model->dx[1];
    ZS_CHECK(feed_back(&b, dout, b.d->dx_narrow[at]));
    ZS_CHECK(attend_back(&b));
    return project_back(&b, dx, b.d->dx_narrow[!at]);
}
