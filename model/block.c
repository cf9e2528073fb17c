/* SPDX-License-Identifier: Apache-2.0 */
/* One decoder block. What concerns single tokens runs as one task a tile of tokens, from norm to
 * norm, while the tile is in the cache; attention and the weights' gradients lie between. */
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "model/internal.h"

typedef struct block {
    zs_model *model;
    const zs_tokens *tokens;
    const float *x;
    float *out; /* forward; NULL: not wanted */
    const float *dout;
    float *dx; /* backward */
    zs_acts *a;
    zs_view q, k, v, o, gate, up, down;
    const float *vec[ZS_WEIGHT_KINDS];
    int hidden, ffn, width_q, width_kv;
} block;

/* Tokens [first, first + n) of a task. */
typedef struct part {
    int first, n;
    size_t at; /* first */
} part;

static part part_of(const zs_tokens *tokens, size_t index)
{
    part p = {.first = (int)index * tokens->tile};
    p.n = ZS_MIN(tokens->tile, tokens->count - p.first);
    p.at = (size_t)p.first;
    return p;
}

static size_t tiles_of(const zs_tokens *tokens)
{
    return ((size_t)tokens->count + (size_t)tokens->tile - 1) / (size_t)tokens->tile;
}

zs_status zs_unit_matrix(zs_model *model, int unit, zs_weight_kind kind, zs_view *out)
{
    const zs_weight *w = &model->weights[model->index[unit][kind]];
    void *data;
    ZS_CHECK(zs_param_data(model->engine, model->params[model->index[unit][kind]], &data));
    *out = (zs_view){data, model->options.dtype, (int)w->shape[0], (int)w->shape[1]};
    return ZS_OK;
}

zs_status zs_unit_vectors(zs_model *model, int unit, const float *vectors[ZS_WEIGHT_KINDS])
{
    float *room = model->vectors;
    for (int kind = 0; kind < ZS_WEIGHT_KINDS; kind++) {
        int32_t i = model->index[unit][kind];
        void *data;
        vectors[kind] = NULL;
        if (i < 0 || model->weights[i].ndim != 1)
            continue;
        ZS_CHECK(zs_param_data(model->engine, model->params[i], &data));
        if (model->options.dtype == ZS_FP32) {
            vectors[kind] = data;
            continue;
        }
        model->nn->widen((size_t)model->weights[i].shape[0], room, data);
        vectors[kind] = room;
        room += model->weights[i].shape[0];
    }
    return ZS_OK;
}

static zs_status block_init(block *b, zs_model *model, const zs_tokens *tokens, int layer,
                            const float *x, zs_acts *acts)
{
    const zs_model_config *c = &model->config;
    *b = (block){.model = model,
                 .tokens = tokens,
                 .x = x,
                 .a = acts,
                 .hidden = c->hidden,
                 .ffn = c->intermediate,
                 .width_q = c->heads * c->head_dim,
                 .width_kv = c->kv_heads * c->head_dim};
    zs_view *const views[] = {&b->q, &b->k, &b->v, &b->o, &b->gate, &b->up, &b->down};
    static const zs_weight_kind kinds[] = {ZS_W_Q,    ZS_W_K,  ZS_W_V,   ZS_W_O,
                                           ZS_W_GATE, ZS_W_UP, ZS_W_DOWN};
    for (size_t i = 0; i < ZS_COUNT(kinds); i++)
        ZS_CHECK(zs_unit_matrix(model, 1 + layer, kinds[i], views[i]));
    return zs_unit_vectors(model, 1 + layer, b->vec);
}

/* Norm of each head when the model has it, then rope; raw NULL: x is rotated in place. */
static void turn_heads(const block *b, part p, int heads, const float *norm, const float *raw,
                       float *rstd, float *x)
{
    const zs_model *model = b->model;
    const zs_nn *nn = model->nn;
    size_t dim = (size_t)model->config.head_dim, half = dim / 2;
    for (int t = p.first; t < p.first + p.n; t++) {
        size_t angle = (size_t)b->tokens->positions[t] * half;
        for (int h = 0; h < heads; h++) {
            size_t head = (size_t)t * (size_t)heads + (size_t)h;
            float *to = x + head * dim;
            if (norm)
                rstd[head] = nn->rms(dim, to, raw + head * dim, norm, (float)model->config.rms_eps);
            nn->rope(half, to, model->cos + angle, model->sin + angle, 0);
        }
    }
}

