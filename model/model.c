/* SPDX-License-Identifier: Apache-2.0 */
#include "model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/status.h"
#include "base/util.h"
#include "model/internal.h"

static const char activations[] = "activations";

/* ---- parameters and units ---- */

static zs_status add_params(zs_model *model)
{
    for (size_t i = 0; i < model->count; i++) {
        const zs_weight *w = &model->weights[i];
        zs_param_config config;
        zs_param_config_init(&config);
        config.frozen = model->options.frozen;
        config.name = w->name;
        config.ndim = w->ndim;
        config.shape = w->shape;
        config.dtype = model->options.dtype;
        config.group = w->ndim >= 2 ? model->options.decay : model->options.no_decay;
        if (w->kind == ZS_W_EMBED && model->config.tied)
            config.grad_uses = 2;
        ZS_CHECK(zs_param_add(model->engine, &config, &model->params[i]));
        model->index[w->unit][w->kind] = (int32_t)i;
    }
    return ZS_OK;
}

/* Weights come in the order of their units. */
static zs_status add_units(zs_model *model)
{
    size_t first = 0;
    for (int unit = 0; unit < model->config.layers + 2; unit++) {
        char name[32];
        size_t end = first;
        while (end < model->count && model->weights[end].unit == unit)
            end++;
        if (unit == 0)
            strcpy(name, "embedding");
        else if (unit <= model->config.layers)
            snprintf(name, sizeof name, "layers.%d", unit - 1);
        else
            strcpy(name, "head");
        ZS_CHECK(zs_unit_add(model->engine, name, model->params + first, end - first,
                             &model->units[unit]));
        first = end;
    }
    return ZS_OK;
}

static zs_status check_options(const zs_model_config *c, const zs_model_options *o)
{
    if (o->dtype != ZS_FP32 && o->dtype != ZS_BF16)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "model: weights in %s are not supported; use fp32 or bf16",
                       zs_dtype_name(o->dtype));
    if (o->grad_dtype != ZS_FP32 && o->grad_dtype != ZS_BF16)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "model: gradients in %s are not supported; use fp32 or bf16",
                       zs_dtype_name(o->grad_dtype));
    if (o->rows < 1 || o->seq < 2)
        return zs_fail(ZS_ERR_ARG,
                       "model: a micro-batch of %d rows of %d tokens; it needs a row of 2 or more",
                       o->rows, o->seq);
    if (o->seq > c->max_positions)
        return zs_fail(ZS_ERR_ARG,
                       "model: sequence length %d is above the %d positions of the model "
                       "(max_position_embeddings); use shorter rows",
                       o->seq, c->max_positions);
    if (c->sliding_window && o->seq > c->sliding_window)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "model: sequence length %d is above the model's sliding_window %d, and "
                       "windowed attention is not supported; use rows of at most %d tokens",
                       o->seq, c->sliding_window, c->sliding_window);
    if ((int64_t)o->rows * o->seq > INT32_MAX / 64)
        return zs_fail(ZS_ERR_ARG,
                       "model: a micro-batch of %d x %d tokens is too large; use a smaller one",
                       o->rows, o->seq);
    if (c->head_dim % 2)
        return zs_fail(ZS_ERR_UNSUPPORTED, "model: head_dim %d is odd; rope needs an even one",
                       c->head_dim);
    return ZS_OK;
}

zs_status zs_model_open(const zs_model_config *config, const zs_model_options *options,
                        zs_engine *engine, zs_pool *pool, zs_model **out)
{
    zs_status status = ZS_ERR_NOMEM;
    *out = NULL;
    ZS_CHECK(check_options(config, options));
    zs_blas_setup();
    size_t units = (size_t)config->layers + 2;
    zs_model *model = calloc(1, sizeof *model);
    if (!model)
        return zs_fail(ZS_ERR_NOMEM, "model: no memory for its handle");
    model->config = *config;
    model->options = *options;
    model->engine = engine;
    model->pool = pool;
    model->nn = zs_nn_get();
    model->kernels = zs_kernels_get();
    ZS_TRY(zs_model_weights(config, &model->weights, &model->count));
    model->params = calloc(model->count, sizeof *model->params);
    model->units = calloc(units, sizeof *model->units);
    model->index = malloc(units * sizeof *model->index);
    if (!model->params || !model->units || !model->index) {
        status =
            zs_fail(ZS_ERR_NOMEM, "model: no memory for the names of %zu weights", model->count);
        goto fail;
    }
    memset(model->index, -1, units * sizeof *model->index);
    ZS_TRY(add_params(model));
    ZS_TRY(add_units(model));
    *out = model;
    return ZS_OK;
fail:
    zs_model_close(&model);
    return status;
}

