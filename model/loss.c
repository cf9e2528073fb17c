/* SPDX-License-Identifier: Apache-2.0 */
/* Final norm, head and cross-entropy, for the counted predictions only, in chunks of them: logits
 * exist as [chunk][vocab]. */
#include <cblas.h>
#include <math.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "model/internal.h"

enum { LOGITS_NUMEL = 16 << 20, LEAST_CHUNK = 64, MOST_CHUNK = 512, ROW_TILE = 8, TASK_TILE = 128 };

typedef struct head {
    zs_model *model;
    const zs_tokens *tokens;
    const float *x;
    zs_view w;
    const float *norm_weight;
    float *norm, *dnorm; /* of the predictions: [predictions][hidden] */
    int predictions;
    int first, n; /* of the present chunk */
    float scale;
    float *logits;
    int ldl; /* of logits: vocab */
    int token_tasks;
    float *grad; /* of the head, fp32 */
    int grad_add;
    float *dx;
} head;

int zs_head_chunk(const zs_model_config *config, int tokens)
{
    int chunk = LOGITS_NUMEL / config->vocab / 32 * 32;
    return ZS_MIN(ZS_MIN(ZS_MAX(chunk, LEAST_CHUNK), MOST_CHUNK), tokens);
}

static int tiles(int count, int tile)
{
    return (count + tile - 1) / tile;
}

static void norm_task(void *arg, size_t index, int worker)
{
    const head *h = arg;
    size_t hidden = (size_t)h->model->config.hidden;
    int first = (int)index * h->tokens->tile;
    (void)worker;
    for (int i = first; i < ZS_MIN(first + h->tokens->tile, h->predictions); i++)
        h->model->nn->rms(hidden, h->norm + (size_t)i * hidden,
                          h->x + (size_t)h->model->batch.sources[i] * hidden, h->norm_weight,
                          (float)h->model->config.rms_eps);
}

static void logits_task(void *arg, size_t index, int worker)
{
    const head *h = arg;
    int row = (int)index * ZS_VOCAB_TILE, rows = ZS_MIN((int)ZS_VOCAB_TILE, h->w.rows - row);
    size_t bytes = (size_t)row * (size_t)h->w.columns * zs_dtype_size(h->w.dtype);
    zs_view part = {(const char *)h->w.data + bytes, h->w.dtype, rows, h->w.columns};
    zs_linear(h->model, worker, &part, NULL, h->n,
              h->norm + (size_t)h->first * (size_t)h->w.columns, h->logits + row, h->ldl, 0);
}

static void entropy_task(void *arg, size_t index, int worker)
{
    const head *h = arg;
    const zs_model *model = h->model;
    size_t vocab = (size_t)h->w.rows;
    (void)worker;
    for (int i = (int)index * ROW_TILE; i < ZS_MIN(((int)index + 1) * ROW_TILE, h->n); i++) {
        float *row = h->logits + (size_t)i * (size_t)h->ldl, max;
        int32_t target = model->batch.targets[h->first + i];
        double logit = row[target];
        float sum = model->nn->softmax(vocab, row, &max);
        model->losses[h->first + i] = log((double)sum) + (double)max - logit;
        if (!h->dx)
            continue;
        model->nn->scale(vocab, row, h->scale / sum);
        row[target] -= h->scale;
    }
}

/* Tiles of predictions: their gradient; then tiles of the vocabulary: the head's. */
static void head_grad_task(void *arg, size_t index, int worker)
{
    const head *h = arg;
    int hidden = h->w.columns;
    if (index < (size_t)h->token_tasks) {
        int first = (int)index * TASK_TILE, n = ZS_MIN((int)TASK_TILE, h->n - first);
        zs_linear_input_grad(h->model, worker, &h->w, n, h->logits + (size_t)first * (size_t)h->ldl,
                             h->dnorm + (size_t)(h->first + first) * (size_t)hidden, 0);
        return;
    }
    int row = (int)(index - (size_t)h->token_tasks) * ZS_VOCAB_TILE;
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans,
                ZS_MIN((int)ZS_VOCAB_TILE, h->w.rows - row), hidden, h->n, 1.0f, h->logits + row,
                h->ldl, h->norm + (size_t)h->first * (size_t)hidden, hidden,
                h->grad_add ? 1.0f : 0.0f, h->grad + (size_t)row * (size_t)hidden, hidden);
}

