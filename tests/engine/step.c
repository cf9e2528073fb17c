/* SPDX-License-Identifier: Apache-2.0 */
/* One step at a time on one rank: missing gradients, overflow, loss scaling, norm, clipping, fork.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/util.h"
#include "tests/engine/harness.h"
#include "tests/engine/small.h"

static void test_missing(void **state)
{
    (void)state;
    /* 0.1 is the first Adam step's size when weights are zero and there is no decay; a zero
     * gradient moves nothing but counts. */
    for (int mode = ZS_MISSING_ZERO; mode <= ZS_MISSING_SKIP; mode++) {
        small s;
        zs_engine_config c;
        zs_engine_config_init(&c);
        c.missing_grad = (zs_missing_grad)mode;
        c.zero_stage = 2;
        small_open(&s, &c);
        assert_int_equal(zs_grad_begin(s.e, 1), ZS_OK);
        give(&s, s.a, 1);
        assert_int_equal(zs_grad_finish(s.e), ZS_OK);
        assert_int_equal(zs_step(s.e, NULL, NULL), ZS_OK);
        assert_float_equal(weight(&s, s.a), -0.1, 1e-6);
        assert_float_equal(weight(&s, s.b), 0, 0);
        assert_int_equal(zs_grad_begin(s.e, 1), ZS_OK);
        give(&s, s.a, 1);
        give(&s, s.b, 1);
        assert_int_equal(zs_grad_finish(s.e), ZS_OK);
        assert_int_equal(zs_step(s.e, NULL, NULL), ZS_OK);
        /* Skipped: b's first step. Zero: its second, with bias corrections of two steps:
         * m = 0.1 / 0.19, v = 0.001 / 0.001999. */
        const double want =
            mode == ZS_MISSING_SKIP ? -0.1 : -0.1 * (0.1 / 0.19) / sqrt(0.001 / 0.001999);
        assert_float_equal(weight(&s, s.b), want, 1e-6);
        /* That b had one before is of no matter now: it rests, or its moments carry it on. */
        assert_int_equal(zs_grad_begin(s.e, 1), ZS_OK);
        give(&s, s.a, 1);
        assert_int_equal(zs_grad_finish(s.e), ZS_OK);
        assert_int_equal(zs_step(s.e, NULL, NULL), ZS_OK);
        if (mode == ZS_MISSING_SKIP)
            assert_float_equal(weight(&s, s.b), want, 0.5e-7);
        else
            assert_true(weight(&s, s.b) < want - 0.01);
        small_close(&s);
    }
}

static void test_overflow(void **state)
{
    (void)state;
    small s;
    zs_engine_config c;
    zs_step_info info = {.size = sizeof info};
    zs_engine_config_init(&c);
    c.loss_scale = 0;
    c.initial_loss_scale = 8;
    c.min_loss_scale = 2;
    c.loss_scale_window = 2;
    c.max_skipped_steps = 2;
    small_open(&s, &c);
    static const struct {
        float grad;
        double scale_after;
        int skipped;
    } steps[] = {{8, 8, 0}, {8, 16, 0}, {INFINITY, 8, 1}, {NAN, 4, 1}, {INFINITY, 2, 1}};
    for (size_t i = 0; i < ZS_COUNT(steps); i++) {
        assert_int_equal(zs_grad_begin(s.e, 1), ZS_OK);
        give(&s, s.a, steps[i].grad);
        give(&s, s.b, steps[i].grad);
        assert_int_equal(zs_grad_finish(s.e), ZS_OK);
        assert_int_equal(zs_step(s.e, NULL, &info), ZS_OK);
        assert_int_equal(info.skipped, steps[i].skipped);
        assert_float_equal(info.loss_scale, steps[i].scale_after, 0);
        if (i == 0)
            assert_float_equal(info.grad_norm, sqrt(40), 1e-6);
    }
    assert_int_equal(info.step, 2);
    assert_float_equal(weight(&s, s.a), -0.2, 1e-6);
    /* At the smallest scale two in a row are too many; a good one between starts anew. */
    static const float last[] = {NAN, 1, NAN, NAN};
    for (size_t i = 0; i < ZS_COUNT(last); i++) {
        assert_int_equal(zs_grad_begin(s.e, 1), ZS_OK);
        give(&s, s.a, last[i]);
        give(&s, s.b, 0);
        assert_int_equal(zs_grad_finish(s.e), ZS_OK);
        zs_status status = zs_step(s.e, NULL, &info);
        if (i + 1 < ZS_COUNT(last))
            assert_int_equal(status, ZS_OK);
        else
            assert_says(status, ZS_ERR_NONFINITE, "2 steps in a row");
    }
    small_close(&s);
}

