/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the above */
#include <cmocka.h>

#include "base/util.h"
#include "data.h"
#include "model/config.h"
#include "unit/temp.h"

#define SIZES                                                                                      \
    "\"vocab_size\":64,\"hidden_size\":32,\"intermediate_size\":48,\"num_hidden_layers\":2,"       \
    "\"num_attention_heads\":4,\"num_key_value_heads\":2"
#define LLAMA "{\"model_type\":\"llama\"," SIZES

static zs_model_config parse(const char *text)
{
    zs_model_config c;
    zs_status status = zs_model_config_parse(text, strlen(text), "c.json", &c);
    if (status)
        fail_msg("%s: %s", text, zs_last_error());
    return c;
}

/* text must be refused with a message that holds expected. */
static void refused(const char *text, zs_status expected_status, const char *expected)
{
    zs_model_config c;
    zs_status status = zs_model_config_parse(text, strlen(text), "c.json", &c);
    if (status != expected_status || !strstr(zs_last_error(), expected))
        fail_msg("%s\ngave %s: %s\nnot %s: ...%s...", text, zs_status_name(status),
                 status ? zs_last_error() : "", zs_status_name(expected_status), expected);
    assert_memory_equal(zs_last_error(), "c.json", 6);
}

static void unsupported(const char *text, const char *expected)
{
    refused(text, ZS_ERR_UNSUPPORTED, expected);
}

static void corrupt(const char *text, const char *expected)
{
    refused(text, ZS_ERR_CORRUPT, expected);
}

static void test_defaults(void **state)
{
    zs_model_config c = parse(LLAMA "}");
    assert_string_equal(c.model_type, "llama");
    assert_int_equal(c.head_dim, 8);
    assert_int_equal(c.max_positions, 2048);
    assert_true(c.rms_eps == 1e-6 && c.init_range == 0.02 && c.rope_theta == 10000);
    assert_int_equal(c.rope_type, ZS_ROPE_DEFAULT);
    assert_int_equal(c.tied + c.qkv_bias + c.o_bias + c.mlp_bias + c.qk_norm, 0);
    assert_int_equal(c.sliding_window, 0);
    assert_int_equal(c.dtype, ZS_FP32);
    c = parse("{\"model_type\":\"llama\",\"vocab_size\":64,\"hidden_size\":32,"
              "\"intermediate_size\":48,\"num_hidden_layers\":2,\"num_attention_heads\":4}");
    assert_int_equal(c.kv_heads, 4);
    /* Each family has its own defaults in transformers. */
    c = parse("{\"model_type\":\"mistral\"," SIZES "}");
    assert_int_equal(c.sliding_window, 4096);
    assert_int_equal(c.max_positions, 131072);
    c = parse("{\"model_type\":\"qwen2\"," SIZES "}");
    assert_int_equal(c.qkv_bias, 1);
    assert_int_equal(c.o_bias + c.qk_norm + c.sliding_window, 0);
    c = parse("{\"model_type\":\"qwen3\"," SIZES "}");
    assert_int_equal(c.head_dim, 128);
    assert_int_equal(c.qk_norm, 1);
    assert_int_equal(c.qkv_bias, 0);
    c = parse("{\"model_type\":\"mistral\",\"vocab_size\":64,\"hidden_size\":32,"
              "\"intermediate_size\":48,\"num_hidden_layers\":2,\"num_attention_heads\":4,"
              "\"num_key_value_heads\":null,\"sliding_window\":null}");
    assert_int_equal(c.kv_heads, 4);
    assert_int_equal(c.sliding_window, 0);
}

static void test_biases(void **state)
{
    zs_model_config c = parse(LLAMA ",\"attention_bias\":true,\"mlp_bias\":true}");
    assert_int_equal(c.qkv_bias + c.o_bias + c.mlp_bias, 3);
    c = parse("{\"model_type\":\"qwen3\"," SIZES ",\"attention_bias\":true}");
    assert_int_equal(c.qkv_bias + c.o_bias, 2);
    unsupported("{\"model_type\":\"mistral\"," SIZES ",\"attention_bias\":true}",
                "attention_bias = true");
    corrupt(LLAMA ",\"attention_bias\":1}", "attention_bias = 1 must be true or false");
}

