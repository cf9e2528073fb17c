/* SPDX-License-Identifier: Apache-2.0 */
/* The states under I/O that is as late as it may be, and under I/O that fails: each request in
 * turn, until none is left to fail. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/status.h"
#include "base/util.h"
#include "lazy_io.h"
#include "unit/states_rig.h"
#include "unit/temp.h"

#define OK(expr)                                                                                   \
    do {                                                                                           \
        if ((expr) != ZS_OK)                                                                       \
            fail_msg("%s: %s", #expr, zs_last_error());                                            \
    } while (0)

static void same(rig *r, rig_reference *ref, const char *when)
{
    char what[128];
    rig_reference_advance(ref, r->step);
    if (rig_differs(r, ref, what))
        fail_msg("%s: %s", when, what);
}

static void run_late(int tier, int aliased, int params, int chunks, int prefetch)
{
    temp_dir dir;
    rig r;
    rig_reference ref;
    int found;
    temp_make(&dir);
    rig_config config = {.tier = (zs_tier)tier,
                         .chunk = 4096,
                         .buffer = (uint64_t)chunks * 16 * 4096,
                         .aliased = aliased,
                         .params = params,
                         .dir = dir.path,
                         .open_io = lazy_io_open};
    rig_reference_open(&ref, 1);
    OK(rig_open(&r, &config));
    OK(rig_load(&r));
    for (int i = 0; i < 6; i++) {
        if (prefetch)
            OK(zs_states_prefetch(r.states));
        OK(rig_step(&r));
        if (i == 3)
            OK(rig_commit(&r));
    }
    same(&r, &ref, "after six steps");
    OK(rig_commit(&r));
    rig_close(&r);
    config.resume = 1;
    OK(rig_open(&r, &config));
    OK(rig_resume(&r, &found));
    same(&r, &ref, "after resuming");
    OK(rig_step(&r));
    same(&r, &ref, "one step later");
    rig_close(&r);
    rig_reference_close(&ref);
    temp_remove(&dir);
}

static void test_late(void **state)
{
    for (int mode = 0; mode < 3; mode++) {
        lazy_io =
            (lazy_io_control){.fail_at = -1, .oldest_first = mode == 1, .early_data = mode == 2};
        for (int tier = 0; tier < ZS_TIERS; tier++)
            for (int aliased = 0; aliased < 2; aliased++)
                for (int params = 0; params < 2; params++)
                    for (int chunks = 3; chunks < 60; chunks *= 4)
                        run_late(tier, aliased, params, chunks, chunks == 12);
    }
}

/* One run with request fail_at failing: whether it got so far. Whatever happens, the next process
 * finds a committed step with the right bits, and none that was committed is lost. */
static int run_failing(zs_tier tier, int params, long fail_at, int persistent, int error, int only)
{
    temp_dir dir;
    rig r;
    rig_reference ref;
    int found;
    uint64_t committed = 0;
    temp_make(&dir);
    rig_config config = {.tier = tier,
                         .chunk = 8192,
                         .buffer = 3 * 16 * 8192,
                         .params = params,
                         .aliased = 1,
                         .dir = dir.path};
    OK(rig_open(&r, &config));
    OK(rig_load(&r));
    OK(rig_step(&r));
    OK(rig_commit(&r));
    committed = r.step;
    rig_close(&r);

    lazy_io = (lazy_io_control){
        .fail_at = fail_at, .persistent = persistent, .error = error, .only = only};
    config.open_io = lazy_io_open;
    config.resume = 1;
    zs_status status = rig_open(&r, &config);
    if (status == ZS_OK)
        status = rig_resume(&r, &found);
    for (int i = 0; i < 3 && status == ZS_OK; i++) {
        status = rig_step(&r);
        if (status == ZS_OK && i == 1) {
            status = rig_commit(&r);
            if (status == ZS_OK)
                committed = r.step;
        }
    }
    if (status == ZS_OK)
        status = rig_commit(&r);
    if (status == ZS_OK)
        committed = r.step;
    int reached = lazy_io.requests > fail_at;
    if (reached) {
        zs_status expected = error == ENOSPC ? ZS_ERR_NOSPACE : ZS_ERR_IO;
        if (status != expected)
            fail_msg("request %ld: %s, %s", fail_at, zs_status_name(status), zs_last_error());
        if (!strstr(zs_last_error(), dir.path + 5) || !strstr(zs_last_error(), strerror(error)) ||
            !strstr(zs_last_error(), "offset"))
            fail_msg("request %ld: file, offset or reason is missing: %s", fail_at,
                     zs_last_error());
        if (r.step > committed && rig_commit(&r) == ZS_OK)
            fail_msg("request %ld: a failed step was committed", fail_at);
    } else if (status != ZS_OK) {
        fail_msg("nothing failed, but: %s", zs_last_error());
    }
    rig_close(&r);

    config.open_io = NULL;
    rig_reference_open(&ref, 1);
    OK(rig_open(&r, &config));
    OK(rig_resume(&r, &found));
    if (r.step < committed)
        fail_msg("request %ld: step %llu was committed, %llu is left", fail_at,
                 (unsigned long long)committed, (unsigned long long)r.step);
    same(&r, &ref, "after a failure");
    rig_close(&r);
    rig_reference_close(&ref);
    temp_remove(&dir);
    return reached;
}

static void fail_each(zs_tier tier, int params, int persistent, int error, int only, long step)
{
    long n = 0;
    while (run_failing(tier, params, n, persistent, error, only))
        n += step;
    assert_true(n > 0);
}

static void test_each_request_fails(void **state)
{
    /* Every one, where there is time. */
    long step = getenv("ZSPILL_FAULTS_ALL") ? 1 : 9;
    fail_each(ZS_TIER_NVME, 0, 0, EIO, 0, step);
    fail_each(ZS_TIER_NVME, 1, 1, ENOSPC, 2, step);
    fail_each(ZS_TIER_NVME, 1, 1, EIO, 1, step);
    fail_each(ZS_TIER_HOST, 1, 0, EIO, 0, step);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_each_request_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
