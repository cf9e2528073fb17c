/* SPDX-License-Identifier: Apache-2.0 */
/* The decoder's maths through a real engine: against torch's recorded values, against itself cut in
 * other ways, and against finite differences. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/util.h"
#include "model/json.h"
#include "tests/data.h"
#include "tests/engine/model_rig.h"

static zs_model_options options_for(int rows, int seq)
{
    return (zs_model_options){.rows = rows, .seq = seq};
}

/* dir NULL: initialized. */
static void rank_open(rank *r, const zs_model_config *config, zs_model_options options, int threads,
                      const char *dir)
{
    must(rank_try(r, NULL, config, options, threads, dir));
}

/* One or two micro-batches (second NULL: one). */
static double train(rank *r, const zs_batch *batch, const zs_batch *second, double scale)
{
    double loss, more = 0;
    must(zs_grad_begin(r->engine, !second));
    must(zs_model_train(r->model, batch, scale, &loss));
    must(zs_grad_finish(r->engine));
    if (second) {
        must(zs_grad_begin(r->engine, 1));
        must(zs_model_train(r->model, second, scale, &more));
        must(zs_grad_finish(r->engine));
    }
    return loss + more;
}

/* All gradients one after the other. */
static float *read_grads(rank *r, size_t *count)
{
    float *all;
    *count = 0;
    for (size_t i = 0; i < r->count; i++)
        *count += numel(&r->weights[i]);
    all = malloc(*count * sizeof *all);
    assert_non_null(all);
    *count = 0;
    for (size_t i = 0; i < r->count; i++) {
        uint64_t n = numel(&r->weights[i]);
        must(zs_param_read(r->engine, r->params[i], ZS_GRAD, 0, n, ZS_FP32, all + *count));
        *count += n;
    }
    must(zs_grad_discard(r->engine));
    return all;
}

static double norm_of(const float *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    return sqrt(sum);
}

static double distance(const float *a, const float *b, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    return sqrt(sum);
}

static void fill_ids(int32_t *ids, size_t n, int vocab)
{
    uint32_t state = 12345;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        ids[i] = (int32_t)((state >> 8) % (uint32_t)vocab);
    }
}

/* ---- against torch ---- */

static void read_rows(const json_t *rows, int32_t *out, int count)
{
    for (int i = 0; i < count; i++) {
        const json_t *row = json_array_get(rows, (size_t)i);
        for (size_t t = 0; t < json_array_size(row); t++)
            *out++ = (int32_t)json_integer_value(json_array_get(row, t));
    }
}

/* A step's rows are one list of rows or one flat list. */
static void read_step(const json_t *step, int32_t *out, int rows)
{
    if (json_is_array(json_array_get(step, 0))) {
        read_rows(step, out, rows);
        return;
    }
    for (size_t t = 0; t < json_array_size(step); t++)
        *out++ = (int32_t)json_integer_value(json_array_get(step, t));
}