static void test_rope_generations(void **state)
{
    zs_model_config c = parse(LLAMA ",\"rope_theta\":5e5,\"torch_dtype\":\"bfloat16\","
                                    "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,"
                                    "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
                                    "\"original_max_position_embeddings\":64}}");
    zs_model_config d = parse(LLAMA ",\"dtype\":\"bfloat16\",\"rope_parameters\":{"
                                    "\"rope_theta\":500000,\"rope_type\":\"llama3\","
                                    "\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,"
                                    "\"original_max_position_embeddings\":64}}");
    assert_memory_equal(&c, &d, sizeof c);
    assert_int_equal(c.rope_type, ZS_ROPE_LLAMA3);
    assert_true(c.rope_theta == 5e5 && c.rope_factor == 8 && c.rope_low_freq == 1 &&
                c.rope_high_freq == 4);
    assert_int_equal(c.rope_original_positions, 64);
    assert_int_equal(c.dtype, ZS_BF16);
    c = parse(LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.5}}");
    assert_int_equal(c.rope_type, ZS_ROPE_LINEAR);
    assert_true(c.rope_factor == 2.5);
    c = parse(LLAMA ",\"rope_scaling\":null,\"dtype\":\"float16\",\"torch_dtype\":\"float32\"}");
    assert_int_equal(c.dtype, ZS_FP16);
    unsupported(LLAMA ",\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4.0}}",
                "rope_scaling.rope_type = \"yarn\" is not supported: default, linear and llama3");
    unsupported(LLAMA ",\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":4.0}}",
                "rope_scaling.type = \"dynamic\"");
    unsupported(LLAMA ",\"rope_parameters\":{\"rope_type\":\"longrope\"}}",
                "rope_parameters.rope_type = \"longrope\"");
    unsupported(LLAMA ",\"rope_parameters\":{\"rope_type\":\"default\","
                      "\"partial_rotary_factor\":0.5}}",
                "rope_parameters.partial_rotary_factor = 0.5");
    unsupported(LLAMA ",\"partial_rotary_factor\":0.5}", "partial_rotary_factor = 0.5");
    unsupported(LLAMA ",\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"default\"}}}",
                "rope_parameters.full_attention");
    corrupt(LLAMA ",\"rope_scaling\":{\"type\":\"linear\"}}", "rope_scaling.factor is missing");
    corrupt(LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":0}}",
            "rope_scaling.factor = 0 must be a number of at least");
    corrupt(LLAMA ",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,"
                  "\"high_freq_factor\":4}}",
            "high_freq_factor = 4 must be larger than low_freq_factor = 4");
    corrupt(LLAMA ",\"rope_scaling\":{\"type\":\"linear\",\"factor\":2},"
                  "\"rope_parameters\":{\"type\":\"linear\",\"factor\":2}}",
            "both rope_scaling and rope_parameters");
}

static void test_windows(void **state)
{
#define QWEN2 "{\"model_type\":\"qwen2\"," SIZES ",\"sliding_window\":16"
    assert_int_equal(parse(QWEN2 "}").sliding_window, 0);
    assert_int_equal(parse(QWEN2 ",\"use_sliding_window\":false}").sliding_window, 0);
    /* The default of max_window_layers leaves no layer of this model with a window. */
    assert_int_equal(parse(QWEN2 ",\"use_sliding_window\":true}").sliding_window, 0);
    assert_int_equal(
        parse(QWEN2 ",\"use_sliding_window\":true,\"max_window_layers\":1}").sliding_window, 16);
    assert_int_equal(parse(QWEN2 ",\"use_sliding_window\":true,\"layer_types\":["
                                 "\"full_attention\",\"sliding_attention\"]}")
                         .sliding_window,
                     16);
    assert_int_equal(parse(QWEN2 ",\"use_sliding_window\":true,\"layer_types\":["
                                 "\"full_attention\",\"full_attention\"]}")
                         .sliding_window,
                     0);
    unsupported(QWEN2 ",\"layer_types\":[\"full_attention\",\"sliding_attention\"]}",
                "layer_types[1] = \"sliding_attention\" is not supported: full_attention is");
    unsupported(LLAMA ",\"layer_types\":[\"linear_attention\",\"full_attention\"]}",
                "layer_types[0] = \"linear_attention\"");
    corrupt(LLAMA ",\"layer_types\":[\"full_attention\"]}",
            "layer_types has 1 entries, but num_hidden_layers = 2");
    assert_int_equal(
        parse("{\"model_type\":\"mistral\"," SIZES ",\"sliding_window\":99}").sliding_window, 99);
    unsupported(LLAMA ",\"sliding_window\":4096}", "sliding_window = 4096");
}

