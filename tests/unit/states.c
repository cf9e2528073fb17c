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

static uint64_t booked(rig *r, zs_tier tier, const char *purpose)
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

/* What a step moves, and what the ledger says, by count. */
static void test_bytes(void **state)
{
    for (int i = 0; i < 2 * ZS_TIERS; i++) {
        const int tier = i % ZS_TIERS, keep = i < ZS_TIERS ? 0 : 3;
        temp_dir dir;
        rig r;
        struct stat st;
        uint64_t numel = 0;
        temp_make(&dir);
        rig_config config = {.tier = (zs_tier)tier,
                             .engine = ZS_IO_POSIX,
                             .chunk = 4096,
                             .buffer = 3 * 12 * 4096 * 4,
                             .slots = 2 + keep,
                             .dir = dir.path};
        OK(rig_open(&r, &config));
        for (size_t s = 0; s < RIG_SHARDS; s++)
            numel += r.shards[s].numel;
        char *path = temp_path(&dir, "zspill-rank00000.state");
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(booked(&r, (zs_tier)tier, "optimizer states"), 12 * numel);
        uint64_t on_disk = booked(&r, ZS_TIER_NVME, "store");
        on_disk += tier == ZS_TIER_NVME ? booked(&r, ZS_TIER_NVME, "optimizer states") : 0;
        assert_int_equal(on_disk, st.st_size);
        assert_true(on_disk >= 12 * numel * (2 + (uint64_t)keep));
        assert_int_equal(booked(&r, ZS_TIER_HOST, "optimizer ring"), config.buffer);
        OK(rig_load(&r));
        OK(rig_step(&r));
        OK(rig_commit(&r));
        while (r.step < 5) /* step 4 ends with shard 0, step 5 begins with it */
            OK(rig_step(&r));
        uint64_t whole = r.traffic[ZS_TIER_NVME].read_bytes;
        uint64_t written = r.traffic[ZS_TIER_NVME].written_bytes;
        if (tier == ZS_TIER_NVME) {
            /* What sat in the ring was not read again, but was written. */
            assert_true(written - whole <= config.buffer);
            assert_true(written >= whole + r.shards[0].numel * 12);
            /* What was fetched ahead counts as the step's. */
            OK(zs_states_prefetch(r.states));
            OK(rig_step(&r));
            assert_true(r.traffic[ZS_TIER_NVME].read_bytes > 0);
        } else {
            assert_int_equal(whole + written, 0);
            assert_true(r.traffic[tier].read_bytes > 0);
            assert_true(r.traffic[tier].read_bytes == r.traffic[tier].written_bytes);
            assert_true(r.traffic[tier].read_bytes < 12 * numel);
        }
        free(path);
        rig_close(&r);
        temp_remove(&dir);
    }
}

static void test_wrong_calls(void **state)
{
    temp_dir dir;
    rig r;
    float x;
    zs_tier_traffic traffic[ZS_TIERS] = {0};
    double seconds = 0;
    temp_make(&dir);
    rig_config config = {.tier = ZS_TIER_HOST, .no_store = 1, .dir = dir.path};
    OK(rig_open(&r, &config));
    assert_int_equal(zs_states_read(r.states, 0, ZS_GRAD, 0, 1, &x), ZS_ERR_ARG);
    assert_int_equal(zs_states_read(r.states, RIG_SHARDS, ZS_MASTER, 0, 1, &x), ZS_ERR_ARG);
    assert_int_equal(zs_states_write(r.states, 3, ZS_MASTER, 300, 1, &x), ZS_ERR_ARG);
    assert_non_null(strstr(zs_last_error(), "300 to 301 of shard 3, which has 300"));
    assert_int_equal(zs_states_commit_prepare(r.states), ZS_ERR_MISUSE);
    assert_non_null(strstr(zs_last_error(), "state directory"));
    zs_adam_coef coef = {0};
    zs_adam_run runs[2] = {{0, 10, &coef}, {5, 10, &coef}};
    zs_states_input inputs[RIG_SHARDS] = {{.grad = &x, .runs = runs, .run_count = 2}};
    assert_int_equal(zs_states_step(r.states, inputs, traffic, &seconds), ZS_ERR_ARG);
    assert_non_null(strstr(zs_last_error(), "shard 0: run 1 covers elements 5 to 15"));
    inputs[0].run_count = 1;
    inputs[0].grad = NULL;
    assert_int_equal(zs_states_step(r.states, inputs, traffic, &seconds), ZS_ERR_ARG);
    assert_non_null(strstr(zs_last_error(), "no gradient"));
    OK(rig_load(&r)); /* a refused call changes nothing */
    OK(rig_step(&r));
    rig_close(&r);
    temp_remove(&dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits_everywhere),
        cmocka_unit_test(test_same_bits_by_io_uring),
        cmocka_unit_test(test_memory_without_a_store),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_wrong_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
