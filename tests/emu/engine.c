/* SPDX-License-Identifier: Apache-2.0 */
/* The engine on a CUDA device (emulated) gives the bits of the engine on the host: norms, weights,
 * moments, and what each forward pass saw. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/kernels.h"
#include "tests/emu/control.h"
#include "tests/engine/job_check.h"

static const char *dir;

static void compare(const job *base, const job *j, const char *what)
{
    expect_same(base, "the host", j, what);
    if (base->seen != j->seen)
        fail_msg("%s: forward saw other weights than on the host", what);
}

typedef struct variant {
    int world, micros;
    zs_dtype grad_dtype;
    int use_buffer, boundary;
    int stride; /* of the shapes, every one of so many; 0: all */
} variant;

static void init(job *j, const variant *v)
{
    job_init(j, dir);
    j->world = v->world;
    j->micros = v->micros;
    j->grad_dtype = v->grad_dtype;
    j->use_buffer = v->use_buffer;
    if (v->boundary)
        j->config.reduce = ZS_REDUCE_BOUNDARY;
}

typedef struct shape {
    int stage;
    zs_tier states, params;
    zs_adam_side adam;
} shape;

static void init_shape(job *j, const variant *v, const shape *s, char what[160])
{
    static const char *const sides[] = {"auto", "device", "host", "zero copy"};
    init(j, v);
    j->device = "cuda";
    j->config.zero_stage = s->stage;
    j->config.optimizer_tier = s->states;
    j->config.param_tier = s->params;
    j->config.adam = s->adam;
    j->config.chunk_numel = s->states ? 4096 : 0;
    snprintf(what, 160, "world %d, %d micro-batches, stage %d, states %d, params %d, Adam %s",
             v->world, v->micros, s->stage, (int)s->states, (int)s->params, sides[s->adam]);
}

/* Every stage, tier and side. */
static int next_shape(const variant *v, shape *s)
{
    const int stages = v->boundary ? 1 : 3;
    if (s->states != ZS_TIER_DEVICE && s->adam < ZS_ADAM_ZERO_COPY) {
        s->adam++;
        return 1;
    }
    s->adam = ZS_ADAM_AUTO;
    if (s->states < ZS_TIER_NVME) {
        s->states++;
        return 1;
    }
    s->states = ZS_TIER_DEVICE;
    if (s->stage == 3 && s->params < ZS_TIER_NVME) {
        s->params++;
        return 1;
    }
    s->params = ZS_TIER_DEVICE;
    return ++s->stage <= stages;
}

static void matrix(const variant *v)
{
    job base, j;
    shape s = {0};
    int runs = 0, shapes = 0;
    init(&base, v);
    run_ok(&base, "host");
    do {
        char what[160];
        if (shapes++ % (v->stride ? v->stride : 1))
            continue;
        init_shape(&j, v, &s, what);
        run_ok(&j, what);
        compare(&base, &j, what);
        job_free(&j);
        runs++;
    } while (next_shape(v, &s));
    job_free(&base);
    print_message("emulated: world %d, %d micro-batches: %d runs equal the host\n", v->world,
                  v->micros, runs);
}

/* A state committed in one shape goes on in another with the same bits. */
static void resume(int world)
{
    const variant v = {.world = world, .micros = 2};
    static const shape shapes[] = {
        {0, ZS_TIER_DEVICE, ZS_TIER_DEVICE, ZS_ADAM_AUTO},
        {1, ZS_TIER_HOST, ZS_TIER_DEVICE, ZS_ADAM_DEVICE},
        {3, ZS_TIER_NVME, ZS_TIER_NVME, ZS_ADAM_DEVICE},
        {3, ZS_TIER_HOST, ZS_TIER_HOST, ZS_ADAM_HOST},
        {3, ZS_TIER_DEVICE, ZS_TIER_NVME, ZS_ADAM_AUTO},
        {2, ZS_TIER_NVME, ZS_TIER_DEVICE, ZS_ADAM_AUTO},
    };
    enum { SHAPES = sizeof shapes / sizeof shapes[0] };
    job base, j;
    char what[160];
    init(&base, &v);
    run_ok(&base, "host");
    for (int from = 0; from < SHAPES; from++)
        for (int i = 1; i <= 4; i += 3) {
            const int to = (from + i) % SHAPES;
            init_shape(&j, &v, &shapes[from], what);
            j.commit_at = j.stop_at = 2;
            j.config.chunk_numel = from % 2 ? 4096 : 0;
            run_ok(&j, what);
            job_free(&j);
            init_shape(&j, &v, &shapes[to], what);
            j.use_resume = j.config.resume = 1;
            j.config.chunk_numel = 0;
            run_ok(&j, what);
            assert_int_equal(j.resumed_at, 2);
            const int p = job_differ(&base, &j);
            if (p)
                fail_msg("%s, resumed: parameter '%s' differs from the host", what,
                         j.params[p - 1].name);
            job_free(&j);
            job_clean(dir);
        }
    job_free(&base);
}

static void several_ranks(void **state)
{
    (void)state;
    matrix(&(variant){.world = 2, .micros = 2});
    matrix(&(variant){.world = 3, .micros = 2, .use_buffer = 1, .stride = 5});
    matrix(&(variant){.world = 4, .micros = 1, .grad_dtype = ZS_BF16, .stride = 5});
    matrix(&(variant){.world = 2, .micros = 3, .boundary = 1, .stride = 5});
}

static void resumed(void **state)
{
    (void)state;
    resume(1);
    resume(2);
}

