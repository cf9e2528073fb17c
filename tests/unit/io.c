/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "io_common.h"

static zs_io *open_io(void **state, unsigned depth)
{
    zs_io *io = NULL;
    char reason[256];

    if (zs_io_probe(engine_of(state), reason, sizeof reason) == ZS_ERR_UNSUPPORTED)
        skip();
    assert_string_equal(reason, "");
    assert_int_equal(zs_io_open(engine_of(state), depth, &test_log, &io), ZS_OK);
    return io;
}

/* ---- each rung ---- */

static void test_round_trips(void **state)
{
    static const size_t pages[] = {1, 3, 127, 128, 129, 257, 1283};
    enum { MOST = 1283 * 4096 };
    static const unsigned depths[] = {1, 3, 0};
    unsigned char *a = map_pages(MOST), *b = map_pages(MOST);

    for (size_t d = 0; d < ZS_COUNT(depths); d++) {
        for (int registered = 0; registered < 2; registered++) {
            zs_io *io = open_io(state, depths[d]);
            zs_file *file = NULL;
            zs_io_stats stats;
            uint64_t sum = 0;
            if (registered) {
                assert_int_equal(zs_io_register(io, a, MOST), ZS_OK);
                assert_int_equal(zs_io_register(io, b, MOST), ZS_OK);
            }
            assert_int_equal(zs_file_open(io, path_of("round"), ZS_FILE_CREATE, 2 * MOST, &file),
                             ZS_OK);
            assert_int_equal(zs_file_bytes(file), 2 * MOST);
            assert_string_equal(zs_file_path(file), path_of("round"));
            assert_true(fcntl(zs_file_fd(file), F_GETFD) & FD_CLOEXEC);
            for (size_t i = 0; i < ZS_COUNT(pages); i++) {
                round_trip(io, file, pages[i] * 4096, i * 4096, a, b);
                sum += pages[i] * 4096;
            }
            assert_int_equal(zs_file_sync(io, file), ZS_OK);
            zs_io_get_stats(io, &stats);
            assert_int_equal(stats.read_bytes, sum);
            assert_int_equal(stats.written_bytes, sum);
            assert_true(stats.requests >= 2 * ZS_COUNT(pages));
            if (registered) {
                zs_io_unregister(io, a);
                zs_io_unregister(io, b);
                round_trip(io, file, 5 * 4096, 0, a, b);
            }
            zs_file_close(&file);
            assert_null(file);
            zs_io_close(&io);
            assert_null(io);
        }
    }
    munmap(a, MOST);
    munmap(b, MOST);
}

static void test_outstanding(void **state)
{
    enum { TRANSFERS = 300, BYTES = 9 * 4096 };
    zs_io *io = open_io(state, 7);
    zs_file *file = NULL;
    zs_io_req *reqs = calloc(TRANSFERS, sizeof *reqs), one = {0};
    unsigned char *a = map_pages(TRANSFERS * BYTES), *b = map_pages(TRANSFERS * BYTES);

    fill(a, TRANSFERS * BYTES, 3);
    assert_int_equal(zs_file_open(io, path_of("many"), ZS_FILE_CREATE, TRANSFERS * BYTES, &file),
                     ZS_OK);
    for (size_t i = 0; i < TRANSFERS; i++)
        assert_int_equal(zs_io_write(io, file, i * BYTES, a + i * BYTES, BYTES, &reqs[i]), ZS_OK);
    zs_io_poll(io);
    for (size_t i = TRANSFERS; i-- > 0;)
        assert_int_equal(zs_io_wait(io, &reqs[i]), ZS_OK);
    /* One request for all of them. */
    for (size_t i = 0; i < TRANSFERS; i++)
        assert_int_equal(zs_io_read(io, file, i * BYTES, b + i * BYTES, BYTES, &one), ZS_OK);
    assert_int_equal(zs_io_wait(io, &one), ZS_OK);
    assert_int_equal(one.pending, 0);
    assert_memory_equal(a, b, TRANSFERS * BYTES);
    /* Nobody waits: closing does. */
    for (size_t i = 0; i < TRANSFERS; i++)
        assert_int_equal(zs_io_write(io, file, i * BYTES, a + i * BYTES, BYTES, &one), ZS_OK);
    zs_file_close(&file);
    assert_int_equal(one.pending, 0);
    zs_io_close(&io);
    free(reqs);
    munmap(a, TRANSFERS * BYTES);
    munmap(b, TRANSFERS * BYTES);
}

