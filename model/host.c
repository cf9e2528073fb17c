/* SPDX-License-Identifier: Apache-2.0 */
/* The decoder on the host: its memory, and the table of what is in the other files. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/status.h"
#include "base/util.h"
#include "model/internal.h"

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

static void lay_out(zs_model *m, zs_bump *b)
{
    const zs_model_config *c = &m->config;
    uint64_t tokens = zs_most_tokens(m), hidden = (uint64_t)c->hidden;
    uint64_t q = (uint64_t)(c->heads * c->head_dim), kv = (uint64_t)(c->kv_heads * c->head_dim);
    zs_take_shared(m, b);
    m->norm_attn = zs_take_floats(b, tokens * hidden);
    m->norm_mlp = zs_take_floats(b, tokens * hidden);
    m->partial_stride = (int)zs_round_up(2 * hidden + 2 * (uint64_t)c->head_dim, 16);
    /* Batches below 1024 tokens have smaller tiles, 8 of them at most. */
    uint64_t most_tiles = ZS_MAX(zs_div_up(tokens, ZS_TOKEN_TILE), 8);
    m->partial = zs_take_floats(b, most_tiles * (uint64_t)m->partial_stride);
    m->vectors = zs_take_floats(b, 4 * hidden + 2 * (uint64_t)c->intermediate + q + 2 * kv +
                                       2 * (uint64_t)c->head_dim);
    zs_take_batch(&m->batch, b, tokens, (uint64_t)c->vocab);
    m->scratch_numel = scratch_numel(m);
    m->scratch = zs_take_floats(b, m->scratch_numel * (uint64_t)zs_pool_threads(m->pool));
}

static zs_status host_prepare(zs_model *model)
{
    zs_bump b = {NULL, 0};
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
    b = (zs_bump){memory, 0};
    lay_out(model, &b);
    ZS_CHECK(zs_memory_note(model->engine, ZS_TIER_DEVICE, "activations", (int64_t)b.used));
    return zs_rope_reach(model, model->options.seq - 1);
}

static void host_close(zs_model *m)
{
    if (m->memory) {
        int64_t bytes = (int64_t)m->memory_bytes;
        bytes += (int64_t)m->table_positions * m->config.head_dim * (int64_t)sizeof(float);
        munmap(m->memory, m->memory_bytes);
        zs_memory_note(m->engine, ZS_TIER_DEVICE, "activations", -bytes);
    }
    free(m->cos);
    free(m->sin);
}

static zs_status host_batch_begin(zs_model *model)
{
    (void)model;
    return ZS_OK;
}

static zs_status host_batch_ready(zs_model *model, const zs_tokens *tokens, int last)
{
    (void)tokens;
    return zs_rope_reach(model, last);
}

static zs_status host_ask_loss(zs_model *model)
{
    (void)model;
    return ZS_OK;
}

static zs_status host_get_loss(zs_model *model, double *out)
{
    *out = model->loss;
    model->loss = 0;
    return ZS_OK;
}

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

static zs_status host_embed(zs_model *m, const zs_tokens *tokens)
{
    lookup l = {.model = m, .tokens = tokens};
    ZS_CHECK(zs_unit_matrix(m, 0, ZS_W_EMBED, &l.w));
    zs_pool_run(m->pool, lookup_task, &l,
                zs_div_up((uint64_t)tokens->count, (uint64_t)tokens->tile));
    return ZS_OK;
}

const zs_backend zs_backend_host = {
    .prepare = host_prepare,
    .close = host_close,
    .batch_begin = host_batch_begin,
    .batch_ready = host_batch_ready,
    .embed = host_embed,
    .embed_grad = zs_embedding_grad,
    .forward = zs_block_forward,
    .backward = zs_block_backward,
    .head = zs_head_run,
    .logits = zs_head_logits,
    .ask_loss = host_ask_loss,
    .get_loss = host_get_loss,
};
