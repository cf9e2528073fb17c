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

/* Working copies are made from the masters, as the engine does it. */
static void follow_masters(rig *r)
{
    for (size_t s = 0; s < RIG_SHARDS; s++) {
        float *master = calloc(r->shards[s].numel + 1, sizeof(float));
        OK(zs_states_read(r->states, s, ZS_MASTER, 0, r->shards[s].numel, master));
        zs_kernels_get()->cast[r->shards[s].working_dtype][ZS_FP32](r->shards[s].numel,
                                                                    r->working[s], master);
        free(master);
    }
}

/* Another rank only has the step before the newest: this one goes back. */
static void test_one_ahead(void **state)
{
    temp_dir dir;
    rig r;
    uint64_t steps[ZS_STATES_COMMITS_MOST];
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
    REFUSED(zs_states_resume(r.states, 2, header, &bytes), ZS_ERR_ARG, "commit 2 is not kept",
            "there are 3:");
    OK(zs_states_adopt(r.states, 2));
    OK(zs_states_resume(r.states, 2, header, &bytes));
    r.step = 2;
    assert_int_equal(bytes, 100);
    assert_string_equal(header, "step 2");
    follow_masters(&r);
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
    uint64_t steps[ZS_STATES_COMMITS_MOST];
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

/* ---- older commits ---- */

/* The present step as commit number `commit`. */
static void commit_as(rig *r, uint64_t commit)
{
    OK(zs_states_commit_prepare(r->states));
    OK(zs_states_commit_publish(r->states, commit, r->step, &r->step, sizeof r->step));
}

static void go_to(rig *r, uint64_t commit)
{
    size_t bytes = sizeof r->step;
    OK(zs_states_resume(r->states, commit, &r->step, &bytes));
    assert_int_equal(bytes, sizeof r->step);
    follow_masters(r);
}

/* Opens, takes commits[0] for the one that all ranks have, and finds each of these, and no other
 * one, whole. steps: of each. */
static void expect_kept(rig *r, const rig_config *config, const uint64_t *commits,
                        const uint64_t *steps, int count)
{
    uint64_t there[ZS_STATES_COMMITS_MOST];
    int found, seen = 0;
    OK(rig_open(r, config));
    OK(zs_states_committed(r->states, there, &found));
    OK(zs_states_adopt(r->states, commits[0]));
    for (int i = count - 1; i >= 0; i--) {
        go_to(r, commits[i]);
        store_rig_expect(r, steps[i]);
    }
    for (int i = 0; i < found; i++) {
        uint64_t step;
        size_t bytes = sizeof step;
        if (seen < count && there[i] == commits[seen])
            seen++;
        else
            REFUSED(zs_states_resume(r->states, there[i], &step, &bytes), ZS_ERR_ARG, "is not kept",
                    "zspill-rank00000.state");
    }
    assert_int_equal(seen, count);
}

static void keep_two(zs_tier tier, int aliased)
{
    temp_dir dir;
    rig r;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    config.tier = tier;
    config.aliased = aliased;
    config.slots = 4;
    OK(rig_open(&r, &config));
    OK(rig_load(&r));
    while (r.step < 6) {
        OK(rig_step(&r));
        commit_as(&r, r.step);
    }
    rig_close(&r);
    config.resume = 1;
    const uint64_t six[] = {6, 5, 4};
    expect_kept(&r, &config, six, six, 3);
    /* Steps from the newest, and from the oldest, leave all of them as they are. */
    for (int i = 0; i < 3; i += 2) {
        go_to(&r, six[i]);
        OK(rig_step(&r));
        OK(zs_states_commit_prepare(r.states));
        OK(rig_step(&r));
        OK(zs_states_commit_prepare(r.states));
        rig_close(&r);
        expect_kept(&r, &config, six, six, 3);
    }
    /* Going back is a commit like any other: what was newer counts as older then. */
    go_to(&r, 4);
    OK(rig_step(&r));
    commit_as(&r, 7);
    rig_close(&r);
    const uint64_t seven[] = {7, 6, 5}, seven_steps[] = {5, 6, 5};
    expect_kept(&r, &config, seven, seven_steps, 3);
    rig_close(&r);
    /* When another rank does not have it, nothing has happened. */
    expect_kept(&r, &config, six, six, 3);
    OK(rig_step(&r));
    commit_as(&r, 8); /* over the abandoned one */
    rig_close(&r);
    const uint64_t eight[] = {8, 6, 5}, eight_steps[] = {7, 6, 5};
    expect_kept(&r, &config, eight, eight_steps, 3);
    rig_close(&r);
    temp_remove(&dir);
}

static void test_keep_nvme(void **state)
{
    keep_two(ZS_TIER_NVME, 0);
}

static void test_keep_partly_resident(void **state)
{
    keep_two(ZS_TIER_NVME, 1);
}

static void test_keep_host(void **state)
{
    keep_two(ZS_TIER_HOST, 1);
}

/* A commit whose superblock is damaged is one fewer, and the others stay. */
static void test_keep_damaged(void **state)
{
    temp_dir dir;
    rig r;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    config.slots = 4;
    OK(rig_open(&r, &config));
    OK(rig_load(&r));
    while (r.step < 6) {
        OK(rig_step(&r));
        commit_as(&r, r.step);
    }
    rig_close(&r);
    char *path = store_rig_path(&dir);
    config.resume = 1;
    store_rig_flip(path, ZS_PAGE + 200); /* commits 1 and 5 */
    const uint64_t left[] = {6, 4, 3};
    expect_kept(&r, &config, left, left, 3);
    go_to(&r, 6);
    OK(rig_step(&r));
    commit_as(&r, 7);
    rig_close(&r);
    const uint64_t after[] = {7, 6, 4};
    expect_kept(&r, &config, after, after, 3);
    rig_close(&r);
    store_rig_flip(path, 20); /* the label's count of superblocks */
    REFUSED(rig_open(&r, &config), ZS_ERR_CORRUPT, path, "its label", "is damaged");
    rig_close(&r);
    free(path);
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

/* One slot, and another rank lacks the newest commit: the one before serves where nothing has been
 * written over since. */
static void test_one_slot_one_ahead(void **state)
{
    temp_dir dir;
    rig r;
    uint64_t commits[ZS_STATES_COMMITS_MOST];
    int found;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    config.slots = 1;
    OK(rig_open(&r, &config));
    OK(rig_load(&r));
    while (r.step < 3) {
        OK(rig_step(&r));
        commit_as(&r, r.step);
    }
    commit_as(&r, 4); /* after a step that was skipped */
    rig_close(&r);
    OK(rig_open(&r, &config));
    OK(zs_states_committed(r.states, commits, &found));
    assert_int_equal(found, 2);
    assert_int_equal(commits[0], 4);
    assert_int_equal(commits[1], 3);
    OK(zs_states_adopt(r.states, 3));
    go_to(&r, 3);
    store_rig_expect(&r, 3);
    OK(rig_step(&r));
    commit_as(&r, 5);
    OK(zs_states_committed(r.states, commits, &found));
    assert_int_equal(found, 1);
    assert_int_equal(commits[0], 5);
    store_rig_expect(&r, 4);
    rig_close(&r);
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
        cmocka_unit_test(test_kill_nvme),
        cmocka_unit_test(test_kill_host),
        cmocka_unit_test(test_prepared_only),
        cmocka_unit_test(test_one_ahead),
        cmocka_unit_test(test_commit_twice),
        cmocka_unit_test(test_afresh_over_old),
        cmocka_unit_test(test_one_slot_one_ahead),
        cmocka_unit_test(test_one_slot_nvme),
        cmocka_unit_test(test_one_slot_partly_resident),
        cmocka_unit_test(test_one_slot_host),
        cmocka_unit_test(test_other_run),
        cmocka_unit_test(test_keep_nvme),
        cmocka_unit_test(test_keep_partly_resident),
        cmocka_unit_test(test_keep_host),
        cmocka_unit_test(test_keep_damaged),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