static void test_many_files(void **state)
{
    enum { FILES = 70 }; /* more than io_uring has slots for */
    zs_io *io = open_io(state, 0);
    zs_file *files[FILES] = {0};
    unsigned char *a = map_pages(8192), *b = map_pages(8192);

    for (int i = 0; i < FILES; i++) {
        char name[16];
        snprintf(name, sizeof name, "file%d", i);
        assert_int_equal(zs_file_open(io, path_of(name), ZS_FILE_CREATE, 8192, &files[i]), ZS_OK);
    }
    for (int i = 0; i < FILES; i++)
        round_trip(io, files[i], 4096, 4096, a, b);
    for (int i = 0; i < FILES; i++)
        zs_file_close(&files[i]);
    zs_io_close(&io);
    munmap(a, 8192);
    munmap(b, 8192);
}

static void test_past_end(void **state)
{
    zs_io *io = open_io(state, 0);
    zs_file *file = NULL;
    zs_io_req req = {0};
    unsigned char *buf = map_pages(1 << 20);

    assert_int_equal(zs_file_open(io, path_of("short"), ZS_FILE_CREATE, 1 << 20, &file), ZS_OK);
    assert_int_equal(zs_io_read(io, file, 1 << 20, buf, 4096, &req), ZS_OK);
    assert_int_equal(zs_io_wait(io, &req), ZS_ERR_CORRUPT);
    check_message("reading 4096 bytes at offset 1048576");
    check_message("short': the file has only 1048576 bytes");
    /* And the request is as good as new. */
    assert_int_equal(zs_io_read(io, file, 0, buf, 4096, &req), ZS_OK);
    assert_int_equal(zs_io_wait(io, &req), ZS_OK);
    assert_int_equal(zs_io_read(io, file, UINT64_MAX - 4095, buf, 4096, &req), ZS_OK);
    assert_int_equal(zs_io_wait(io, &req), ZS_ERR_CORRUPT);
    assert_int_equal(zs_io_write(io, file, 1 << 20, buf, 4096, &req), ZS_ERR_ARG);
    check_message("goes beyond its 1048576 bytes");
    /* Cut short behind our back, in the middle of a block. */
    assert_int_equal(truncate(path_of("short"), 100000), 0);
    assert_int_equal(zs_io_read(io, file, 0, buf, 1 << 20, &req), ZS_OK);
    assert_int_equal(zs_io_wait(io, &req), ZS_ERR_CORRUPT);
    check_message("the file ends there");
    zs_file_close(&file);
    zs_io_close(&io);
    munmap(buf, 1 << 20);
}

static void test_open_errors(void **state)
{
    zs_io *io = open_io(state, 0);
    zs_file *file = NULL;

    assert_int_equal(zs_file_open(io, path_of("no/such/dir"), ZS_FILE_CREATE, 4096, &file),
                     ZS_ERR_IO);
    assert_null(file);
    check_message("no/such/dir' cannot be made: No such file or directory");
    check_message("its directory must be there");
    assert_int_equal(zs_file_open(io, path_of("absent"), 0, 0, &file), ZS_ERR_IO);
    check_message("absent' cannot be opened: No such file");
    assert_int_equal(zs_file_open(io, io_dir, ZS_FILE_READ_ONLY, 0, &file), ZS_ERR_ARG);
    check_message("is not a regular file");
    assert_int_equal(zs_file_open(io, path_of("x"), ZS_FILE_CREATE | ZS_FILE_READ_ONLY, 0, &file),
                     ZS_ERR_ARG);
    assert_int_equal(zs_file_open(io, path_of("huge"), ZS_FILE_CREATE, 1ull << 60, &file),
                     ZS_ERR_NOSPACE);
    check_message("needs 1152921504606846976 bytes (1024.00 PiB), but ");
    check_message("are free there");
    assert_int_equal(access(path_of("huge"), F_OK), -1);
    /* A file that was there stays. */
    assert_int_equal(zs_file_open(io, path_of("old"), ZS_FILE_CREATE, 4096, &file), ZS_OK);
    zs_file_close(&file);
    assert_int_equal(zs_file_open(io, path_of("old"), ZS_FILE_CREATE, 1ull << 60, &file),
                     ZS_ERR_NOSPACE);
    assert_int_equal(access(path_of("old"), F_OK), 0);
    zs_io_close(&io);
}

static void test_read_only(void **state)
{
    zs_io *io = open_io(state, 0);
    zs_file *file = NULL;
    zs_io_req req = {0};
    unsigned char *a = map_pages(8192), *b = map_pages(8192);

    assert_int_equal(zs_file_open(io, path_of("ro"), ZS_FILE_CREATE, 8192, &file), ZS_OK);
    round_trip(io, file, 8192, 0, a, b);
    zs_file_close(&file);
    assert_int_equal(zs_file_open(io, path_of("ro"), ZS_FILE_READ_ONLY, 0, &file), ZS_OK);
    assert_int_equal(zs_file_bytes(file), 8192);
    memset(b, 0, 8192);
    assert_int_equal(zs_io_read(io, file, 0, b, 8192, &req), ZS_OK);
    assert_int_equal(zs_io_wait(io, &req), ZS_OK);
    assert_memory_equal(a, b, 8192);
    assert_int_equal(zs_io_write(io, file, 0, a, 4096, &req), ZS_ERR_MISUSE);
    check_message("open for reading only");
    if (zs_file_is_direct(file)) {
        assert_int_equal(zs_io_read(io, file, 512, b, 4096, &req), ZS_ERR_ARG);
        check_message("multiples of 4096");
    }
    zs_file_close(&file);
    zs_io_close(&io);
    munmap(a, 8192);
    munmap(b, 8192);
}