void zs_model_params(const zs_model *model, const zs_weight **weights, const zs_param **params,
                     size_t *count)
{
    *weights = model->weights;
    *params = model->params;
    *count = model->count;
}

/* ---- memory ---- */

/* Hands out pieces of one allocation; without one it only adds up. */
typedef struct bump {
    char *base;
    uint64_t used;
} bump;

static void *take(bump *b, uint64_t count, size_t size)
{
    void *at = b->base ? b->base + b->used : NULL;
    b->used += zs_round_up(count * size, 64);
    return at;
}

static float *take_floats(bump *b, uint64_t count)
{
    return take(b, count, sizeof(float));
}

static void take_acts(zs_model *m, bump *b, uint64_t tokens, zs_acts *a)
{
    const zs_model_config *c = &m->config;
    uint64_t q = (uint64_t)(c->heads * c->head_dim), kv = (uint64_t)(c->kv_heads * c->head_dim);
    a->q = take_floats(b, tokens * q);
    a->k = take_floats(b, tokens * kv);
    a->v = take_floats(b, tokens * kv);
    if (c->qk_norm) {
        a->raw_q = take_floats(b, tokens * q);
        a->raw_k = take_floats(b, tokens * kv);
        a->rstd_q = take_floats(b, tokens * (uint64_t)c->heads);
        a->rstd_k = take_floats(b, tokens * (uint64_t)c->kv_heads);
    }
    a->attn = take_floats(b, tokens * q);
    a->mid = take_floats(b, tokens * (uint64_t)c->hidden);
    a->gate = take_floats(b, tokens * (uint64_t)c->intermediate);
    a->up = take_floats(b, tokens * (uint64_t)c->intermediate);
    a->rstd_attn = take_floats(b, tokens);
    a->rstd_mlp = take_floats(b, tokens);
    a->lse = take_floats(b, tokens * (uint64_t)c->heads);
}

/* Tokens of one task: large enough for efficient products (each packs the weights anew), small
 * enough to occupy the cores. */
static int tile_of(int tokens)
{
    return tokens >= 1024  ? ZS_TOKEN_TILE
           : tokens >= 512 ? ZS_TOKEN_TILE / 2
           : tokens >= 128 ? ZS_TOKEN_TILE / 4
                           : ZS_TOKEN_TILE / 8;
}

static size_t scratch_numel(const zs_model *m)
{
    const zs_model_config *c = &m->config;
    size_t widest = (size_t)zs_model_widest(c);
    size_t rows = (size_t)ZS_TOKEN_TILE * (size_t)(c->hidden + c->intermediate);
    size_t grads = ZS_MAX((size_t)ZS_OUTPUT_TILE * widest, (size_t)c->hidden);
    size_t numel = ZS_MAX(rows, zs_attention_scratch(c, m->options.seq));
    if (m->options.grad_dtype != ZS_FP32)
        numel = ZS_MAX(numel, grads);
    if (m->options.dtype != ZS_FP32)
        numel += ZS_MAX((size_t)ZS_WIDE_NUMEL, 16 * widest);
    return zs_round_up(numel, 16);
}

