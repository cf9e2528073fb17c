/* SPDX-License-Identifier: Apache-2.0 */
/* Fault injection, and what io/ makes of each fault, over each rung. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "base/util.h"
#include "io/fault.h"
#include "io_common.h"

enum { BYTES = 8 * ZS_IO_REQUEST };

static unsigned char *a, *b;

typedef struct bench {
    zs_faults *faults;
    zs_io *io;
    zs_file *file;
} bench;

static void open_spec(void **state, const char *spec, bench *out)
{
    char reason[256];

    memset(out, 0, sizeof *out);
    if (zs_io_probe(engine_of(state), reason, sizeof reason) == ZS_ERR_UNSUPPORTED)
        skip();
    assert_int_equal(zs_faults_open(spec, &out->faults), ZS_OK);
    assert_int_equal(zs_io_open_faults(engine_of(state), 0, &test_log, out->faults, &out->io),
                     ZS_OK);
    assert_non_null(strstr(zs_io_describe(out->io), "faults over "));
}

static void open_bench(void **state, const char *spec, bench *out)
{
    open_spec(state, spec, out);
    assert_int_equal(zs_file_open(out->io, path_of("faults"), ZS_FILE_CREATE, BYTES, &out->file),
                     ZS_OK);
}

static void close_bench(bench *x)
{
    zs_file_close(&x->file);
    zs_io_close(&x->io);
    zs_faults_close(&x->faults);
}

static zs_status put(bench *x, uint64_t offset, size_t bytes)
{
    zs_io_req req = {0};

    assert_int_equal(zs_io_write(x->io, x->file, offset, a + offset, bytes, &req), ZS_OK);
    return zs_io_wait(x->io, &req);
}

static zs_status get(bench *x, uint64_t offset, size_t bytes)
{
    zs_io_req req = {0};

    memset(b + offset, 0, bytes);
    assert_int_equal(zs_io_read(x->io, x->file, offset, b + offset, bytes, &req), ZS_OK);
    return zs_io_wait(x->io, &req);
}

/* What lies on the medium, into b. */
static void look(void)
{
    int fd = open(path_of("faults"), O_RDONLY);

    assert_true(fd >= 0);
    memset(b, 0, BYTES);
    for (ssize_t n = 1, at = 0; n > 0; at += n) {
        n = pread(fd, b + at, (size_t)(BYTES - at), at);
        assert_true(n >= 0);
    }
    close(fd);
}

static unsigned count_different_bits(const unsigned char *x, const unsigned char *y, size_t bytes)
{
    unsigned count = 0;

    for (size_t i = 0; i < bytes; i++)
        count += (unsigned)__builtin_popcount(x[i] ^ y[i]);
    return count;
}

/* ---- errors ---- */

static void test_nth_fails(void **state)
{
    bench x;

    fill(a, BYTES, 1);
    open_bench(state, "write@3=EIO;read@2=EIO;read@5=ENXIO", &x);
    assert_int_equal(put(&x, 0, BYTES), ZS_ERR_IO);
    check_message("writing 524288 bytes at offset 1048576 of '");
    check_message("/faults': Input/output error");
    assert_int_equal(put(&x, 0, BYTES), ZS_OK);
    assert_int_equal(get(&x, 0, ZS_IO_REQUEST), ZS_OK);
    assert_int_equal(get(&x, 4096, 4096), ZS_ERR_IO);
    check_message("reading 4096 bytes at offset 4096 of '");
    assert_int_equal(zs_faults_fired(x.faults), 2);
    assert_int_equal(get(&x, 0, ZS_IO_REQUEST), ZS_OK);
    assert_int_equal(get(&x, 0, ZS_IO_REQUEST), ZS_OK);
    assert_int_equal(get(&x, 0, ZS_IO_REQUEST), ZS_ERR_IO);
    check_message("No such device or address");
    assert_int_equal(get(&x, 0, BYTES), ZS_OK);
    assert_memory_equal(a, b, BYTES);
    close_bench(&x);
}

