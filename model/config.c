/* SPDX-License-Identifier: Apache-2.0 */
#include "model/config.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"
#include "base/util.h"
#include "model/json.h"

enum { CONFIG_BYTES_MAX = 4 << 20 };

/* What the four families have in common and where transformers' defaults for absent keys differ. */
typedef struct family {
    const char *type, *architecture;
    int kv_heads;      /* default; 0: as many as heads */
    int head_dim;      /* default; 0: hidden / heads */
    int max_positions; /* default */
    int always_qkv_bias, qk_norm;
    int reads_attention_bias, reads_mlp_bias;
    int window; /* 0: none; 1: always (Mistral); 2: with use_sliding_window (Qwen) */
} family;

static const family families[] = {
    {"llama", "LlamaForCausalLM", 0, 0, 2048, 0, 0, 1, 1, 0},
    {"mistral", "MistralForCausalLM", 8, 0, 131072, 0, 0, 0, 0, 1},
    {"qwen2", "Qwen2ForCausalLM", 32, 0, 32768, 1, 0, 0, 0, 2},
    {"qwen3", "Qwen3ForCausalLM", 32, 128, 32768, 0, 1, 1, 0, 2},
};
enum { DEFAULT_WINDOW = 4096, DEFAULT_WINDOW_LAYERS = 28 };

/* Keys that read_* below looks at. attention_bias, mlp_bias and the window's keys are known only to
 * the families that have them. */
static const char *const read_keys[] = {
    "model_type",        "architectures",           "vocab_size",          "hidden_size",
    "intermediate_size", "num_hidden_layers",       "num_attention_heads", "num_key_value_heads",
    "head_dim",          "max_position_embeddings", "rms_norm_eps",        "initializer_range",
    "hidden_act",        "tie_word_embeddings",     "rope_theta",          "rope_scaling",
    "rope_parameters",   "partial_rotary_factor",   "torch_dtype",         "dtype",
    "attention_dropout", "pretraining_tp",          "layer_types",         "quantization_config",
};

/* Keys that say nothing about the maths of a training step. */
static const char *const harmless_keys[] = {
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "is_decoder",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "max_window_layers",
    "min_length",
    "model_max_length",
    "name_or_path",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "prefix",
    "problem_type",
    "repetition_penalty",
    "return_dict",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tie_last_hidden_states",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
};

static const char *const rope_keys[] = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
};

typedef struct reader {
    const char *path;
    const char *within; /* "" or "rope_scaling.": put before keys in messages */
    const json_t *object;
} reader;

static int listed(const char *key, const char *const *list, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!strcmp(key, list[i]))
            return 1;
    return 0;
}

static zs_status refuse(const reader *r, const char *key, const json_t *value, const char *fix)
{
    char text[80];
    return zs_fail(ZS_ERR_UNSUPPORTED, "%s: %s%s = %s is not supported: %s", r->path, r->within,
                   key, zs_json_text(value, text), fix);
}

/* NULL for a key that is absent or null: transformers treats both alike but where said. */
static const json_t *get(const reader *r, const char *key)
{
    const json_t *value = json_object_get(r->object, key);
    return json_is_null(value) ? NULL : value;
}

/* fallback 0: the key must be there. */
static zs_status read_int(const reader *r, const char *key, int fallback, int most, int *out)
{
    const json_t *value = get(r, key);
    char text[80];
    *out = fallback;
    if (!value && fallback)
        return ZS_OK;
    if (!value)
        return zs_fail(ZS_ERR_CORRUPT, "%s: %s%s is missing", r->path, r->within, key);
    if (!json_is_integer(value) || json_integer_value(value) < 1 ||
        json_integer_value(value) > most)
        return zs_fail(ZS_ERR_CORRUPT, "%s: %s%s = %s must be an integer from 1 to %d", r->path,
                       r->within, key, zs_json_text(value, text), most);
    *out = (int)json_integer_value(value);
    return ZS_OK;
}

/* least: the smallest value accepted. fallback < least: the key must be there. */
static zs_status read_real(const reader *r, const char *key, double fallback, double least,
                           double *out)
{
    const json_t *value = get(r, key);
    char text[80];
    *out = fallback;
    if (!value && fallback >= least)
        return ZS_OK;
    if (!value)
        return zs_fail(ZS_ERR_CORRUPT, "%s: %s%s is missing", r->path, r->within, key);
    double number = json_number_value(value);
    if (!json_is_number(value) || !isfinite(number) || number < least || number > 1e30)
        return zs_fail(ZS_ERR_CORRUPT, "%s: %s%s = %s must be a number of at least %g", r->path,
                       r->within, key, zs_json_text(value, text), least);
    *out = number;
    return ZS_OK;
}

