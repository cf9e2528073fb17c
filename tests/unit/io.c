/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "check.h"
#include "io/backend.h"

static char dir[64];
static char logged[8192];

static void log_line(void *cookie, zs_log_level level, const char *text)
{
    size_t used = strlen(logged);
    snprintf(logged + used, sizeof logged - used, "%d %s\n", (int)level, text);
}

static const zs_log test_log = {log_line, NULL, ZS_LOG_DEBUG};

static zs_io_engine engine_of(void **state)
{
    return *(zs_io_engine *)*state;
}

static zs_io *open_io(void **state, unsigned depth)
{
    zs_io *io = NULL;
    char reason[256];

    if (engine_of(state) == ZS_IO_URING && zs_io_uring_probe(reason, sizeof reason) != ZS_OK)
        skip();
    assert_int_equal(zs_io_open(engine_of(state), depth, &test_log, &io), ZS_OK);
    return io;
}

static const char *path_of(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static unsigned char *map_pages(size_t bytes)
{
    void *ptr = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(ptr, MAP_FAILED);
    return ptr;
}

static void fill(unsigned char *buf, size_t bytes, uint32_t seed)
{
    for (size_t i = 0; i < bytes; i++) {
        seed = seed * 1664525u + 1013904223u;
        buf[i] = (unsigned char)(seed >> 24);
    }
}

/* ---- both engines ---- */

static void round_trip(zs_io *io, zs_file *file, size_t bytes, uint64_t offset, unsigned char *a,
                       unsigned char *b)
{
    zs_io_req req = {0};

    fill(a, bytes, (uint32_t)(bytes + offset));
    memset(b, 0, bytes);
    assert_int_equal(zs_io_write(io, file, offset, a, bytes, &req), ZS_OK);
    assert_int_equal(zs_io_wait(io, &req), ZS_OK);
    assert_int_equal(zs_io_read(io, file, offset, b, bytes, &req), ZS_OK);
    assert_int_equal(zs_io_wait(io, &req), ZS_OK);
    assert_memory_equal(a, b, bytes);
}

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
    assert_int_equal(zs_file_open(io, dir, ZS_FILE_READ_ONLY, 0, &file), ZS_ERR_ARG);
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

    if (engine_of(state) == ZS_IO_URING) {
        assert_non_null(strstr(zs_io_describe(io), "io_uring ("));
        assert_non_null(strstr(zs_io_describe(io), "plain buffers"));
        logged[0] = '\0';
        assert_int_equal(zs_io_register(io, a, 8192), ZS_OK);
        /* Where it is not registered, the log says so. */
        assert_true(strstr(zs_io_describe(io), "registered buffers") ||
                    strstr(logged, "stay unregistered"));
    } else {
        assert_string_equal(zs_io_describe(io), "posix (8 threads)");
        assert_int_equal(zs_io_register(io, a, 8192), ZS_OK);
    }
    assert_int_equal(zs_io_register(io, a + 1, 4096), ZS_ERR_ARG);
    check_message("not aligned to 4096");
    zs_io_close(&io);
    munmap(a, 8192);
}

/* ---- no engine in particular ---- */

static void test_engine_names(void **state)
{
    zs_io *io = NULL;
    char reason[256];

    assert_int_equal(zs_io_open(ZS_IO_LIBAIO, 0, NULL, &io), ZS_ERR_UNSUPPORTED);
    check_message("libaio is not in this version");
    assert_int_equal(zs_io_open((zs_io_engine)9, 0, NULL, &io), ZS_ERR_ARG);
    assert_int_equal(zs_io_open(ZS_IO_POSIX, 1025, NULL, &io), ZS_ERR_ARG);
    check_message("depth 1025: use 1 to 1024");
    logged[0] = '\0';
    assert_int_equal(zs_io_open(ZS_IO_AUTO, 0, &test_log, &io), ZS_OK);
    if (zs_io_uring_probe(reason, sizeof reason) == ZS_OK) {
        assert_string_equal(logged, "");
        assert_non_null(strstr(zs_io_describe(io), "io_uring"));
    } else {
        assert_non_null(strstr(logged, reason));
        assert_non_null(strstr(logged, "using posix threads instead"));
        assert_non_null(strstr(zs_io_describe(io), "posix"));
    }
    zs_io_close(&io);
    zs_io_close(&io);
}

/* ---- an engine that misbehaves ---- */

typedef struct fake {
    zs_io_backend base;
    zs_io_op *first;
    unsigned calls;
    unsigned longest;
    int error;       /* of every write */
    int interrupted; /* every other call is -EINTR, -EAGAIN or -ECANCELED */
    int shorten;     /* transfers at most this much */
} fake;

