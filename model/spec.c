/* SPDX-License-Identifier: Apache-2.0 */
/* Which weights a configuration has: names, shapes, units. */
#include <stdio.h>
#include <stdlib.h>

#include "base/status.h"
#include "base/util.h"
#include "model/config.h"

/* How a dimension follows from the configuration. */
typedef enum dim { NONE, VOCAB, HIDDEN, FFN, Q_WIDTH, KV_WIDTH, HEAD_DIM } dim;
/* When a weight is there. */
typedef enum when { ALWAYS, QKV_BIAS, O_BIAS, MLP_BIAS, QK_NORM, UNTIED } when;

typedef struct entry {
    zs_weight_kind kind;
    const char *name;
    dim rows, columns;
    when when;
} entry;

static const entry embedding = {ZS_W_EMBED, "model.embed_tokens.weight", VOCAB, HIDDEN, ALWAYS};

static const entry block[] = {
    {ZS_W_ATTN_NORM, "input_layernorm.weight", HIDDEN, NONE, ALWAYS},
    {ZS_W_Q, "self_attn.q_proj.weight", Q_WIDTH, HIDDEN, ALWAYS},
    {ZS_W_K, "self_attn.k_proj.weight", KV_WIDTH, HIDDEN, ALWAYS},
    {ZS_W_V, "self_attn.v_proj.weight", KV_WIDTH, HIDDEN, ALWAYS},
    {ZS_W_O, "self_attn.o_proj.weight", HIDDEN, Q_WIDTH, ALWAYS},
    {ZS_W_Q_BIAS, "self_attn.q_proj.bias", Q_WIDTH, NONE, QKV_BIAS},
    {ZS_W_K_BIAS, "self_attn.k_proj.bias", KV_WIDTH, NONE, QKV_BIAS},
    {ZS_W_V_BIAS, "self_attn.v_proj.bias", KV_WIDTH, NONE, QKV_BIAS},
    {ZS_W_O_BIAS, "self_attn.o_proj.bias", HIDDEN, NONE, O_BIAS},
    {ZS_W_Q_NORM, "self_attn.q_norm.weight", HEAD_DIM, NONE, QK_NORM},
    {ZS_W_K_NORM, "self_attn.k_norm.weight", HEAD_DIM, NONE, QK_NORM},
    {ZS_W_MLP_NORM, "post_attention_layernorm.weight", HIDDEN, NONE, ALWAYS},
    {ZS_W_GATE, "mlp.gate_proj.weight", FFN, HIDDEN, ALWAYS},
    {ZS_W_UP, "mlp.up_proj.weight", FFN, HIDDEN, ALWAYS},
    {ZS_W_DOWN, "mlp.down_proj.weight", HIDDEN, FFN, ALWAYS},
    {ZS_W_GATE_BIAS, "mlp.gate_proj.bias", FFN, NONE, MLP_BIAS},
    {ZS_W_UP_BIAS, "mlp.up_proj.bias", FFN, NONE, MLP_BIAS},
    {ZS_W_DOWN_BIAS, "mlp.down_proj.bias", HIDDEN, NONE, MLP_BIAS},
};

static const entry head[] = {
    {ZS_W_FINAL_NORM, "model.norm.weight", HIDDEN, NONE, ALWAYS},
    {ZS_W_HEAD, "lm_head.weight", VOCAB, HIDDEN, UNTIED},
};

static int64_t extent(const zs_model_config *config, dim which)
{
    switch (which) {
    case VOCAB:
        return config->vocab;
    case HIDDEN:
        return config->hidden;
    case FFN:
        return config->intermediate;
    case Q_WIDTH:
        return (int64_t)config->heads * config->head_dim;
    case KV_WIDTH:
        return (int64_t)config->kv_heads * config->head_dim;
    case HEAD_DIM:
        return config->head_dim;
    case NONE:
        break;
    }
    return 1;
}

static int present(const zs_model_config *config, when condition)
{
    switch (condition) {
    case QKV_BIAS:
        return config->qkv_bias;
    case O_BIAS:
        return config->o_bias;
    case MLP_BIAS:
        return config->mlp_bias;
    case QK_NORM:
        return config->qk_norm;
    case UNTIED:
        return !config->tied;
    case ALWAYS:
        break;
    }
    return 1;
}

static uint64_t entry_numel(const zs_model_config *config, const entry *e)
{
    return present(config, e->when)
               ? (uint64_t)extent(config, e->rows) * (uint64_t)extent(config, e->columns)
               : 0;
}

uint64_t zs_model_config_numel(const zs_model_config *config)
{
    uint64_t in_block = 0;
    uint64_t total = entry_numel(config, &embedding);
    for (size_t i = 0; i < ZS_COUNT(block); i++)
        in_block += entry_numel(config, &block[i]);
    total += in_block * (uint64_t)config->layers;
    for (size_t i = 0; i < ZS_COUNT(head); i++)
        total += entry_numel(config, &head[i]);
    return total;
}

static void add(const zs_model_config *config, const entry *e, int layer, int unit,
                zs_weight *weights, size_t *count)
{
    if (!present(config, e->when))
        return;
    zs_weight *w = &weights[(*count)++];
    if (layer < 0)
        snprintf(w->name, sizeof w->name, "%s", e->name);
    else
        snprintf(w->name, sizeof w->name, "model.layers.%d.%s", layer, e->name);
    w->kind = e->kind;
    w->layer = layer;
    w->unit = unit;
    w->shape[0] = extent(config, e->rows);
    w->shape[1] = extent(config, e->columns);
    w->ndim = e->columns == NONE ? 1 : 2;
}

zs_status zs_model_weights(const zs_model_config *config, zs_weight **out, size_t *count)
{
    size_t most = 1 + (size_t)config->layers * ZS_COUNT(block) + ZS_COUNT(head);
    *count = 0;
    *out = calloc(most, sizeof **out);
    if (!*out)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the names of %zu weights", most);
    add(config, &embedding, -1, 0, *out, count);
    for (int layer = 0; layer < config->layers; layer++)
        for (size_t i = 0; i < ZS_COUNT(block); i++)
            add(config, &block[i], layer, 1 + layer, *out, count);
    for (size_t i = 0; i < ZS_COUNT(head); i++)
        add(config, &head[i], -1, 1 + config->layers, *out, count);
    return ZS_OK;
}

uint64_t zs_weight_numel(const zs_weight *weight)
{
    uint64_t numel = 1;
    for (int d = 0; d < weight->ndim; d++)
        numel *= (uint64_t)weight->shape[d];
    return numel;
}
