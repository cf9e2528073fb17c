/* SPDX-License-Identifier: Apache-2.0 */
/* What survives a power cut: all that was flushed, and of the rest what the seed says. */
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "base/util.h"
#include "io/fault.h"
#include "io_common.h"

enum { SECTOR = 512, REQUESTS = 6, BYTES = REQUESTS * ZS_IO_REQUEST };

/* Three versions of the file, and what is left of them. */
static unsigned char *flushed, *first, *second, *left;
static size_t left_bytes;

static zs_faults *open_faults(const char *format, int seed)
{
    zs_faults *faults = NULL;
    char spec[128];

    snprintf(spec, sizeof spec, format, seed);
    assert_int_equal(zs_faults_open(spec, &faults), ZS_OK);
    return faults;
}

static zs_io *open_over(void **state, zs_faults *faults)
{
    zs_io *io = NULL;
    char reason[256];

    if (zs_io_probe(engine_of(state), reason, sizeof reason) == ZS_ERR_UNSUPPORTED)
        skip();
    assert_int_equal(zs_io_open_faults(engine_of(state), 0, &test_log, faults, &io), ZS_OK);
    return io;
}

static zs_status put(zs_io *io, zs_file *file, uint64_t offset, const unsigned char *data,
                     size_t bytes)
{
    zs_io_req req = {0};

    assert_int_equal(zs_io_write(io, file, offset, data + offset, bytes, &req), ZS_OK);
    return zs_io_wait(io, &req);
}

static void look(const char *name)
{
    struct stat st;
    int fd = open(path_of(name), O_RDONLY);

    assert_true(fd >= 0);
    assert_int_equal(fstat(fd, &st), 0);
    left_bytes = (size_t)st.st_size;
    assert_true(left_bytes <= BYTES);
    memset(left, 0, BYTES);
    assert_int_equal(pread(fd, left, left_bytes, 0), left_bytes);
    close(fd);
}

/* Of which versions (a bit each) the sectors of request i are. Fails for a sector of none. */
static unsigned versions_of(int i)
{
    const unsigned char *const all[] = {flushed, first, second};
    unsigned seen = 0;

    for (size_t at = (size_t)i * ZS_IO_REQUEST; at < (size_t)(i + 1) * ZS_IO_REQUEST;
         at += SECTOR) {
        unsigned version = 0;
        while (version < ZS_COUNT(all) && memcmp(left + at, all[version] + at, SECTOR) != 0)
            version++;
        if (version == ZS_COUNT(all))
            fail_msg("sector at %zu is of no version", at);
        seen |= 1u << version;
    }
    return seen;
}

/* The first half is flushed and written again, part of it twice; the power fails with one more
 * write. */
static void write_and_cut(zs_io *io, zs_file *file, zs_status expected)
{
    assert_int_equal(put(io, file, 0, flushed, BYTES), ZS_OK);
    assert_int_equal(zs_file_sync(io, file), ZS_OK);
    assert_int_equal(put(io, file, ZS_IO_REQUEST, first, 4 * ZS_IO_REQUEST), ZS_OK);
    assert_int_equal(put(io, file, 3 * ZS_IO_REQUEST, second, ZS_IO_REQUEST), ZS_OK);
    assert_int_equal(put(io, file, 5 * ZS_IO_REQUEST, first, ZS_IO_REQUEST), expected);
}

static void test_cut(void **state)
{
    unsigned single = 0, twice = 0, last = 0;

    for (int seed = 0; seed < 24; seed++) {
        /* One allocation, six writes and a flush, four and one and one: the last is the 14th. */
        zs_faults *faults = open_faults("change@14=cut;seed=%d", seed);
        zs_io *io = open_over(state, faults);
        zs_file *file = NULL;
        zs_io_req req = {0};
        assert_int_equal(zs_file_open(io, path_of("cut"), ZS_FILE_CREATE, BYTES, &file), ZS_OK);
        write_and_cut(io, file, ZS_ERR_IO);
        check_message("Input/output error");
        /* It is dark. */
        assert_int_equal(put(io, file, 0, second, 4096), ZS_ERR_IO);
        assert_int_equal(zs_file_sync(io, file), ZS_ERR_IO);
        assert_int_equal(zs_io_read(io, file, 0, left, 4096, &req), ZS_OK);
        assert_int_equal(zs_io_wait(io, &req), ZS_ERR_IO);
        zs_file_close(&file);
        zs_io_close(&io);
        zs_faults_close(&faults);
        look("cut");
        assert_int_equal(left_bytes, BYTES);
        assert_int_equal(versions_of(0), 1);
        for (int i = 1; i < 5; i++) {
            unsigned seen = versions_of(i);
            if (i == 3) {
                twice |= 1u << seen;
                continue;
            }
            assert_int_equal(seen & 4, 0);
            single |= 1u << seen;
        }
        assert_int_equal(versions_of(5) & 4, 0);
        last |= 1u << versions_of(5);
    }
    /* Dropped, kept and torn, each was there; written twice, more mixtures than that. */
    assert_int_equal(single, 1u << 1 | 1u << 2 | 1u << 3);
    assert_int_equal(last, 1u << 1 | 1u << 2 | 1u << 3);
    assert_true(twice & 1u << 1);
    assert_true(twice & 1u << 2);
    assert_true(twice & 1u << 4);
    assert_true(twice & (1u << 3 | 1u << 5 | 1u << 6 | 1u << 7));
}

