/* SPDX-License-Identifier: Apache-2.0 */
/* A program as a user of the installed library writes it: zspill.h and nothing else of the project.
 * Twenty AdamW steps at each stage, with states in host memory and on disk in
 * directories whose names begin with PREFIX, compared with
 * the same in double; the ledger read; an error provoked.
 *
 *     consumer PREFIX */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <zspill.h>

enum { ROWS = 37, COLS = 29, NUMEL = ROWS * COLS, STEPS = 20 };

#define CHECK(call)                                                                                \
    do {                                                                                           \
        zs_status check_status = (call);                                                           \
        if (check_status != ZS_OK) {                                                               \
            fprintf(stderr, "%s: %s: %s\n", #call, zs_status_name(check_status), zs_last_error()); \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

static float start_at(int i)
{
    return (float)sin(0.1 * i);
}

static float grad_at(int step, int i)
{
    return (float)cos(0.01 * i * step + step);
}

static double largest_error(const float *weights)
{
    const double lr = 1e-2, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, decay = 0.1;
    double worst = 0;
    for (int i = 0; i < NUMEL; i++) {
        double w = start_at(i), m = 0, v = 0;
        for (int t = 1; t <= STEPS; t++) {
            double g = grad_at(t, i);
            w *= 1 - lr * decay;
            m = beta1 * m + (1 - beta1) * g;
            v = beta2 * v + (1 - beta2) * g * g;
            w -= lr * (m / (1 - pow(beta1, t))) / (sqrt(v / (1 - pow(beta2, t))) + eps);
        }
        worst = fmax(worst, fabs(w - weights[i]));
    }
    return worst;
}

/* Bytes that the ledger has for the states: master and both moments, or the moments alone where the
 * resident fp32 weights are the master. */
static uint64_t state_bytes(zs_engine *engine, zs_tier tier)
{
    zs_memory_row rows[32];
    size_t count = 0;
    uint64_t bytes = 0;
    if (zs_memory_report(engine, rows, 32, &count) != ZS_OK || count > 32)
        return 0;
    for (size_t i = 0; i < count; i++)
        if (rows[i].tier == tier && !strcmp(rows[i].purpose, "optimizer states"))
            bytes += rows[i].bytes;
    return bytes;
}

static int train(int stage, zs_tier tier, const char *prefix, zs_comm *comm)
{
    char path[4096];
    zs_engine_config config;
    zs_engine_config_init(&config);
    config.zero_stage = stage;
    config.optimizer_tier = tier;
    config.threads = 1;
    if (tier == ZS_TIER_NVME) {
        snprintf(path, sizeof(path), "%s-stage%d", prefix, stage);
        config.state_dir = path;
    }
    zs_engine *engine;
    CHECK(zs_engine_open(&config, comm, &engine));

    zs_group_config hyper;
    zs_group_config_init(&hyper);
    hyper.lr = 1e-2;
    hyper.weight_decay = 0.1;
    zs_group group;
    CHECK(zs_group_add(engine, &hyper, &group));

    const int64_t shape[2] = {ROWS, COLS};
    zs_param_config described;
    zs_param_config_init(&described);
    described.name = "weight";
    described.ndim = 2;
    described.shape = shape;
    described.group = group;
    zs_param param;
    CHECK(zs_param_add(engine, &described, &param));
    zs_unit unit;
    CHECK(zs_unit_add(engine, "layer", &param, 1, &unit));
    CHECK(zs_engine_commit(engine));

    static float values[NUMEL];
    for (int i = 0; i < NUMEL; i++)
        values[i] = start_at(i);
    CHECK(zs_param_write(engine, param, 0, NUMEL, ZS_FP32, values));
    CHECK(zs_params_publish(engine));

    zs_step_info info = {.size = sizeof(info)};
    for (int step = 1; step <= STEPS; step++) {
        CHECK(zs_unit_acquire(engine, unit));
        CHECK(zs_unit_release(engine, unit));
        CHECK(zs_grad_begin(engine, 1));
        for (int i = 0; i < NUMEL; i++)
            values[i] = grad_at(step, i);
        CHECK(zs_grad_ready(engine, param, values, ZS_FP32));
        CHECK(zs_grad_finish(engine));
        CHECK(zs_step(engine, NULL, &info));
    }
    CHECK(zs_param_read(engine, param, ZS_WEIGHT, 0, NUMEL, ZS_FP32, values));
    uint64_t bytes = state_bytes(engine, tier), padded = (NUMEL + 31) / 32 * 32;
    zs_engine_close(&engine);
    double error = largest_error(values);
    printf("stage %d, states in tier %d: %d steps, largest error %.2e, %d bytes of states\n", stage,
           (int)tier, (int)info.step, error, (int)bytes);
    return info.step != STEPS || !(error < 1e-6) || engine != NULL || bytes != 8 * padded;
}

int main(int argc, char **argv)
{
    zs_comm *comm;
    if (argc != 2) {
        fprintf(stderr, "usage: consumer PREFIX\n");
        return 2;
    }
    CHECK(zs_comm_open_self(&comm));
    for (int stage = 0; stage <= 3; stage++) {
        if (train(stage, ZS_TIER_HOST, argv[1], comm) || train(stage, ZS_TIER_NVME, argv[1], comm))
            return 1;
    }
    zs_comm_close(&comm);
    /* What goes wrong is told in words. */
    zs_pool *pool;
    if (zs_pool_open(65, -1, &pool) != ZS_ERR_ARG || !strstr(zs_last_error(), "65")) {
        fprintf(stderr, "a pool of 65 threads: %s\n", zs_last_error());
        return 1;
    }
    printf("zspill %s\n", zs_version());
    return 0;
}
