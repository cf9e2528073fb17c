/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that have gradients of different parameters: all must reduce in one order, agree on who is
 * missing, and end with the same weights. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "zspill.h"

enum { WORLD = 2, PARAMS = 4, NUMEL = 50 };

typedef struct rank {
    zs_comm *comm;
    int number, stage;
    zs_missing_grad mode;
    zs_status status;
    char error[1024];
    float first[PARAMS], last[PARAMS]; /* weights, of those elements that are here; else 0 */
} rank;

/* Parameter 0: rank 0 alone. 1: rank 1 alone. 2: nobody. 3: both. Each a unit of its own, handed in
 * upwards by rank 0 and downwards by rank 1. */
static int has(int number, int param)
{
    return param == 3 || param == number;
}

static zs_status train(rank *r, zs_engine *e)
{
    const int64_t shape[1] = {NUMEL};
    zs_group_config group;
    zs_param_config config;
    zs_param params[PARAMS];
    zs_status s;
    float ones[NUMEL], values[NUMEL];
    zs_group_config_init(&group);
    zs_param_config_init(&config);
    group.lr = 0.1;
    group.weight_decay = 0;
    config.ndim = 1;
    config.shape = shape;
    for (int i = 0; i < NUMEL; i++)
        ones[i] = 1;
    if ((s = zs_group_add(e, &group, NULL)))
        return s;
    for (int p = 0; p < PARAMS; p++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", p);
        config.name = name;
        if ((s = zs_param_add(e, &config, &params[p])) ||
            (s = zs_unit_add(e, name, &params[p], 1, NULL)))
            return s;
    }
    if ((s = zs_engine_commit(e)) || (s = zs_grad_begin(e, 1)))
        return s;
    for (int i = 0; i < PARAMS; i++) {
        int p = r->number ? PARAMS - 1 - i : i;
        if (has(r->number, p) && (s = zs_grad_ready(e, params[p], ones, ZS_FP32)))
            return s;
    }
    if ((s = zs_grad_finish(e)) || (s = zs_step(e, NULL, NULL)))
        return s;
    for (int p = 0; p < PARAMS; p++) {
        uint64_t first, count;
        if ((s = zs_param_local(e, params[p], &first, &count)) ||
            (s = zs_param_read(e, params[p], ZS_WEIGHT, first, count, ZS_FP32, values)))
            return s;
        r->first[p] = count && first == 0 ? values[0] : 0;
        r->last[p] = count && first + count == NUMEL ? values[count - 1] : 0;
    }
    return ZS_OK;
}

static void *rank_main(void *arg)
{
    rank *r = arg;
    zs_engine_config config;
    zs_engine *e = NULL;
    zs_engine_config_init(&config);
    config.zero_stage = r->stage;
    config.missing_grad = r->mode;
    config.threads = 1;
    r->status = zs_engine_open(&config, r->comm, &e);
    if (!r->status)
        r->status = train(r, e);
    snprintf(r->error, sizeof r->error, "%s", r->status ? zs_last_error() : "");
    zs_engine_close(&e);
    return NULL;
}

static void run(zs_missing_grad mode, int stage, rank r[WORLD])
{
    zs_comm *comms[WORLD];
    pthread_t threads[WORLD];
    assert_int_equal(zs_comm_open_threads(WORLD, 20, comms), ZS_OK);
    for (int i = 0; i < WORLD; i++) {
        r[i] = (rank){.comm = comms[i], .number = i, .stage = stage, .mode = mode};
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &r[i]), 0);
    }
    for (int i = 0; i < WORLD; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < WORLD; i++)
        zs_comm_close(&comms[i]);
}

static void test_different_ranks_miss_different_ones(void **state)
{
    (void)state;
    for (int mode = ZS_MISSING_ZERO; mode <= ZS_MISSING_SKIP; mode++) {
        for (int stage = 0; stage <= 3; stage++) {
            rank r[WORLD];
            run((zs_missing_grad)mode, stage, r);
            for (int i = 0; i < WORLD; i++) {
                if (r[i].status)
                    fail_msg("mode %d, stage %d, rank %d: %s", mode, stage, i, r[i].error);
                for (int p = 0; p < PARAMS; p++) {
                    /* Adam's first step is lr whatever the gradient; without one nothing moves. */
                    const float want = p == 2 ? 0 : -0.1f;
                    const int whole = stage == 0;
                    if (whole || i == 0)
                        assert_float_equal(r[i].first[p], want, 1e-6);
                    if (whole || i == WORLD - 1)
                        assert_float_equal(r[i].last[p], want, 1e-6);
                }
            }
        }
    }
}

static void test_error_names_what_is_missing(void **state)
{
    rank r[WORLD];
    (void)state;
    run(ZS_MISSING_ERROR, 2, r);
    /* Whichever of the two kinds comes first, no rank hangs and a unit is named. */
    for (int i = 0; i < WORLD; i++) {
        assert_int_not_equal(r[i].status, ZS_OK);
        if (!strstr(r[i].error, "unit 'p"))
            fail_msg("rank %d: %s", i, r[i].error);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_different_ranks_miss_different_ones),
        cmocka_unit_test(test_error_names_what_is_missing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