/* A file system in memory has no O_DIRECT: the page cache does it, and the log says so. */
static void test_tmpfs(void **state)
{
    zs_io *io = open_io(state, 0);
    zs_file *file = NULL;
    char path[64];
    unsigned char *a = map_pages(700 * 4096), *b = map_pages(700 * 4096);
    struct statfs fs;

    if (statfs("/dev/shm", &fs) || fs.f_type != 0x01021994 || access("/dev/shm", W_OK)) {
        zs_io_close(&io);
        skip();
    }
    snprintf(path, sizeof path, "/dev/shm/zspill-io-%d", (int)getpid());
    logged[0] = '\0';
    assert_int_equal(zs_file_open(io, path, ZS_FILE_CREATE, 700 * 4096, &file), ZS_OK);
    assert_false(zs_file_is_direct(file));
    assert_non_null(strstr(logged, "goes through the page cache: it lies in memory (tmpfs)"));
    round_trip(io, file, 700 * 4096, 0, a, b);
    round_trip(io, file, 12345, 77, a + 1, b + 3); /* no alignment needed here */
    assert_int_equal(zs_file_sync(io, file), ZS_OK);
    zs_file_close(&file);
    unlink(path);
    zs_io_close(&io);
    munmap(a, 700 * 4096);
    munmap(b, 700 * 4096);
}

typedef struct other {
    zs_io *io;
    zs_file *file;
    unsigned char *a, *b;
    zs_io_req req;
    zs_status status;
} other;

static void *on_other_thread(void *cookie)
{
    other *o = cookie;
    o->status = zs_io_wait(o->io, &o->req);
    if (o->status == ZS_OK)
        o->status = zs_io_read(o->io, o->file, 0, o->b, 1 << 20, &o->req);
    return NULL;
}

/* Opened here, waited for and begun there, ended here: by a thread that is gone by then. */
static void test_threads_take_turns(void **state)
{
    other o = {.io = open_io(state, 0)};
    pthread_t thread;

    o.a = map_pages(1 << 20);
    o.b = map_pages(1 << 20);
    fill(o.a, 1 << 20, 5);
    assert_int_equal(zs_file_open(o.io, path_of("turns"), ZS_FILE_CREATE, 1 << 20, &o.file), ZS_OK);
    for (int i = 0; i < 10; i++) {
        memset(o.b, 0, 1 << 20);
        assert_int_equal(zs_io_write(o.io, o.file, 0, o.a, 1 << 20, &o.req), ZS_OK);
        assert_int_equal(pthread_create(&thread, NULL, on_other_thread, &o), 0);
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(o.status, ZS_OK);
        assert_int_equal(zs_io_wait(o.io, &o.req), ZS_OK);
        assert_memory_equal(o.a, o.b, 1 << 20);
    }
    zs_file_close(&o.file);
    zs_io_close(&o.io);
    munmap(o.a, 1 << 20);
    munmap(o.b, 1 << 20);
}

/* The child has neither the file nor the ring, and closing there harms nobody. */
static void test_fork(void **state)
{
    zs_io *io = open_io(state, 0);
    zs_file *file = NULL;
    zs_io_req req = {0};
    unsigned char *a = map_pages(4 << 20), *b = map_pages(4 << 20);
    int result = -1;
    pid_t pid;

    assert_int_equal(zs_io_register(io, a, 4 << 20), ZS_OK);
    fill(a, 4 << 20, 9);
    assert_int_equal(zs_file_open(io, path_of("fork"), ZS_FILE_CREATE, 4 << 20, &file), ZS_OK);
    assert_int_equal(zs_io_write(io, file, 0, a, 4 << 20, &req), ZS_OK);
    pid = fork();
    if (!pid) {
        int gone = fcntl(zs_file_fd(file), F_GETFD) == -1 && errno == EBADF;
        zs_file_close(&file);
        zs_io_close(&io);
        _exit(gone && !file && !io ? 0 : 1);
    }
    assert_int_equal(zs_io_wait(io, &req), ZS_OK);
    assert_int_equal(waitpid(pid, &result, 0), pid);
    assert_int_equal(result, 0);
    assert_int_equal(zs_io_read(io, file, 0, b, 4 << 20, &req), ZS_OK);
    assert_int_equal(zs_io_wait(io, &req), ZS_OK);
    assert_memory_equal(a, b, 4 << 20);
    zs_file_close(&file);
    zs_io_close(&io);
    munmap(a, 4 << 20);
    munmap(b, 4 << 20);
}

