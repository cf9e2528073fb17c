/* SPDX-License-Identifier: Apache-2.0 */
/* Causal attention within documents. Scores exist for one tile of queries of one head at a time;
 * backward computes them again from the logarithm of the softmax' denominator. */
#include <cblas.h>
#include <math.h>
#include <string.h>

#include "base/util.h"
#include "model/internal.h"

typedef struct pass {
    zs_model *model;
    const zs_tokens *tokens;
    const zs_acts *acts;
    int query_tiles;
    float scale;
} pass;

/* One head's queries [first, end) of a row, and the keys from begin on that any of them sees. */
typedef struct span {
    int row, first, end, begin;
} span;

static span span_of(const zs_tokens *tokens, int row, int tile)
{
    span s = {.row = row, .first = tile * ZS_QUERY_TILE};
    s.end = ZS_MIN(s.first + ZS_QUERY_TILE, tokens->seq);
    s.begin = tokens->starts[(size_t)row * (size_t)tokens->seq + (size_t)s.first];
    return s;
}

size_t zs_attention_scratch(const zs_model_config *config, int seq)
{
    (void)config;
    return 2 * (size_t)ZS_MIN(seq, (int)ZS_QUERY_TILE) * (size_t)seq;
}

static void scores(const pass *p, const span *s, const float *q, int ldq, const float *k, int ldk,
                   float *out)
{
    int keys = s->end - s->begin;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, s->end - s->first, keys,
                p->model->config.head_dim, p->scale, q, ldq, k, ldk, 0.0f, out, keys);
}

static void forward_task(void *arg, size_t index, int worker)
{
    const pass *p = arg;
    const zs_model_config *c = &p->model->config;
    const zs_tokens *tokens = p->tokens;
    const zs_acts *a = p->acts;
    int dim = c->head_dim, ldq = c->heads * dim, ldk = c->kv_heads * dim;
    int group = c->heads / c->kv_heads;
    /* The last tiles are the largest and go first. */
    size_t pairs = (size_t)tokens->rows * (size_t)c->kv_heads;
    int tile = p->query_tiles - 1 - (int)(index / pairs);
    int row = (int)(index % pairs) / c->kv_heads, kv = (int)(index % pairs) % c->kv_heads;
    span s = span_of(tokens, row, tile);
    int keys = s.end - s.begin;
    size_t base = (size_t)row * (size_t)tokens->seq;
    const float *k = a->k + (base + (size_t)s.begin) * (size_t)ldk + kv * dim;
    const float *v = a->v + (base + (size_t)s.begin) * (size_t)ldk + kv * dim;
    float *probs = zs_model_scratch(p->model, worker);
    for (int head = kv * group; head < (kv + 1) * group; head++) {
        size_t at = (base + (size_t)s.first) * (size_t)ldq + (size_t)(head * dim);
        float sums[ZS_QUERY_TILE];
        scores(p, &s, a->q + at, ldq, k, ldk, probs);
        for (int t = s.first; t < s.end; t++) {
            float *line = probs + (size_t)(t - s.first) * (size_t)keys, max;
            int from = tokens->starts[base + (size_t)t] - s.begin, to = t + 1 - s.begin;
            float sum = p->model->nn->softmax((size_t)(to - from), line + from, &max);
            memset(line, 0, (size_t)from * sizeof(float));
            memset(line + to, 0, (size_t)(keys - to) * sizeof(float));
            sums[t - s.first] = 1.0f / sum;
            a->lse[(base + (size_t)t) * (size_t)c->heads + (size_t)head] = max + logf(sum);
        }
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, s.end - s.first, dim, keys, 1.0f,
                    probs, keys, v, ldk, 0.0f, a->attn + at, ldq);
        for (int t = 0; t < s.end - s.first; t++)
            p->model->nn->scale((size_t)dim, a->attn + at + (size_t)t * (size_t)ldq, sums[t]);
    }
}