static void test_refusals(void **state)
{
    unsupported("{\"model_type\":\"gemma\"," SIZES "}",
                "model_type = \"gemma\" is not supported: llama, mistral, qwen2 and qwen3");
    unsupported(LLAMA ",\"architectures\":[\"LlamaForSequenceClassification\"]}",
                "architectures = [\"LlamaForSequenceClassification\"] is not supported: "
                "[\"LlamaForCausalLM\"] is");
    unsupported(LLAMA ",\"num_experts\":8}", "num_experts = 8");
    unsupported(LLAMA ",\"hidden_act\":\"gelu\"}", "hidden_act = \"gelu\"");
    unsupported(LLAMA ",\"attention_dropout\":0.1}", "attention_dropout = 0.1");
    unsupported(LLAMA ",\"pretraining_tp\":2}", "pretraining_tp = 2");
    unsupported(LLAMA ",\"quantization_config\":{\"quant_method\":\"fp8\"}}",
                "quantization_config = {\"quant_method\":\"fp8\"}");
    unsupported(LLAMA ",\"torch_dtype\":\"float64\"}", "torch_dtype = \"float64\"");
    unsupported(LLAMA ",\"rope_interleaved\":true}", "rope_interleaved = true");
    unsupported(LLAMA ",\"logit_scale\":0.5}", "it is not known for model_type llama");
    parse(LLAMA ",\"rope_interleaved\":false,\"some_new_switch\":null,\"mlp_only_layers\":[],"
                "\"hidden_dropout\":0.0,\"transformers_version\":\"9.9\",\"eos_token_id\":[1,2],"
                "\"_name_or_path\":\"x\",\"pretraining_tp\":1}");
    corrupt("{" SIZES "}", "model_type is missing");
    corrupt("{\"model_type\":\"llama\"}", "vocab_size is missing");
    corrupt(LLAMA ",\"head_dim\":7}", "head_dim = 7 must be even");
    corrupt(LLAMA ",\"head_dim\":-8}", "head_dim = -8 must be an integer from 1");
    corrupt(LLAMA ",\"max_position_embeddings\":1e3}", "max_position_embeddings = 1000.0 must be");
    corrupt(LLAMA ",\"rms_norm_eps\":-1}", "rms_norm_eps = -1 must be");
    corrupt("{\"model_type\":\"llama\",\"vocab_size\":64,\"hidden_size\":30,"
            "\"intermediate_size\":48,\"num_hidden_layers\":2,\"num_attention_heads\":4}",
            "hidden_size = 30 is not a multiple of num_attention_heads = 4");
    corrupt("{\"model_type\":\"llama\",\"vocab_size\":64,\"hidden_size\":32,"
            "\"intermediate_size\":48,\"num_hidden_layers\":2,\"num_attention_heads\":4,"
            "\"num_key_value_heads\":3}",
            "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3");
    corrupt("{\"model_type\":\"llama\",\"vocab_size\":9999999999}", "vocab_size = 9999999999");
    corrupt("[]", "must hold a JSON object");
    corrupt("{\"model_type\":", "is not valid JSON: line 1");
    corrupt(LLAMA ",\"vocab_size\":65}", "duplicate");
}

static void test_files(void **state)
{
    temp_dir dir;
    zs_model_config c;
    temp_make(&dir);
    temp_write(&dir, "config.json", LLAMA "}", strlen(LLAMA "}"));
    char *path = temp_path(&dir, "config.json"), *missing = temp_path(&dir, "missing.json");
    assert_int_equal(zs_model_config_load(path, &c), ZS_OK);
    assert_int_equal(zs_model_config_load(missing, &c), ZS_ERR_IO);
    assert_non_null(strstr(zs_last_error(), "missing.json: No such file"));
    assert_int_equal(zs_model_config_load(dir.path, &c), ZS_ERR_ARG);
    assert_non_null(strstr(zs_last_error(), "is not a regular file"));
    free(path);
    free(missing);
    temp_remove(&dir);
}

