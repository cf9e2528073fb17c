/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "fuzz/fuzz.h"
#include "model/config.h"

#define SIZES                                                                                      \
    "\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":48,\"num_hidden_layers\":2,"       \
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"max_position_embeddings\":128,"

const char *const fuzz_words[] = {"0",
                                  "-1",
                                  "1e308",
                                  "9223372036854775807",
                                  "1073741824",
                                  "null",
                                  "true",
                                  "false",
                                  "{",
                                  "}",
                                  "[",
                                  "]",
                                  ",",
                                  ":",
                                  "\"",
                                  "\\u0000",
                                  "\"llama3\"",
                                  "\"linear\"",
                                  "\"factor\":",
                                  "\"head_dim\":",
                                  "\"rope_scaling\":",
                                  "\"layer_types\":",
                                  "\"model_type\":",
                                  "\"qwen3\"",
                                  NULL};

size_t fuzz_seed(size_t i, uint8_t *out)
{
    static const char *const seeds[] = {
        "{\"model_type\":\"llama\"," SIZES "\"rope_theta\":10000.0,\"rope_scaling\":{"
        "\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
        "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":64},"
        "\"torch_dtype\":\"bfloat16\",\"attention_bias\":true,\"mlp_bias\":true}",
        "{\"model_type\":\"qwen3\"," SIZES "\"head_dim\":16,\"rope_parameters\":{"
        "\"rope_type\":\"linear\",\"factor\":2,\"rope_theta\":1e6},\"dtype\":\"float32\","
        "\"use_sliding_window\":true,\"sliding_window\":16,\"max_window_layers\":1,"
        "\"tie_word_embeddings\":true}",
        "{\"model_type\":\"qwen2\"," SIZES "\"layer_types\":[\"full_attention\","
        "\"full_attention\"],\"architectures\":[\"Qwen2ForCausalLM\"],\"hidden_act\":\"silu\"}",
        "{\"model_type\":\"mistral\"," SIZES "\"sliding_window\":null,\"eos_token_id\":[1,2],"
        "\"quantization_config\":null,\"attention_dropout\":0.0}",
    };
    if (i >= sizeof seeds / sizeof *seeds)
        return 0;
    memcpy(out, seeds[i], strlen(seeds[i]));
    return strlen(seeds[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    zs_model_config c;
    zs_weight *weights;
    size_t count;
    uint64_t numel = 0;
    if (zs_model_config_parse((const char *)data, size, "input", &c)) {
        if (!strstr(zs_last_error(), "input"))
            abort();
        return 0;
    }
    if (zs_model_weights(&c, &weights, &count))
        abort();
    for (size_t i = 0; i < count; i++) {
        if (weights[i].shape[0] < 1 || weights[i].shape[1] < 1)
            abort();
        numel += (uint64_t)weights[i].shape[0] * (uint64_t)weights[i].shape[1];
    }
    if (numel != zs_model_config_numel(&c) || numel >> 63 || c.heads % c.kv_heads || c.head_dim % 2)
        abort();
    free(weights);
    return 0;
}