static void check_golden(const char *base, const char *name, int checkpointing)
{
    char dir[600], path[700];
    zs_model_config config;
    json_t *golden;
    rank r;
    snprintf(dir, sizeof dir, "%s/%s", base, name);
    snprintf(path, sizeof path, "%s/golden.json", dir);
    must(zs_json_load(path, 64 << 20, &golden));
    snprintf(path, sizeof path, "%s/config.json", dir);
    must(zs_model_config_load(path, &config));
    int rows = (int)json_integer_value(json_object_get(golden, "batch"));
    int seq = (int)json_integer_value(json_object_get(golden, "seq"));
    int32_t *ids = calloc((size_t)(rows * seq) * 2, sizeof *ids), *labels = ids + rows * seq;
    read_step(json_array_get(json_object_get(golden, "input_ids"), 0), ids, rows);
    read_step(json_array_get(json_object_get(golden, "labels"), 0), labels, rows);
    zs_model_options options = options_for(rows, seq);
    options.checkpointing = checkpointing;
    rank_open(&r, &config, options, 2, dir);

    zs_batch batch = {.rows = rows, .seq = seq, .ids = ids, .labels = labels};
    const json_t *first = json_object_get(golden, "first_batch");
    double tokens = (double)zs_batch_tokens(&batch), evaluated;
    must(zs_model_evaluate(r.model, &batch, &evaluated));
    double loss = train(&r, &batch, NULL, 1 / tokens);
    double want = json_number_value(json_object_get(first, "loss"));
    assert_true(loss == evaluated);
    if (fabs(loss / tokens / want - 1) > 1e-6)
        fail_msg("%s: loss %.9g, torch has %.9g", name, loss / tokens, want);

    const json_t *norms = json_object_get(first, "grad_norm_per_parameter");
    assert_int_equal(json_object_size(norms), r.count);
    for (size_t i = 0; i < r.count; i++) {
        float *grad = read_array(&r, i, ZS_GRAD);
        double norm = norm_of(grad, numel(&r.weights[i]));
        want = json_number_value(json_object_get(norms, r.weights[i].name));
        if (!(fabs(norm / want - 1) <= 1e-5))
            fail_msg("%s: gradient norm of %s is %.9g, torch has %.9g", name, r.weights[i].name,
                     norm, want);
        free(grad);
    }
    const json_t *logits = json_object_get(first, "logits_row0_last_position");
    float *got = calloc((size_t)rows * (size_t)config.vocab, sizeof *got);
    must(zs_model_logits(r.model, &batch, got));
    assert_true(json_array_size(logits) > 0);
    for (size_t i = 0; i < json_array_size(logits); i++)
        if (fabs(got[i] - json_number_value(json_array_get(logits, i))) > 1e-5)
            fail_msg("%s: logit %zu is %.9g, torch has %.9g", name, i, (double)got[i],
                     json_number_value(json_array_get(logits, i)));
    rank_close(&r);
    free(got);
    free(ids);
    json_decref(golden);
}

static void equals_torch(void **state)
{
    static const char *const names[] = {"smollm2", "llama3-rope", "mistral", "qwen2-bias",
                                        "qwen3-qknorm"};
    char *base = data_path("golden/arch");
    (void)state;
    if (!base) {
        print_message("no golden/arch in the folder of ZSPILL_TEST_DATA\n");
        skip();
    }
    for (size_t i = 0; i < ZS_COUNT(names); i++)
        check_golden(base, names[i], (int)i % 2);
    free(base);
}

/* ---- the same bits ---- */

static void same_bits(const zs_model_config *config, zs_dtype dtype, zs_dtype grad_dtype)
{
    enum { ROWS = 3, SEQ = 200 };
    int32_t ids[ROWS * SEQ];
    float *first = NULL;
    double first_loss = 0;
    size_t count;
    fill_ids(ids, ROWS * SEQ, config->vocab);
    zs_batch batch = {.rows = ROWS, .seq = SEQ, .ids = ids};
    for (int threads = 1; threads <= 3; threads++) {
        for (int checkpointing = 0; checkpointing < 2; checkpointing++) {
            zs_model_options options = options_for(ROWS, SEQ);
            rank r;
            options.dtype = dtype;
            options.grad_dtype = grad_dtype;
            options.checkpointing = checkpointing;
            rank_open(&r, config, options, threads, NULL);
            double loss = train(&r, &batch, &batch, 0.01);
            float *grads = read_grads(&r, &count);
            assert_true(isfinite(loss) && norm_of(grads, count) > 0);
            if (!first) {
                first = grads;
                first_loss = loss;
            } else {
                assert_true(loss == first_loss);
                if (memcmp(grads, first, count * sizeof *grads) != 0)
                    fail_msg("%d threads, checkpointing %d: other gradients", threads,
                             checkpointing);
                free(grads);
            }
            rank_close(&r);
        }
    }
    free(first);
}

static void threads_and_checkpointing_change_nothing(void **state)
{
    zs_model_config biased = small;
    (void)state;
    biased.qk_norm = 0;
    biased.tied = 0;
    biased.qkv_bias = biased.o_bias = biased.mlp_bias = 1;
    same_bits(&small, ZS_FP32, ZS_FP32);
    same_bits(&biased, ZS_FP32, ZS_FP32);
    same_bits(&small, ZS_BF16, ZS_BF16);
    same_bits(&biased, ZS_BF16, ZS_FP32);
}