static void norm_back_task(void *arg, size_t index, int worker)
{
    const head *h = arg;
    zs_model *model = h->model;
    size_t hidden = (size_t)model->config.hidden;
    float *dw = model->partial + index * (size_t)model->partial_stride;
    int first = (int)index * h->tokens->tile;
    (void)worker;
    memset(dw, 0, hidden * sizeof(float));
    for (int t = first; t < ZS_MIN(first + h->tokens->tile, h->tokens->count); t++) {
        const float *x = h->x + (size_t)t * hidden;
        float *dx = h->dx + (size_t)t * hidden;
        int i = model->batch.slot_of[t];
        if (i < 0) {
            memset(dx, 0, hidden * sizeof(float));
            continue;
        }
        /* rstd again rather than kept: sums of one row cost nothing beside the head. */
        float rstd = 1.0f / sqrtf(model->nn->dot(hidden, x, x) / (float)hidden +
                                  (float)model->config.rms_eps);
        model->nn->rms_grad(hidden, dx, NULL, h->dnorm + (size_t)i * hidden, x, h->norm_weight,
                            rstd, dw, NULL);
    }
}

static int head_unit(const zs_model *model)
{
    return model->config.layers + 1;
}

static zs_status head_open(head *h, zs_model *model, const zs_tokens *tokens, const float *x,
                           int predictions)
{
    const float *vectors[ZS_WEIGHT_KINDS];
    *h = (head){.model = model,
                .tokens = tokens,
                .x = x,
                .norm = model->norm_attn,
                .dnorm = model->norm_mlp,
                .predictions = predictions,
                .logits = model->logits,
                .ldl = model->config.vocab};
    ZS_CHECK(zs_unit_vectors(model, head_unit(model), vectors));
    h->norm_weight = vectors[ZS_W_FINAL_NORM];
    return model->config.tied ? zs_unit_matrix(model, 0, ZS_W_EMBED, &h->w)
                              : zs_unit_matrix(model, head_unit(model), ZS_W_HEAD, &h->w);
}

zs_param zs_head_param(const zs_model *model)
{
    int32_t i = model->config.tied ? model->index[0][ZS_W_EMBED]
                                   : model->index[head_unit(model)][ZS_W_HEAD];
    return model->params[i];
}

static zs_status ready(head *h)
{
    zs_model *model = h->model;
    const zs_grad_job norm = {model->params[model->index[head_unit(model)][ZS_W_FINAL_NORM]],
                              model->partial,
                              NULL,
                              tiles(h->tokens->count, h->tokens->tile),
                              model->partial_stride,
                              model->config.hidden,
                              1};
    if (!h->grad_add) /* nothing was counted */
        memset(h->grad, 0, (size_t)h->w.rows * (size_t)h->w.columns * sizeof(float));
    ZS_CHECK(zs_grad_ready(model->engine, zs_head_param(model), h->grad, ZS_FP32));
    return zs_grads_run(model, &norm, 1);
}

zs_status zs_head_run(zs_model *model, const zs_tokens *tokens, const float *x, int predictions,
                      double scale, float *dx)
{
    head h;
    ZS_CHECK(head_open(&h, model, tokens, x, predictions));
    h.dx = dx;
    h.scale = (float)scale;
    h.grad = model->head_grad;
    if (dx && !h.grad) {
        void *buffer;
        ZS_CHECK(zs_grad_buffer(model->engine, zs_head_param(model), &buffer, &h.grad_add));
        h.grad = buffer;
    }
    zs_pool_run(model->pool, norm_task, &h, (size_t)tiles(predictions, tokens->tile));
    for (h.first = 0; h.first < predictions; h.first += h.n) {
        h.n = ZS_MIN(model->head_chunk, predictions - h.first);
        h.token_tasks = tiles(h.n, TASK_TILE);
        zs_pool_run(model->pool, logits_task, &h, (size_t)tiles(h.w.rows, ZS_VOCAB_TILE));
        zs_pool_run(model->pool, entropy_task, &h, (size_t)tiles(h.n, ROW_TILE));
        if (!dx)
            continue;
        zs_pool_run(model->pool, head_grad_task, &h,
                    (size_t)h.token_tasks + (size_t)tiles(h.w.rows, ZS_VOCAB_TILE));
        h.grad_add = 1;
    }
    double sum = 0;
    for (int i = 0; i < predictions; i++)
        sum += model->losses[i];
    model->loss += sum;
    if (!dx)
        return ZS_OK;
    zs_pool_run(model->pool, norm_back_task, &h, (size_t)tiles(tokens->count, tokens->tile));
    return ready(&h);
}

zs_status zs_head_logits(zs_model *model, const zs_tokens *tokens, const float *x, float *out)
{
    head h;
    ZS_CHECK(head_open(&h, model, tokens, x, tokens->rows));
    h.n = tokens->rows;
    h.logits = out;
    zs_pool_run(model->pool, norm_task, &h, (size_t)tiles(tokens->rows, tokens->tile));
    zs_pool_run(model->pool, logits_task, &h, (size_t)tiles(h.w.rows, ZS_VOCAB_TILE));
    return ZS_OK;
}
