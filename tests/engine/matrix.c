/* SPDX-License-Identifier: Apache-2.0 */
/* Same bits everywhere: within a world size, stages, tiers, I/O engines and thread counts must not
 * show in norms, weights or moments. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "io/io.h"
#include "tests/engine/job_check.h"

static const char *dir;
static int have_uring;

static void check_reference(job *j)
{
    double *want[JOB_MAX_PARAMS], norms[JOB_MAX_STEPS];
    for (int p = 0; p < j->param_count; p++)
        want[p] = calloc(job_numel(&j->params[p]) + 1, sizeof(double));
    job_reference(j, want, norms);
    for (int s = 0; s < j->steps; s++)
        if (!(fabs(norms[s] - j->norms[s]) <= 1e-6 * norms[s]))
            fail_msg("step %d: norm %.9g, should be %.9g", s, j->norms[s], norms[s]);
    for (int p = 0; p < j->param_count; p++) {
        const zs_dtype d = j->params[p].dtype;
        const double tolerance = d == ZS_FP32 ? 1e-6 : d == ZS_BF16 ? 4e-3 : 5e-4;
        for (uint64_t i = 0; i < job_numel(&j->params[p]); i++)
            if (!(fabs(want[p][i] - (double)j->weights[p][i]) <=
                  tolerance * fmax(1, fabs(want[p][i]))))
                fail_msg("%s[%llu] is %.9g, should be %.9g", j->params[p].name,
                         (unsigned long long)i, (double)j->weights[p][i], want[p][i]);
        free(want[p]);
    }
}

typedef struct variant {
    int world, micros;
    zs_dtype grad_dtype;
    int use_buffer;
} variant;

static void one_world(const variant *v)
{
    job base, j;
    int runs = 0;
    job_init(&base, dir);
    base.world = v->world;
    base.micros = v->micros;
    base.grad_dtype = v->grad_dtype;
    run_ok(&base, "stage 0 in memory");
    if (v->grad_dtype == ZS_FP32)
        check_reference(&base);
    static const zs_io_engine engines[] = {ZS_IO_POSIX, ZS_IO_URING};
    for (int stage = 0; stage <= 3; stage++) {
        for (int states = 0; states < ZS_TIERS; states++) {
            for (int params = 0; params < (stage == 3 ? (int)ZS_TIERS : 1); params++) {
                const int on_disk = states == ZS_TIER_NVME || params == ZS_TIER_NVME;
                for (int io = 0; io < (on_disk ? 1 + have_uring : 1); io++) {
                    char what[96];
                    job_init(&j, dir);
                    j.world = v->world;
                    j.micros = v->micros;
                    j.grad_dtype = v->grad_dtype;
                    j.use_buffer = v->use_buffer;
                    j.config.zero_stage = stage;
                    j.config.optimizer_tier = (zs_tier)states;
                    j.config.param_tier = (zs_tier)params;
                    j.config.io_engine = engines[io];
                    j.config.threads = 1 + (stage + io) % 2;
                    j.config.chunk_numel = states == ZS_TIER_NVME ? 4096 : 0;
                    snprintf(what, sizeof what,
                             "world %d, %d micro-batches, stage %d, states %d, params %d, io %d",
                             v->world, v->micros, stage, states, params, (int)engines[io]);
                    run_ok(&j, what);
                    expect_same(&base, "stage 0 in memory", &j, what);
                    job_free(&j);
                    runs++;
                }
            }
        }
    }
    job_free(&base);
    print_message("world %d, %d micro-batches, gradients %d: %d runs equal\n", v->world, v->micros,
                  (int)v->grad_dtype, runs);
}

static void test_worlds(void **state)
{
    (void)state;
    for (int world = 1; world <= 4; world++)
        one_world(&(variant){world, 2, ZS_FP32, 0});
}

static void test_one_micro_batch(void **state)
{
    (void)state;
    one_world(&(variant){2, 1, ZS_FP32, 1});
}

static void test_bf16_gradients(void **state)
{
    (void)state;
    one_world(&(variant){3, 2, ZS_BF16, 0});
}

/* Boundary reduction gives its own bits, the same at stages 0 and 1, and the right values. */
static void test_boundary(void **state)
{
    (void)state;
    job a, b;
    job_init(&a, dir);
    a.world = 3;
    a.micros = 3;
    a.config.reduce = ZS_REDUCE_BOUNDARY;
    run_ok(&a, "boundary, stage 0");
    check_reference(&a);
    job_init(&b, dir);
    b.world = 3;
    b.micros = 3;
    b.config.reduce = ZS_REDUCE_BOUNDARY;
    b.config.zero_stage = 1;
    run_ok(&b, "boundary, stage 1");
    expect_same(&a, "stage 0 in memory", &b, "boundary, stage 1");
    job_free(&a);
    job_free(&b);
}

int main(void)
{
    char reason[256];
    dir = job_temp_dir();
    if (!dir)
        return 1;
    have_uring = zs_io_probe(ZS_IO_URING, reason, sizeof reason) == ZS_OK;
    if (!have_uring)
        print_message("without io_uring: %s\n", reason);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_worlds),
        cmocka_unit_test(test_one_micro_batch),
        cmocka_unit_test(test_bf16_gradients),
        cmocka_unit_test(test_boundary),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    job_clean(dir);
    return failed;
}