/* Gradients kept in bf16 are the fp32 ones, rounded. */
static void gradients_in_bf16(void **state)
{
    enum { ROWS = 2, SEQ = 70 };
    int32_t ids[ROWS * SEQ];
    float *grads[2];
    size_t count;
    (void)state;
    fill_ids(ids, ROWS * SEQ, small.vocab);
    zs_batch batch = {.rows = ROWS, .seq = SEQ, .ids = ids};
    for (int i = 0; i < 2; i++) {
        zs_model_options options = options_for(ROWS, SEQ);
        rank r;
        options.grad_dtype = i ? ZS_BF16 : ZS_FP32;
        rank_open(&r, &small, options, 2, NULL);
        train(&r, &batch, NULL, 1);
        grads[i] = read_grads(&r, &count);
        rank_close(&r);
    }
    double apart = distance(grads[0], grads[1], count) / norm_of(grads[0], count);
    assert_true(apart > 1e-5 && apart < 0x1p-8);
    free(grads[0]);
    free(grads[1]);
}

/* ---- the same values, cut in other ways ---- */

static void close_to(const float *got, const float *want, size_t count, double tolerance)
{
    double apart = distance(got, want, count) / norm_of(want, count);
    if (!(apart <= tolerance))
        fail_msg("gradients are %.3g apart", apart);
}

/* Documents packed into rows with positions give what rows of their own give. */
static void packed_documents(void **state)
{
    enum { DOCS = 3, LENGTH = 150, TOTAL = DOCS * LENGTH };
    int32_t ids[TOTAL], positions[TOTAL];
    size_t count;
    rank r;
    (void)state;
    fill_ids(ids, TOTAL, small.vocab);
    for (int i = 0; i < TOTAL; i++)
        positions[i] = i % LENGTH;
    zs_batch apart = {.rows = DOCS, .seq = LENGTH, .ids = ids};
    zs_batch packed = {.rows = 1, .seq = TOTAL, .ids = ids, .positions = positions};
    zs_batch merged = {.rows = 1, .seq = TOTAL, .ids = ids};
    assert_int_equal(zs_batch_tokens(&apart), DOCS * (LENGTH - 1));
    assert_int_equal(zs_batch_tokens(&packed), DOCS * (LENGTH - 1));
    assert_int_equal(zs_batch_tokens(&merged), TOTAL - 1);
    rank_open(&r, &small, options_for(DOCS, TOTAL), 2, NULL);
    double want_loss = train(&r, &apart, NULL, 1);
    float *want = read_grads(&r, &count);
    double loss = train(&r, &packed, NULL, 1);
    float *got = read_grads(&r, &count);
    assert_true(fabs(loss / want_loss - 1) < 1e-6);
    close_to(got, want, count, 1e-5);
    free(got);
    train(&r, &merged, NULL, 1);
    got = read_grads(&r, &count);
    assert_true(distance(got, want, count) > 1e-3 * norm_of(want, count));
    free(got);
    free(want);
    rank_close(&r);
}

/* Labels split between two micro-batches, each in one chunk of the head, add up to all labels, in
 * two chunks; a batch without labels adds zeros. */
static void masked_labels(void **state)
{
    enum { ROWS = 2, SEQ = 310, TOTAL = ROWS * SEQ };
    int32_t ids[TOTAL], odd[TOTAL], even[TOTAL], none[TOTAL];
    size_t count;
    rank r;
    (void)state;
    fill_ids(ids, TOTAL, small.vocab);
    for (int i = 0; i < TOTAL; i++) {
        odd[i] = i % 2 ? ids[i] : -100;
        even[i] = i % 2 ? -100 : ids[i];
        none[i] = -100;
    }
    zs_batch all = {.rows = ROWS, .seq = SEQ, .ids = ids}, a = all, b = all, zero = all;
    a.labels = odd;
    b.labels = even;
    zero.labels = none;
    assert_int_equal(zs_batch_tokens(&all), zs_batch_tokens(&a) + zs_batch_tokens(&b));
    assert_int_equal(zs_batch_tokens(&zero), 0);
    rank_open(&r, &small, options_for(ROWS, SEQ), 2, NULL);
    double want_loss = train(&r, &all, NULL, 1);
    float *want = read_grads(&r, &count);
    double loss = train(&r, &a, &b, 1);
    float *got = read_grads(&r, &count);
    assert_true(fabs(loss / want_loss - 1) < 1e-6);
    close_to(got, want, count, 1e-5);
    free(got);
    assert_true(train(&r, &all, &zero, 1) == want_loss);
    got = read_grads(&r, &count);
    assert_memory_equal(got, want, count * sizeof *got);
    free(got);
    assert_true(train(&r, &zero, NULL, 1) == 0);
    got = read_grads(&r, &count);
    assert_true(norm_of(got, count) == 0);
    free(got);
    free(want);
    rank_close(&r);
}

