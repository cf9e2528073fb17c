/* SPDX-License-Identifier: Apache-2.0 */
/* What the engine refuses and says, and what several ranks do together beside the straight path:
 * the budget of live parameters, the ledger, disagreement, commit and resume. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/util.h"
#include "tests/engine/job_check.h"
#include "tests/engine/small.h"
#include "zero/layout.h"

static const char *dir;

static void test_config_errors(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        zs_engine_config change;
    } cases[] = {
        {"zero_stage is 4", {.zero_stage = 4, .grad_accum_steps = 1}},
        {"needs zero_stage 3", {.zero_stage = 2, .param_tier = ZS_TIER_HOST}},
        {"needs state_dir", {.optimizer_tier = ZS_TIER_NVME}},
        {"needs param_dir", {.zero_stage = 3, .param_tier = ZS_TIER_NVME}},
        {"grad_dtype is 2 (fp16)", {.grad_dtype = ZS_FP16}},
        {"use stage 0 or 1", {.zero_stage = 2, .reduce = ZS_REDUCE_BOUNDARY}},
        {"multiple of 4096", {.chunk_numel = 100}},
        {"threads is 65", {.threads = 65}},
    };
    zs_comm *comm;
    assert_int_equal(zs_comm_open_self(&comm), ZS_OK);
    for (size_t i = 0; i < ZS_COUNT(cases); i++) {
        zs_engine_config c;
        zs_engine *e = (zs_engine *)&c;
        zs_engine_config_init(&c);
        c.zero_stage = cases[i].change.zero_stage;
        c.param_tier = cases[i].change.param_tier;
        c.optimizer_tier = cases[i].change.optimizer_tier;
        c.grad_dtype = cases[i].change.grad_dtype;
        c.reduce = cases[i].change.reduce;
        c.chunk_numel = cases[i].change.chunk_numel;
        c.threads = cases[i].change.threads;
        assert_says(zs_engine_open(&c, comm, &e), ZS_ERR_ARG, cases[i].text);
        assert_null(e);
    }
    zs_engine *e;
    zs_engine_config c;
    zs_engine_config_init(&c);
    c.keep = 15;
    assert_says(zs_engine_open(&c, comm, &e), ZS_ERR_ARG, "keep is 15; it must be -1 to 14");
    c.keep = 1;
    assert_says(zs_engine_open(&c, comm, &e), ZS_ERR_ARG, "need a state_dir");
    c.state_dir = dir;
    c.slots = 1;
    assert_says(zs_engine_open(&c, comm, &e), ZS_ERR_ARG, "need a state_dir and slots 2, not 1");
    zs_engine_config_init(&c);
    c.resume_commit = 3;
    assert_says(zs_engine_open(&c, comm, &e), ZS_ERR_ARG, "resume_commit is 3, but resume is 0");
    zs_engine_config_init(&c);
    c.size = 8;
    assert_says(zs_engine_open(&c, comm, &e), ZS_ERR_ARG, "its size is not");
    assert_says(zs_engine_open(NULL, comm, &e), ZS_ERR_ARG, "config is NULL");
    assert_says(zs_step(NULL, NULL, NULL), ZS_ERR_ARG, "engine is NULL");
    zs_comm_close(&comm);
}

static void test_registration_errors(void **state)
{
    (void)state;
    zs_comm *comm;
    zs_engine *e;
    zs_engine_config c;
    zs_param_config p;
    zs_group_config g;
    const int64_t shape[] = {3, -1}, huge[] = {INT64_MAX / 4, INT64_MAX / 4};
    zs_param zero = 0, one = 1;
    zs_engine_config_init(&c);
    zs_param_config_init(&p);
    zs_group_config_init(&g);
    assert_int_equal(zs_comm_open_self(&comm), ZS_OK);
    assert_int_equal(zs_engine_open(&c, comm, &e), ZS_OK);
    assert_says(zs_engine_commit(e), ZS_ERR_MISUSE, "no units");
    zs_engine_close(&e);
    assert_int_equal(zs_engine_open(&c, comm, &e), ZS_OK);
    g.beta2 = 1;
    assert_says(zs_group_add(e, &g, NULL), ZS_ERR_ARG, "beta2 1");
    g.beta2 = 0.5;
    p.name = "w";
    p.ndim = 1;
    p.shape = shape;
    assert_says(zs_param_add(e, &p, NULL), ZS_ERR_ARG, "no group 0");
    assert_int_equal(zs_group_add(e, &g, NULL), ZS_OK);
    assert_int_equal(zs_param_add(e, &p, NULL), ZS_OK);
    assert_says(zs_param_add(e, &p, NULL), ZS_ERR_ARG, "'w' is there already");
    p.name = "x";
    p.ndim = 2;
    assert_says(zs_param_add(e, &p, NULL), ZS_ERR_ARG, "dimension 1 is -1");
    p.shape = huge;
    assert_says(zs_param_add(e, &p, NULL), ZS_ERR_ARG, "overflow");
    assert_says(zs_unit_add(e, "u", &one, 1, NULL), ZS_ERR_ARG, "no parameter 1");
    assert_int_equal(zs_unit_add(e, "u", &zero, 1, NULL), ZS_OK);
    assert_says(zs_unit_add(e, "v", &zero, 1, NULL), ZS_ERR_ARG, "belongs to unit 'u'");
    assert_says(zs_grad_begin(e, 1), ZS_ERR_MISUSE, "not committed");
    p.name = "y";
    p.ndim = 1;
    p.shape = shape;
    assert_int_equal(zs_param_add(e, &p, NULL), ZS_OK);
    assert_says(zs_engine_commit(e), ZS_ERR_MISUSE, "'y' is in no unit");
    zs_engine_close(&e);
    zs_comm_close(&comm);
}

static void test_misuse(void **state)
{
    (void)state;
    small s;
    zs_engine_config c;
    void *data;
    float w[30] = {0};
    zs_engine_config_init(&c);
    c.zero_stage = 3;
    small_open(&s, &c);
    assert_says(zs_param_data(s.e, s.a, &data), ZS_ERR_MISUSE, "unit 'first' is not acquired");
    assert_says(zs_unit_release(s.e, s.u), ZS_ERR_MISUSE, "'first' is released");
    assert_says(zs_unit_acquire(s.e, 7), ZS_ERR_ARG, "no unit 7");
    assert_says(zs_step(s.e, NULL, NULL), ZS_ERR_MISUSE, "there are no gradients");
    assert_says(zs_grad_ready(s.e, s.a, w, ZS_FP32), ZS_ERR_MISUSE, "no micro-batch");
    assert_says(zs_param_write(s.e, s.a, 20, 11, ZS_FP32, w), ZS_ERR_ARG, "elements 20 to 31");
    assert_says(zs_param_read(s.e, s.a, ZS_GRAD, 0, 1, ZS_FP32, w), ZS_ERR_MISUSE,
                "there are no gradients");
    assert_says(zs_state_commit(s.e, NULL, 0), ZS_ERR_MISUSE, "no store");
    assert_int_equal(zs_grad_begin(s.e, 1), ZS_OK);
    assert_says(zs_grad_begin(s.e, 1), ZS_ERR_MISUSE, "in progress");
    give(&s, s.a, 1);
    assert_says(zs_grad_ready(s.e, s.a, w, ZS_FP32), ZS_ERR_MISUSE, "1 contribution");
    assert_says(zs_step(s.e, NULL, NULL), ZS_ERR_MISUSE, "in progress");
    give(&s, s.b, 1);
    assert_int_equal(zs_grad_finish(s.e), ZS_OK);
    assert_says(zs_grad_begin(s.e, 1), ZS_ERR_MISUSE, "zs_step or zs_grad_discard");
    assert_int_equal(zs_unit_acquire(s.e, s.v), ZS_OK);
    assert_says(zs_step(s.e, NULL, NULL), ZS_ERR_MISUSE, "unit 'second' is acquired");
    /* What went wrong inside a collective cannot be taken back. */
    assert_says(zs_grad_discard(s.e), ZS_ERR_MISUSE, "failed earlier");
    small_close(&s);

    zs_engine_config_init(&c);
    small_open(&s, &c);
    assert_int_equal(zs_grad_begin(s.e, 1), ZS_OK);
    give(&s, s.a, 1);
    assert_says(zs_grad_finish(s.e), ZS_ERR_MISUSE, "unit 'second': parameter 'b' got 0 of 1");
    small_close(&s);

    small_open(&s, &c);
    assert_int_equal(zs_grad_begin(s.e, 0), ZS_OK);
    give(&s, s.a, 1);
    give(&s, s.b, 1);
    assert_int_equal(zs_grad_finish(s.e), ZS_OK);
    assert_says(zs_grad_begin(s.e, 1), ZS_ERR_MISUSE, "grad_accum_steps is 1");
    assert_int_equal(zs_grad_discard(s.e), ZS_OK);
    zs_engine_cancel(s.e);
    assert_says(zs_grad_begin(s.e, 1), ZS_ERR_CANCELED, "canceled");
    small_close(&s);
}

