/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/states.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"

void bench_die(const char *what)
{
    fprintf(stderr, "benchmark: %s: %s\n", what, zs_last_error());
    exit(1);
}

void bench_env_open(bench_env *env, zs_io_engine engine)
{
    BENCH_OK(zs_ledger_open(&env->ledger));
    BENCH_OK(zs_device_open_host(&env->device));
    BENCH_OK(zs_pool_open(0, -1, &env->pool));
    BENCH_OK(zs_math_open_host(env->pool, &env->math));
    BENCH_OK(zs_io_open(engine, 0, NULL, &env->io));
}

void bench_env_close(bench_env *env)
{
    zs_io_close(&env->io);
    zs_math_close(&env->math);
    zs_pool_close(&env->pool);
    zs_device_close(&env->device);
    zs_ledger_close(&env->ledger);
}

void bench_states_open(const bench_env *env, const char *dir, uint64_t numel, uint64_t buffer_bytes,
                       bench_states *out)
{
    zs_states_shard shards[BENCH_SHARDS];
    uint64_t left = numel;
    memset(out, 0, sizeof *out);
    zs_group_config_init(&out->group);
    out->numel = numel;
    out->dir = strdup(dir);
    if (!out->dir)
        bench_die("memory");
    for (size_t s = 0; s < BENCH_SHARDS; s++) {
        /* Unequal, as embedding and blocks are. */
        uint64_t n = s + 1 < BENCH_SHARDS ? left / (s + 2) / 64 * 64 : left;
        left -= n;
        shards[s] = (zs_states_shard){.numel = n, .working_dtype = ZS_BF16};
        void *grad = calloc(n, 2), *working = calloc(n, 2);
        if (!grad || !working)
            bench_die("memory");
        for (uint64_t i = 0; i < n; i++)
            ((uint16_t *)grad)[i] = (uint16_t)(0x3c00 | (i & 0x807f));
        out->runs[s] = (zs_adam_run){0, n, &out->coef};
        out->inputs[s] = (zs_states_input){.grad = grad,
                                           .grad_dtype = ZS_BF16,
                                           .working = working,
                                           .runs = &out->runs[s],
                                           .run_count = 1};
    }
    zs_states_config config = {.tier = ZS_TIER_NVME,
                               .dir = dir,
                               .world = 1,
                               .buffer_bytes = buffer_bytes,
                               .io = env->io,
                               .device = env->device,
                               .math = env->math,
                               .pool = env->pool,
                               .ledger = env->ledger,
                               .shards = shards,
                               .shard_count = BENCH_SHARDS};
    BENCH_OK(zs_states_open(&config, &out->states));
}

void bench_states_close(bench_states *b)
{
    char *path;
    zs_states_close(&b->states);
    for (size_t s = 0; s < BENCH_SHARDS; s++) {
        free((void *)b->inputs[s].grad);
        free(b->inputs[s].working);
    }
    /* A store that was committed stays; this one is nobody's. */
    if (asprintf(&path, "%s/zspill-rank00000.state", b->dir) < 0)
        bench_die("memory");
    unlink(path);
    free(path);
    rmdir(b->dir);
    free(b->dir);
}

void bench_states_step(bench_states *b)
{
    memset(b->traffic, 0, sizeof b->traffic);
    b->adam_seconds = 0;
    zs_adam_coef_make(&b->coef, &b->group, ++b->step, 1.0);
    BENCH_OK(zs_states_step(b->states, b->inputs, b->traffic, &b->adam_seconds));
}

/* ---- figures ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void sort_values(const double *values, int n, double sorted[BENCH_ROUNDS_MOST])
{
    memcpy(sorted, values, (size_t)n * sizeof *values);
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
}

double bench_median(const double *values, int n)
{
    double sorted[BENCH_ROUNDS_MOST];
    sort_values(values, n, sorted);
    return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

void bench_print(const char *name, const double *values, int n, const char *unit)
{
    double sorted[BENCH_ROUNDS_MOST];
    sort_values(values, n, sorted);
    printf("%-44s %8.3f  (%.3f to %.3f) %s\n", name, bench_median(values, n), sorted[n / 10],
           sorted[n - 1 - n / 10], unit);
}
