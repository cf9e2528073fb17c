/* SPDX-License-Identifier: Apache-2.0 */
/* As attention.c, a tile of a row's queries at a time, but of all heads at once: a product for each
 * member of the groups of query heads that share keys, over all groups. Inputs are fp32; where the
 * weights are bf16, products may round them to TF32, which keeps more than bf16 does. */
#include <math.h>

#include "base/util.h"
#include "model/device.h"

typedef struct tile {
    zs_nn_scores scores;
    int64_t q, k, stat; /* elements from q, k and lse to the tile's */
} tile;

typedef struct pass {
    zs_model *model;
    const zs_nn_device_ops *ops;
    const zs_tokens *tokens;
    const zs_acts *acts;
    int dim, group, kv_heads, ldq, ldk;
    float scale;
} pass;

static pass pass_of(zs_model *m, const zs_tokens *tokens, const zs_acts *acts)
{
    const zs_model_config *c = &m->config;
    return (pass){.model = m,
                  .ops = m->device->nn->ops,
                  .tokens = tokens,
                  .acts = acts,
                  .dim = c->head_dim,
                  .group = c->heads / c->kv_heads,
                  .kv_heads = c->kv_heads,
                  .ldq = c->heads * c->head_dim,
                  .ldk = c->kv_heads * c->head_dim,
                  .scale = 1.0f / sqrtf((float)c->head_dim)};
}

static tile tile_of(const pass *p, int row, int first)
{
    const zs_tokens *t = p->tokens;
    const int heads = p->model->config.heads;
    const int64_t base = (int64_t)row * t->seq, at = base + first;
    const int queries = ZS_MIN(t->seq - first, (int)ZS_QUERY_TILE), begin = t->starts[at];
    return (tile){.scores = {.heads = heads,
                             .queries = queries,
                             .keys = first + queries - begin,
                             .first = first,
                             .begin = begin,
                             .starts = p->model->device->batch.starts + at,
                             .lse = p->acts->lse + at * heads},
                  .q = at * p->ldq,
                  .k = (base + begin) * p->ldk,
                  .stat = at * heads};
}

/* What a product has on each side: queries (or keys) with their dimensions, or scores. */
typedef struct side {
    const float *at;
    int ld, transpose;
    int64_t step;
} side;

static side queries_of(const pass *p, const float *q, const tile *t, int member)
{
    return (side){q + t->q + (int64_t)member * p->dim, p->ldq, 0, (int64_t)p->group * p->dim};
}

static side keys_of(const pass *p, const float *k, const tile *t)
{
    return (side){k + t->k, p->ldk, 0, p->dim};
}

static side scores_of(const pass *p, const float *x, const tile *t, int member)
{
    const int64_t each = (int64_t)t->scores.queries * t->scores.keys;
    return (side){x + member * each, t->scores.keys, 0, p->group * each};
}

static side turned(side x)
{
    x.transpose = 1;
    return x;
}

/* c = scale a b (+ c when add), for one member of all groups. */
static zs_status multiply(const pass *p, int m, int n, int k, side a, side b, side c, float scale,
                          int add)
{
    return p->ops->gemm(p->model->device->nn,
                        &(zs_nn_gemm){.m = m,
                                      .n = n,
                                      .k = k,
                                      .a = a.at,
                                      .b = b.at,
                                      .c = (float *)c.at,
                                      .in = ZS_FP32,
                                      .out = ZS_FP32,
                                      .transpose_a = a.transpose,
                                      .transpose_b = b.transpose,
                                      .lda = a.ld,
                                      .ldb = b.ld,
                                      .ldc = c.ld,
                                      .batch = p->kv_heads,
                                      .step_a = a.step,
                                      .step_b = b.step,
                                      .step_c = c.step,
                                      .alpha = scale,
                                      .beta = add ? 1 : 0,
                                      .tf32 = p->model->options.dtype != ZS_FP32});
}

static zs_status forward_tile(const pass *p, const tile *t)
{
    const zs_model_device *d = p->model->device;
    const zs_acts *a = p->acts;
    const int queries = t->scores.queries, keys = t->scores.keys;
    for (int i = 0; i < p->group; i++)
        ZS_CHECK(multiply(p, queries, keys, p->dim, queries_of(p, a->q, t, i),
                          turned(keys_of(p, a->k, t)), scores_of(p, d->scores, t, i), p->scale, 0));
    ZS_CHECK(p->ops->softmax(d->nn, &t->scores, d->scores));
    for (int i = 0; i < p->group; i++)
        ZS_CHECK(multiply(p, queries, p->dim, keys, scores_of(p, d->scores, t, i),
                          keys_of(p, a->v, t), queries_of(p, a->attn, t, i), 1, 0));
    return ZS_OK;
}

zs_status zs_device_attention(zs_model *m, const zs_tokens *tokens, const zs_acts *acts)
{
    const pass p = pass_of(m, tokens, acts);
    for (int row = 0; row < tokens->rows; row++)
        for (int first = 0; first < tokens->seq; first += ZS_QUERY_TILE) {
            const tile t = tile_of(&p, row, first);
            ZS_CHECK(forward_tile(&p, &t));
        }
    return ZS_OK;
}

/* Gradients of keys and values are added up over tiles and members, in their order. */
static zs_status backward_tile(const pass *p, const tile *t)
{
    const zs_model *m = p->model;
    const zs_model_device *d = m->device;
    const zs_acts *a = p->acts;
    const int queries = t->scores.queries, keys = t->scores.keys;
    const side k = keys_of(p, a->k, t), v = keys_of(p, a->v, t);
    const side dk = keys_of(p, m->dk, t), dv = keys_of(p, m->dv, t);
    for (int i = 0; i < p->group; i++) {
        ZS_CHECK(multiply(p, queries, keys, p->dim, queries_of(p, a->q, t, i), turned(k),
                          scores_of(p, d->scores, t, i), p->scale, 0));
        ZS_CHECK(multiply(p, queries, keys, p->dim, queries_of(p, m->dattn, t, i), turned(v),
                          scores_of(p, d->dscores, t, i), 1, 0));
    }
    ZS_CHECK(p->ops->softmax_grad(d->nn, &t->scores, d->scores, d->dscores, m->delta + t->stat));
    for (int i = 0; i < p->group; i++) {
        const side probs = scores_of(p, d->scores, t, i), grad = scores_of(p, d->dscores, t, i);
        const side q = queries_of(p, a->q, t, i), dout = queries_of(p, m->dattn, t, i);
        ZS_CHECK(multiply(p, keys, p->dim, queries, turned(probs), dout, dv, 1, 1));
        ZS_CHECK(multiply(p, keys, p->dim, queries, turned(grad), q, dk, p->scale, 1));
        ZS_CHECK(multiply(p, queries, p->dim, keys, grad, k, dout, p->scale, 0));
    }
    return ZS_OK;
}

zs_status zs_device_attention_grad(zs_model *m, const zs_tokens *tokens, const zs_acts *acts)
{
    const pass p = pass_of(m, tokens, acts);
    zs_device *device = m->device->device;
    const size_t bytes = (size_t)tokens->count * (size_t)p.ldk * sizeof(float);
    ZS_CHECK(device->ops->zero(device, m->dk, bytes, m->device->stream));
    ZS_CHECK(device->ops->zero(device, m->dv, bytes, m->device->stream));
    for (int row = 0; row < tokens->rows; row++)
        for (int first = 0; first < tokens->seq; first += ZS_QUERY_TILE) {
            const tile t = tile_of(&p, row, first);
            ZS_CHECK(backward_tile(&p, &t));
        }
    return ZS_OK;
}