static zs_status read_flag(const reader *r, const char *key, int *out)
{
    const json_t *value = get(r, key);
    char text[80];
    *out = json_is_true(value);
    if (value && !json_is_boolean(value))
        return zs_fail(ZS_ERR_CORRUPT, "%s: %s%s = %s must be true or false", r->path, r->within,
                       key, zs_json_text(value, text));
    return ZS_OK;
}

/* null, false, 0, "", [] and {}: a feature that is switched off. */
static int is_off(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_NULL:
    case JSON_FALSE:
        return 1;
    case JSON_INTEGER:
    case JSON_REAL:
        return json_number_value(value) == 0;
    case JSON_STRING:
        return json_string_length(value) == 0;
    case JSON_ARRAY:
        return json_array_size(value) == 0;
    case JSON_OBJECT:
        return json_object_size(value) == 0;
    case JSON_TRUE:
        break;
    }
    return 0;
}

static zs_status read_family(const reader *r, const family **out)
{
    const json_t *type = get(r, "model_type");
    const json_t *architectures = get(r, "architectures");
    *out = NULL;
    if (!type)
        return zs_fail(ZS_ERR_CORRUPT, "%s: model_type is missing", r->path);
    for (size_t i = 0; json_is_string(type) && i < ZS_COUNT(families); i++)
        if (!strcmp(json_string_value(type), families[i].type))
            *out = &families[i];
    if (!*out)
        return refuse(r, "model_type", type,
                      "llama, mistral, qwen2 and qwen3 (dense decoders) are");
    if (!architectures)
        return ZS_OK;
    const json_t *first = json_array_get(architectures, 0);
    if (json_array_size(architectures) != 1 || !json_is_string(first) ||
        strcmp(json_string_value(first), (*out)->architecture) != 0) {
        char fix[64];
        snprintf(fix, sizeof fix, "[\"%s\"] is", (*out)->architecture);
        return refuse(r, "architectures", architectures, fix);
    }
    return ZS_OK;
}

static zs_status read_sizes(const reader *r, const family *f, zs_model_config *c)
{
    /* The bounds keep every product of sizes within 63 bits. */
    ZS_CHECK(read_int(r, "vocab_size", 0, 1 << 26, &c->vocab));
    ZS_CHECK(read_int(r, "hidden_size", 0, 1 << 20, &c->hidden));
    ZS_CHECK(read_int(r, "intermediate_size", 0, 1 << 22, &c->intermediate));
    ZS_CHECK(read_int(r, "num_hidden_layers", 0, 1 << 12, &c->layers));
    ZS_CHECK(read_int(r, "num_attention_heads", 0, 1 << 12, &c->heads));
    /* An explicit null means "as many as heads" in every family. */
    int kv = json_object_get(r->object, "num_key_value_heads") ? 0 : f->kv_heads;
    ZS_CHECK(read_int(r, "num_key_value_heads", kv ? kv : c->heads, 1 << 12, &c->kv_heads));
    if (c->heads % c->kv_heads)
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s: num_attention_heads = %d is not a multiple of num_key_value_heads = "
                       "%d%s",
                       r->path, c->heads, c->kv_heads,
                       kv ? ", the default of this model_type" : "");
    int head_dim = f->head_dim ? f->head_dim : c->hidden / c->heads;
    if (!get(r, "head_dim") && !f->head_dim && c->hidden % c->heads)
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s: hidden_size = %d is not a multiple of num_attention_heads = %d, and "
                       "head_dim is not given",
                       r->path, c->hidden, c->heads);
    ZS_CHECK(read_int(r, "head_dim", head_dim, 1 << 12, &c->head_dim));
    if (c->head_dim % 2)
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s: head_dim = %d must be even, as rotary embeddings pair its elements",
                       r->path, c->head_dim);
    ZS_CHECK(read_int(r, "max_position_embeddings", f->max_positions, 1 << 30, &c->max_positions));
    ZS_CHECK(read_real(r, "rms_norm_eps", 1e-6, 0, &c->rms_eps));
    ZS_CHECK(read_real(r, "initializer_range", 0.02, 0, &c->init_range));
    if (c->init_range == 0) /* as transformers */
        c->init_range = 0.02;
    return read_flag(r, "tie_word_embeddings", &c->tied);
}

static zs_status check_partial_rotary(const reader *r)
{
    const json_t *value = get(r, "partial_rotary_factor");
    if (value && json_number_value(value) != 1)
        return refuse(r, "partial_rotary_factor", value, "only 1.0 is (all of each head rotates)");
    return ZS_OK;
}