/* The way back, in place over dx; dnorm is added to. */
static void turn_heads_back(const block *b, part p, int heads, const float *norm, const float *raw,
                            const float *rstd, float *dx, float *dnorm)
{
    const zs_model *model = b->model;
    const zs_nn *nn = model->nn;
    size_t dim = (size_t)model->config.head_dim, half = dim / 2;
    for (int t = p.first; t < p.first + p.n; t++) {
        size_t angle = (size_t)b->tokens->positions[t] * half;
        for (int h = 0; h < heads; h++) {
            size_t head = (size_t)t * (size_t)heads + (size_t)h;
            float *d = dx + head * dim;
            nn->rope(half, d, model->cos + angle, model->sin + angle, 1);
            if (norm)
                nn->rms_grad(dim, d, NULL, d, raw + head * dim, norm, rstd[head], dnorm, NULL);
        }
    }
}

static void norm_rows(const block *b, part p, const float *x, const float *w, float *rstd, float *y)
{
    size_t hidden = (size_t)b->hidden;
    for (int t = 0; t < p.n; t++)
        rstd[p.first + t] =
            b->model->nn->rms(hidden, y + (size_t)t * hidden, x + (p.at + (size_t)t) * hidden, w,
                              (float)b->model->config.rms_eps);
}

static void project_task(void *arg, size_t index, int worker)
{
    const block *b = arg;
    const zs_model *model = b->model;
    const zs_acts *a = b->a;
    part p = part_of(b->tokens, index);
    float *norm = zs_model_scratch(model, worker);
    size_t at_q = p.at * (size_t)b->width_q, at_kv = p.at * (size_t)b->width_kv;
    float *q = (a->raw_q ? a->raw_q : a->q) + at_q, *k = (a->raw_k ? a->raw_k : a->k) + at_kv;
    norm_rows(b, p, b->x, b->vec[ZS_W_ATTN_NORM], a->rstd_attn, norm);
    zs_linear(model, worker, &b->q, b->vec[ZS_W_Q_BIAS], p.n, norm, q, b->width_q, 0);
    zs_linear(model, worker, &b->k, b->vec[ZS_W_K_BIAS], p.n, norm, k, b->width_kv, 0);
    zs_linear(model, worker, &b->v, b->vec[ZS_W_V_BIAS], p.n, norm, a->v + at_kv, b->width_kv, 0);
    turn_heads(b, p, model->config.heads, b->vec[ZS_W_Q_NORM], a->raw_q, a->rstd_q, a->q);
    turn_heads(b, p, model->config.kv_heads, b->vec[ZS_W_K_NORM], a->raw_k, a->rstd_k, a->k);
}

static void feed_task(void *arg, size_t index, int worker)
{
    const block *b = arg;
    const zs_model *model = b->model;
    const zs_acts *a = b->a;
    part p = part_of(b->tokens, index);
    size_t at = p.at * (size_t)b->hidden, at_ffn = p.at * (size_t)b->ffn;
    size_t bytes = (size_t)p.n * (size_t)b->hidden * sizeof(float);
    float *norm = zs_model_scratch(model, worker);
    float *act = norm + (size_t)b->tokens->tile * (size_t)b->hidden;
    memcpy(a->mid + at, b->x + at, bytes);
    zs_linear(model, worker, &b->o, b->vec[ZS_W_O_BIAS], p.n, a->attn + p.at * (size_t)b->width_q,
              a->mid + at, b->hidden, 1);
    norm_rows(b, p, a->mid, b->vec[ZS_W_MLP_NORM], a->rstd_mlp, norm);
    zs_linear(model, worker, &b->gate, b->vec[ZS_W_GATE_BIAS], p.n, norm, a->gate + at_ffn, b->ffn,
              0);
    zs_linear(model, worker, &b->up, b->vec[ZS_W_UP_BIAS], p.n, norm, a->up + at_ffn, b->ffn, 0);
    if (!b->out)
        return;
    model->nn->swiglu((size_t)p.n * (size_t)b->ffn, act, a->gate + at_ffn, a->up + at_ffn);
    memcpy(b->out + at, a->mid + at, bytes);
    zs_linear(model, worker, &b->down, b->vec[ZS_W_DOWN_BIAS], p.n, act, b->out + at, b->hidden, 1);
}

