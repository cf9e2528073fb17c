/* SPDX-License-Identifier: Apache-2.0 */
/* State taken over by jobs of another world, stage, tier, chunk length, dtype and number of slots:
 * masters and moments must come out with the bits they went in with, and working copies be rounded
 * from those, whatever the two shapes are.
 *
 * usage: reshape [--all]
 *
 * Without an option a walk of some dozens of changes, drawn by ZSPILL_TEST_SEED or the clock, which
 * it prints; with --all every ordered pair of shapes. */
#include <dirent.h>
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

enum { STEP = 2, FINGERPRINT = 99, WALK = 60, DTYPES = 4 };

typedef struct shape {
    int world, stage;
    zs_tier states, params;
} shape;

static shape shapes[64];
static size_t shape_count;
/* The small model as it is, with all that is trained in one dtype, and with each in another one. */
static job_param models[DTYPES][JOB_MAX_PARAMS];
static int all;
static uint64_t seed;

static void make_shapes(void)
{
    for (int world = 1; world <= 4; world++)
        for (int stage = 0; stage <= 3; stage++)
            for (zs_tier tier = ZS_TIER_DEVICE; tier <= ZS_TIER_NVME; tier++)
                shapes[shape_count++] =
                    (shape){world, stage, tier, stage == 3 ? tier : ZS_TIER_DEVICE};
}

static void make_models(void)
{
    static const zs_dtype another[] = {
        [ZS_FP32] = ZS_BF16, [ZS_BF16] = ZS_FP16, [ZS_FP16] = ZS_FP32};
    for (int i = 0; i < job_small_count; i++) {
        for (int m = 0; m < DTYPES; m++)
            models[m][i] = job_small[i];
        if (job_small[i].frozen)
            continue;
        models[1][i].dtype = ZS_FP32;
        models[2][i].dtype = ZS_BF16;
        models[3][i].dtype = another[job_small[i].dtype];
    }
}

static uint64_t draw(uint64_t below)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (seed >> 33) % below;
}

static void take_shape(job *j, const char *dir, const shape *s, uint64_t chunk_numel)
{
    job_init(j, dir);
    j->world = s->world;
    j->config.zero_stage = s->stage;
    j->config.optimizer_tier = s->states;
    j->config.param_tier = s->params;
    j->config.chunk_numel = chunk_numel;
    j->config.fingerprint = FINGERPRINT;
}

/* A parameter of which now has not the state of then, or not its weights rounded from that; NULL:
 * none. */
static const char *differing(const job *then, const job *now)
{
    for (int p = 0; p < now->param_count; p++) {
        const job_param *param = &now->params[p];
        const uint64_t n = job_numel(param);
        if (memcmp(then->moments[p], now->moments[p], 2 * n * sizeof(float)) ||
            memcmp(then->masters[p], now->masters[p], n * sizeof(float)))
            return param->name;
        for (uint64_t i = 0; i < n; i++) {
            const float wanted =
                param->frozen ? then->weights[p][i] : job_round(param->dtype, now->masters[p][i]);
            if (memcmp(&wanted, &now->weights[p][i], sizeof wanted))
                return param->name;
        }
    }
    return NULL;
}

static int files_in(const char *dir)
{
    int n = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *entry; (entry = readdir(d));)
        n += entry->d_name[0] != '.';
    closedir(d);
    return n;
}

static void leave(job *first, const char *dir, const shape *s)
{
    take_shape(first, dir, s, 0);
    first->commit_at = first->stop_at = STEP;
    run_ok(first, __func__);
}

/* Nothing but the change of shape. */
static void take_over(const job *first, const char *dir, const shape *from, const shape *to)
{
    job next;
    const uint64_t chunk = draw(3) * 4096;
    const size_t model = draw(DTYPES);
    take_shape(&next, dir, to, chunk);
    next.params = models[model];
    next.config.slots = 1 + (int)draw(2);
    next.config.keep = next.config.slots == 2 ? (int)draw(2) : 0;
    next.config.resume = next.use_resume = 1;
    next.stop_at = STEP;
    run_ok(&next, __func__);
    assert_int_equal(next.resumed_at, STEP);
    const char *name = differing(first, &next);
    if (name)
        fail_msg("parameter '%s' differs: world %d, stage %d, states in tier %d, taken over by "
                 "world %d, stage %d, tier %d, chunks of %llu, dtypes of model %zu, %d slot(s) and "
                 "%d kept",
                 name, from->world, from->stage, (int)from->states, to->world, to->stage,
                 (int)to->states, (unsigned long long)chunk, model, next.config.slots,
                 next.config.keep);
    /* the manifest and one store a rank */
    assert_int_equal(files_in(dir), 1 + next.world);
    job_free(&next);
}