/* r: the dictionary rope_scaling (transformers 4) or rope_parameters (5). */
static zs_status read_rope_scaling(const reader *r, zs_model_config *c)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)r->object, key, value) if (
        !listed(key, rope_keys, ZS_COUNT(rope_keys)) &&
        !is_off(value)) return refuse(r, key, value,
                                      "rope types default, linear and llama3 have no such key");
    ZS_CHECK(check_partial_rotary(r));
    ZS_CHECK(read_real(r, "rope_theta", c->rope_theta, 1e-3, &c->rope_theta));
    const char *type_key = get(r, "rope_type") ? "rope_type" : "type";
    const json_t *type = get(r, type_key);
    const char *name = type ? json_string_value(type) : "default";
    if (name && !strcmp(name, "default"))
        return ZS_OK;
    if (name && !strcmp(name, "linear")) {
        c->rope_type = ZS_ROPE_LINEAR;
        return read_real(r, "factor", -1, 1e-3, &c->rope_factor);
    }
    if (!name || strcmp(name, "llama3") != 0)
        return refuse(r, type_key, type, "default, linear and llama3 are");
    c->rope_type = ZS_ROPE_LLAMA3;
    ZS_CHECK(read_real(r, "factor", -1, 1e-3, &c->rope_factor));
    ZS_CHECK(read_real(r, "low_freq_factor", -1, 1e-3, &c->rope_low_freq));
    ZS_CHECK(read_real(r, "high_freq_factor", -1, 1e-3, &c->rope_high_freq));
    ZS_CHECK(read_int(r, "original_max_position_embeddings", c->max_positions, 1 << 30,
                      &c->rope_original_positions));
    if (c->rope_high_freq <= c->rope_low_freq)
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s: %shigh_freq_factor = %g must be larger than low_freq_factor = %g",
                       r->path, r->within, c->rope_high_freq, c->rope_low_freq);
    return ZS_OK;
}

static zs_status read_rope(const reader *r, zs_model_config *c)
{
    static const char *const keys[] = {"rope_scaling", "rope_parameters"};
    static const char *const prefixes[] = {"rope_scaling.", "rope_parameters."};
    int seen = 0;
    c->rope_type = ZS_ROPE_DEFAULT;
    c->rope_factor = 1;
    ZS_CHECK(check_partial_rotary(r));
    ZS_CHECK(read_real(r, "rope_theta", 10000, 1e-3, &c->rope_theta));
    for (size_t i = 0; i < ZS_COUNT(keys); i++) {
        const json_t *value = get(r, keys[i]);
        if (!value || is_off(value))
            continue;
        if (!json_is_object(value))
            return refuse(r, keys[i], value, "it must be an object");
        if (seen++)
            return zs_fail(ZS_ERR_CORRUPT,
                           "%s: both rope_scaling and rope_parameters are given; keep one of them",
                           r->path);
        reader inner = {r->path, prefixes[i], value};
        ZS_CHECK(read_rope_scaling(&inner, c));
    }
    return ZS_OK;
}

static zs_status read_dtype(const reader *r, zs_model_config *c)
{
    static const char *const names[] = {"float32", "bfloat16", "float16"}; /* by zs_dtype */
    const char *key = get(r, "dtype") ? "dtype" : "torch_dtype";
    const json_t *value = get(r, key);
    c->dtype = ZS_FP32;
    if (!value)
        return ZS_OK;
    const char *name = json_string_value(value);
    for (int i = 0; name && i < (int)ZS_COUNT(names); i++)
        if (!strcmp(name, names[i])) {
            c->dtype = (zs_dtype)i;
            return ZS_OK;
        }
    return refuse(r, key, value, "float32, bfloat16 and float16 are");
}

/* A window that no training sequence may exceed leaves the maths of full attention, whichever
 * layers have it. */
static zs_status read_window(const reader *r, const family *f, zs_model_config *c)
{
    int on = f->window == 1, window_layers = DEFAULT_WINDOW_LAYERS;
    const json_t *types = get(r, "layer_types");
    if (f->window == 2)
        ZS_CHECK(read_flag(r, "use_sliding_window", &on));
    /* An explicit null switches it off; absent means the default. */
    if (on && !json_is_null(json_object_get(r->object, "sliding_window")))
        ZS_CHECK(read_int(r, "sliding_window", DEFAULT_WINDOW, 1 << 30, &c->sliding_window));
    if (types && !json_is_array(types))
        return refuse(r, "layer_types", types, "it must be a list");
    if (types && json_array_size(types) != (size_t)c->layers)
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s: layer_types has %zu entries, but num_hidden_layers = %d", r->path,
                       json_array_size(types), c->layers);
    int sliding = 0;
    size_t i;
    json_t *type;
    json_array_foreach(types, i, type)
    {
        const char *name = json_string_value(type);
        if (name && !strcmp(name, "full_attention"))
            continue;
        if (name && !strcmp(name, "sliding_attention") && f->window == 2 && c->sliding_window) {
            sliding++;
            continue;
        }
        char key[48];
        snprintf(key, sizeof key, "layer_types[%zu]", i);
        return refuse(r, key, type, "full_attention is");
    }
    if (f->window == 2 && c->sliding_window && types && !sliding)
        c->sliding_window = 0;
    if (f->window == 2 && c->sliding_window && !types) {
        const json_t *most = get(r, "max_window_layers");
        if (most && json_is_integer(most) && json_integer_value(most) >= 0 &&
            json_integer_value(most) <= INT_MAX)
            window_layers = (int)json_integer_value(most);
        if (window_layers >= c->layers)
            c->sliding_window = 0;
    }
    return ZS_OK;
}