static void lay_out(zs_model *m, bump *b)
{
    const zs_model_config *c = &m->config;
    uint64_t tokens = (uint64_t)m->options.rows * (uint64_t)m->options.seq;
    uint64_t hidden = (uint64_t)c->hidden, vocab = (uint64_t)c->vocab;
    uint64_t q = (uint64_t)(c->heads * c->head_dim), kv = (uint64_t)(c->kv_heads * c->head_dim);
    for (int i = 0; i <= c->layers; i++) {
        float *input = take_floats(b, tokens * hidden);
        if (b->base)
            m->inputs[i] = input;
    }
    for (int i = 0; i < m->slot_count; i++) {
        zs_acts acts = {0};
        take_acts(m, b, tokens, &acts);
        if (b->base)
            m->slots[i] = acts;
    }
    m->act = take_floats(b, tokens * (uint64_t)c->intermediate);
    m->norm_attn = take_floats(b, tokens * hidden);
    m->norm_mlp = take_floats(b, tokens * hidden);
    m->dmid = take_floats(b, tokens * hidden);
    m->dattn = take_floats(b, tokens * q);
    m->delta = take_floats(b, tokens * (uint64_t)c->heads);
    m->dk = take_floats(b, tokens * kv);
    m->dv = take_floats(b, tokens * kv);
    m->dx[0] = take_floats(b, tokens * hidden);
    m->dx[1] = take_floats(b, tokens * hidden);
    m->partial_stride = (int)zs_round_up(2 * hidden + 2 * (uint64_t)c->head_dim, 16);
    /* Batches below 1024 tokens have smaller tiles, 8 of them at most. */
    uint64_t most_tiles = ZS_MAX(zs_div_up(tokens, ZS_TOKEN_TILE), 8);
    m->partial = take_floats(b, most_tiles * (uint64_t)m->partial_stride);
    m->vectors = take_floats(b, 4 * hidden + 2 * (uint64_t)c->intermediate + q + 2 * kv +
                                    2 * (uint64_t)c->head_dim);
    m->head_chunk = zs_head_chunk(c, (int)tokens);
    m->logits = take_floats(b, (uint64_t)m->head_chunk * vocab);
    /* Chunks are added up in fp32 whatever the gradient's dtype. */
    m->head_grad = m->options.grad_dtype == ZS_FP32 ? NULL : take_floats(b, vocab * hidden);
    m->losses = take(b, tokens, sizeof(double));
    m->sources = take(b, tokens, sizeof(int32_t));
    m->targets = take(b, tokens, sizeof(int32_t));
    m->slot_of = take(b, tokens, sizeof(int32_t));
    m->positions = take(b, tokens, sizeof(int32_t));
    m->starts = take(b, tokens, sizeof(int32_t));
    m->next_use = take(b, tokens, sizeof(int32_t));
    m->first_use = take(b, vocab, sizeof(int32_t));
    m->scratch_numel = scratch_numel(m);
    m->scratch = take_floats(b, m->scratch_numel * (uint64_t)zs_pool_threads(m->pool));
}

zs_status zs_model_prepare(zs_model *model)
{
    bump b = {NULL, 0};
    if (model->memory)
        return zs_fail(ZS_ERR_MISUSE, "model: prepared twice");
    model->slot_count = model->options.checkpointing ? 1 : model->config.layers;
    model->inputs = calloc((size_t)model->config.layers + 1, sizeof *model->inputs);
    model->slots = calloc((size_t)model->slot_count, sizeof *model->slots);
    if (!model->inputs || !model->slots)
        return zs_fail(ZS_ERR_NOMEM, "model: no memory for the activations of %d layers",
                       model->config.layers);
    lay_out(model, &b);
    void *memory = mmap(NULL, b.used, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        char text[16];
        return zs_fail(ZS_ERR_NOMEM,
                       "model: no memory for activations of %d x %d tokens (%s); use a smaller "
                       "micro-batch, shorter rows or activation checkpointing",
                       model->options.rows, model->options.seq, zs_format_bytes(b.used, text));
    }
    madvise(memory, b.used, MADV_HUGEPAGE); /* where there are any */
    model->memory = memory;
    model->memory_bytes = b.used;
    b = (bump){memory, 0};
    lay_out(model, &b);
    ZS_CHECK(zs_memory_note(model->engine, ZS_TIER_DEVICE, activations, (int64_t)b.used));
    return zs_rope_reach(model, model->options.seq - 1);
}

void zs_model_close(zs_model **model)
{
    zs_model *m = *model;
    if (!m)
        return;
    *model = NULL;
    if (m->memory) {
        int64_t bytes = (int64_t)m->memory_bytes;
        bytes += (int64_t)m->table_positions * m->config.head_dim * (int64_t)sizeof(float);
        munmap(m->memory, m->memory_bytes);
        zs_memory_note(m->engine, ZS_TIER_DEVICE, activations, -bytes);
    }
    free(m->cos);
    free(m->sin);
    free(m->inputs);
    free(m->slots);
    free(m->index);
    free(m->units);
    free(m->params);
    free(m->weights);
    free(m);
}

/* ---- batches ---- */

static int counted(const zs_batch *batch, size_t i)
{
    const int32_t *labels = batch->labels ? batch->labels : batch->ids;
    if (i % (size_t)batch->seq == 0 || (batch->positions && batch->positions[i] == 0))
        return 0;
    return labels[i] != -100;
}

