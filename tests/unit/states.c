/* SPDX-License-Identifier: Apache-2.0 */
/* The same bits in every tier, through every ring, after every commit and resume. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "base/status.h"
#include "base/util.h"
#include "states_rig.h"
#include "temp.h"

#define OK(expr)                                                                                   \
    do {                                                                                           \
        if ((expr) != ZS_OK)                                                                       \
            fail_msg("%s: %s", #expr, zs_last_error());                                            \
    } while (0)

static void same(rig *r, const rig_reference *ref, const char *when)
{
    char what[128];
    if (rig_differs(r, ref, what))
        fail_msg("%s, tier %s, chunk %llu, buffer %llu, engine %d, aliased %d, params %d: %s", when,
                 zs_tier_name(r->config.tier), (unsigned long long)r->config.chunk,
                 (unsigned long long)r->config.buffer, (int)r->config.engine, r->config.aliased,
                 r->config.params, what);
}

static int can(zs_io_engine engine)
{
    zs_io *io = NULL;
    zs_status status = zs_io_open(engine, 4, NULL, &io);
    zs_io_close(&io);
    return status == ZS_OK;
}

static __attribute__((unused)) uint64_t booked(rig *r, zs_tier tier, const char *purpose)
{
    zs_memory_row rows[16];
    size_t count;
    zs_ledger_rows(r->ledger, rows, 16, &count);
    for (size_t i = 0; i < count; i++)
        if (rows[i].tier == tier && strcmp(rows[i].purpose, purpose) == 0)
            return rows[i].bytes;
    return 0;
}

/* Steps, reads in between, prefetch, commit; then again from the store. */
static void run_one(rig_config config)
{
    temp_dir dir;
    rig r;
    rig_reference ref;
    int found;
    temp_make(&dir);
    config.dir = dir.path;
    rig_reference_open(&ref, config.scale);
    OK(rig_open(&r, &config));
    OK(rig_load(&r));
    same(&r, &ref, "after loading");
    for (int i = 0; i < 5; i++) {
        if (i % 2)
            OK(zs_states_prefetch(r.states));
        OK(rig_step(&r));
        rig_reference_advance(&ref, r.step);
        if (i == 2)
            same(&r, &ref, "between steps");
        if (i == 3 && !config.no_store)
            OK(rig_commit(&r));
    }
    same(&r, &ref, "after five steps");
    if (config.no_store) {
        rig_close(&r);
    } else {
        OK(rig_commit(&r));
        OK(rig_step(&r)); /* lost with the process */
        rig_close(&r);
        config.resume = 1;
        OK(rig_open(&r, &config));
        OK(rig_resume(&r, &found));
        assert_true(found >= 1);
        same(&r, &ref, "after resuming");
        for (int i = 0; i < 3; i++) {
            OK(rig_step(&r));
            OK(rig_commit(&r));
        }
        rig_reference_advance(&ref, r.step);
        same(&r, &ref, "three steps after resuming");
        rig_close(&r);
    }
    rig_reference_close(&ref);
    temp_remove(&dir);
}

static void test_same_bits_everywhere(void **state)
{
    static const struct {
        uint64_t chunk, buffer;
    } sizes[] = {
        {0, 0}, {4096, 0}, {4096, 3 * 4096 * 16}, {16384, 3 * 16384 * 16}, {8192, 8 << 20}};
    for (int tier = 0; tier < ZS_TIERS; tier++)
        for (int aliased = 0; aliased < 2; aliased++)
            for (int params = 0; params < 2; params++)
                for (size_t i = 0; i < ZS_COUNT(sizes); i++)
                    run_one((rig_config){.tier = (zs_tier)tier,
                                         .engine = i % 2 ? ZS_IO_POSIX : ZS_IO_AUTO,
                                         .threads = 1 + (int)i % 3,
                                         .chunk = sizes[i].chunk,
                                         .buffer = sizes[i].buffer,
                                         .aliased = aliased,
                                         .params = params});
}

static void test_same_bits_by_io_uring(void **state)
{
    if (!can(ZS_IO_URING))
        skip();
    for (int aliased = 0; aliased < 2; aliased++)
        for (int params = 0; params < 2; params++)
            run_one((rig_config){.tier = ZS_TIER_NVME,
                                 .engine = ZS_IO_URING,
                                 .threads = 2,
                                 .chunk = 4096,
                                 .aliased = aliased,
                                 .params = params,
                                 .scale = 3});
}

static void test_memory_without_a_store(void **state)
{
    for (int tier = 0; tier < ZS_TIER_NVME; tier++)
        run_one((rig_config){.tier = (zs_tier)tier, .no_store = 1, .threads = 2});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits_everywhere),
        cmocka_unit_test(test_same_bits_by_io_uring),
        cmocka_unit_test(test_memory_without_a_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
