/* SPDX-License-Identifier: Apache-2.0 */
/* The decoder on a CUDA device (emulated) against the decoder on the host: losses, logits and
 * gradients of models that have all there is, in the dtypes that there are. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/status.h"
#include "base/util.h"
#include "tests/emu/control.h"
#include "tests/engine/model_rig.h"

static const emu_control *emu;

/* All biases, a head of its own, a head for each key. */
static const zs_model_config llama = {.model_type = "llama",
                                      .vocab = 97,
                                      .hidden = 40,
                                      .intermediate = 56,
                                      .layers = 2,
                                      .heads = 5,
                                      .kv_heads = 5,
                                      .head_dim = 8,
                                      .max_positions = 1024,
                                      .rms_eps = 1e-5,
                                      .init_range = 0.1,
                                      .rope_theta = 500000,
                                      .qkv_bias = 1,
                                      .o_bias = 1,
                                      .mlp_bias = 1};

static void rank_open(rank *r, const char *device, const zs_model_config *config,
                      zs_model_options options)
{
    must(rank_try(r, device, config, options, 1, NULL));
}

static zs_status train_two(rank *r, const zs_batch *one, const zs_batch *two, double *loss)
{
    ZS_CHECK(zs_grad_begin(r->engine, 0));
    ZS_CHECK(zs_model_train(r->model, one, 0.02, NULL));
    ZS_CHECK(zs_grad_finish(r->engine));
    ZS_CHECK(zs_grad_begin(r->engine, 1));
    ZS_CHECK(zs_model_train(r->model, two, 0.02, loss));
    return zs_grad_finish(r->engine);
}

static double loss_of_two(rank *r, const zs_batch *one, const zs_batch *two)
{
    double loss;
    must(train_two(r, one, two, &loss));
    return loss;
}

static void near(const char *what, const char *name, const float *got, const float *want,
                 uint64_t n, double tolerance)
{
    double squares = 0, wrong = 0;
    for (uint64_t i = 0; i < n; i++) {
        squares += (double)want[i] * (double)want[i];
        wrong += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]);
    }
    if (!(sqrt(wrong) <= tolerance * sqrt(squares)))
        fail_msg("%s: %s is off by %.3g of its norm %.3g, more than %.3g", what, name,
                 sqrt(wrong / squares), sqrt(squares), tolerance);
}

static void close_to(const char *what, double got, double want, double tolerance)
{
    if (!(fabs(got - want) <= tolerance * fabs(want)))
        fail_msg("%s: loss %.9g, on the host %.9g", what, got, want);
}

enum { ROWS = 2, SEQ = 150 };

typedef struct variant {
    const zs_model_config *config;
    zs_dtype dtype, grad_dtype;
    int seq, checkpointing;
} variant;

static void compare(const variant *v, double loss_tolerance, double grad_tolerance)
{
    static int32_t ids[2][ROWS * SEQ], labels[ROWS * SEQ], positions[ROWS * SEQ];
    const zs_model_options options = {.rows = ROWS,
                                      .seq = v->seq,
                                      .dtype = v->dtype,
                                      .grad_dtype = v->grad_dtype,
                                      .checkpointing = v->checkpointing};
    const size_t count = (size_t)(ROWS * v->seq), vocab = (size_t)v->config->vocab;
    char what[128];
    rank host, gpu;
    uint32_t state = 7;
    snprintf(what, sizeof what, "%s, weights %s, gradients %s, rows of %d, checkpointing %d",
             v->config->model_type, zs_dtype_name(v->dtype), zs_dtype_name(v->grad_dtype), v->seq,
             v->checkpointing);
    for (size_t i = 0; i < count; i++) {
        for (int b = 0; b < 2; b++) {
            state = state * 1664525u + 1013904223u;
            ids[b][i] = (int32_t)((state >> 8) % vocab);
        }
        labels[i] = i % 5 == 3 ? -100 : ids[1][i];
        /* Documents of 11 tokens in one row; of the row in the other. */
        positions[i] = (int32_t)(i < (size_t)v->seq ? i % 11 : i - (size_t)v->seq);
    }
    const zs_batch one = {.rows = ROWS, .seq = v->seq, .ids = ids[0]};
    const zs_batch two = {
        .rows = ROWS, .seq = v->seq, .ids = ids[1], .labels = labels, .positions = positions};
    const zs_batch shorter = {.rows = 1, .seq = v->seq / 2, .ids = ids[0]};
    rank_open(&host, "host", v->config, options);
    rank_open(&gpu, "cuda", v->config, options);

    close_to(what, loss_of_two(&gpu, &one, &two), loss_of_two(&host, &one, &two), loss_tolerance);
    for (size_t i = 0; i < host.count; i++) {
        float *want = read_array(&host, i, ZS_GRAD), *got = read_array(&gpu, i, ZS_GRAD);
        near(what, host.weights[i].name, got, want, numel(&host.weights[i]), grad_tolerance);
        free(want), free(got);
    }
    must(zs_grad_discard(host.engine));
    must(zs_grad_discard(gpu.engine));

    double got, want;
    must(zs_model_evaluate(host.model, &shorter, &want));
    must(zs_model_evaluate(gpu.model, &shorter, &got));
    close_to(what, got, want, loss_tolerance);
    float *want_logits = malloc(ROWS * vocab * sizeof(float));
    float *got_logits = malloc(ROWS * vocab * sizeof(float));
    assert_true(want_logits && got_logits);
    must(zs_model_logits(host.model, &two, want_logits));
    must(zs_model_logits(gpu.model, &two, got_logits));
    near(what, "logits", got_logits, want_logits, ROWS * vocab, grad_tolerance);
    free(want_logits), free(got_logits);
    rank_close(&host);
    rank_close(&gpu);
}