/* Along its own gradient, a parameter changes the loss by the gradient's norm. */
static void check_differences(const zs_model_config *config)
{
    enum { ROWS = 2, SEQ = 12 };
    const double step = 0.01;
    int32_t ids[ROWS * SEQ];
    rank r;
    fill_ids(ids, ROWS * SEQ, config->vocab);
    zs_batch batch = {.rows = ROWS, .seq = SEQ, .ids = ids};
    rank_open(&r, config, options_for(ROWS, SEQ), 2, NULL);
    train(&r, &batch, NULL, 1);
    float **grads = calloc(r.count, sizeof *grads);
    for (size_t i = 0; i < r.count; i++)
        grads[i] = read_array(&r, i, ZS_GRAD);
    must(zs_grad_discard(r.engine));
    for (size_t i = 0; i < r.count; i++) {
        uint64_t n = numel(&r.weights[i]);
        float *weight = read_array(&r, i, ZS_MASTER), *moved = malloc(n * sizeof *moved);
        double norm = norm_of(grads[i], n), loss[2];
        /* A bias of k adds the same to all scores of a query: its gradient is rounding. */
        for (int side = 0; norm > 1e-4 && side < 2; side++) {
            for (uint64_t j = 0; j < n; j++)
                moved[j] = weight[j] + (float)((side ? step : -step) * grads[i][j] / norm);
            must(zs_param_write(r.engine, r.params[i], 0, n, ZS_FP32, moved));
            must(zs_params_publish(r.engine));
            must(zs_model_evaluate(r.model, &batch, &loss[side]));
        }
        must(zs_param_write(r.engine, r.params[i], 0, n, ZS_FP32, weight));
        must(zs_params_publish(r.engine));
        double slope = norm > 1e-4 ? (loss[1] - loss[0]) / (2 * step) : norm;
        if (fabs(slope - norm) > 0.01 * norm + 1e-3)
            fail_msg("%s: the loss changes by %.6g, its gradient's norm is %.6g", r.weights[i].name,
                     slope, norm);
        free(weight);
        free(moved);
    }
    for (size_t i = 0; i < r.count; i++)
        free(grads[i]);
    free(grads);
    rank_close(&r);
}

static void finite_differences(void **state)
{
    zs_model_config other = small;
    (void)state;
    check_differences(&small);
    other.tied = 0;
    other.qk_norm = 0;
    other.qkv_bias = other.o_bias = other.mlp_bias = 1;
    other.rope_type = ZS_ROPE_LINEAR;
    other.rope_factor = 4;
    other.heads = 6; /* groups of three */
    check_differences(&other);
}

/* ---- what goes wrong ---- */

static void refuse_open(const zs_model_config *config, zs_model_options options, zs_status want,
                        const char *message)
{
    zs_engine_config engine;
    zs_comm *comm;
    zs_engine *e;
    zs_pool *pool;
    zs_model *model = (zs_model *)&comm;
    must(zs_comm_open_self(&comm));
    must(zs_pool_open(1, -1, &pool));
    zs_engine_config_init(&engine);
    must(zs_engine_open(&engine, comm, &e));
    assert_int_equal(zs_model_open(config, &options, e, pool, &model), want);
    assert_null(model);
    if (!strstr(zs_last_error(), message))
        fail_msg("the message is \"%s\", without \"%s\"", zs_last_error(), message);
    zs_engine_close(&e);
    zs_pool_close(&pool);
    zs_comm_close(&comm);
}

static void refused_models(void **state)
{
    zs_model_config config = small;
    zs_model_options options = options_for(1, 2000);
    (void)state;
    refuse_open(&config, options, ZS_ERR_ARG, "sequence length 2000 is above the 1024 positions");
    config.sliding_window = 100;
    refuse_open(&config, options_for(1, 101), ZS_ERR_UNSUPPORTED, "sliding_window 100");
    refuse_open(&small, options_for(1, 1), ZS_ERR_ARG, "1 rows of 1 tokens");
    refuse_open(&small, options_for(1 << 20, 1024), ZS_ERR_ARG, "too large");
    options = options_for(1, 8);
    options.dtype = ZS_FP16;
    refuse_open(&small, options, ZS_ERR_UNSUPPORTED, "weights in fp16");
    options.dtype = ZS_FP32;
    options.grad_dtype = ZS_FP16;
    refuse_open(&small, options, ZS_ERR_UNSUPPORTED, "gradients in fp16");
    config = small;
    config.head_dim = 15;
    refuse_open(&config, options_for(1, 8), ZS_ERR_UNSUPPORTED, "head_dim 15 is odd");
}