static void give_all(small *s, float value)
{
    assert_int_equal(zs_grad_begin(s->e, 1), ZS_OK);
    give(s, s->a, value);
    give(s, s->b, value);
    assert_int_equal(zs_grad_finish(s->e), ZS_OK);
}

static float first_moment(small *s)
{
    float m;
    assert_int_equal(zs_param_read(s->e, s->a, ZS_EXP_AVG, 0, 1, ZS_FP32, &m), ZS_OK);
    return m;
}

/* The first moment after one step is a tenth of the gradient that Adam saw. */
static void test_scales(void **state)
{
    (void)state;
    const double raw = sqrt(40); /* of 40 ones */
    static const struct {
        double loss_scale, grad_scale, max_norm, clip_factor;
        double factor; /* expected */
    } cases[] = {
        {1, 1, 0, 0, 1},       {1, 0.25, 0, 0, 1}, {4, 0.5, 0, 0, 1},   {1, 1, 2, 0, -1},
        {8, 0.5, 0.25, 0, -1}, {1, 1, 1000, 0, 1}, {1, 1, 2, 0.5, 0.5}, {1, 1, 0, 3, 3},
    };
    for (size_t i = 0; i < ZS_COUNT(cases); i++) {
        small s;
        zs_engine_config c;
        zs_step_config config;
        zs_step_info info = {.size = sizeof info};
        double norm, factor = cases[i].factor;
        zs_engine_config_init(&c);
        zs_step_config_init(&config);
        c.loss_scale = cases[i].loss_scale;
        config.grad_scale = cases[i].grad_scale;
        config.max_norm = cases[i].max_norm;
        config.clip_factor = cases[i].clip_factor;
        small_open(&s, &c);
        assert_float_equal(zs_loss_scale(s.e), cases[i].loss_scale, 0);
        give_all(&s, 1);
        const double unscale = cases[i].grad_scale / cases[i].loss_scale;
        assert_int_equal(zs_grad_norm(s.e, cases[i].grad_scale, &norm), ZS_OK);
        assert_float_equal(norm, raw * unscale, 1e-6);
        if (factor < 0)
            factor = cases[i].max_norm / (raw * unscale + 1e-6);
        assert_int_equal(zs_step(s.e, &config, &info), ZS_OK);
        assert_float_equal(info.grad_norm, raw * unscale, 1e-6);
        assert_float_equal(info.clip_factor, factor, 1e-9);
        assert_float_equal(first_moment(&s), 0.1 * unscale * factor, 1e-7);
        small_close(&s);
    }
}

static void test_found_inf(void **state)
{
    (void)state;
    small s;
    zs_engine_config c;
    zs_step_config config;
    zs_step_info info = {.size = sizeof info};
    zs_engine_config_init(&c);
    zs_step_config_init(&config);
    c.loss_scale = 0;
    c.initial_loss_scale = 4;
    small_open(&s, &c);
    give_all(&s, 1);
    config.found_inf = 1;
    assert_int_equal(zs_step(s.e, &config, &info), ZS_OK);
    assert_int_equal(info.skipped, 1);
    assert_int_equal(info.step, 0);
    assert_float_equal(info.loss_scale, 2, 0);
    assert_float_equal(weight(&s, s.a), 0, 0);
    small_close(&s);
}

static void test_step_errors(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        double grad_scale, max_norm, clip_factor;
    } cases[] = {
        {"grad_scale is 0", 0, 0, 0},
        {"grad_scale is nan", NAN, 0, 0},
        {"max_norm -1", 1, -1, 0},
        {"clip_factor nan", 1, 0, NAN},
        {"the factor finite", 1, 0, INFINITY},
    };
    small s;
    zs_engine_config c;
    zs_step_config config;
    zs_step_info info = {.size = 1};
    double norm;
    zs_engine_config_init(&c);
    small_open(&s, &c);
    assert_says(zs_grad_norm(s.e, 1, &norm), ZS_ERR_MISUSE, "there are no gradients");
    give_all(&s, 1);
    for (size_t i = 0; i < ZS_COUNT(cases); i++) {
        zs_step_config_init(&config);
        config.grad_scale = cases[i].grad_scale;
        config.max_norm = cases[i].max_norm;
        config.clip_factor = cases[i].clip_factor;
        assert_says(zs_step(s.e, &config, NULL), ZS_ERR_ARG, cases[i].text);
    }
    config.size = 1;
    assert_says(zs_step(s.e, &config, NULL), ZS_ERR_ARG, "config's size is 1");
    assert_says(zs_step(s.e, NULL, &info), ZS_ERR_ARG, "info's size is 1");
    /* None of these cost anything. */
    assert_int_equal(zs_step(s.e, NULL, NULL), ZS_OK);
    assert_float_equal(weight(&s, s.a), -0.1, 1e-6);
    small_close(&s);
}