uint64_t zs_batch_tokens(const zs_batch *batch)
{
    uint64_t count = 0;
    for (size_t i = 0; i < (size_t)batch->rows * (size_t)batch->seq; i++)
        count += (uint64_t)counted(batch, i);
    return count;
}

/* Checks batch and fills in positions, document starts and the counted predictions. */
static zs_status read_batch(zs_model *m, const zs_batch *batch, zs_tokens *out, int *predictions)
{
    const zs_model_options *o = &m->options;
    int last = 0;
    *predictions = 0;
    if (!m->memory)
        return zs_fail(ZS_ERR_MISUSE, "model: a batch before zs_model_prepare");
    if (batch->rows < 1 || batch->seq < 1 || batch->seq > o->seq || batch->rows > o->rows)
        return zs_fail(ZS_ERR_ARG, "model: a batch of %d x %d tokens; it was opened for %d x %d",
                       batch->rows, batch->seq, o->rows, o->seq);
    size_t count = (size_t)batch->rows * (size_t)batch->seq;
    for (size_t i = 0; i < count; i++) {
        int in_row = (int)(i % (size_t)batch->seq);
        int32_t position = batch->positions ? batch->positions[i] : in_row;
        if (batch->ids[i] < 0 || batch->ids[i] >= m->config.vocab)
            return zs_fail(ZS_ERR_ARG, "model: token id %d at row %zu; the vocabulary has %d",
                           batch->ids[i], i / (size_t)batch->seq, m->config.vocab);
        if (position < 0 || position >= m->config.max_positions)
            return zs_fail(ZS_ERR_ARG, "model: position %d at row %zu; the model has %d", position,
                           i / (size_t)batch->seq, m->config.max_positions);
        m->positions[i] = position;
        m->starts[i] = in_row == 0 || position == 0 ? in_row : m->starts[i - 1];
        last = ZS_MAX(last, position);
        m->slot_of[i] = -1;
        if (!counted(batch, i))
            continue;
        int32_t label = batch->labels ? batch->labels[i] : batch->ids[i];
        if (label < 0 || label >= m->config.vocab)
            return zs_fail(ZS_ERR_ARG,
                           "model: label %d at row %zu; labels are below the vocabulary of %d, or "
                           "-100 where not counted",
                           label, i / (size_t)batch->seq, m->config.vocab);
        m->slot_of[i - 1] = *predictions;
        m->sources[*predictions] = (int32_t)i - 1;
        m->targets[(*predictions)++] = label;
    }
    *out = (zs_tokens){batch->rows, batch->seq,   (int)count, tile_of((int)count),
                       batch->ids,  m->positions, m->starts};
    return zs_rope_reach(m, last);
}

/* ---- passes ---- */

typedef struct lookup {
    zs_model *model;
    const zs_tokens *tokens;
    zs_view w;
} lookup;

static void lookup_task(void *arg, size_t index, int worker)
{
    const lookup *l = arg;
    size_t hidden = (size_t)l->w.columns;
    int first = (int)index * l->tokens->tile;
    (void)worker;
    for (int t = first; t < ZS_MIN(first + l->tokens->tile, l->tokens->count); t++) {
        size_t row = (size_t)l->tokens->ids[t] * hidden;
        float *to = l->model->inputs[0] + (size_t)t * hidden;
        if (l->w.dtype == ZS_FP32)
            memcpy(to, (const float *)l->w.data + row, hidden * sizeof(float));
        else
            l->model->nn->widen(hidden, to, (const unsigned short *)l->w.data + row);
    }
}

static zs_status embed(zs_model *m, const zs_tokens *tokens)
{
    lookup l = {.model = m, .tokens = tokens};
    ZS_CHECK(zs_unit_acquire(m->engine, m->units[0]));
    zs_status status = zs_unit_matrix(m, 0, ZS_W_EMBED, &l.w);
    if (status == ZS_OK)
        zs_pool_run(m->pool, lookup_task, &l,
                    zs_div_up((uint64_t)tokens->count, (uint64_t)tokens->tile));
    zs_status released = zs_unit_release(m->engine, m->units[0]);
    return status != ZS_OK ? status : released;
}

static zs_acts *slot(zs_model *m, int layer)
{
    return &m->slots[m->options.checkpointing ? 0 : layer];
}

