/* SPDX-License-Identifier: Apache-2.0 */
/* What must not harm the store, or must be refused: damaged files, strangers' files, second
 * openers, full disks. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/util.h"
#include "faults/store_rig.h"

/* ---- refusals ---- */

static void test_existing_state(void **state)
{
    temp_dir dir;
    rig r;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    store_rig_make(config, 2);
    config.resume = 0;
    REFUSED(rig_open(&r, &config), ZS_ERR_EXISTS, "zspill-rank00000.state", "step 2", "resume",
            "another directory");
    rig_close(&r);
    config.resume = 1;
    int found;
    OK(rig_open(&r, &config));
    OK(rig_resume(&r, &found));
    assert_int_equal(found, 2);
    store_rig_expect(&r, 2);
    rig_close(&r);
    temp_remove(&dir);
}

static void test_not_committed_is_removed(void **state)
{
    temp_dir dir;
    rig r;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    char *path = store_rig_path(&dir);
    OK(rig_open(&r, &config));
    OK(rig_load(&r));
    OK(rig_step(&r));
    assert_true(store_rig_bytes(path) > 0);
    rig_close(&r);
    assert_int_equal(access(path, F_OK), -1);
    free(path);
    temp_remove(&dir);
}

static void test_mismatches(void **state)
{
    temp_dir dir;
    rig r;
    int found;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    config.fingerprint = 0xabc;
    store_rig_make(config, 1);
    config.fingerprint = 0xdef;
    OK(rig_open(&r, &config));
    REFUSED(rig_resume(&r, &found), ZS_ERR_MISMATCH, "0000000000000abc", "0000000000000def",
            "another directory");
    rig_close(&r);
    config.fingerprint = 0xabc;
    config.world = 3;
    REFUSED(rig_open(&r, &config), ZS_ERR_MISMATCH, "world of 1 ranks", "has 3",
            "another directory");
    rig_close(&r);
    config.world = 1;
    config.chunk = 8192;
    REFUSED(rig_open(&r, &config), ZS_ERR_MISMATCH, "4096", "8192", "chunk_numel");
    rig_close(&r);
    config.chunk = 0; /* takes what is there */
    OK(rig_open(&r, &config));
    OK(rig_resume(&r, &found));
    store_rig_expect(&r, 1);
    rig_close(&r);
    config.scale = 2;
    REFUSED(rig_open(&r, &config), ZS_ERR_MISMATCH, "shard 0", "20000", "40000");
    rig_close(&r);
    char *path = store_rig_path(&dir), *other = temp_path(&dir, "zspill-rank00001.state");
    assert_int_equal(rename(path, other), 0);
    config.scale = 1;
    config.rank = 1;
    config.world = 2;
    REFUSED(rig_open(&r, &config), ZS_ERR_MISMATCH, "world of 1 ranks", "has 2");
    rig_close(&r);
    free(path);
    free(other);
    temp_remove(&dir);
}

static void test_stranger(void **state)
{
    static const char text[] = "Dear diary, nobody will ever overwrite this.";
    temp_dir dir;
    rig r;
    char back[sizeof text] = {0};
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    temp_write(&dir, "zspill-rank00000.state", text, sizeof text);
    for (config.resume = 0; config.resume < 2; config.resume++) {
        REFUSED(rig_open(&r, &config), ZS_ERR_CORRUPT, "zspill-rank00000.state",
                "not a zspill store", "move it away");
        rig_close(&r);
    }
    char *path = store_rig_path(&dir);
    FILE *file = fopen(path, "r");
    assert_int_equal(fread(back, 1, sizeof back, file), sizeof back);
    fclose(file);
    assert_string_equal(back, text);
    assert_int_equal(store_rig_bytes(path), sizeof text);
    free(path);
    temp_remove(&dir);
}

static void test_second_opener(void **state)
{
    temp_dir dir;
    rig r, second;
    char pid[32];
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    snprintf(pid, sizeof pid, "process %ld:", (long)getpid());
    OK(rig_open(&r, &config));
    REFUSED(rig_open(&second, &config), ZS_ERR_LOCKED, "zspill-rank00000.state", pid);
    rig_close(&second);
    OK(rig_load(&r));
    OK(rig_commit(&r));
    REFUSED(rig_open(&second, &config), ZS_ERR_LOCKED, pid);
    rig_close(&second);

    rig_close(&r);
    OK(rig_open(&second, &config));
    rig_close(&second);
    temp_remove(&dir);
}