/* Which of ten writes fail. */
static void check_turns(void **state, const char *spec, const char *turns)
{
    bench x;

    open_bench(state, spec, &x);
    for (int i = 0; turns[i]; i++)
        assert_int_equal(put(&x, 0, 4096), turns[i] == 'x' ? ZS_ERR_IO : ZS_OK);
    close_bench(&x);
}

static void test_turns(void **state)
{
    check_turns(state, "write=EIO", "xxxxx");
    check_turns(state, "write@2=EIO", ".x.....");
    check_turns(state, "write@2-4=EIO", ".xxx...");
    check_turns(state, "write@4+=EIO", "...xxxx");
    check_turns(state, "write@2/3=EIO", ".x..x..x.");
    check_turns(state, "write@2=EIO;change@5=EROFS;read=EIO", ".x.x.."); /* and the allocation */
    check_turns(state, "write=EIO,file=elsewhere", "...");
    check_turns(state, "write@2=EIO,file=/faults", ".x.");
}

static void test_full(void **state)
{
    static const struct {
        const char *spec;
        zs_status status;
        const char *text;
    } cases[] = {{"allocate=ENOSPC", ZS_ERR_NOSPACE, "No space left on device; free some space"},
                 {"allocate=EDQUOT", ZS_ERR_NOSPACE, "Disk quota exceeded; free some space"},
                 {"allocate=EFBIG", ZS_ERR_NOSPACE, "or raise the limit on file sizes (ulimit -f)"},
                 {"allocate@1=EIO", ZS_ERR_IO, "allocating 4194304 bytes: Input/output error"}};
    bench x;

    for (size_t i = 0; i < ZS_COUNT(cases); i++) {
        open_spec(state, cases[i].spec, &x);
        assert_int_equal(zs_file_open(x.io, path_of("new"), ZS_FILE_CREATE, BYTES, &x.file),
                         cases[i].status);
        check_message(cases[i].text);
        assert_int_equal(access(path_of("new"), F_OK), -1);
        close_bench(&x);
    }
    /* An interrupted one is tried again. */
    open_bench(state, "allocate@1-3=EINTR;sync@1-3=EINTR", &x);
    assert_int_equal(zs_file_sync(x.io, x.file), ZS_OK);
    assert_int_equal(zs_faults_fired(x.faults), 6);
    close_bench(&x);
    open_bench(state, "write@2=ENOSPC", &x);
    assert_int_equal(put(&x, 0, BYTES), ZS_ERR_NOSPACE);
    check_message("writing 524288 bytes at offset 524288 of '");
    check_message("No space left on device");
    close_bench(&x);
}

static void test_flush_fails(void **state)
{
    bench x;

    open_bench(state, "sync@1=EIO;sync@2=ENOSPC;sync@4=EIO,file=zspill-io", &x);
    assert_int_equal(zs_file_sync(x.io, x.file), ZS_ERR_IO);
    check_message("flushing '");
    check_message(
        "/faults': Input/output error; what was written since the last flush may be lost");
    assert_int_equal(zs_file_sync(x.io, x.file), ZS_ERR_NOSPACE);
    assert_int_equal(zs_file_sync(x.io, x.file), ZS_OK);
    assert_int_equal(zs_io_sync_dir(x.io, io_dir), ZS_ERR_IO);
    check_message("cannot be flushed: Input/output error");
    assert_int_equal(zs_io_sync_dir(x.io, io_dir), ZS_OK);
    close_bench(&x);
}

static void test_storm(void **state)
{
    bench x;

    fill(a, BYTES, 2);
    open_bench(state, "write@1-300=EAGAIN;read@2-90=EAGAIN;read@100-150=EINTR", &x);
    assert_int_equal(put(&x, 0, BYTES), ZS_OK);
    assert_int_equal(get(&x, 0, BYTES), ZS_OK);
    assert_memory_equal(a, b, BYTES);
    assert_int_equal(zs_faults_fired(x.faults), 300 + 89);
    assert_int_equal(get(&x, 0, BYTES), ZS_OK);
    assert_memory_equal(a, b, BYTES);
    assert_int_equal(zs_faults_fired(x.faults), 300 + 89 + 51);
    close_bench(&x);
}

