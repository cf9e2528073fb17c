/* SPDX-License-Identifier: Apache-2.0 */
/* A Hugging Face config.json, reduced to what the decoder's maths needs. Anything that would change
 * the maths and is not known here is refused by the key's name. */
#ifndef ZS_MODEL_CONFIG_H
#define ZS_MODEL_CONFIG_H

#include "zspill.h"

typedef enum zs_rope_type {
    ZS_ROPE_DEFAULT = 0,
    ZS_ROPE_LINEAR = 1, /* positions / factor */
    ZS_ROPE_LLAMA3 = 2  /* transformers' _compute_llama3_parameters */
} zs_rope_type;

typedef struct zs_model_config {
    char model_type[16]; /* "llama", "mistral", "qwen2", "qwen3" */
    int vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, max_positions;
    double rms_eps, init_range;
    double rope_theta;
    zs_rope_type rope_type;
    double rope_factor, rope_low_freq, rope_high_freq;
    int rope_original_positions;
    int tied; /* lm_head is the embedding */
    int qkv_bias, o_bias, mlp_bias;
    int qk_norm;        /* RMSNorm of each head of q and k before rope (Qwen3) */
    int sliding_window; /* 0: none; else the training sequence must not be longer, or it is refused
                         */
    zs_dtype dtype;     /* of the stored weights as the config says; fp32 when it does not */
} zs_model_config;

/* path: a config.json. Both key generations: rope_theta, rope_scaling, torch_dtype;
 * rope_parameters, dtype. */
zs_status zs_model_config_load(const char *path, zs_model_config *out);
/* path: a model directory, or a config.json. */
zs_status zs_model_config_find(const char *path, zs_model_config *out);
/* The same from memory; path is what messages call it. */
zs_status zs_model_config_parse(const char *text, size_t bytes, const char *path,
                                zs_model_config *out);
/* The parameters' total number, tied ones once. */
uint64_t zs_model_config_numel(const zs_model_config *config);

/* Every weight, in the order of the forward pass, with its Hugging Face name. */
typedef enum zs_weight_kind {
    ZS_W_EMBED,     /* model.embed_tokens.weight */
    ZS_W_ATTN_NORM, /* input_layernorm.weight */
    ZS_W_Q,
    ZS_W_K,
    ZS_W_V,
    ZS_W_O,
    ZS_W_Q_BIAS,
    ZS_W_K_BIAS,
    ZS_W_V_BIAS,
    ZS_W_O_BIAS,
    ZS_W_Q_NORM,
    ZS_W_K_NORM,
    ZS_W_MLP_NORM, /* post_attention_layernorm.weight */
    ZS_W_GATE,
    ZS_W_UP,
    ZS_W_DOWN,
    ZS_W_GATE_BIAS,
    ZS_W_UP_BIAS,
    ZS_W_DOWN_BIAS,
    ZS_W_FINAL_NORM, /* model.norm.weight */
    ZS_W_HEAD,       /* lm_head.weight; absent when tied */
    ZS_WEIGHT_KINDS
} zs_weight_kind;

typedef struct zs_weight {
    char name[96];
    zs_weight_kind kind;
    int layer; /* -1 outside the blocks */
    int unit;  /* 0: embedding; 1 + layer: a block; layers + 1: head (final norm, lm_head when not
                  tied) */
    int ndim;
    int64_t shape[2];
} zs_weight;
uint64_t zs_weight_numel(const zs_weight *weight);

/* *out is a malloc'ed array, to be freed by the caller. */
zs_status zs_model_weights(const zs_model_config *config, zs_weight **out, size_t *count);

#endif