static void test_describe(void **state)
{
    zs_io *io = open_io(state, 0);
    unsigned char *a = map_pages(8192);

    logged[0] = '\0';
    switch (engine_of(state)) {
    case ZS_IO_URING:
        assert_string_equal(zs_io_describe(io), "io_uring (plain buffers, registered files)");
        assert_int_equal(zs_io_register(io, a, 8192), ZS_OK);
        /* Where it is not registered, the log says so. */
        assert_true(
            !strcmp(zs_io_describe(io), "io_uring (registered buffers, registered files)") ||
            strstr(logged, "stay unregistered"));
        break;
    case ZS_IO_URING_PLAIN:
        assert_int_equal(zs_io_register(io, a, 8192), ZS_OK);
        assert_string_equal(zs_io_describe(io), "io_uring (plain buffers, plain files)");
        break;
    case ZS_IO_LIBAIO:
        assert_int_equal(zs_io_register(io, a, 8192), ZS_OK);
        assert_string_equal(zs_io_describe(io), "libaio");
        break;
    default:
        assert_int_equal(zs_io_register(io, a, 8192), ZS_OK);
        assert_string_equal(zs_io_describe(io), "posix (8 threads)");
    }
    assert_int_equal(zs_io_register(io, a + 1, 4096), ZS_ERR_ARG);
    check_message("not aligned to 4096");
    zs_io_close(&io);
    munmap(a, 8192);
}

/* Any offset, length and address where it was asked for. */
static void test_buffered(void **state)
{
    zs_io *io = open_io(state, 0);
    zs_file *file = NULL;
    unsigned char *a = map_pages(2 << 20), *b = map_pages(2 << 20);

    logged[0] = '\0';
    assert_int_equal(
        zs_file_open(io, path_of("cached"), ZS_FILE_CREATE | ZS_FILE_BUFFERED, 1234567, &file),
        ZS_OK);
    assert_string_equal(logged, "");
    assert_false(zs_file_is_direct(file));
    round_trip(io, file, 1234500, 67, a + 1, b + 3);
    zs_file_close(&file);
    zs_io_close(&io);
    munmap(a, 2 << 20);
    munmap(b, 2 << 20);
}

static void test_sync_dir(void **state)
{
    zs_io *io = open_io(state, 0);

    assert_int_equal(zs_io_sync_dir(io, io_dir), ZS_OK);
    assert_int_equal(zs_io_sync_dir(io, path_of("nowhere")), ZS_ERR_IO);
    check_message("nowhere' cannot be flushed: No such file or directory");
    zs_io_close(&io);
}

/* ---- no engine in particular ---- */

static void test_engine_names(void **state)
{
    zs_io *io = NULL;
    char reason[256];

    assert_int_equal(zs_io_open((zs_io_engine)9, 0, NULL, &io), ZS_ERR_ARG);
    check_message("I/O engine 9: use auto (0), io_uring (1), posix (2)");
    assert_int_equal(zs_io_probe(ZS_IO_AUTO, reason, sizeof reason), ZS_ERR_ARG);
    assert_int_equal(zs_io_open(ZS_IO_POSIX, 1025, NULL, &io), ZS_ERR_ARG);
    check_message("depth 1025: use 1 to 1024");
    logged[0] = '\0';
    assert_int_equal(zs_io_open(ZS_IO_AUTO, 0, &test_log, &io), ZS_OK);
    if (zs_io_probe(ZS_IO_URING, reason, sizeof reason) == ZS_OK) {
        assert_string_equal(logged, "");
        assert_string_equal(zs_io_describe(io), "io_uring (plain buffers, registered files)");
    } else {
        assert_non_null(strstr(logged, reason));
        assert_non_null(strstr(zs_io_describe(io), "; not io_uring: "));
        assert_non_null(strstr(zs_io_describe(io), reason));
    }
    zs_io_close(&io);
    zs_io_close(&io);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        RUNGS(test_round_trips),
        RUNGS(test_outstanding),
        RUNGS(test_many_files),
        RUNGS(test_past_end),
        RUNGS(test_open_errors),
        RUNGS(test_read_only),
        RUNGS(test_tmpfs),
        RUNGS(test_threads_take_turns),
        RUNGS(test_fork),
        RUNGS(test_describe),
        RUNGS(test_buffered),
        RUNGS(test_sync_dir),
        cmocka_unit_test(test_engine_names),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
