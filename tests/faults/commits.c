/* SPDX-License-Identifier: Apache-2.0 */
/* What commits leave behind, and what is resumed: after kill -9, a commit that only some ranks
 * finished, a start over, one slot. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/util.h"
#include "faults/store_rig.h"

/* ---- kill -9 ---- */

static void work_until_killed(rig_config config, int commits)
{
    rig r;
    int found;
    if (rig_open(&r, &config) != ZS_OK || rig_resume(&r, &found) != ZS_OK ||
        (!found && (rig_load(&r) != ZS_OK || rig_commit(&r) != ZS_OK))) {
        fprintf(stderr, "child: %s\n", zs_last_error());
        _exit(3);
    }
    for (;;)
        if (rig_step(&r) != ZS_OK || rig_commit(&r) != ZS_OK) {
            fprintf(stderr, "child: %s\n", zs_last_error());
            _exit(4);
        } else if (write(commits, "", 1) != 1) {
            _exit(5);
        }
}

static void kill_often(zs_tier tier, zs_io_engine engine, int rounds, unsigned seed)
{
    temp_dir dir;
    rig r;
    int found, resumed = 0;
    uint64_t last = 0;
    rig_reference ref;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    config.tier = tier;
    config.engine = engine;
    config.buffer = 4 * 12 * 4096;
    rig_reference_open(&ref, 1);
    /* On a busy machine the first commit may take long: then more rounds, and longer ones. */
    for (int round = 0; round < rounds || (!resumed && round < 200); round++) {
        config.params = round & 1;
        int commits[2];
        char one;
        assert_int_equal(pipe(commits), 0);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0)
            work_until_killed(config, commits[1]);
        close(commits[1]);
        /* However slow the machine, the later rounds are killed after a commit or more. */
        if (round > 1)
            assert_int_equal(read(commits[0], &one, 1), 1);
        /* From before the first commit to many steps later. */
        seed = seed * 1103515245u + 12345u;
        long most = 20 + ZS_MIN(round, 40) * 20L;
        struct timespec pause = {0, (long)(seed >> 8) % most * 1000000L};
        nanosleep(&pause, NULL);
        kill(child, SIGKILL);
        close(commits[0]);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        if (!WIFSIGNALED(status))
            fail_msg("round %d: the child ended by itself: %d", round, WEXITSTATUS(status));
        OK(rig_open(&r, &config));
        OK(rig_resume(&r, &found));
        if (!found) {
            assert_int_equal(last, 0); /* nothing that was committed may vanish */
            rig_close(&r);
            continue;
        }
        if (r.step < last)
            fail_msg("round %d: step %llu after step %llu", round, (unsigned long long)r.step,
                     (unsigned long long)last);
        char what[128];
        rig_reference_advance(&ref, r.step);
        if (rig_differs(&r, &ref, what))
            fail_msg("round %d, step %llu: %s", round, (unsigned long long)r.step, what);
        resumed += r.step > last;
        last = r.step;
        rig_close(&r);
    }
    assert_true(resumed > 0);
    rig_reference_close(&ref);
    temp_remove(&dir);
}

static int kill_rounds(void)
{
    const char *text = getenv("ZSPILL_KILL_ROUNDS");
    return text ? atoi(text) : 8;
}

static void test_kill_nvme(void **state)
{
    kill_often(ZS_TIER_NVME, ZS_IO_AUTO, kill_rounds(), 1);
    kill_often(ZS_TIER_NVME, ZS_IO_POSIX, kill_rounds(), 2);
}

static void test_kill_host(void **state)
{
    kill_often(ZS_TIER_HOST, ZS_IO_AUTO, kill_rounds(), 3);
}

/* ---- what a prepare without publish, and an older commit, leave ---- */

static void test_prepared_only(void **state)
{
    temp_dir dir;
    rig r;
    int found;
    for (int tier = 0; tier < ZS_TIERS; tier++) {
        temp_make(&dir);
        rig_config config = store_rig_nvme(&dir);
        config.tier = (zs_tier)tier;
        store_rig_make(config, 2);
        OK(rig_open(&r, &config));
        OK(rig_resume(&r, &found));
        OK(rig_step(&r));
        OK(zs_states_commit_prepare(r.states)); /* another rank failed: no publish */
        rig_close(&r);
        OK(rig_open(&r, &config));
        OK(rig_resume(&r, &found));
        store_rig_expect(&r, 2);
        /* And when the run goes on instead. */
        OK(rig_step(&r));
        OK(zs_states_commit_prepare(r.states));
        OK(rig_step(&r));
        OK(rig_commit(&r));
        rig_close(&r);
        OK(rig_open(&r, &config));
        OK(rig_resume(&r, &found));
        store_rig_expect(&r, 4);
        rig_close(&r);
        temp_remove(&dir);
    }
}