static void test_weights(void **state)
{
    zs_model_config c = parse("{\"model_type\":\"qwen3\"," SIZES ",\"head_dim\":16,"
                              "\"attention_bias\":true,\"tie_word_embeddings\":true}");
    zs_weight *weights;
    size_t count;
    assert_int_equal(zs_model_weights(&c, &weights, &count), ZS_OK);
    assert_int_equal(count, 1 + 2 * 15 + 1);
    assert_string_equal(weights[0].name, "model.embed_tokens.weight");
    assert_int_equal(weights[0].unit, 0);
    assert_int_equal(weights[0].layer, -1);
    assert_string_equal(weights[16].name, "model.layers.1.input_layernorm.weight");
    assert_int_equal(weights[16].unit, 2);
    assert_int_equal(weights[16].layer, 1);
    assert_int_equal(weights[16].ndim, 1);
    assert_string_equal(weights[18].name, "model.layers.1.self_attn.k_proj.weight");
    assert_int_equal(weights[18].kind, ZS_W_K);
    assert_int_equal(weights[18].shape[0], 2 * 16);
    assert_int_equal(weights[18].shape[1], 32);
    assert_string_equal(weights[count - 1].name, "model.norm.weight");
    assert_int_equal(weights[count - 1].unit, 3);
    uint64_t numel = 0;
    for (size_t i = 0; i < count; i++)
        numel += (uint64_t)weights[i].shape[0] *
                 (uint64_t)(weights[i].ndim == 2 ? weights[i].shape[1] : 1);
    assert_true(numel == zs_model_config_numel(&c));
    free(weights);
    c = parse(LLAMA ",\"mlp_bias\":true}");
    assert_int_equal(zs_model_weights(&c, &weights, &count), ZS_OK);
    assert_int_equal(count, 1 + 2 * 12 + 2);
    assert_string_equal(weights[12].name, "model.layers.0.mlp.down_proj.bias");
    assert_string_equal(weights[count - 1].name, "lm_head.weight");
    assert_int_equal(weights[count - 1].shape[0], 64);
    free(weights);
}

static void test_published(void **state)
{
    static const struct {
        const char *name;
        uint64_t numel;
    } models[] = {
        {"Llama-3.1-70B-Instruct", 70553706496},
        {"Llama-3.1-8B", 8030261248},
        {"Llama-3.2-1B-Instruct", 1235814400},
        {"Mistral-7B-Instruct-v0.2", 7241732096},
        {"Mistral-7B-v0.1", 7241732096},
        {"Qwen2.5-0.5B", 494032768},
        {"Qwen2.5-3B", 3085938688},
        {"Qwen2.5-7B", 7615616512},
        {"Qwen3-0.6B", 596049920},
        {"Qwen3-14B", 14768307200},
        {"Qwen3-32B", 32762123264},
        {"Qwen3-4B", 4022468096},
        {"Qwen3-8B", 8190735360},
        {"SmolLM2-135M", 134515008},
    };
    static const struct {
        const char *name, *message;
    } others[] = {
        {"Qwen3-30B-A3B", "model_type = \"qwen3_moe\""},
        {"gpt-oss-20b", "model_type = \"gpt_oss\""},
        {"Qwen3-8B-FP8", "quantization_config = "},
        {"Olmo-3-7B.assembled", "model_type = \"olmo3\""},
    };
    zs_model_config c;
    char name[100];
    for (size_t i = 0; i < ZS_COUNT(models); i++) {
        snprintf(name, sizeof name, "hf_configs/%s.json", models[i].name);
        char *path = data_path(name);
        if (!path)
            skip();
        if (zs_model_config_load(path, &c))
            fail_msg("%s", zs_last_error());
        if (zs_model_config_numel(&c) != models[i].numel)
            fail_msg("%s: %llu parameters", name, (unsigned long long)zs_model_config_numel(&c));
        assert_int_equal(c.dtype, ZS_BF16);
        assert_int_equal(c.sliding_window, strcmp(models[i].name, "Mistral-7B-v0.1") ? 0 : 4096);
        free(path);
    }
    for (size_t i = 0; i < ZS_COUNT(others); i++) {
        snprintf(name, sizeof name, "hf_configs/%s.json", others[i].name);
        char *path = data_path(name);
        assert_non_null(path);
        assert_int_equal(zs_model_config_load(path, &c), ZS_ERR_UNSUPPORTED);
        if (!strstr(zs_last_error(), others[i].message))
            fail_msg("%s", zs_last_error());
        free(path);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults), cmocka_unit_test(test_biases),
        cmocka_unit_test(test_windows),  cmocka_unit_test(test_rope_generations),
        cmocka_unit_test(test_refusals), cmocka_unit_test(test_files),
        cmocka_unit_test(test_weights),  cmocka_unit_test(test_published),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
