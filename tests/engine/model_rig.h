/* SPDX-License-Identifier: Apache-2.0 */
/* One rank with a model in it, for the tests of the decoder on the host and on a device. */
#ifndef ZS_TESTS_ENGINE_MODEL_RIG_H
#define ZS_TESTS_ENGINE_MODEL_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/status.h"
#include "model/model.h"
#include "model/weights.h"

#define must(expr)                                                                                 \
    do {                                                                                           \
        zs_status must_status = (expr);                                                            \
        if (must_status != ZS_OK)                                                                  \
            fail_msg("%s: %s", #expr, zs_last_error());                                            \
    } while (0)

typedef struct rank {
    zs_device *device;
    zs_comm *comm;
    zs_pool *pool;
    zs_engine *engine;
    zs_model *model;
    const zs_weight *weights;
    const zs_param *params;
    size_t count;
} rank;

/* Grouped heads, norms of heads, tied. */
static const zs_model_config small = {.model_type = "qwen3",
                                      .vocab = 131,
                                      .hidden = 48,
                                      .intermediate = 72,
                                      .layers = 3,
                                      .heads = 4,
                                      .kv_heads = 2,
                                      .head_dim = 16,
                                      .max_positions = 1024,
                                      .rms_eps = 1e-6,
                                      .init_range = 0.1,
                                      .rope_theta = 10000,
                                      .tied = 1,
                                      .qk_norm = 1};

/* device NULL: none is opened, and the engine takes the host; else its name. dir
 * NULL: weights are initialized. On failure as far as it came: rank_close takes it. */
static inline zs_status rank_try(rank *r, const char *device, const zs_model_config *config,
                                 zs_model_options options, int threads, const char *dir)
{
    zs_engine_config engine;
    zs_group_config group;
    memset(r, 0, sizeof *r);
    if (device)
        ZS_CHECK(zs_device_open(device, &r->device));
    ZS_CHECK(zs_comm_open_self(&r->comm));
    ZS_CHECK(zs_pool_open(threads, -1, &r->pool));
    zs_engine_config_init(&engine);
    engine.pool = r->pool;
    engine.device = r->device;
    engine.grad_dtype = options.grad_dtype;
    engine.grad_accum_steps = 2;
    ZS_CHECK(zs_engine_open(&engine, r->comm, &r->engine));
    zs_group_config_init(&group);
    ZS_CHECK(zs_group_add(r->engine, &group, &options.decay));
    ZS_CHECK(zs_group_add(r->engine, &group, &options.no_decay));
    options.device = r->device;
    ZS_CHECK(zs_model_open(config, &options, r->engine, r->pool, &r->model));
    ZS_CHECK(zs_engine_commit(r->engine));
    ZS_CHECK(zs_model_prepare(r->model));
    zs_model_params(r->model, &r->weights, &r->params, &r->count);
    if (dir)
        return zs_weights_load(r->engine, dir, r->weights, r->params, r->count);
    return zs_weights_init(r->engine, config, 5, r->weights, r->params, r->count);
}

static inline void rank_close(rank *r)
{
    zs_model_close(&r->model);
    zs_engine_close(&r->engine);
    zs_pool_close(&r->pool);
    zs_comm_close(&r->comm);
    zs_device_close(&r->device);
}

static inline uint64_t numel(const zs_weight *w)
{
    return (uint64_t)w->shape[0] * (uint64_t)(w->ndim == 2 ? w->shape[1] : 1);
}

/* To be freed. */
static inline float *read_array(rank *r, size_t i, zs_array array)
{
    float *x = malloc(numel(&r->weights[i]) * sizeof *x);
    assert_non_null(x);
    must(zs_param_read(r->engine, r->params[i], array, 0, numel(&r->weights[i]), ZS_FP32, x));
    return x;
}

#endif