/* Another rank only has the step before the newest: this one goes back. */
static void test_one_ahead(void **state)
{
    temp_dir dir;
    rig r;
    uint64_t steps[2];
    int found;
    char header[100];
    size_t bytes = sizeof header;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    store_rig_make(config, 3);
    OK(rig_open(&r, &config));
    OK(zs_states_committed(r.states, steps, &found));
    assert_int_equal(found, 2);
    assert_int_equal(steps[0], 3);
    assert_int_equal(steps[1], 2);
    REFUSED(zs_states_resume(r.states, 7, header, &bytes), ZS_ERR_ARG, "no commit 7");
    OK(zs_states_resume(r.states, 2, header, &bytes));
    r.step = 2;
    assert_int_equal(bytes, 100);
    assert_string_equal(header, "step 2");
    for (size_t s = 0; s < RIG_SHARDS; s++) { /* working copies follow the masters */
        float *master = calloc(r.shards[s].numel + 1, sizeof(float));
        OK(zs_states_read(r.states, s, ZS_MASTER, 0, r.shards[s].numel, master));
        zs_kernels_get()->cast[r.shards[s].working_dtype][ZS_FP32](r.shards[s].numel, r.working[s],
                                                                   master);
        free(master);
    }
    store_rig_expect(&r, 2);
    OK(rig_step(&r));
    OK(rig_step(&r));
    OK(rig_commit(&r)); /* replaces the abandoned step 3 */
    OK(zs_states_committed(r.states, steps, &found));
    assert_int_equal(steps[0], 4);
    assert_int_equal(steps[1], 2);
    rig_close(&r);
    OK(rig_open(&r, &config));
    OK(rig_resume(&r, &found));
    store_rig_expect(&r, 4);
    rig_close(&r);
    temp_remove(&dir);
}

/* A commit without a step in between writes no chunk again, but keeps a changed master. */
static void test_commit_twice(void **state)
{
    temp_dir dir;
    rig r;
    int found;
    zs_io_stats before, after;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    OK(rig_open(&r, &config));
    OK(rig_load(&r));
    OK(rig_step(&r));
    OK(rig_commit(&r));
    zs_io_get_stats(r.io, &before);
    OK(rig_commit(&r));
    zs_io_get_stats(r.io, &after);
    zs_store_geometry g;
    store_rig_geometry(&g);
    assert_true(after.written_bytes - before.written_bytes <= g.superblock_bytes);
    zs_store_geometry_free(&g);
    r.own_master[1][7] = 0.125f; /* the caller's own copy, changed without a word */
    OK(rig_commit(&r));
    rig_close(&r);
    OK(rig_open(&r, &config));
    OK(rig_resume(&r, &found));
    assert_true(r.own_master[1][7] == 0.125f);
    rig_close(&r);
    temp_remove(&dir);
}

/* Starting afresh on top of an old run keeps it until the first commit, and no longer. */
static void test_afresh_over_old(void **state)
{
    temp_dir dir;
    rig r;
    uint64_t steps[2];
    int found;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    store_rig_make(config, 3);
    OK(rig_open(&r, &config));
    OK(rig_load(&r));
    OK(rig_step(&r));
    rig_close(&r);
    OK(rig_open(&r, &config));
    OK(rig_resume(&r, &found));
    store_rig_expect(&r, 3);
    rig_close(&r);
    OK(rig_open(&r, &config));
    OK(rig_load(&r));
    OK(rig_commit(&r));
    OK(zs_states_committed(r.states, steps, &found));
    assert_int_equal(found, 1);
    assert_int_equal(steps[0], 0);
    rig_close(&r);
    temp_remove(&dir);
}

/* One slot: half the file, and what is written over is not taken for state. */
static void one_slot(zs_tier tier, int aliased)
{
    temp_dir dir;
    rig r;
    int found;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    config.tier = tier;
    config.aliased = aliased;
    char *path = store_rig_path(&dir);
    store_rig_make(config, 1);
    const uint64_t two = store_rig_bytes(path);
    assert_int_equal(unlink(path), 0);
    config.slots = 1;
    store_rig_make(config, 3);
    assert_true(store_rig_bytes(path) < two * 6 / 10);
    OK(rig_open(&r, &config));
    OK(rig_resume(&r, &found));
    assert_int_equal(r.step, 3);
    store_rig_expect(&r, 3);
    OK(rig_step(&r));
    OK(rig_commit(&r));
    rig_close(&r);
    OK(rig_open(&r, &config));
    OK(rig_resume(&r, &found));
    assert_int_equal(r.step, 4);
    store_rig_expect(&r, 4);
    OK(rig_step(&r));
    OK(zs_states_commit_prepare(r.states));
    rig_close(&r); /* as a crash would end it */
    OK(rig_open(&r, &config));
    REFUSED(rig_resume(&r, &found), ZS_ERR_CORRUPT, path, "one slot", "write over step 4",
            "start afresh in an empty directory");
    rig_close(&r);
    config.slots = 2;
    REFUSED(rig_open(&r, &config), ZS_ERR_MISMATCH, path, "1 slot(s)", "asks for 2");
    rig_close(&r);
    free(path);
    temp_remove(&dir);
}

static void test_one_slot_nvme(void **state)
{
    one_slot(ZS_TIER_NVME, 0);
}

static void test_one_slot_partly_resident(void **state)
{
    one_slot(ZS_TIER_NVME, 1);
}

static void test_one_slot_host(void **state)
{
    one_slot(ZS_TIER_HOST, 1);
}

static void test_other_run(void **state)
{
    temp_dir dir;
    rig r;
    int found;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    config.run = 7;
    store_rig_make(config, 2);
    config.run = 8;
    OK(rig_open(&r, &config));
    REFUSED(rig_resume(&r, &found), ZS_ERR_MISMATCH, "zspill-rank00000.state", "another run",
            "from one copy");
    rig_close(&r);
    temp_remove(&dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kill_nvme),     cmocka_unit_test(test_kill_host),
        cmocka_unit_test(test_prepared_only), cmocka_unit_test(test_one_ahead),
        cmocka_unit_test(test_commit_twice),  cmocka_unit_test(test_afresh_over_old),
        cmocka_unit_test(test_one_slot_nvme), cmocka_unit_test(test_one_slot_partly_resident),
        cmocka_unit_test(test_one_slot_host), cmocka_unit_test(test_other_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