/* A flush during which the power fails has not happened; one that failed has not, either. */
static void test_cut_in_flush(void **state)
{
    static const char *const specs[] = {"sync@2=cut;seed=%d", "sync@2=EIO;sync@3=cut;seed=%d"};
    unsigned seen = 0;

    for (int seed = 0; seed < 12; seed++) {
        zs_faults *faults = open_faults(specs[seed % 2], seed);
        zs_io *io = open_over(state, faults);
        zs_file *file = NULL;
        assert_int_equal(zs_file_open(io, path_of("flush"), ZS_FILE_CREATE, BYTES, &file), ZS_OK);
        assert_int_equal(put(io, file, 0, flushed, BYTES), ZS_OK);
        assert_int_equal(zs_file_sync(io, file), ZS_OK);
        assert_int_equal(put(io, file, 0, first, BYTES), ZS_OK);
        assert_int_equal(zs_file_sync(io, file), ZS_ERR_IO);
        if (seed % 2)
            assert_int_equal(zs_file_sync(io, file), ZS_ERR_IO);
        zs_file_close(&file);
        zs_io_close(&io);
        zs_faults_close(&faults);
        look("flush");
        for (int i = 0; i < REQUESTS; i++)
            seen |= 1u << versions_of(i);
    }
    assert_int_equal(seen, 1u << 1 | 1u << 2 | 1u << 3);
}

/* The same seed leaves the same file, whether the process goes on or not. */
static void test_kill(void **state)
{
    static unsigned char *again;
    int result = -1;
    pid_t pid;

    again = again ? again : map_pages(BYTES);
    for (int mode = 0; mode < 2; mode++) {
        fflush(NULL);
        pid = fork();
        if (!pid) {
            zs_faults *faults =
                open_faults(mode ? "change@14=cut:kill;seed=%d" : "change@14=cut;seed=%d", 5);
            zs_io *io = open_over(state, faults);
            zs_file *file = NULL;
            if (zs_file_open(io, path_of("kill"), ZS_FILE_CREATE, BYTES, &file) != ZS_OK)
                _exit(2);
            write_and_cut(io, file, ZS_ERR_IO);
            _exit(0);
        }
        assert_int_equal(waitpid(pid, &result, 0), pid);
        if (!mode) {
            assert_int_equal(result, 0);
            look("kill");
            memcpy(again, left, BYTES);
        }
    }
    assert_true(WIFSIGNALED(result));
    assert_int_equal(WTERMSIG(result), SIGKILL);
    look("kill");
    assert_memory_equal(left, again, BYTES);
}

static void test_silent(void **state)
{
    zs_faults *faults = open_faults("write@8=cut:silent;seed=%d", 1);
    zs_io *io = open_over(state, faults);
    zs_file *file = NULL;
    zs_io_req req = {0};

    assert_int_equal(zs_file_open(io, path_of("silent"), ZS_FILE_CREATE, BYTES, &file), ZS_OK);
    assert_int_equal(put(io, file, 0, flushed, BYTES), ZS_OK);
    assert_int_equal(zs_file_sync(io, file), ZS_OK);
    assert_int_equal(put(io, file, 0, first, BYTES), ZS_OK);
    assert_int_equal(zs_file_sync(io, file), ZS_OK);
    assert_int_equal(zs_io_sync_dir(io, io_dir), ZS_OK);
    assert_int_equal(zs_io_read(io, file, 2 * ZS_IO_REQUEST, left, ZS_IO_REQUEST, &req), ZS_OK);
    assert_int_equal(zs_io_wait(io, &req), ZS_OK);
    assert_memory_equal(left, flushed + 2 * ZS_IO_REQUEST, ZS_IO_REQUEST);
    zs_file_close(&file);
    zs_io_close(&io);
    zs_faults_close(&faults);
    look("silent");
    for (int i = 2; i < REQUESTS; i++)
        assert_int_equal(versions_of(i), 1);
}

/* An allocation that was not flushed is there or not, and so is what was written then. */
static void test_allocation(void **state)
{
    int kept = 0, lost = 0;

    for (int seed = 0; seed < 12; seed++) {
        zs_faults *faults = open_faults("sync@1=cut;seed=%d", seed);
        zs_io *io = open_over(state, faults);
        zs_file *file = NULL;
        assert_int_equal(zs_file_open(io, path_of("size"), ZS_FILE_CREATE, BYTES, &file), ZS_OK);
        assert_int_equal(put(io, file, 0, first, BYTES), ZS_OK);
        assert_int_equal(zs_file_sync(io, file), ZS_ERR_IO);
        zs_file_close(&file);
        zs_io_close(&io);
        zs_faults_close(&faults);
        look("size");
        assert_true(!left_bytes || left_bytes == BYTES);
        kept += left_bytes != 0;
        lost += !left_bytes;
        assert_int_equal(unlink(path_of("size")), 0);
    }
    assert_true(kept > 0);
    assert_true(lost > 0);
}