/* As a DataLoader's worker does: it lives on after its parent was killed, but must not keep the
 * lock. */
static void test_forked_child_outlives_holder(void **state)
{
    temp_dir dir;
    rig r;
    int ready[2], stop[2], found;
    char byte = 0;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    assert_int_equal(pipe(ready) | pipe(stop), 0);
    pid_t holder = fork();
    if (holder == 0) {
        if (rig_open(&r, &config) != ZS_OK || rig_load(&r) != ZS_OK || rig_step(&r) != ZS_OK ||
            rig_commit(&r) != ZS_OK || rig_step(&r) != ZS_OK)
            _exit(3);
        if (fork() == 0) {
            close(stop[1]);
            (void)!write(ready[1], &byte, 1);
            (void)!read(stop[0], &byte, 1);
            _exit(0);
        }
        pause();
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    REFUSED(rig_open(&r, &config), ZS_ERR_LOCKED, "held by process");
    rig_close(&r);
    kill(holder, SIGKILL);
    waitpid(holder, NULL, 0);
    OK(rig_open(&r, &config));
    OK(rig_resume(&r, &found));
    store_rig_expect(&r, 1);
    rig_close(&r);
    for (int i = 0; i < 2; i++) {
        close(stop[i]);
        close(ready[i]);
    }
    temp_remove(&dir);
}

/* The lock of the file that a store's writes go through, tried by somebody else: 0, or errno. */
static int try_writes_lock(int fd, short type)
{
    const struct flock whole = {.l_type = type, .l_whence = SEEK_SET};
    return fcntl(fd, F_OFD_SETLK, &whole) ? errno : 0;
}

static void *close_soon(void *fd)
{
    const struct timespec pause = {0, 100 * 1000 * 1000};
    nanosleep(&pause, NULL);
    close(*(int *)fd);
    return NULL;
}

/* A killed process whose writes are still under way holds the file that they go through. */
static void test_writes_under_way(void **state)
{
    temp_dir dir;
    rig r;
    int found;
    pthread_t thread;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    store_rig_make(config, 2);
    char *path = store_rig_path(&dir);
    int late = open(path, O_RDWR);
    assert_int_equal(try_writes_lock(late, F_WRLCK), 0);
    REFUSED(rig_open(&r, &config), ZS_ERR_LOCKED, path, "still under way after 5 seconds",
            "try again");
    rig_close(&r);
    assert_int_equal(pthread_create(&thread, NULL, close_soon, &late), 0);
    OK(rig_open(&r, &config));
    assert_int_equal(pthread_join(thread, NULL), 0);
    OK(rig_resume(&r, &found));
    store_rig_expect(&r, 2);
    late = open(path, O_RDWR);
    assert_int_equal(try_writes_lock(late, F_WRLCK), EAGAIN);
    rig_close(&r);
    assert_int_equal(try_writes_lock(late, F_WRLCK), 0);
    close(late);
    free(path);
    temp_remove(&dir);
}

static void test_directories(void **state)
{
    temp_dir dir;
    rig r;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    char *missing = temp_path(&dir, "no/such"), *made = temp_path(&dir, "made");
    config.dir = missing;
    REFUSED(rig_open(&r, &config), ZS_ERR_IO, "no/such", "No such file");
    rig_close(&r);
    config.dir = made;
    OK(rig_open(&r, &config));
    assert_int_equal(access(made, F_OK), 0);
    rig_close(&r);
    assert_int_equal(access(made, F_OK), -1); /* nothing was committed */
    temp_write(&dir, "file", "x", 1);
    char *file = temp_path(&dir, "file");
    config.dir = file;
    REFUSED(rig_open(&r, &config), ZS_ERR_IO, "/file", "Not a directory");
    rig_close(&r);
    if (geteuid() != 0) { /* root may write anywhere */
        assert_int_equal(chmod(dir.path, 0500), 0);
        config.dir = dir.path;
        REFUSED(rig_open(&r, &config), ZS_ERR_IO, dir.path, "ermission", "another");
        rig_close(&r);
        assert_int_equal(chmod(dir.path, 0700), 0);
    }
    config.tier = ZS_TIER_NVME;
    config.dir = NULL;
    REFUSED(rig_open(&r, &config), ZS_ERR_ARG, "nvme", "directory");
    rig_close(&r);
    free(missing);
    free(made);
    free(file);
    temp_remove(&dir);
}

static void test_disk_too_small(void **state)
{
    temp_dir dir;
    zs_ledger *ledger;
    zs_device *device;
    zs_pool *pool;
    zs_math *math;
    zs_io *io;
    zs_states *states;
    temp_make(&dir);
    OK(zs_ledger_open(&ledger));
    OK(zs_device_open_host(&device));
    OK(zs_pool_open(1, -1, &pool));
    OK(zs_math_open_host(pool, &math));
    OK(zs_io_open(ZS_IO_POSIX, 0, NULL, &io));
    zs_states_shard shard = {.numel = 1ull << 41, .working_dtype = ZS_BF16};
    zs_states_config config = {.tier = ZS_TIER_NVME,
                               .dir = dir.path,
                               .world = 1,
                               .io = io,
                               .device = device,
                               .math = math,
                               .ledger = ledger,
                               .shards = &shard,
                               .shard_count = 1};
    REFUSED(zs_states_open(&config, &states), ZS_ERR_NOSPACE, "zspill-rank00000.state", "needs",
            "bytes", "free");
    assert_null(states);
    char *path = store_rig_path(&dir);
    assert_int_equal(access(path, F_OK), -1);
    free(path);
    config.buffer_bytes = 4096;
    config.chunk_numel = 4096;
    shard.numel = 1 << 20;
    REFUSED(zs_states_open(&config, &states), ZS_ERR_ARG, "buffer_bytes 4096", "147456");
    config.chunk_numel = 1000;
    REFUSED(zs_states_open(&config, &states), ZS_ERR_ARG, "chunk_numel 1000", "4096");
    zs_memory_row rows[8];
    size_t count;
    zs_ledger_rows(ledger, rows, 8, &count);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(rows[i].bytes, 0);
    zs_io_close(&io);
    zs_math_close(&math);
    zs_pool_close(&pool);
    zs_device_close(&device);
    zs_ledger_close(&ledger);
    temp_remove(&dir);
}

static void test_file_size_limit(void **state)
{
    temp_dir dir;
    rig r;
    temp_make(&dir);
    struct rlimit old, low;
    rig_config config = store_rig_nvme(&dir);
    getrlimit(RLIMIT_FSIZE, &old);
    low = old;
    low.rlim_cur = 65536;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    zs_status status = rig_open(&r, &config);
    setrlimit(RLIMIT_FSIZE, &old);
    REFUSED(status, ZS_ERR_NOSPACE, "needs", "free");
    rig_close(&r);
    char *path = store_rig_path(&dir);
    assert_int_equal(access(path, F_OK), -1);
    free(path);
    temp_remove(&dir);
}

/* ---- damage ---- */

static void test_flipped_bit_in_chunks(void **state)
{
    static const char *const arrays[] = {"master", "exp_avg", "exp_avg_sq"};
    zs_store_geometry g;
    store_rig_geometry(&g);
    for (int a = 0; a < 3; a++)
        for (size_t c = 0; c < g.chunk_count; c += 7) {
            temp_dir dir;
            rig r;
            int found;
            uint64_t steps[ZS_STATES_COMMITS_MOST];
            char header[8], number[32], where[32];
            size_t bytes = sizeof header;
            temp_make(&dir);
            rig_config config = store_rig_nvme(&dir);
            store_rig_make(config, 4);
            char *path = store_rig_path(&dir);
            /* One of the two slots is that of step 4. */
            for (int slot = 0; slot < 2; slot++)
                store_rig_flip(path, zs_store_slot_offset(&g.chunks[c], slot) +
                                         (uint64_t)a * g.chunks[c].stride + 100);
            snprintf(number, sizeof number, "chunk %zu ", c);
            OK(rig_open(&r, &config));
            OK(zs_states_committed(r.states, steps, &found));
            assert_int_equal(found, 2);
            REFUSED(zs_states_resume(r.states, steps[0], header, &bytes), ZS_ERR_CORRUPT, path,
                    number, arrays[a], "offset", "checksum");
            snprintf(where, sizeof where, "offset %llu:",
                     (unsigned long long)(zs_store_slot_offset(&g.chunks[c], 0) +
                                          (uint64_t)a * g.chunks[c].stride));
            if (!strstr(zs_last_error(), where)) {
                snprintf(where, sizeof where, "offset %llu:",
                         (unsigned long long)(zs_store_slot_offset(&g.chunks[c], 1) +
                                              (uint64_t)a * g.chunks[c].stride));
                store_rig_says(__LINE__, (const char *const[]){where, NULL});
            }
            /* Nothing but a resume is possible then. */
            REFUSED(rig_step(&r), ZS_ERR_MISUSE, "resume");
            rig_close(&r);
            free(path);
            temp_remove(&dir);
        }
    zs_store_geometry_free(&g);
}

/* A bit that flips while the run goes on stops the step, and the commit stays. */
static void test_flipped_bit_during_run(void **state)
{
    temp_dir dir;
    rig r;
    zs_store_geometry g;
    store_rig_geometry(&g);
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    config.buffer = 3 * 12 * 4096;
    OK(rig_open(&r, &config));
    OK(rig_load(&r));
    OK(rig_step(&r));
    OK(rig_commit(&r));
    char *path = store_rig_path(&dir);
    for (int slot = 0; slot < 2; slot++)
        store_rig_flip(path, zs_store_slot_offset(&g.chunks[1], slot) + g.chunks[1].stride);
    REFUSED(rig_step(&r), ZS_ERR_CORRUPT, "chunk 1 ", "exp_avg", "checksum");
    REFUSED(rig_commit(&r), ZS_ERR_MISUSE, "failed half-way");
    for (int slot = 0; slot < 2; slot++)
        store_rig_flip(path, zs_store_slot_offset(&g.chunks[1], slot) + g.chunks[1].stride);
    int found;
    OK(rig_resume(&r, &found));
    store_rig_expect(&r, 1);
    OK(rig_step(&r));
    store_rig_expect(&r, 2);
    rig_close(&r);
    free(path);
    zs_store_geometry_free(&g);
    temp_remove(&dir);
}

/* Steps 1 and 2 are committed, to superblocks A and B. */
static void test_damaged_superblocks(void **state)
{
    zs_store_geometry g;
    store_rig_geometry(&g);
    uint64_t area[2] = {4096, 4096 + g.superblock_bytes};
    for (uint64_t at = 0; at < 600; at += 37) {
        temp_dir dir;
        rig r;
        int found;
        temp_make(&dir);
        rig_config config = store_rig_nvme(&dir);
        store_rig_make(config, 2);
        char *path = store_rig_path(&dir);
        store_rig_flip(path, area[1] + at);
        store_rig_logged[0] = 0;
        OK(rig_open(&r, &config));
        if (!strstr(store_rig_logged, "superblock B") ||
            !strstr(store_rig_logged, "step 1 of superblock A"))
            fail_msg("byte %llu: nothing of superblock B in: %s", (unsigned long long)at,
                     store_rig_logged);
        OK(rig_resume(&r, &found));
        assert_int_equal(found, 1);
        store_rig_expect(&r, 1);
        OK(rig_step(&r));
        OK(rig_commit(&r)); /* over the damaged one */
        rig_close(&r);
        OK(rig_open(&r, &config));
        OK(rig_resume(&r, &found));
        assert_int_equal(found, 2);
        store_rig_expect(&r, 2);
        rig_close(&r);
        store_rig_flip(path, area[0] + at);
        store_rig_flip(path, area[1] + at);
        REFUSED(rig_open(&r, &config), ZS_ERR_CORRUPT, path, "no superblock is whole", "copy");
        rig_close(&r);
        assert_true(store_rig_bytes(path) == g.file_bytes);
        free(path);
        temp_remove(&dir);
    }
    zs_store_geometry_free(&g);
}

static void test_damaged_label(void **state)
{
    for (uint64_t at = 0; at < 64; at += 5) {
        temp_dir dir;
        rig r;
        temp_make(&dir);
        rig_config config = store_rig_nvme(&dir);
        store_rig_make(config, 1);
        char *path = store_rig_path(&dir);
        store_rig_flip(path, at);
        if (rig_open(&r, &config) != ZS_ERR_CORRUPT)
            fail_msg("byte %llu of the label: %s", (unsigned long long)at, zs_last_error());
        store_rig_says(__LINE__, (const char *const[]){path, "another directory", NULL});
        rig_close(&r);
        free(path);
        temp_remove(&dir);
    }
}

static void test_truncated(void **state)
{
    temp_dir dir;
    rig r;
    temp_make(&dir);
    rig_config config = store_rig_nvme(&dir);
    store_rig_make(config, 2);
    char *path = store_rig_path(&dir);
    uint64_t bytes = store_rig_bytes(path);
    const uint64_t lengths[] = {bytes - 1, bytes / 2, 8192, 4096, 100};
    for (size_t i = 0; i < ZS_COUNT(lengths); i++) {
        assert_int_equal(truncate(path, (off_t)lengths[i]), 0);
        REFUSED(rig_open(&r, &config), ZS_ERR_CORRUPT, path, "truncated", "copy");
        rig_close(&r);
        assert_true(store_rig_bytes(path) == lengths[i]);
    }
    assert_int_equal(truncate(path, 20), 0);
    REFUSED(rig_open(&r, &config), ZS_ERR_CORRUPT, path);
    rig_close(&r);
    free(path);
    temp_remove(&dir);
}

/* Every byte of a superblock counts, and no garbage is taken for one. */
static void test_superblock_encoding(void **state)
{
    zs_store_shard shards[2] = {{8193, ZS_BF16}, {0, ZS_FP32}};
    zs_store_slot slots[3] = {{0, {1, 2, 3}}, {0, {4, 5, 6}}, {0, {7, 8, 9}}};
    unsigned char header[5] = "abcd";
    zs_superblock super = {.fingerprint = 0x1122334455667788,
                           .lineage = 2,
                           .commit = 9,
                           .run = 0x0badf00d,
                           .slot_count = 1,
                           .dirty = 1,
                           .sequence = 3,
                           .step = 4,
                           .chunk_numel = 4096,
                           .rank = 5,
                           .world = 6,
                           .shards = shards,
                           .shard_count = 2,
                           .slots = slots,
                           .chunk_count = 3,
                           .header = header,
                           .header_bytes = sizeof header};
    zs_superblock back;
    uint64_t bytes = zs_superblock_bytes(&super);
    assert_int_equal(bytes, 128 + 2 * 16 + 3 * 16 + 5);
    unsigned char *data = malloc(bytes);
    zs_superblock_encode(&super, data);
    /* Little-endian at the offsets of docs/format.md. */
    assert_memory_equal(data, "ZSPSUPER\2\0\0\0", 12);
    assert_memory_equal(data + 24, "\x88\x77\x66\x55\x44\x33\x22\x11\6\0\0\0\5\0\0\0", 16);
    assert_memory_equal(data + 96, "\x0d\xf0\xad\x0b\0\0\0\0\1\0\0\0\1\0\0\0", 16);
    assert_memory_equal(data + 128, "\1\x20\0\0\0\0\0\0\1\0\0\0", 12);
    assert_memory_equal(data + 160, "\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0", 16);
    assert_memory_equal(data + 208, "abcd", 5);
    OK(zs_superblock_decode(data, bytes, &back));
    assert_int_equal(back.step, 4);
    assert_true(back.run == 0x0badf00d && back.dirty && back.slot_count == 1);
    assert_int_equal(back.slots[2].crc[2], 9);
    assert_memory_equal(back.header, header, sizeof header);
    zs_superblock_free(&back);
    for (uint64_t i = 0; i < bytes; i++) {
        data[i] ^= 1;
        if (zs_superblock_decode(data, bytes, &back) != ZS_ERR_CORRUPT)
            fail_msg("byte %llu may change unseen", (unsigned long long)i);
        data[i] ^= 1;
    }
    for (uint64_t n = 0; n < bytes; n++)
        assert_int_equal(zs_superblock_decode(data, n, &back), ZS_ERR_CORRUPT);
    free(data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_existing_state),
        cmocka_unit_test(test_not_committed_is_removed),
        cmocka_unit_test(test_mismatches),
        cmocka_unit_test(test_stranger),
        cmocka_unit_test(test_second_opener),
        cmocka_unit_test(test_forked_child_outlives_holder),
        cmocka_unit_test(test_writes_under_way),
        cmocka_unit_test(test_directories),
        cmocka_unit_test(test_disk_too_small),
        cmocka_unit_test(test_file_size_limit),
        cmocka_unit_test(test_flipped_bit_in_chunks),
        cmocka_unit_test(test_flipped_bit_during_run),
        cmocka_unit_test(test_damaged_superblocks),
        cmocka_unit_test(test_damaged_label),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_superblock_encoding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