/* ---- several ranks ---- */

static void test_live_budget(void **state)
{
    (void)state;
    job base, j;
    job_init(&base, dir);
    base.world = 2;
    run_ok(&base, __func__);
    static const uint64_t budgets[] = {8900, 9800, 12000, 1000000};
    for (size_t i = 0; i < ZS_COUNT(budgets); i++) {
        for (int tier = ZS_TIER_HOST; tier <= ZS_TIER_NVME; tier++) {
            job_init(&j, dir);
            j.world = 2;
            j.config.zero_stage = 3;
            j.config.param_tier = (zs_tier)tier;
            j.config.max_live_params = budgets[i];
            run_ok(&j, __func__);
            assert_int_equal(job_differ(&base, &j), 0);
            for (size_t r = 0; r < j.row_count; r++)
                if (!strcmp(j.rows[r].purpose, "gathered parameters") &&
                    j.rows[r].peak > 4 * budgets[i] + 8 * 4096)
                    fail_msg("%llu bytes of gathered parameters with a budget of %llu elements",
                             (unsigned long long)j.rows[r].peak, (unsigned long long)budgets[i]);
            job_free(&j);
        }
    }
    job_init(&j, dir);
    j.world = 2;
    j.config.zero_stage = 3;
    j.config.max_live_params = 100;
    job_run(&j);
    assert_int_equal(j.status[0], ZS_ERR_ARG);
    assert_non_null(strstr(j.error[0], "max_live_params is 100, but the largest unit alone has"));
    job_free(&j);
    job_free(&base);
}