zs_status zs_block_forward(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                           float *out, zs_acts *acts)
{
    block b;
    ZS_CHECK(block_init(&b, model, tokens, layer, x, acts));
    b.out = out;
    zs_pool_run(model->pool, project_task, &b, tiles_of(tokens));
    zs_attention(model, tokens, acts);
    zs_pool_run(model->pool, feed_task, &b, tiles_of(tokens));
    return ZS_OK;
}

/* This tile's sums for the gradients of norm weights: attention, mlp, q, k. */
static float *partial_of(const block *b, size_t index, zs_weight_kind kind)
{
    float *sums = b->model->partial + index * (size_t)b->model->partial_stride;
    switch (kind) {
    case ZS_W_MLP_NORM:
        return sums + b->hidden;
    case ZS_W_Q_NORM:
        return sums + 2 * b->hidden;
    case ZS_W_K_NORM:
        return sums + 2 * b->hidden + b->model->config.head_dim;
    default:
        return sums;
    }
}

static void feed_back_task(void *arg, size_t index, int worker)
{
    const block *b = arg;
    zs_model *model = b->model;
    const zs_nn *nn = model->nn;
    const zs_acts *a = b->a;
    part p = part_of(b->tokens, index);
    size_t hidden = (size_t)b->hidden, dim = (size_t)model->config.head_dim;
    size_t heads = (size_t)model->config.heads;
    size_t at_ffn = p.at * (size_t)b->ffn, at_q = p.at * (size_t)b->width_q;
    float *dnorm = zs_model_scratch(model, worker);
    float *dw = partial_of(b, index, ZS_W_MLP_NORM);
    memset(model->partial + index * (size_t)model->partial_stride, 0,
           (size_t)model->partial_stride * sizeof(float));
    zs_linear_input_grad(model, worker, &b->down, p.n, b->dout + p.at * hidden, model->act + at_ffn,
                         0);
    nn->swiglu_grad((size_t)p.n * (size_t)b->ffn, model->act + at_ffn, a->gate + at_ffn,
                    a->up + at_ffn, model->act + at_ffn);
    zs_linear_input_grad(model, worker, &b->gate, p.n, a->gate + at_ffn, dnorm, 0);
    zs_linear_input_grad(model, worker, &b->up, p.n, a->up + at_ffn, dnorm, 1);
    for (int t = p.first; t < p.first + p.n; t++) {
        size_t at = (size_t)t * hidden;
        nn->rms_grad(hidden, model->dmid + at, b->dout + at, dnorm + (size_t)(t - p.first) * hidden,
                     a->mid + at, b->vec[ZS_W_MLP_NORM], a->rstd_mlp[t], dw, model->norm_mlp + at);
    }
    zs_linear_input_grad(model, worker, &b->o, p.n, model->dmid + p.at * hidden,
                         model->dattn + at_q, 0);
    for (size_t i = p.at * heads; i < (p.at + (size_t)p.n) * heads; i++)
        model->delta[i] = nn->dot(dim, model->dattn + i * dim, a->attn + i * dim);
}