/* One that does not end is an error after a while. */
static void test_endless_storm(void **state)
{
    bench x;

    open_bench(state, "write=EAGAIN", &x);
    assert_int_equal(put(&x, 0, 4096), ZS_ERR_IO);
    check_message("writing 4096 bytes at offset 0 of '");
    check_message("Resource temporarily unavailable");
    close_bench(&x);
}

/* ---- short, flipped, late ---- */

static void check_short(void **state, const char *spec)
{
    bench x;
    zs_io_stats stats;

    fill(a, BYTES, 3);
    open_bench(state, spec, &x);
    assert_int_equal(put(&x, 0, BYTES), ZS_OK);
    look();
    assert_memory_equal(a, b, BYTES);
    assert_int_equal(get(&x, 0, BYTES), ZS_OK);
    assert_memory_equal(a, b, BYTES);
    assert_true(zs_faults_fired(x.faults) > 0);
    zs_io_get_stats(x.io, &stats);
    assert_int_equal(stats.read_bytes, BYTES);
    assert_int_equal(stats.written_bytes, BYTES);
    assert_true(stats.requests > 16);
    close_bench(&x);
}

static void test_short(void **state)
{
    bench x;

    check_short(state, "write@1/2=short;read@1/2=short");
    check_short(state, "write@2/3=short:5000;read@3/2=short:12289");
    check_short(state, "write@2/3=short:0;read@1/2=short:4096");
    check_short(state, "write@1/2=short:100;read@1/2=short:524287");
    /* Nothing read is the end of the file. */
    open_bench(state, "read@2=short:0", &x);
    assert_int_equal(get(&x, 0, BYTES), ZS_ERR_CORRUPT);
    check_message("reading 524288 bytes at offset 524288 of '");
    check_message("the file ends there: it was cut short");
    close_bench(&x);
}

static void test_flip(void **state)
{
    bench x;

    fill(a, BYTES, 4);
    open_bench(state, "seed=7;read@2=flip:8;read@3=flip", &x);
    assert_int_equal(put(&x, 0, BYTES), ZS_OK);
    assert_int_equal(get(&x, 0, BYTES), ZS_OK);
    assert_int_equal(count_different_bits(a, b, BYTES), 2);
    assert_int_equal(a[ZS_IO_REQUEST + 1] ^ b[ZS_IO_REQUEST + 1], 1);
    assert_int_equal(get(&x, 0, BYTES), ZS_OK); /* the medium is well */
    assert_memory_equal(a, b, BYTES);
    close_bench(&x);
    open_bench(state, "write@2=flip:15;write@7=flip", &x);
    assert_int_equal(put(&x, 0, BYTES), ZS_OK);
    fill(b, BYTES, 4);
    assert_memory_equal(a, b, BYTES); /* so is the caller's buffer */
    look();
    assert_int_equal(count_different_bits(a, b, BYTES), 2);
    assert_int_equal(a[ZS_IO_REQUEST + 1] ^ b[ZS_IO_REQUEST + 1], 128);
    close_bench(&x);
}

static void test_delay(void **state)
{
    bench x;
    zs_io_req late = {0}, soon = {0};

    fill(a, BYTES, 5);
    open_bench(state, "write@1=delay:40;write@3/2=delay:3;sync@1=delay:1;read@1/2=delay:2", &x);
    assert_int_equal(zs_io_write(x.io, x.file, 0, a, ZS_IO_REQUEST, &late), ZS_OK);
    assert_int_equal(
        zs_io_write(x.io, x.file, ZS_IO_REQUEST, a + ZS_IO_REQUEST, BYTES - ZS_IO_REQUEST, &soon),
        ZS_OK);
    assert_int_equal(zs_io_wait(x.io, &soon), ZS_OK);
    assert_int_equal(zs_io_wait(x.io, &late), ZS_OK);
    assert_int_equal(zs_file_sync(x.io, x.file), ZS_OK);
    assert_int_equal(get(&x, 0, BYTES), ZS_OK);
    assert_memory_equal(a, b, BYTES);
    /* Closing waits for the late, too. */
    assert_int_equal(zs_io_write(x.io, x.file, 0, a, BYTES, &soon), ZS_OK);
    close_bench(&x);
    assert_int_equal(soon.pending, 0);
}