static void fp32(void **state)
{
    (void)state;
    compare(&(variant){&small, ZS_FP32, ZS_FP32, 24, 1}, 1e-7, 5e-6);
    compare(&(variant){&llama, ZS_FP32, ZS_FP32, 24, 0}, 1e-7, 5e-6);
}

/* More queries than a tile has. */
static void several_tiles(void **state)
{
    (void)state;
    compare(&(variant){&small, ZS_FP32, ZS_FP32, SEQ, 0}, 1e-7, 5e-6);
}

static void narrow_gradients(void **state)
{
    (void)state;
    compare(&(variant){&llama, ZS_FP32, ZS_BF16, 24, 1}, 1e-7, 1e-3);
}

/* The device rounds what enters and leaves a product to bf16, the host does not. */
static void bf16(void **state)
{
    (void)state;
    compare(&(variant){&small, ZS_BF16, ZS_FP32, 24, 1}, 5e-4, 4e-2);
    compare(&(variant){&llama, ZS_BF16, ZS_BF16, 24, 0}, 5e-4, 4e-2);
}

static const int32_t some_ids[16] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3};
static const zs_batch some = {.rows = 2, .seq = 8, .ids = some_ids};

/* Of a step's micro-batches the host reads the loss, once, and waits for nothing else. */
static void one_read(void **state)
{
    rank r;
    double loss;
    (void)state;
    rank_open(&r, "cuda", &small, (zs_model_options){.rows = 2, .seq = 8, .checkpointing = 1});
    const uint64_t bytes = emu->bytes(EMU_TO_HOST);
    const uint64_t syncs = emu->calls(EMU_STREAM_SYNC, EMU_ANY_DEVICE);
    must(train_two(&r, &some, &some, &loss));
    assert_int_equal(emu->bytes(EMU_TO_HOST) - bytes, sizeof(double));
    assert_int_equal(emu->calls(EMU_STREAM_SYNC, EMU_ANY_DEVICE) - syncs, 0);
    must(zs_grad_discard(r.engine));
    rank_close(&r);
}

/* What CUDA and cuBLAS refuse, call by call, is a status with a cause, and leaves nothing behind.
 */
static void refused_calls(void **state)
{
    static const struct {
        emu_call call;
        const char *name, *cause;
        int step; /* tenths by which the number of the call grows */
    } calls[] = {{EMU_MALLOC, "cudaMalloc", "cudaErrorMemoryAllocation", 0},
                 {EMU_HOST_REGISTER, "cudaHostRegister", "cudaErrorMemoryAllocation", 0},
                 {EMU_STREAM, "a stream", "cudaErrorMemoryAllocation", 0},
                 {EMU_EVENT, "an event", "cudaErrorMemoryAllocation", 0},
                 {EMU_COPY, "a copy", "cudaErrorInvalidValue", 2},
                 {EMU_CUBLAS, "cuBLAS", "CUBLAS_STATUS", 2},
                 {EMU_LAUNCH, "a launch", "cudaErrorLaunchOutOfResources", 2}};
    (void)state;
    for (size_t c = 0; c < ZS_COUNT(calls); c++) {
        zs_status status = ZS_ERR_DEVICE;
        int failed = 0;
        for (int n = 1; status != ZS_OK; n += 1 + n * calls[c].step / 10) {
            const size_t open = emu->open_objects();
            rank r;
            double loss;
            (emu->fail)(calls[c].call, EMU_ANY_DEVICE, (uint64_t)n);
            status = rank_try(&r, "cuda", &llama, (zs_model_options){.rows = 2, .seq = 8}, 1, NULL);
            if (status == ZS_OK)
                status = train_two(&r, &some, &some, &loss);
            (emu->fail)(calls[c].call, EMU_ANY_DEVICE, 0);
            if (status != ZS_OK && !strstr(zs_last_error(), calls[c].cause))
                fail_msg("%s %d: no cause in: %s", calls[c].name, n, zs_last_error());
            rank_close(&r);
            if (emu->open_objects() != open)
                fail_msg("%s %d: %zu objects are left", calls[c].name, n,
                         emu->open_objects() - open);
            failed += status != ZS_OK;
        }
        print_message("emulated: %d failures of %s\n", failed, calls[c].name);
        assert_true(failed > 1);
    }
}

int main(void)
{
    emu = emu_control_find();
    if (!emu)
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp32), cmocka_unit_test(several_tiles), cmocka_unit_test(narrow_gradients),
        cmocka_unit_test(bf16), cmocka_unit_test(one_read),      cmocka_unit_test(refused_calls),
    };
    print_message("emulated\n");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