static uint64_t row_bytes(const job *j, zs_tier tier, const char *purpose)
{
    for (size_t i = 0; i < j->row_count; i++)
        if (j->rows[i].tier == tier && !strcmp(j->rows[i].purpose, purpose))
            return j->rows[i].bytes;
    return 0;
}

/* Beside the model states there is nothing but the buffers that docs/architecture.md names. */
static void check_purposes(const job *j)
{
    static const char *const known[] = {
        "parameters",        "gathered parameters",
        "parameter staging", "parameter window",
        "gradients",         "gradient accumulators",
        "gradient buckets",  "optimizer states",
        "optimizer ring",    "store",
    };
    for (size_t i = 0; i < j->row_count; i++) {
        size_t k = 0;
        while (k < ZS_COUNT(known) && strcmp(j->rows[i].purpose, known[k]) != 0)
            k++;
        if (k == ZS_COUNT(known))
            fail_msg("the ledger has a row '%s' that nobody explains", j->rows[i].purpose);
    }
}

/* Model-state bytes per rank are the ZeRO formula on padded sizes, exactly: weights, gradients and
 * {master where it is apart, exp_avg, exp_avg_sq}, each divided by the world from stage 3, 2 and 1
 * on. */
static void test_ledger(void **state)
{
    (void)state;
    for (int world = 1; world <= 4; world++) {
        for (int stage = 0; stage <= 3; stage++) {
            for (int tier = ZS_TIER_DEVICE; tier <= ZS_TIER_NVME; tier++) {
                /* Both gradient dtypes, each with every stage and tier. */
                const zs_dtype grad_dtype = world % 2 ? ZS_FP32 : ZS_BF16;
                uint64_t weights = 0, grads = 0, states = 0;
                job j;
                job_init(&j, dir);
                j.world = world;
                j.micros = 1;
                j.grad_dtype = grad_dtype;
                j.config.zero_stage = stage;
                j.config.optimizer_tier = (zs_tier)tier;
                run_ok(&j, __func__);
                for (int u = 0; u < j.unit_count; u++) {
                    for (int d = 0; d < 3; d++) {
                        for (int frozen = 0; frozen <= 1; frozen++) {
                            uint64_t numel[JOB_MAX_PARAMS];
                            size_t n = 0;
                            zs_layout layout;
                            for (int p = 0; p < j.param_count; p++)
                                if (j.params[p].unit == u && (int)j.params[p].dtype == d &&
                                    j.params[p].frozen == frozen)
                                    numel[n++] = job_numel(&j.params[p]);
                            if (!n)
                                continue;
                            assert_int_equal(zs_layout_init(&layout, numel, n, world), ZS_OK);
                            const uint64_t all = layout.padded, part = layout.shard;
                            weights += (stage == 3 ? part : all) * (d == ZS_FP32 ? 4 : 2);
                            if (!frozen) {
                                grads += (stage >= 2 ? part : all) * zs_dtype_size(grad_dtype);
                                states += (stage >= 1 ? part : all) * (d == ZS_FP32 ? 8 : 12);
                            }
                            zs_layout_free(&layout);
                        }
                    }
                }
                const zs_tier grad_tier =
                    stage >= 2 && tier != ZS_TIER_DEVICE ? ZS_TIER_HOST : ZS_TIER_DEVICE;
                assert_int_equal(row_bytes(&j, ZS_TIER_DEVICE, "parameters"), weights);
                assert_int_equal(row_bytes(&j, grad_tier, "gradients"), grads);
                assert_int_equal(row_bytes(&j, (zs_tier)tier, "optimizer states"), states);
                check_purposes(&j);
                job_free(&j);
            }
        }
    }
}