/* ---- files that are replaced ---- */

static int holds(const char *name, const char *text)
{
    char data[64] = "";
    int fd = open(path_of(name), O_RDONLY);
    ssize_t n = fd < 0 ? -1 : pread(fd, data, sizeof data - 1, 0);

    if (fd >= 0)
        close(fd);
    return n >= 0 && !strcmp(data, text);
}

/* Each operation of it fails in turn: the old or the new one is there, and nothing beside it. */
static void test_replace(void **state)
{
    static const char *const texts[] = {"old, and longer than the new one", "new"};
    bench x;
    uint64_t fired = 1;
    int n;

    for (n = 1; fired; n++) {
        char spec[32];
        zs_status status;
        open_spec(state, "", &x);
        assert_int_equal(zs_io_replace_file(x.io, path_of("small"), texts[0], strlen(texts[0])),
                         ZS_OK);
        assert_true(holds("small", texts[0]));
        close_bench(&x);
        snprintf(spec, sizeof spec, "change@%d=EIO", n);
        open_spec(state, spec, &x);
        status = zs_io_replace_file(x.io, path_of("small"), texts[1], strlen(texts[1]));
        fired = zs_faults_fired(x.faults);
        assert_int_equal(status, fired ? ZS_ERR_IO : ZS_OK);
        if (fired)
            check_message("Input/output error");
        if (n == 4)
            check_message("small' cannot be put in place: ");
        /* Only when the directory could not be flushed is it the new one all the same. */
        assert_true(holds("small", texts[!fired || n == 5]));
        assert_int_equal(access(path_of("small.tmp"), F_OK), -1);
        close_bench(&x);
    }
    assert_int_equal(n - 1, 6); /* allocate, write, flush, rename, flush, none */
    open_spec(state, "", &x);
    assert_int_equal(zs_io_replace_file(x.io, path_of("no/where"), "x", 1), ZS_ERR_IO);
    check_message("no/where.tmp' cannot be made: No such file or directory");
    close_bench(&x);
}

/* ---- the specification ---- */

static void test_specification(void **state)
{
    static const struct {
        const char *spec, *text;
    } cases[] = {
        {"write", "fault 'write': there is no '='"},
        {"read=EIO;wriet@2=EIO", "fault 'wriet@2=EIO': use read, write, sync, allocate, rename"},
        {"write@0=EIO", "after @ use N, N-M, N+ or N/K, counted from 1"},
        {"write@x=EIO", "after @ use"},
        {"write@5-2=EIO", "after @ use"},
        {"write@1/0=EIO", "after @ use"},
        {"write@2+3=EIO", "after @ use"},
        {"write@99999999999999999999999=EIO", "after @ use"},
        {"write=EOOPS", "after = use an errno such as EIO, short[:BYTES]"},
        {"write=", "after = use an errno"},
        {"write=short:x", "after = use"},
        {"write=delay", "after = use"},
        {"write=EIO:3", "after = use"},
        {"write=cut:later", "after = use"},
        {"sync=short", "only reads and writes have bytes"},
        {"any=flip", "only reads and writes have bytes"},
        {"seed=x", "the seed is no number"},
        {"read=EIO,file="
         "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567"
         "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567"
         "0123456789012345678901234567890123456789",
         "it is longer than 199 characters"}};
    zs_faults *faults = NULL;
    char many[2000] = "";

    for (size_t i = 0; i < ZS_COUNT(cases); i++) {
        assert_int_equal(zs_faults_open(cases[i].spec, &faults), ZS_ERR_ARG);
        assert_null(faults);
        check_message(cases[i].text);
        check_message("; see docs/faults.md");
    }
    for (int i = 0; i < 65; i++)
        strcat(many, "sync@9=EIO;");
    assert_int_equal(zs_faults_open(many, &faults), ZS_ERR_ARG);
    check_message("there are more than 64 of them");
    assert_int_equal(zs_faults_open(";;seed=18446744073709551615;any@3+=cut:silent;", &faults),
                     ZS_OK);
    zs_faults_close(&faults);
    assert_int_equal(zs_faults_open("", &faults), ZS_OK);
    zs_faults_close(&faults);
    zs_faults_close(&faults);
}