static zs_status check_maths(const reader *r)
{
    const json_t *value = get(r, "hidden_act");
    const char *act = json_string_value(value);
    if (value && (!act || (strcmp(act, "silu") != 0 && strcmp(act, "swish") != 0)))
        return refuse(r, "hidden_act", value, "\"silu\" is");
    value = get(r, "attention_dropout");
    if (value && !is_off(value))
        return refuse(r, "attention_dropout", value, "set it to 0.0");
    value = get(r, "pretraining_tp");
    if (value && json_integer_value(value) != 1)
        return refuse(r, "pretraining_tp", value, "set it to 1");
    value = get(r, "quantization_config");
    if (value)
        return refuse(r, "quantization_config", value,
                      "use the model's unquantized weights (bf16, fp16 or fp32)");
    return ZS_OK;
}

static zs_status check_keys(const reader *r, const family *f)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)r->object, key, value)
    {
        int known = listed(key, read_keys, ZS_COUNT(read_keys)) ||
                    listed(key, harmless_keys, ZS_COUNT(harmless_keys)) || key[0] == '_';
        if (f->reads_attention_bias)
            known |= !strcmp(key, "attention_bias");
        if (f->reads_mlp_bias)
            known |= !strcmp(key, "mlp_bias");
        if (f->window)
            known |= !strcmp(key, "sliding_window");
        if (f->window == 2)
            known |= !strcmp(key, "use_sliding_window");
        if (!known && !is_off(value)) {
            char fix[128];
            snprintf(fix, sizeof fix,
                     "it is not known for model_type %s, and may change the maths; remove it if it "
                     "does not",
                     f->type);
            return refuse(r, key, value, fix);
        }
    }
    return ZS_OK;
}

static zs_status read_config(const reader *r, zs_model_config *c)
{
    const family *f;
    ZS_CHECK(read_family(r, &f));
    snprintf(c->model_type, sizeof c->model_type, "%s", f->type);
    ZS_CHECK(check_maths(r));
    ZS_CHECK(check_keys(r, f));
    ZS_CHECK(read_sizes(r, f, c));
    ZS_CHECK(read_rope(r, c));
    ZS_CHECK(read_dtype(r, c));
    ZS_CHECK(read_window(r, f, c));
    c->qk_norm = f->qk_norm;
    c->qkv_bias = f->always_qkv_bias;
    if (f->reads_attention_bias) {
        ZS_CHECK(read_flag(r, "attention_bias", &c->qkv_bias));
        c->o_bias = c->qkv_bias;
    }
    if (f->reads_mlp_bias)
        ZS_CHECK(read_flag(r, "mlp_bias", &c->mlp_bias));
    return ZS_OK;
}

static zs_status read_root(json_t *root, const char *path, zs_model_config *out)
{
    reader r = {path, "", root};
    zs_status status = read_config(&r, out);
    json_decref(root);
    return status;
}

zs_status zs_model_config_parse(const char *text, size_t bytes, const char *path,
                                zs_model_config *out)
{
    json_t *root;
    memset(out, 0, sizeof *out);
    ZS_CHECK(zs_json_parse(text, bytes, path, &root));
    return read_root(root, path, out);
}

zs_status zs_model_config_load(const char *path, zs_model_config *out)
{
    json_t *root;
    memset(out, 0, sizeof *out);
    ZS_CHECK(zs_json_load(path, CONFIG_BYTES_MAX, &root));
    return read_root(root, path, out);
}

zs_status zs_model_config_find(const char *path, zs_model_config *out)
{
    char *name = NULL;
    struct stat info;
    if (stat(path, &info) != 0 || !S_ISDIR(info.st_mode))
        return zs_model_config_load(path, out);
    if (asprintf(&name, "%s/config.json", path) < 0)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a path");
    const zs_status status = zs_model_config_load(name, out);
    free(name);
    return status;
}