/* Units of one size share a bucket; what one left between the parameters of the next must not be
 * summed. */
static void test_gaps(void **state)
{
    (void)state;
    const int64_t sizes[3] = {64, 30, 32};
    static const char *const names[3] = {"whole", "short", "behind"};
    float ones[64];
    for (int i = 0; i < 64; i++)
        ones[i] = 1;
    for (int stage = 0; stage <= 3; stage++) {
        small s;
        zs_engine_config c;
        zs_group_config group;
        zs_param_config param;
        zs_param p[3];
        double norm;
        zs_engine_config_init(&c);
        zs_group_config_init(&group);
        zs_param_config_init(&param);
        c.zero_stage = stage;
        assert_int_equal(zs_comm_open_self(&s.comm), ZS_OK);
        assert_int_equal(zs_engine_open(&c, s.comm, &s.e), ZS_OK);
        assert_int_equal(zs_group_add(s.e, &group, NULL), ZS_OK);
        param.ndim = 1;
        for (int i = 0; i < 3; i++) {
            param.name = names[i];
            param.shape = &sizes[i];
            assert_int_equal(zs_param_add(s.e, &param, &p[i]), ZS_OK);
        }
        assert_int_equal(zs_unit_add(s.e, "one", p, 1, NULL), ZS_OK);
        assert_int_equal(zs_unit_add(s.e, "two", p + 1, 2, NULL), ZS_OK);
        assert_int_equal(zs_engine_commit(s.e), ZS_OK);
        assert_int_equal(zs_grad_begin(s.e, 1), ZS_OK);
        for (int i = 0; i < 3; i++)
            assert_int_equal(zs_grad_ready(s.e, p[i], ones, ZS_FP32), ZS_OK);
        assert_int_equal(zs_grad_finish(s.e), ZS_OK);
        assert_int_equal(zs_grad_norm(s.e, 1, &norm), ZS_OK);
        assert_float_equal(norm, sqrt(64 + 30 + 32), 1e-9);
        small_close(&s);
    }
}

/* Looking at a weight keeps its shard at hand; a step writes the file behind that. */
static void test_weights_after_a_step(void **state)
{
    (void)state;
    small s;
    zs_engine_config c;
    const char *sub = job_temp_dir();
    zs_engine_config_init(&c);
    c.zero_stage = 3;
    c.param_tier = ZS_TIER_NVME;
    c.param_dir = sub;
    small_open(&s, &c);
    for (int step = 1; step <= 3; step++) {
        give_all(&s, 1);
        assert_float_equal(weight(&s, s.a), -0.1 * (step - 1), 1e-6);
        assert_int_equal(zs_step(s.e, NULL, NULL), ZS_OK);
        assert_float_equal(weight(&s, s.a), -0.1 * step, 1e-6);
    }
    small_close(&s);
    job_clean(sub);
}

static void test_fork(void **state)
{
    (void)state;
    small s;
    zs_engine_config c;
    const char *sub = job_temp_dir();
    zs_engine_config_init(&c);
    c.optimizer_tier = ZS_TIER_NVME;
    c.state_dir = sub;
    small_open(&s, &c);
    assert_int_equal(zs_grad_begin(s.e, 1), ZS_OK);
    give(&s, s.a, 1);
    pid_t child = fork();
    if (child == 0) {
        int bad = zs_grad_finish(s.e) != ZS_ERR_FORKED || !strstr(zs_last_error(), "fork");
        zs_engine_close(&s.e);
        _exit(bad);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    give(&s, s.b, 1);
    assert_int_equal(zs_grad_finish(s.e), ZS_OK);
    assert_int_equal(zs_step(s.e, NULL, NULL), ZS_OK);
    assert_float_equal(weight(&s, s.b), -0.1, 1e-6);
    small_close(&s);
    job_clean(sub);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_missing),     cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_scales),      cmocka_unit_test(test_found_inf),
        cmocka_unit_test(test_step_errors), cmocka_unit_test(test_fork),
        cmocka_unit_test(test_gaps),        cmocka_unit_test(test_weights_after_a_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