static void refuse_batch(rank *r, const zs_batch *batch, zs_status want, const char *message)
{
    double loss;
    assert_int_equal(zs_model_evaluate(r->model, batch, &loss), want);
    if (!strstr(zs_last_error(), message))
        fail_msg("the message is \"%s\", without \"%s\"", zs_last_error(), message);
}

static void refused_batches(void **state)
{
    int32_t ids[16] = {0}, labels[16] = {0}, positions[16] = {0};
    zs_batch batch = {.rows = 2, .seq = 8, .ids = ids, .labels = labels, .positions = positions};
    double loss;
    rank r;
    (void)state;
    rank_open(&r, &small, options_for(2, 8), 1, NULL);
    for (int i = 0; i < 16; i++)
        positions[i] = i % 8;
    must(zs_model_evaluate(r.model, &batch, &loss));
    ids[9] = small.vocab;
    refuse_batch(&r, &batch, ZS_ERR_ARG, "token id 131 at row 1; the vocabulary has 131");
    ids[9] = -1;
    refuse_batch(&r, &batch, ZS_ERR_ARG, "token id -1");
    ids[9] = 0;
    labels[3] = 131;
    refuse_batch(&r, &batch, ZS_ERR_ARG, "label 131 at row 0");
    labels[3] = -1;
    refuse_batch(&r, &batch, ZS_ERR_ARG, "label -1");
    labels[3] = -100;
    positions[15] = 1024;
    refuse_batch(&r, &batch, ZS_ERR_ARG, "position 1024 at row 1; the model has 1024");
    /* Beyond the row's length, but the model's own: the tables of angles grow. */
    positions[15] = 1023;
    must(zs_model_evaluate(r.model, &batch, &loss));
    batch.rows = 3;
    refuse_batch(&r, &batch, ZS_ERR_ARG, "3 x 8 tokens; it was opened for 2 x 8");
    assert_int_equal(zs_model_prepare(r.model), ZS_ERR_MISUSE);
    rank_close(&r);
}

static uint64_t booked(const zs_engine *engine)
{
    zs_memory_row rows[64];
    size_t count;
    must(zs_memory_report(engine, rows, ZS_COUNT(rows), &count));
    for (size_t i = 0; i < count; i++)
        if (strcmp(rows[i].purpose, "activations") == 0)
            return rows[i].bytes;
    return 0;
}

static void activations_are_booked(void **state)
{
    uint64_t bytes[2];
    (void)state;
    for (int i = 0; i < 2; i++) {
        zs_model_options options = options_for(2, 256);
        rank r;
        options.checkpointing = i;
        rank_open(&r, &small, options, 1, NULL);
        bytes[i] = booked(r.engine);
        zs_model_close(&r.model);
        assert_int_equal(booked(r.engine), 0);
        rank_close(&r);
    }
    /* Two of three layers' gate and up at least. */
    assert_true(bytes[1] > 0);
    assert_true(bytes[0] > bytes[1] + 2u * 512 * 2 * 72 * sizeof(float));
}

static void flops(void **state)
{
    rank r;
    (void)state;
    rank_open(&r, &small, options_for(1, 64), 1, NULL);
    double weights = 131 * 48 + 3 * (48 * 64 * 2 + 48 * 32 * 2 + 3 * 48 * 72);
    assert_true(zs_model_flops(r.model, 2, 32) == 64 * (6 * weights + 6.0 * 3 * 64 * 32));
    rank_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_torch),
        cmocka_unit_test(threads_and_checkpointing_change_nothing),
        cmocka_unit_test(gradients_in_bf16),
        cmocka_unit_test(packed_documents),
        cmocka_unit_test(masked_labels),
        cmocka_unit_test(finite_differences),
        cmocka_unit_test(refused_models),
        cmocka_unit_test(refused_batches),
        cmocka_unit_test(activations_are_booked),
        cmocka_unit_test(flops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