static void fake_submit(zs_io_backend *backend, zs_io_op *op)
{
    fake *f = (fake *)backend;
    uint32_t bytes = f->shorten ? ZS_MIN(op->bytes, (uint32_t)f->shorten) : op->bytes;
    static const int codes[] = {-EINTR, -EAGAIN, -ECANCELED};

    f->calls++;
    f->longest = ZS_MAX(f->longest, op->bytes);
    if (f->interrupted && f->calls % 2)
        op->result = codes[f->calls % 3];
    else if (f->error && op->write)
        op->result = f->error;
    else if (op->write)
        op->result = (int)pwrite(op->file->fd, op->buf, bytes, (off_t)op->offset);
    else
        op->result = (int)pread(op->file->fd, op->buf, bytes, (off_t)op->offset);
    op->next = f->first;
    f->first = op;
}

static void fake_flush(zs_io_backend *backend)
{
}

static zs_io_op *fake_reap(zs_io_backend *backend, int wait)
{
    fake *f = (fake *)backend;
    zs_io_op *done = f->first;
    f->first = NULL;
    return done;
}

static void fake_close(zs_io_backend *backend)
{
}

static const zs_io_backend_ops fake_ops = {
    .submit = fake_submit, .flush = fake_flush, .reap = fake_reap, .close = fake_close};

static void test_short_and_interrupted(void **state)
{
    enum { BYTES = 1283 * 4096 };
    unsigned char *a = map_pages(BYTES), *b = map_pages(BYTES);
    static const int lengths[] = {0, 4096, 4096 * 3 + 512};

    for (size_t i = 0; i < ZS_COUNT(lengths); i++) {
        fake f = {.base.ops = &fake_ops, .interrupted = 1, .shorten = lengths[i]};
        zs_io *io = NULL;
        zs_file *file = NULL;
        zs_io_stats stats;
        assert_int_equal(zs_io_open_backend(&f.base, 5, NULL, &io), ZS_OK);
        assert_int_equal(zs_file_open(io, path_of("fake"), ZS_FILE_CREATE, BYTES, &file), ZS_OK);
        round_trip(io, file, BYTES, 0, a, b);
        assert_true(f.longest <= ZS_IO_REQUEST);
        zs_io_get_stats(io, &stats);
        assert_int_equal(stats.read_bytes, BYTES);
        assert_int_equal(stats.written_bytes, BYTES);
        zs_file_close(&file);
        zs_io_close(&io);
    }
    munmap(a, BYTES);
    munmap(b, BYTES);
}

static void test_failures(void **state)
{
    static const struct {
        int error;
        zs_status status;
        const char *text;
    } cases[] = {{-EIO, ZS_ERR_IO, "Input/output error"},
                 {-ENOSPC, ZS_ERR_NOSPACE, "No space left on device"},
                 {-EAGAIN, ZS_ERR_IO, "Resource temporarily unavailable"}};
    enum { BYTES = 8 << 20 };
    unsigned char *a = map_pages(BYTES);

    for (size_t i = 0; i < ZS_COUNT(cases); i++) {
        fake f = {.base.ops = &fake_ops, .error = cases[i].error};
        zs_io *io = NULL;
        zs_file *file = NULL;
        zs_io_req req = {0}, read = {0};
        assert_int_equal(zs_io_open_backend(&f.base, 1, NULL, &io), ZS_OK);
        assert_int_equal(zs_file_open(io, path_of("fails"), ZS_FILE_CREATE, BYTES, &file), ZS_OK);
        assert_int_equal(zs_io_write(io, file, 4096, a, BYTES - 4096, &req), ZS_OK);
        assert_int_equal(zs_io_read(io, file, 0, a, 4096, &read), ZS_OK);
        assert_int_equal(zs_io_wait(io, &req), cases[i].status);
        check_message("writing 524288 bytes at offset 4096 of '");
        check_message("/fails': ");
        check_message(cases[i].text);
        /* The rest of a lost transfer is not tried. */
        assert_true(f.calls <= 1001);
        assert_int_equal(zs_io_wait(io, &read), ZS_OK);
        zs_file_close(&file);
        zs_io_close(&io);
    }
    munmap(a, BYTES);
}

static int make_dir(void **state)
{
    /* A real file system where there is one: the build directory's, not /tmp. */
    const char *root = getenv("ZSPILL_BUILD_ROOT");
    snprintf(dir, sizeof dir, "%.40s/zspill-io-XXXXXX", root && strlen(root) < 40 ? root : "/tmp");
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", dir);
    return system(command);
}

#define BOTH(f)                                                                                    \
    {#f " uring", f, NULL, NULL, (void *)&uring},                                                  \
    {                                                                                              \
#f " posix", f, NULL, NULL, (void *)&posix                                                 \
    }

int main(void)
{
    static const zs_io_engine uring = ZS_IO_URING, posix = ZS_IO_POSIX;
    const struct CMUnitTest tests[] = {
        BOTH(test_round_trips),
        BOTH(test_outstanding),
        BOTH(test_many_files),
        BOTH(test_past_end),
        BOTH(test_open_errors),
        BOTH(test_read_only),
        BOTH(test_tmpfs),
        BOTH(test_threads_take_turns),
        BOTH(test_fork),
        BOTH(test_describe),
        cmocka_unit_test(test_engine_names),
        cmocka_unit_test(test_short_and_interrupted),
        cmocka_unit_test(test_failures),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