static void project_back_task(void *arg, size_t index, int worker)
{
    const block *b = arg;
    zs_model *model = b->model;
    const zs_acts *a = b->a;
    part p = part_of(b->tokens, index);
    size_t hidden = (size_t)b->hidden;
    float *dnorm = zs_model_scratch(model, worker);
    float *dw = partial_of(b, index, ZS_W_ATTN_NORM);
    turn_heads_back(b, p, model->config.heads, b->vec[ZS_W_Q_NORM], a->raw_q, a->rstd_q,
                    model->dattn, partial_of(b, index, ZS_W_Q_NORM));
    turn_heads_back(b, p, model->config.kv_heads, b->vec[ZS_W_K_NORM], a->raw_k, a->rstd_k,
                    model->dk, partial_of(b, index, ZS_W_K_NORM));
    zs_linear_input_grad(model, worker, &b->q, p.n, model->dattn + p.at * (size_t)b->width_q, dnorm,
                         0);
    zs_linear_input_grad(model, worker, &b->k, p.n, model->dk + p.at * (size_t)b->width_kv, dnorm,
                         1);
    zs_linear_input_grad(model, worker, &b->v, p.n, model->dv + p.at * (size_t)b->width_kv, dnorm,
                         1);
    for (int t = p.first; t < p.first + p.n; t++) {
        size_t at = (size_t)t * hidden;
        model->nn->rms_grad(hidden, b->dx + at, model->dmid + at,
                            dnorm + (size_t)(t - p.first) * hidden, b->x + at,
                            b->vec[ZS_W_ATTN_NORM], a->rstd_attn[t], dw, model->norm_attn + at);
    }
}

static zs_status weight_grads(const block *b, int layer)
{
    zs_model *model = b->model;
    const zs_acts *a = b->a;
    const int hidden = b->hidden;
    /* Matrix, bias, what went in, what came back. */
    const struct {
        zs_weight_kind weight, bias;
        const float *x, *dy;
        int rows, columns;
    } products[] = {
        {ZS_W_DOWN, ZS_W_DOWN_BIAS, model->act, b->dout, hidden, b->ffn},
        {ZS_W_GATE, ZS_W_GATE_BIAS, model->norm_mlp, a->gate, b->ffn, hidden},
        {ZS_W_UP, ZS_W_UP_BIAS, model->norm_mlp, a->up, b->ffn, hidden},
        {ZS_W_O, ZS_W_O_BIAS, a->attn, model->dmid, hidden, b->width_q},
        {ZS_W_Q, ZS_W_Q_BIAS, model->norm_attn, model->dattn, b->width_q, hidden},
        {ZS_W_K, ZS_W_K_BIAS, model->norm_attn, model->dk, b->width_kv, hidden},
        {ZS_W_V, ZS_W_V_BIAS, model->norm_attn, model->dv, b->width_kv, hidden},
    };
    static const zs_weight_kind norms[] = {ZS_W_ATTN_NORM, ZS_W_MLP_NORM, ZS_W_Q_NORM, ZS_W_K_NORM};
    zs_grad_job jobs[2 * ZS_COUNT(products) + ZS_COUNT(norms)];
    const int32_t *index = model->index[1 + layer];
    size_t count = 0;
    for (size_t i = 0; i < ZS_COUNT(products); i++)
        jobs[count++] = (zs_grad_job){model->params[index[products[i].weight]],
                                      products[i].dy,
                                      products[i].x,
                                      b->tokens->count,
                                      products[i].rows,
                                      products[i].rows,
                                      products[i].columns};
    for (size_t i = 0; i < ZS_COUNT(products); i++)
        if (index[products[i].bias] >= 0)
            jobs[count++] = (zs_grad_job){model->params[index[products[i].bias]],
                                          products[i].dy,
                                          NULL,
                                          b->tokens->count,
                                          products[i].rows,
                                          products[i].rows,
                                          1};
    for (size_t i = 0; i < ZS_COUNT(norms); i++)
        if (index[norms[i]] >= 0)
            jobs[count++] = (zs_grad_job){model->params[index[norms[i]]],
                                          partial_of(b, 0, norms[i]),
                                          NULL,
                                          (int)tiles_of(b->tokens),
                                          model->partial_stride,
                                          (int)model->weights[index[norms[i]]].shape[0],
                                          1};
    return zs_grads_run(model, jobs, count);
}

zs_status zs_block_backward(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                            zs_acts *acts, const float *dout, float *dx)
{
    block b;
    ZS_CHECK(block_init(&b, model, tokens, layer, x, acts));
    b.dout = dout;
    b.dx = dx;
    zs_pool_run(model->pool, feed_back_task, &b, tiles_of(tokens));
    zs_attention_grad(model, tokens, acts);
    zs_pool_run(model->pool, project_back_task, &b, tiles_of(tokens));
    return weight_grads(&b, layer);
}
