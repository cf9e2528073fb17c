/* SPDX-License-Identifier: Apache-2.0 */
/* What CUDA and NCCL refuse, at each call that an engine makes: a status on every rank, a message,
 * and nothing left behind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "tests/emu/control.h"
#include "tests/engine/harness.h"

static const char *dir;
static const emu_control *emu;

static void init(job *j, int world, int stage, zs_tier states, zs_tier params)
{
    job_init(j, dir);
    j->device = "cuda";
    j->world = world;
    j->steps = 2;
    j->config.zero_stage = stage;
    j->config.optimizer_tier = states;
    j->config.param_tier = params;
    j->config.chunk_numel = states ? 4096 : 0;
}

static void sides_that_do_not_fit(void **state)
{
    job j;
    (void)state;
    init(&j, 1, 0, ZS_TIER_DEVICE, ZS_TIER_DEVICE);
    j.config.adam = ZS_ADAM_HOST;
    job_run(&j);
    assert_int_equal(j.status[0], ZS_ERR_ARG);
    assert_non_null(strstr(j.error[0], "optimizer_tier is device"));
    job_free(&j);
    init(&j, 1, 0, ZS_TIER_HOST, ZS_TIER_DEVICE);
    j.device = NULL;
    j.config.adam = ZS_ADAM_ZERO_COPY;
    job_run(&j);
    assert_int_equal(j.status[0], ZS_ERR_ARG);
    assert_non_null(strstr(j.error[0], "needs a CUDA device"));
    job_free(&j);
}

/* Each call of that kind fails in turn, until a run does not come to that many. */
static int fail_each(emu_call call, int stage, zs_tier states, zs_tier params, int own)
{
    for (int n = 1;; n++) {
        job j;
        const size_t open = emu->open_objects();
        init(&j, 1, stage, states, params);
        (emu->fail)(call, EMU_ANY_DEVICE, (uint64_t)n);
        job_run(&j);
        (emu->fail)(call, EMU_ANY_DEVICE, 0);
        const zs_status status = j.status[0];
        if (status != ZS_OK && status != ZS_ERR_NOMEM)
            fail_msg("call %d: %s", n, j.error[0]);
        if (status != ZS_OK && !strstr(j.error[0], "cudaErrorMemoryAllocation"))
            fail_msg("call %d: no cause in: %s", n, j.error[0]);
        /* The first ones are the test's own. */
        if (status != ZS_OK && call == EMU_MALLOC && n > own &&
            (!strstr(j.error[0], "beside what is held") || !strstr(j.error[0], "ZeRO stage")))
            fail_msg("call %d: no way out in: %s", n, j.error[0]);
        if (emu->open_objects() != open)
            fail_msg("call %d: %zu objects are left", n, emu->open_objects() - open);
        job_free(&j);
        job_clean(dir);
        if (status == ZS_OK)
            return n - 1;
        assert_true(n < 1000);
    }
}

static void no_memory(void **state)
{
    static const struct {
        int stage;
        zs_tier states, params;
    } shapes[] = {{0, ZS_TIER_DEVICE, ZS_TIER_DEVICE},
                  {2, ZS_TIER_HOST, ZS_TIER_DEVICE},
                  {3, ZS_TIER_NVME, ZS_TIER_NVME}};
    static const struct {
        emu_call call;
        const char *name;
    } calls[] = {{EMU_MALLOC, "cudaMalloc"},
                 {EMU_HOST_REGISTER, "cudaHostRegister"},
                 {EMU_STREAM, "stream"},
                 {EMU_EVENT, "event"}};
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (size_t c = 0; c < sizeof calls / sizeof calls[0]; c++) {
            const int failed =
                fail_each(calls[c].call, shapes[s].stage, shapes[s].states, shapes[s].params, 1);
            print_message("emulated: stage %d, states %d: %d failures of %s\n", shapes[s].stage,
                          (int)shapes[s].states, failed, calls[c].name);
            assert_true(failed > 1);
        }
}

/* All ranks end, and one of them says what it was. */
static void expect_all(job *j, const char *what, const char *text)
{
    int found = 0;
    const size_t open = emu->open_objects();
    job_run(j);
    for (int r = 0; r < j->world; r++) {
        if (j->status[r] == ZS_OK)
            fail_msg("%s: rank %d saw nothing", what, r);
        found |= strstr(j->error[r], text) != NULL;
    }
    if (!found)
        fail_msg("%s: nobody says '%s' but: %s", what, text, j->error[0]);
    assert_int_equal(emu->open_objects(), open);
    job_free(j);
    job_clean(dir);
}

static void a_collective_is_refused(void **state)
{
    job j;
    (void)state;
    for (int stage = 0; stage <= 3; stage++) {
        init(&j, 3, stage, ZS_TIER_DEVICE, ZS_TIER_DEVICE);
        (emu->fail)(EMU_NCCL, 1, 7);
        expect_all(&j, "a refused call", "NCCL");
        (emu->fail)(EMU_NCCL, 1, 0);
    }
}

static void a_device_fails_in_a_collective(void **state)
{
    job j;
    (void)state;
    for (int n = 1; n <= 9; n += 4) {
        init(&j, 2, 3, ZS_TIER_HOST, ZS_TIER_DEVICE);
        (emu->fail)(EMU_NCCL_ASYNC, 1, (uint64_t)n);
        expect_all(&j, "an asynchronous error", "NCCL");
        (emu->fail)(EMU_NCCL_ASYNC, 1, 0);
    }
}

static void a_device_hangs(void **state)
{
    job j;
    (void)state;
    init(&j, 2, 2, ZS_TIER_DEVICE, ZS_TIER_DEVICE);
    j.timeout_s = 2;
    (emu->fail)(EMU_NCCL_HANG, 1, 3);
    expect_all(&j, "a hang", "time-out");
    (emu->fail)(EMU_NCCL_HANG, 1, 0);
}

int main(void)
{
    dir = job_temp_dir();
    emu = emu_control_find();
    if (!dir || !emu)
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sides_that_do_not_fit),   cmocka_unit_test(no_memory),
        cmocka_unit_test(a_collective_is_refused), cmocka_unit_test(a_device_fails_in_a_collective),
        cmocka_unit_test(a_device_hangs),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    job_clean(dir);
    return failed;
}