/* A rank that registers something else, or visits units in another order, is an error that names
 * the unit, on every rank. */
typedef struct disagree {
    zs_comm *comm;
    int rank;
    int mode; /* 0: shapes, 1: order of units, 2: hyper-parameters, 3: loss scale */
    zs_status status;
    char error[1024];
} disagree;

static zs_status disagree_run(disagree *d, zs_engine *e)
{
    const int64_t shape[1] = {100};
    const int64_t shape_of_other[1] = {d->mode == 0 && d->rank == 1 ? 101 : 100};
    zs_group_config g;
    zs_param_config p;
    zs_param a, b;
    zs_status s;
    float grad[101] = {0};
    zs_group_config_init(&g);
    zs_param_config_init(&p);
    p.ndim = 1;
    p.shape = shape;
    p.name = "a";
    if ((s = zs_group_add(e, &g, NULL)) || (s = zs_param_add(e, &p, &a)))
        return s;
    p.name = "b";
    p.shape = shape_of_other;
    if ((s = zs_param_add(e, &p, &b)) || (s = zs_unit_add(e, "lower", &a, 1, NULL)) ||
        (s = zs_unit_add(e, "upper", &b, 1, NULL)) || (s = zs_engine_commit(e)))
        return s;
    const int first = d->mode == 1 && d->rank == 1;
    if ((s = zs_unit_acquire(e, first)) || (s = zs_unit_release(e, first)) ||
        (s = zs_grad_begin(e, 1)) || (s = zs_grad_ready(e, b, grad, ZS_FP32)) ||
        (s = zs_grad_ready(e, a, grad, ZS_FP32)) || (s = zs_grad_finish(e)))
        return s;
    if (d->mode == 2) {
        g.lr += d->rank;
        if ((s = zs_group_set(e, 0, &g)))
            return s;
    }
    return zs_step(e, NULL, NULL);
}

static void *disagree_main(void *arg)
{
    disagree *d = arg;
    zs_engine_config c;
    zs_engine *e = NULL;
    zs_engine_config_init(&c);
    c.zero_stage = 3;
    c.threads = 1;
    if (d->mode == 3)
        c.loss_scale = 1 + d->rank;
    d->status = zs_engine_open(&c, d->comm, &e);
    if (!d->status)
        d->status = disagree_run(d, e);
    snprintf(d->error, sizeof d->error, "%s", d->status ? zs_last_error() : "");
    zs_engine_close(&e);
    return NULL;
}

