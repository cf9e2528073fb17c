/* SPDX-License-Identifier: Apache-2.0 */
/* Block files over engines that misbehave. */
#include <errno.h>

#include "base/util.h"
#include "io_common.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_short_and_interrupted),
        cmocka_unit_test(test_failures),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