static zs_status forward(zs_model *m, const zs_tokens *tokens)
{
    ZS_CHECK(embed(m, tokens));
    for (int layer = 0; layer < m->config.layers; layer++) {
        ZS_CHECK(zs_unit_acquire(m->engine, m->units[1 + layer]));
        zs_status status = zs_block_forward(m, tokens, layer, m->inputs[layer],
                                            m->inputs[layer + 1], slot(m, layer));
        zs_status released = zs_unit_release(m->engine, m->units[1 + layer]);
        ZS_CHECK(status);
        ZS_CHECK(released);
    }
    return ZS_OK;
}

static zs_status backward(zs_model *m, const zs_tokens *tokens)
{
    int at = 0; /* which of dx holds what comes in */
    for (int layer = m->config.layers - 1; layer >= 0; layer--, at = !at) {
        ZS_CHECK(zs_unit_acquire(m->engine, m->units[1 + layer]));
        zs_status status = ZS_OK;
        /* The last block's activations are still there. */
        if (m->options.checkpointing && layer != m->config.layers - 1)
            status = zs_block_forward(m, tokens, layer, m->inputs[layer], NULL, slot(m, layer));
        if (status == ZS_OK)
            status = zs_block_backward(m, tokens, layer, m->inputs[layer], slot(m, layer),
                                       m->dx[at], m->dx[!at]);
        zs_status released = zs_unit_release(m->engine, m->units[1 + layer]);
        ZS_CHECK(status);
        ZS_CHECK(released);
    }
    return zs_embedding_grad(m, tokens, m->dx[at]);
}

/* The head's units, the embedding among them when tied. */
static zs_status acquire_head(zs_model *m)
{
    int head = m->config.layers + 1;
    ZS_CHECK(zs_unit_acquire(m->engine, m->units[head]));
    return m->config.tied ? zs_unit_acquire(m->engine, m->units[0]) : ZS_OK;
}

static zs_status release_head(zs_model *m)
{
    int head = m->config.layers + 1;
    if (m->config.tied)
        ZS_CHECK(zs_unit_release(m->engine, m->units[0]));
    return zs_unit_release(m->engine, m->units[head]);
}

static zs_status head(zs_model *m, const zs_tokens *tokens, int predictions, double scale,
                      double *loss_sum, float *dx)
{
    ZS_CHECK(acquire_head(m));
    zs_status status =
        zs_head_run(m, tokens, m->inputs[m->config.layers], predictions, scale, loss_sum, dx);
    zs_status released = release_head(m);
    return status != ZS_OK ? status : released;
}

zs_status zs_model_evaluate(zs_model *model, const zs_batch *batch, double *loss_sum)
{
    zs_tokens tokens;
    int predictions;
    ZS_CHECK(read_batch(model, batch, &tokens, &predictions));
    ZS_CHECK(forward(model, &tokens));
    return head(model, &tokens, predictions, 1.0, loss_sum, NULL);
}

zs_status zs_model_train(zs_model *model, const zs_batch *batch, double scale, double *loss_sum)
{
    zs_tokens tokens;
    int predictions;
    ZS_CHECK(read_batch(model, batch, &tokens, &predictions));
    ZS_CHECK(forward(model, &tokens));
    ZS_CHECK(head(model, &tokens, predictions, scale, loss_sum, model->dx[0]));
    return backward(model, &tokens);
}

zs_status zs_model_logits(zs_model *model, const zs_batch *batch, float *out)
{
    zs_tokens tokens;
    int predictions;
    ZS_CHECK(read_batch(model, batch, &tokens, &predictions));
    ZS_CHECK(forward(model, &tokens));
    ZS_CHECK(acquire_head(model));
    zs_status status = zs_head_logits(model, &tokens, model->inputs[model->config.layers], out);
    zs_status released = release_head(model);
    return status != ZS_OK ? status : released;
}

double zs_model_flops(const zs_model *model, int rows, int seq)
{
    const zs_model_config *c = &model->config;
    double tokens = (double)rows * seq, weights = (double)c->vocab * c->hidden;
    for (size_t i = 0; i < model->count; i++)
        if (model->weights[i].layer >= 0 && model->weights[i].ndim == 2)
            weights += (double)model->weights[i].shape[0] * (double)model->weights[i].shape[1];
    /* Causal: a token attends to half of the row on average. */
    double attention = 6.0 * c->layers * c->heads * c->head_dim * (double)seq;
    return tokens * (6.0 * weights + attention);
}
