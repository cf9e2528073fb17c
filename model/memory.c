/* SPDX-License-Identifier: Apache-2.0 */
/* Which arrays a model has, wherever its memory is. */
#include "base/util.h"
#include "model/internal.h"

void *zs_take(zs_bump *b, uint64_t count, size_t size)
{
    void *at = b->base ? b->base + b->used : NULL;
    b->used += zs_round_up(count * size, 64);
    return at;
}

float *zs_take_floats(zs_bump *b, uint64_t count)
{
    return zs_take(b, count, sizeof(float));
}

uint64_t zs_most_tokens(const zs_model *model)
{
    return (uint64_t)model->options.rows * (uint64_t)model->options.seq;
}

static void take_acts(zs_model *m, zs_bump *b, uint64_t tokens, zs_acts *a)
{
    const zs_model_config *c = &m->config;
    uint64_t q = (uint64_t)(c->heads * c->head_dim), kv = (uint64_t)(c->kv_heads * c->head_dim);
    a->q = zs_take_floats(b, tokens * q);
    a->k = zs_take_floats(b, tokens * kv);
    a->v = zs_take_floats(b, tokens * kv);
    if (c->qk_norm) {
        a->raw_q = zs_take_floats(b, tokens * q);
        a->raw_k = zs_take_floats(b, tokens * kv);
        a->rstd_q = zs_take_floats(b, tokens * (uint64_t)c->heads);
        a->rstd_k = zs_take_floats(b, tokens * (uint64_t)c->kv_heads);
    }
    a->attn = zs_take_floats(b, tokens * q);
    a->mid = zs_take_floats(b, tokens * (uint64_t)c->hidden);
    a->gate = zs_take_floats(b, tokens * (uint64_t)c->intermediate);
    a->up = zs_take_floats(b, tokens * (uint64_t)c->intermediate);
    a->rstd_attn = zs_take_floats(b, tokens);
    a->rstd_mlp = zs_take_floats(b, tokens);
    a->lse = zs_take_floats(b, tokens * (uint64_t)c->heads);
}

void zs_take_shared(zs_model *m, zs_bump *b)
{
    const zs_model_config *c = &m->config;
    uint64_t tokens = zs_most_tokens(m);
    uint64_t hidden = (uint64_t)c->hidden, vocab = (uint64_t)c->vocab;
    uint64_t q = (uint64_t)(c->heads * c->head_dim), kv = (uint64_t)(c->kv_heads * c->head_dim);
    for (int i = 0; i <= c->layers; i++) {
        float *input = zs_take_floats(b, tokens * hidden);
        if (b->base)
            m->inputs[i] = input;
    }
    for (int i = 0; i < m->slot_count; i++) {
        zs_acts acts = {0};
        take_acts(m, b, tokens, &acts);
        if (b->base)
            m->slots[i] = acts;
    }
    m->act = zs_take_floats(b, tokens * (uint64_t)c->intermediate);
    m->dmid = zs_take_floats(b, tokens * hidden);
    m->dattn = zs_take_floats(b, tokens * q);
    m->delta = zs_take_floats(b, tokens * (uint64_t)c->heads);
    m->dk = zs_take_floats(b, tokens * kv);
    m->dv = zs_take_floats(b, tokens * kv);
    m->dx[0] = zs_take_floats(b, tokens * hidden);
    m->dx[1] = zs_take_floats(b, tokens * hidden);
    m->head_chunk = zs_head_chunk(c, (int)tokens);
    m->logits = zs_take_floats(b, (uint64_t)m->head_chunk * vocab);
    /* Chunks are added up in fp32 whatever the gradient's dtype. */
    m->head_grad = m->options.grad_dtype == ZS_FP32 ? NULL : zs_take_floats(b, vocab * hidden);
    m->losses = zs_take(b, tokens, sizeof(double));
}

void zs_take_batch(zs_batch_arrays *batch, zs_bump *b, uint64_t tokens, uint64_t vocab)
{
    int32_t **const by_token[] = {&batch->ids,     &batch->positions, &batch->starts,
                                  &batch->sources, &batch->targets,   &batch->slot_of,
                                  &batch->next_use};
    for (size_t i = 0; i < ZS_COUNT(by_token); i++)
        *by_token[i] = zs_take(b, tokens, sizeof(int32_t));
    batch->first_use = zs_take(b, vocab, sizeof(int32_t));
}