static void one_rank(void **state)
{
    (void)state;
    matrix(&(variant){.world = 1, .micros = 2, .use_buffer = 1});
    matrix(&(variant){.world = 1, .micros = 1, .stride = 5});
    matrix(&(variant){.world = 1, .micros = 3, .boundary = 1, .stride = 5});
    matrix(&(variant){.world = 1, .micros = 2, .grad_dtype = ZS_BF16, .stride = 5});
}

/* A step whose gradients are not finite on one rank changes nothing on any. */
static void skipped(void **state)
{
    (void)state;
    for (int world = 1; world <= 2; world++) {
        const variant v = {.world = world, .micros = 2};
        job base, j;
        init(&base, &v);
        base.poison_step = 2;
        run_ok(&base, "host");
        assert_true(base.skipped[1] && !base.skipped[0] && !base.skipped[2]);
        for (int stage = 0; stage <= 3; stage++)
            for (zs_tier tier = ZS_TIER_DEVICE; tier <= ZS_TIER_HOST; tier++) {
                const shape s = {stage, tier, ZS_TIER_DEVICE, ZS_ADAM_AUTO};
                char what[160];
                init_shape(&j, &v, &s, what);
                j.poison_step = 2;
                run_ok(&j, what);
                assert_memory_equal(base.skipped, j.skipped, sizeof base.skipped);
                const int p = job_differ(&base, &j);
                if (p)
                    fail_msg("%s: parameter '%s' differs", what, j.params[p - 1].name);
                assert_true(base.seen == j.seen);
                job_free(&j);
            }
        job_free(&base);
    }
}

typedef struct traffic {
    uint64_t up, down, states;
} traffic;

/* Bytes over the bus, and of the states in host memory, of a run of so many steps. */
static traffic run_counted(const emu_control *emu, zs_tier states, zs_adam_side side, int steps)
{
    const variant v = {.world = 1, .micros = 1};
    const shape s = {0, states, ZS_TIER_DEVICE, side};
    traffic t = {emu->bytes(EMU_TO_DEVICE), emu->bytes(EMU_TO_HOST), 0};
    char what[160];
    job j;
    init_shape(&j, &v, &s, what);
    j.steps = steps;
    run_ok(&j, what);
    t.up = emu->bytes(EMU_TO_DEVICE) - t.up;
    t.down = emu->bytes(EMU_TO_HOST) - t.down;
    for (size_t i = 0; i < j.row_count; i++)
        if (j.rows[i].tier == ZS_TIER_HOST && !strcmp(j.rows[i].purpose, "optimizer states"))
            t.states = j.rows[i].bytes;
    job_free(&j);
    return t;
}

/* A step moves what docs/numerics.md says, and not a byte more: what a run with states on the
 * device moves is the test's own. */
static void bytes_over_the_bus(void **state)
{
    const emu_control *emu = emu_control_find();
    (void)state;
    assert_non_null(emu);
    const traffic base2 = run_counted(emu, ZS_TIER_DEVICE, ZS_ADAM_AUTO, 2);
    const traffic base4 = run_counted(emu, ZS_TIER_DEVICE, ZS_ADAM_AUTO, 4);
    for (zs_adam_side side = ZS_ADAM_DEVICE; side <= ZS_ADAM_HOST; side++) {
        const traffic two = run_counted(emu, ZS_TIER_HOST, side, 2);
        const traffic four = run_counted(emu, ZS_TIER_HOST, side, 4);
        const uint64_t up = (four.up - two.up) - (base4.up - base2.up);
        /* With states on the device the host is told each decision. */
        const uint64_t own = base4.down - base2.down - 2 * sizeof(zs_clip);
        const uint64_t down = (four.down - two.down) - own;
        const uint64_t numel = four.states / 12;
        assert_true(numel > 0 && four.states % 12 == 0);
        if (side == ZS_ADAM_DEVICE) {
            /* Master and both moments, each way, each step. */
            assert_int_equal(up, 2 * 12 * numel);
            assert_int_equal(down, 2 * 12 * numel);
        } else {
            /* The gradient down; the working copy, which some are 2 bytes of, up. */
            assert_int_equal(down, 2 * 4 * numel);
            assert_in_range(up, 2 * 2 * numel, 2 * 4 * numel);
        }
        print_message("emulated: Adam %s: %.2f bytes up and %.2f down per parameter and step\n",
                      side == ZS_ADAM_DEVICE ? "device" : "host", (double)up / 2 / (double)numel,
                      (double)down / 2 / (double)numel);
    }
}

/* One job alone, for engine_waits.py: world, stage, states, params, side. */
static int one_job(char **numbers)
{
    const variant v = {.world = atoi(numbers[0]), .micros = 2, .use_buffer = 1};
    const shape s = {atoi(numbers[1]), (zs_tier)atoi(numbers[2]), (zs_tier)atoi(numbers[3]),
                     (zs_adam_side)atoi(numbers[4])};
    const emu_control *emu = emu_control_find();
    char what[160];
    job j;
    init_shape(&j, &v, &s, what);
    j.steps = 2;
    job_run(&j);
    const zs_status status = j.status[0];
    if (status != ZS_OK)
        printf("%s: %s\n", what, j.error[0]);
    job_free(&j);
    printf("waits %llu\n",
           (unsigned long long)(emu ? emu->calls(EMU_STREAM_WAIT, EMU_ANY_DEVICE) : 0));
    return status != ZS_OK;
}

int main(int argc, char **argv)
{
    dir = job_temp_dir();
    if (!dir)
        return 1;
    if (argc == 6) {
        const int failed_job = one_job(argv + 1);
        job_clean(dir);
        return failed_job;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank), cmocka_unit_test(several_ranks),      cmocka_unit_test(skipped),
        cmocka_unit_test(resumed),  cmocka_unit_test(bytes_over_the_bus),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    job_clean(dir);
    return failed;
}