void zs_attention(zs_model *model, const zs_tokens *tokens, const zs_acts *acts)
{
    pass p = {model, tokens, acts, (tokens->seq + ZS_QUERY_TILE - 1) / ZS_QUERY_TILE,
              1.0f / sqrtf((float)model->config.head_dim)};
    zs_pool_run(model->pool, forward_task, &p,
                (size_t)tokens->rows * (size_t)model->config.kv_heads * (size_t)p.query_tiles);
}

static void clear_head(const zs_tokens *tokens, size_t base, float *x, int ld, int dim)
{
    for (int t = 0; t < tokens->seq; t++)
        memset(x + (base + (size_t)t) * (size_t)ld, 0, (size_t)dim * sizeof(float));
}

/* One row and key head whole: the sums over queries keep one order. */
static void backward_task(void *arg, size_t index, int worker)
{
    const pass *p = arg;
    zs_model *model = p->model;
    const zs_model_config *c = &model->config;
    const zs_tokens *tokens = p->tokens;
    const zs_acts *a = p->acts;
    int dim = c->head_dim, ldq = c->heads * dim, ldk = c->kv_heads * dim;
    int group = c->heads / c->kv_heads;
    int row = (int)index / c->kv_heads, kv = (int)index % c->kv_heads;
    size_t base = (size_t)row * (size_t)tokens->seq;
    float *probs = zs_model_scratch(model, worker);
    float *dprobs = probs + zs_attention_scratch(c, tokens->seq) / 2;
    clear_head(tokens, base, model->dk + kv * dim, ldk, dim);
    clear_head(tokens, base, model->dv + kv * dim, ldk, dim);
    for (int tile = 0; tile < p->query_tiles; tile++) {
        span s = span_of(tokens, row, tile);
        int keys = s.end - s.begin, queries = s.end - s.first;
        size_t key_at = (base + (size_t)s.begin) * (size_t)ldk + (size_t)(kv * dim);
        for (int head = kv * group; head < (kv + 1) * group; head++) {
            size_t at = (base + (size_t)s.first) * (size_t)ldq + (size_t)(head * dim);
            float *dout = model->dattn + at;
            scores(p, &s, a->q + at, ldq, a->k + key_at, ldk, probs);
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, queries, keys, dim, 1.0f, dout,
                        ldq, a->v + key_at, ldk, 0.0f, dprobs, keys);
            for (int t = s.first; t < s.end; t++) {
                size_t line = (size_t)(t - s.first) * (size_t)keys;
                size_t stat = (base + (size_t)t) * (size_t)c->heads + (size_t)head;
                int from = tokens->starts[base + (size_t)t] - s.begin, to = t + 1 - s.begin;
                model->nn->softmax_grad((size_t)(to - from), probs + line + from,
                                        dprobs + line + from, a->lse[stat], model->delta[stat]);
                for (int i = 0; i < 2; i++) {
                    float *x = (i ? dprobs : probs) + line;
                    memset(x, 0, (size_t)from * sizeof(float));
                    memset(x + to, 0, (size_t)(keys - to) * sizeof(float));
                }
            }
            cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, keys, dim, queries, 1.0f, probs,
                        keys, dout, ldq, 1.0f, model->dv + key_at, ldk);
            cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, keys, dim, queries, p->scale,
                        dprobs, keys, a->q + at, ldq, 1.0f, model->dk + key_at, ldk);
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, queries, dim, keys, p->scale,
                        dprobs, keys, a->k + key_at, ldk, 0.0f, dout, ldq);
        }
    }
}

void zs_attention_grad(zs_model *model, const zs_tokens *tokens, const zs_acts *acts)
{
    pass p = {model, tokens, acts, (tokens->seq + ZS_QUERY_TILE - 1) / ZS_QUERY_TILE,
              1.0f / sqrtf((float)model->config.head_dim)};
    zs_pool_run(model->pool, backward_task, &p,
                (size_t)tokens->rows * (size_t)model->config.kv_heads);
}