static void test_environment(void **state)
{
    zs_io *first = NULL, *second = NULL;
    zs_file *file = NULL;

    assert_int_equal(setenv("ZSPILL_FAULTS", "write=EOOPS", 1), 0);
    assert_int_equal(zs_io_open(ZS_IO_POSIX, 0, &test_log, &first), ZS_ERR_ARG);
    check_message("ZSPILL_FAULTS: fault 'write=EOOPS'");
    /* One count for all: the second allocation fails, wherever it is, and no third. */
    assert_int_equal(setenv("ZSPILL_FAULTS", "allocate@2=EIO", 1), 0);
    logged[0] = '\0';
    assert_int_equal(zs_io_open(ZS_IO_POSIX, 0, &test_log, &first), ZS_OK);
    assert_non_null(strstr(logged, "1 faults are injected as ZSPILL_FAULTS says"));
    assert_string_equal(zs_io_describe(first), "faults over posix (8 threads)");
    assert_int_equal(zs_file_open(first, path_of("env"), ZS_FILE_CREATE, 4096, &file), ZS_OK);
    zs_file_close(&file);
    zs_io_close(&first);
    assert_int_equal(zs_io_open(ZS_IO_POSIX, 0, NULL, &first), ZS_OK);
    assert_int_equal(zs_io_open(ZS_IO_POSIX, 0, NULL, &second), ZS_OK);
    assert_int_equal(zs_file_open(second, path_of("env"), ZS_FILE_CREATE, 4096, &file), ZS_ERR_IO);
    assert_int_equal(zs_file_open(first, path_of("env"), ZS_FILE_CREATE, 4096, &file), ZS_OK);
    zs_file_close(&file);
    /* Another text begins anew, for those that open from then on. */
    assert_int_equal(setenv("ZSPILL_FAULTS", "allocate@1=EIO", 1), 0);
    zs_io_close(&second);
    assert_int_equal(zs_io_open(ZS_IO_POSIX, 0, NULL, &second), ZS_OK);
    assert_int_equal(zs_file_open(first, path_of("env"), ZS_FILE_CREATE, 4096, &file), ZS_OK);
    zs_file_close(&file);
    assert_int_equal(zs_file_open(second, path_of("env"), ZS_FILE_CREATE, 4096, &file), ZS_ERR_IO);
    zs_io_close(&first);
    zs_io_close(&second);
    assert_int_equal(setenv("ZSPILL_FAULTS", "", 1), 0);
    assert_int_equal(zs_io_open(ZS_IO_POSIX, 0, NULL, &first), ZS_OK);
    assert_string_equal(zs_io_describe(first), "posix (8 threads)");
    zs_io_close(&first);
    unsetenv("ZSPILL_FAULTS");
}

static int make_all(void **state)
{
    a = map_pages(BYTES);
    b = map_pages(BYTES);
    return make_dir(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        RUNGS(test_nth_fails),
        RUNGS(test_turns),
        RUNGS(test_full),
        RUNGS(test_flush_fails),
        RUNGS(test_storm),
        RUNGS(test_endless_storm),
        RUNGS(test_short),
        RUNGS(test_flip),
        RUNGS(test_delay),
        RUNGS(test_replace),
        cmocka_unit_test(test_specification),
        cmocka_unit_test(test_environment),
    };
    return cmocka_run_group_tests(tests, make_all, remove_dir);
}