/* What file there is, by its one byte; 0: none. */
static char byte_of(const char *name)
{
    char byte = 0;
    int fd = open(path_of(name), O_RDONLY);

    if (fd >= 0)
        assert_int_equal(pread(fd, &byte, 1, 0), 1);
    if (fd >= 0)
        close(fd);
    return byte;
}

/* Renames that were not flushed: those up to some point. */
static void test_names(void **state)
{
    unsigned seen[2] = {0};

    for (int seed = 0; seed < 24; seed++) {
        /* Each replacement has two flushes, the second of the directory: it always fails here, so
         * that the names are never flushed. */
        zs_faults *faults = open_faults("sync@2/2=EIO;sync@7=cut;seed=%d", seed);
        zs_io *io = open_over(state, faults);
        char one, two;
        (void)unlink(path_of("one"));
        (void)unlink(path_of("two"));
        assert_int_equal(zs_io_replace_file(io, path_of("one"), "a", 1), ZS_ERR_IO);
        assert_int_equal(zs_io_replace_file(io, path_of("one"), "b", 1), ZS_ERR_IO);
        assert_int_equal(zs_io_replace_file(io, path_of("two"), "c", 1), ZS_ERR_IO);
        assert_int_equal(byte_of("one"), 'b');
        assert_int_equal(byte_of("two"), 'c');
        assert_int_equal(zs_io_replace_file(io, path_of("three"), "d", 1), ZS_ERR_IO);
        assert_int_equal(byte_of("three"), 0);
        zs_io_close(&io);
        zs_faults_close(&faults);
        one = byte_of("one");
        two = byte_of("two");
        assert_true(one == 0 || one == 'a' || one == 'b');
        assert_true(two == 0 || (two == 'c' && one == 'b'));
        seen[0] |= 1u << (one ? one - 'a' + 1 : 0);
        seen[1] |= 1u << (two != 0);
    }
    assert_int_equal(seen[0], 7);
    assert_int_equal(seen[1], 3);
}

/* One that was flushed stays. */
static void test_flushed_name(void **state)
{
    for (int seed = 0; seed < 8; seed++) {
        zs_faults *faults = open_faults("rename@2=cut;seed=%d", seed);
        zs_io *io = open_over(state, faults);
        assert_int_equal(zs_io_replace_file(io, path_of("flushed"), "a", 1), ZS_OK);
        assert_int_equal(zs_io_replace_file(io, path_of("flushed"), "b", 1), ZS_ERR_IO);
        zs_io_close(&io);
        zs_faults_close(&faults);
        assert_int_equal(byte_of("flushed"), 'a');
        assert_int_equal(unlink(path_of("flushed")), 0);
    }
}

/* Engines that share faults share the power supply, and a file is hit after it was closed, too. */
static void test_one_supply(void **state)
{
    unsigned seen = 0;

    for (int seed = 0; seed < 8; seed++) {
        zs_faults *faults = open_faults("write=cut,file=there;seed=%d", seed);
        zs_io *here = open_over(state, faults), *there = open_over(state, faults);
        zs_file *file = NULL, *other = NULL;
        assert_int_equal(zs_file_open(here, path_of("here"), ZS_FILE_CREATE, BYTES, &file), ZS_OK);
        assert_int_equal(zs_file_open(there, path_of("there"), ZS_FILE_CREATE, 4096, &other),
                         ZS_OK);
        assert_int_equal(put(here, file, 0, flushed, BYTES), ZS_OK);
        assert_int_equal(zs_file_sync(here, file), ZS_OK);
        assert_int_equal(put(here, file, 0, first, BYTES), ZS_OK);
        zs_file_close(&file);
        assert_int_equal(put(there, other, 0, first, 4096), ZS_ERR_IO);
        assert_int_equal(zs_file_open(here, path_of("here"), 0, 0, &file), ZS_OK);
        assert_int_equal(put(here, file, 0, first, 4096), ZS_ERR_IO);
        zs_file_close(&file);
        zs_file_close(&other);
        zs_io_close(&here);
        zs_io_close(&there);
        zs_faults_close(&faults);
        look("here");
        for (int i = 0; i < REQUESTS; i++)
            seen |= 1u << versions_of(i);
    }
    assert_int_equal(seen, 1u << 1 | 1u << 2 | 1u << 3);
}

static int make_all(void **state)
{
    flushed = map_pages(BYTES);
    first = map_pages(BYTES);
    second = map_pages(BYTES);
    left = map_pages(BYTES);
    fill(flushed, BYTES, 1);
    fill(first, BYTES, 2);
    fill(second, BYTES, 3);
    return make_dir(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        RUNGS(test_cut),          RUNGS(test_cut_in_flush), RUNGS(test_kill),
        RUNGS(test_silent),       RUNGS(test_allocation),   RUNGS(test_names),
        RUNGS(test_flushed_name), RUNGS(test_one_supply),
    };
    return cmocka_run_group_tests(tests, make_all, remove_dir);
}