static void test_disagreement(void **state)
{
    (void)state;
    static const char *const names[] = {"unit 'upper'", "unit 'lower'", "hyper-parameters",
                                        "loss_scale"};
    for (int mode = 0; mode < (int)ZS_COUNT(names); mode++) {
        zs_comm *comms[2];
        disagree d[2];
        pthread_t t[2];
        assert_int_equal(zs_comm_open_threads(2, 20, comms), ZS_OK);
        for (int r = 0; r < 2; r++) {
            d[r] = (disagree){.comm = comms[r], .rank = r, .mode = mode};
            pthread_create(&t[r], NULL, disagree_main, &d[r]);
        }
        for (int r = 0; r < 2; r++) {
            pthread_join(t[r], NULL);
            assert_int_equal(d[r].status, ZS_ERR_MISMATCH);
            if (!strstr(d[r].error, names[mode]))
                fail_msg("'%s' is not in '%s'", names[mode], d[r].error);
        }
        zs_comm_close(&comms[0]);
        zs_comm_close(&comms[1]);
    }
}

static void test_rank_stops(void **state)
{
    (void)state;
    job j;
    job_init(&j, dir);
    j.world = 3;
    j.poison_step = 1;
    j.config.max_skipped_steps = 1;
    job_run(&j);
    for (int r = 0; r < 3; r++)
        if (!strstr(j.error[r], "not finite in 1 steps in a row"))
            fail_msg("rank %d says '%s'", r, j.error[r]);
    job_free(&j);
}

static void test_skipped_step(void **state)
{
    (void)state;
    job j;
    job_init(&j, dir);
    j.world = 2;
    j.poison_step = 2;
    run_ok(&j, __func__);
    for (int s = 0; s < j.steps; s++)
        assert_int_equal(j.skipped[s], s == 1);
    job_free(&j);
}

/* ---- commit and resume ---- */

static void test_resume(void **state)
{
    (void)state;
    for (int states = 0; states < ZS_TIERS; states++) {
        for (int stage = 0; stage <= 3; stage++) {
            job whole, part;
            const char *sub = job_temp_dir();
            job_init(&whole, sub);
            whole.world = 2;
            run_ok(&whole, __func__);
            job_init(&part, sub);
            part.world = 2;
            part.config.zero_stage = stage;
            part.config.optimizer_tier = (zs_tier)states;
            part.config.param_tier = stage == 3 ? (zs_tier)states : ZS_TIER_DEVICE;
            part.commit_at = 2;
            part.stop_at = 3; /* the step after the commit is lost */
            run_ok(&part, __func__);
            part.stop_at = 0;
            part.commit_at = 0;
            /* without resume, state is an error */
            part.use_resume = 1;
            part.config.resume = 0;
            job_run(&part);
            if (part.status[0] != ZS_ERR_EXISTS)
                fail_msg("existing state: %s", part.error[0]);
            part.config.resume = 1;
            run_ok(&part, __func__);
            assert_int_equal(part.resumed_at, 2);
            if (job_differ(&whole, &part))
                fail_msg("stage %d, states %d: parameter %d differs after resume", stage, states,
                         job_differ(&whole, &part) - 1);
            job_free(&whole);
            job_free(&part);
            job_clean(sub);
        }
    }
}

int main(void)
{
    dir = job_temp_dir();
    if (!dir)
        return 1;
    char keep[256];
    snprintf(keep, sizeof keep, "%s", dir);
    dir = keep; /* job_temp_dir has one buffer */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config_errors), cmocka_unit_test(test_registration_errors),
        cmocka_unit_test(test_misuse),        cmocka_unit_test(test_live_budget),
        cmocka_unit_test(test_ledger),        cmocka_unit_test(test_disagreement),
        cmocka_unit_test(test_rank_stops),    cmocka_unit_test(test_skipped_step),
        cmocka_unit_test(test_resume),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    job_clean(dir);
    return failed;
}