static void each_to_each(void **state)
{
    (void)state;
    const char *dir = job_temp_dir();
    job first;
    assert_non_null(dir);
    leave(&first, dir, &shapes[0]);
    const shape *at = &shapes[0];
    for (size_t i = 0; i < WALK && !all; i++) {
        const shape *to = &shapes[draw(shape_count)];
        take_over(&first, dir, at, to);
        at = to;
    }
    /* From i to itself, then to each later one and back. */
    for (size_t i = 0; i < shape_count && all; i++) {
        take_over(&first, dir, at, &shapes[i]);
        take_over(&first, dir, &shapes[i], &shapes[i]);
        for (size_t k = i + 1; k < shape_count; k++) {
            take_over(&first, dir, &shapes[i], &shapes[k]);
            take_over(&first, dir, &shapes[k], &shapes[i]);
        }
        at = &shapes[i];
    }
    job_free(&first);
    job_clean(dir);
}

/* Gradients are summed over the world in use, so a step in another world gives other bits; that it
 * can be taken, with every shape, is what is asked here. */
static void training_goes_on(void **state)
{
    (void)state;
    const char *dir = job_temp_dir();
    job first, next;
    assert_non_null(dir);
    leave(&first, dir, &shapes[0]);
    for (size_t i = 0; i < shape_count; i += 1 + draw(6)) {
        take_shape(&next, dir, &shapes[i], 0);
        next.config.resume = next.use_resume = 1;
        next.steps = STEP + 1;
        run_ok(&next, __func__);
        assert_int_equal(next.resumed_at, STEP);
        assert_int_not_equal(job_differ(&first, &next), 0);
        job_free(&next);
    }
    job_free(&first);
    job_clean(dir);
}

static void another_fingerprint(void **state)
{
    (void)state;
    const char *dir = job_temp_dir();
    job first, next;
    assert_non_null(dir);
    leave(&first, dir, &shapes[0]);
    take_shape(&next, dir, &shapes[20], 0);
    next.config.resume = next.use_resume = 1;
    next.config.fingerprint = FINGERPRINT - 1;
    job_run(&next);
    assert_int_equal(next.status[0], ZS_ERR_MISMATCH);
    assert_non_null(strstr(next.error[0], "fingerprint"));
    job_free(&next);
    job_free(&first);
    job_clean(dir);
}

/* Refused, each in another shape, before any file is made; then the state is as it was. */
static void other_parameters(void **state)
{
    (void)state;
    const char *dir = job_temp_dir();
    static const struct {
        const char *message;
        job_param change;
    } cases[] = {
        {"has 9 trained parameters, this engine has 8",
         {"block1.w", 2, {131, 67}, ZS_FP32, 0, 1, 1, 2}},
        {"'block1.w' has 8646 elements, and 8777 in the state",
         {"block1.w", 2, {131, 66}, ZS_FP32, 0, 0, 1, 2}},
        {"'block1.v' is not in the state", {"block1.v", 2, {131, 67}, ZS_FP32, 0, 0, 1, 2}},
    };
    job first, next;
    assert_non_null(dir);
    leave(&first, dir, &shapes[0]);
    for (size_t i = 0; i < ZS_COUNT(cases); i++) {
        job_param model[JOB_MAX_PARAMS];
        memcpy(model, models[0], sizeof model);
        model[6] = cases[i].change;
        take_shape(&next, dir, &shapes[draw(shape_count - 12) + 12], 0);
        next.params = model;
        next.config.resume = next.use_resume = 1;
        job_run(&next);
        assert_int_equal(next.status[0], ZS_ERR_MISMATCH);
        if (!strstr(next.error[0], cases[i].message))
            fail_msg("\"%s\" does not say: %s", next.error[0], cases[i].message);
        assert_int_equal(files_in(dir), 2);
        job_free(&next);
    }
    take_over(&first, dir, &shapes[0], &shapes[20]);
    job_free(&first);
    job_clean(dir);
}

int main(int argc, char **argv)
{
    const char *text = getenv("ZSPILL_TEST_SEED");
    seed = text ? strtoull(text, NULL, 0) : zs_trace_now();
    all = argc > 1 && !strcmp(argv[1], "--all");
    make_shapes();
    make_models();
    printf("%zu shapes, ZSPILL_TEST_SEED=%llu\n", shape_count, (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_to_each),
        cmocka_unit_test(training_goes_on),
        cmocka_unit_test(another_fingerprint),
        cmocka_unit_test(other_parameters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
