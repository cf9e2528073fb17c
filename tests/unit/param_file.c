/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/status.h"
#include "base/util.h"
#include "offload/param_file.h"
#include "temp.h"

enum { COUNT = 4 };
static const uint64_t lengths[COUNT] = {10000, 0, 4096, 1};

typedef struct fixture {
    temp_dir dir;
    zs_ledger *ledger;
    zs_io *io;
    zs_param_file *file;
} fixture;

static void set_up(fixture *f)
{
    memset(f, 0, sizeof *f);
    temp_make(&f->dir);
    assert_int_equal(zs_ledger_open(&f->ledger), ZS_OK);
    assert_int_equal(zs_io_open(ZS_IO_POSIX, 4, NULL, &f->io), ZS_OK);
}

static void tear_down(fixture *f)
{
    zs_param_file_close(&f->file);
    zs_io_close(&f->io);
    zs_ledger_close(&f->ledger);
    temp_remove(&f->dir);
}

static uint64_t booked(const fixture *f)
{
    zs_memory_row rows[4];
    size_t count;
    zs_ledger_rows(f->ledger, rows, 4, &count);
    for (size_t i = 0; i < count; i++)
        if (rows[i].tier == ZS_TIER_NVME && strcmp(rows[i].purpose, "parameters") == 0)
            return rows[i].bytes;
    return 0;
}

static void test_extents(void **state)
{
    fixture f;
    unsigned char *data, *back;
    zs_io_req req = {0};
    set_up(&f);
    assert_int_equal(zs_param_file_open(f.dir.path, 3, f.io, f.ledger, lengths, COUNT, &f.file),
                     ZS_OK);
    assert_int_equal(zs_param_file_extent(f.file, 0), 12288);
    assert_int_equal(zs_param_file_extent(f.file, 1), 0);
    assert_int_equal(zs_param_file_extent(f.file, 2), 4096);
    assert_int_equal(zs_param_file_extent(f.file, 3), 4096);
    assert_int_equal(booked(&f), 12288 + 4096 + 4096);
    assert_int_equal(posix_memalign((void **)&data, 4096, 12288), 0);
    assert_int_equal(posix_memalign((void **)&back, 4096, 12288), 0);
    for (size_t s = 0; s < COUNT; s++) {
        memset(data, (int)(s + 1), 12288);
        assert_int_equal(zs_param_file_write(f.file, s, 0, data, lengths[s], &req), ZS_OK);
        assert_int_equal(zs_io_wait(f.io, &req), ZS_OK);
    }
    /* A part in the middle, rounded up, and no further. */
    memset(data, 9, 12288);
    assert_int_equal(zs_param_file_write(f.file, 0, 4096, data, 100, &req), ZS_OK);
    assert_int_equal(zs_io_wait(f.io, &req), ZS_OK);
    for (size_t s = 0; s < COUNT; s++) {
        memset(back, 0, 12288);
        assert_int_equal(zs_param_file_read(f.file, s, back, &req), ZS_OK);
        assert_int_equal(zs_io_wait(f.io, &req), ZS_OK);
        for (uint64_t i = 0; i < zs_param_file_extent(f.file, s); i++)
            assert_int_equal(back[i], s == 0 && i >= 4096 && i < 8192 ? 9 : s + 1);
    }
    free(data);
    free(back);
    zs_param_file_close(&f.file);
    assert_int_equal(booked(&f), 0);
    tear_down(&f);
}

static void test_leaves_nothing(void **state)
{
    fixture f;
    int entries = 0;
    set_up(&f);
    assert_int_equal(zs_param_file_open(f.dir.path, 0, f.io, f.ledger, lengths, COUNT, &f.file),
                     ZS_OK);
    DIR *dir = opendir(f.dir.path); /* while it is open, too */
    while (readdir(dir))
        entries++;
    closedir(dir);
    assert_int_equal(entries, 2);
    tear_down(&f);
}

static void test_refusals(void **state)
{
    fixture f;
    char *missing, buffer[1];
    zs_io_req req = {0};
    set_up(&f);
    missing = temp_path(&f.dir, "no/such");
    assert_int_equal(zs_param_file_open(missing, 0, f.io, f.ledger, lengths, COUNT, &f.file),
                     ZS_ERR_IO);
    assert_non_null(strstr(zs_last_error(), "no/such"));
    assert_null(f.file);
    const uint64_t huge[] = {1ull << 45};
    char *made = temp_path(&f.dir, "made");
    assert_int_equal(zs_param_file_open(made, 0, f.io, f.ledger, huge, 1, &f.file), ZS_ERR_NOSPACE);
    assert_non_null(strstr(zs_last_error(), "35184372088832"));
    assert_int_equal(access(made, F_OK), -1);
    const uint64_t wraps[] = {UINT64_MAX - 5, 4096};
    assert_int_equal(zs_param_file_open(f.dir.path, 0, f.io, f.ledger, wraps, 2, &f.file),
                     ZS_ERR_ARG);
    assert_int_equal(booked(&f), 0);

    assert_int_equal(zs_param_file_open(f.dir.path, 0, f.io, f.ledger, lengths, COUNT, &f.file),
                     ZS_OK);
    assert_int_equal(zs_param_file_write(f.file, 0, 100, buffer, 1, &req), ZS_ERR_ARG);
    assert_int_equal(zs_param_file_write(f.file, 0, 12288, buffer, 1, &req), ZS_ERR_ARG);
    assert_non_null(strstr(zs_last_error(), "parameter shard 0: bytes 12288 to 16384 of 12288"));
    assert_int_equal(zs_param_file_write(f.file, 9, 0, buffer, 1, &req), ZS_ERR_ARG);
    assert_int_equal(zs_param_file_read(f.file, 9, buffer, &req), ZS_ERR_ARG);
    assert_non_null(strstr(zs_last_error(), "parameter shard 9 of 4"));
    free(missing);
    free(made);
    tear_down(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_extents),
        cmocka_unit_test(test_leaves_nothing),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
