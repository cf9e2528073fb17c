/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* after the above */
#include <cmocka.h>

#include <dirent.h>
#include <sys/stat.h>

#include "base/util.h"
#include "data.h"
#include "model/files.h"
#include "model/safetensors.h"
#include "unit/temp.h"

static temp_dir dir;

static int set_up(void **state)
{
    temp_make(&dir);
    return 0;
}

static int tear_down(void **state)
{
    temp_remove(&dir);
    return 0;
}

/* name becomes a file of header and data_bytes bytes 0, 1, 2, ... */
static void make_file(const char *name, const char *header, size_t data_bytes)
{
    size_t length = strlen(header);
    unsigned char *bytes = calloc(1, 8 + length + data_bytes);
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(length >> (8 * i));
    memcpy(bytes + 8, header, length);
    for (size_t i = 0; i < data_bytes; i++)
        bytes[8 + length + i] = (unsigned char)i;
    temp_write(&dir, name, bytes, 8 + length + data_bytes);
    free(bytes);
}

static zs_st *open_ok(const char *name)
{
    zs_st *st;
    char *path = temp_path(&dir, name);
    if (zs_st_open(path, &st))
        fail_msg("%s", zs_last_error());
    free(path);
    return st;
}

static void refused(const char *name, zs_status expected, const char *message)
{
    zs_st *st = (zs_st *)1;
    char *path = temp_path(&dir, name);
    zs_status status = zs_st_open(path, &st);
    if (status != expected || !strstr(zs_last_error(), message))
        fail_msg("gave %s: %s\nnot %s: ...%s...", zs_status_name(status), zs_last_error(),
                 zs_status_name(expected), message);
    assert_null(st);
    free(path);
}

static void bad_header(const char *header, size_t data_bytes, const char *message)
{
    make_file("bad.safetensors", header, data_bytes);
    refused("bad.safetensors", ZS_ERR_CORRUPT, message);
}

static void test_read(void **state)
{
    make_file("a.safetensors",
              "{\"__metadata__\":{\"format\":\"pt\",\"k\":\"v\"},"
              "\"b\":{\"dtype\":\"I16\",\"shape\":[2,3],\"data_offsets\":[4,16]},"
              "\"none\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[4,4]},"
              "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}   ",
              16);
    zs_st *st = open_ok("a.safetensors");
    assert_int_equal(zs_st_count(st), 3);
    assert_string_equal(zs_st_at(st, 0)->name, "a");
    assert_string_equal(zs_st_at(st, 1)->name, "none");
    assert_string_equal(zs_st_metadata(st, "k"), "v");
    assert_null(zs_st_metadata(st, "x"));
    const char *value = NULL;
    assert_string_equal(zs_st_metadata_at(st, 1, &value), "k");
    assert_string_equal(value, "v");
    assert_null(zs_st_metadata_at(st, 2, &value));
    uint64_t bytes;
    assert_non_null(strstr(zs_st_file(st, 0, &bytes), "a.safetensors"));
    assert_null(zs_st_file(st, 1, &bytes));
    const zs_st_tensor *t = zs_st_find(st, "b");
    assert_ptr_equal(t, zs_st_at(st, 2));
    assert_int_equal(t->numel, 6);
    assert_int_equal(t->bytes, 12);
    assert_int_equal(t->shape[1], 3);
    assert_null(zs_st_find(st, "c"));
    uint16_t got[2];
    assert_int_equal(zs_st_read(st, t, 1, 2, got), ZS_OK);
    assert_int_equal(got[0], 0x0706);
    assert_int_equal(got[1], 0x0908);
    assert_int_equal(zs_st_read(st, t, 6, 0, got), ZS_OK);
    assert_int_equal(zs_st_read(st, t, 5, 2, got), ZS_ERR_ARG);
    assert_non_null(strstr(zs_last_error(), "tensor \"b\" has 6 elements"));
    /* A file that shrinks while open. */
    char *path = temp_path(&dir, "a.safetensors");
    assert_int_equal(truncate(path, 20), 0);
    assert_int_equal(zs_st_read(st, t, 0, 2, got), ZS_ERR_IO);
    assert_non_null(strstr(zs_last_error(), "became shorter"));
    free(path);
    zs_st_close(&st);
    assert_null(st);
    zs_st_close(&st);
}

static void test_bad_headers(void **state)
{
    static const char one[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}";
    bad_header(one, 7, "tensor \"a\" ends at byte 8 of the data, but the file ends at 7");
    bad_header(one, 9, "1 bytes after the last tensor belong to nothing");
    bad_header("{\"a\":{\"dtype\":\"F31\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8,
               "tensor \"a\" has the unknown dtype \"F31\"");
    bad_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}}", 8,
               "has data_offsets of 8 bytes, but its shape and dtype take 12");
    bad_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12,
               "begins at byte 4 of the data where 0 was expected");
    bad_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
               "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}",
               6, "tensor \"b\" begins at byte 2 of the data where 4 was expected");
    bad_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],"
               "\"data_offsets\":[0,0]}}",
               0, "overflows 64 bits");
    bad_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,0]}}", 0,
               "something else than counts");
    bad_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}", 1,
               "something else than counts");
    bad_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1,
               "more than the 8 dimensions");
    bad_header("{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "has no shape list");
    bad_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,0]}}", 1,
               "not [begin, end]");
    bad_header("{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "not [begin, end]");
    bad_header("{\"a\":3}", 0, "tensor \"a\" has the unknown dtype \"(not a string)\"");
    bad_header("{\"__metadata__\":{\"a\":1}}", 0, "__metadata__ key \"a\" must hold a string");
    bad_header("{\"__metadata__\":[]}", 0, "__metadata__ must be an object");
    bad_header("{\"a\":{},\"a\":{}}", 0, "duplicate object key");
    bad_header(" {}", 0, "does not begin with {");
    bad_header("", 0, "does not begin with {");
    bad_header("{\"a\":", 0, "is not valid JSON");
    temp_write(&dir, "bad.safetensors", "1234567", 7);
    refused("bad.safetensors", ZS_ERR_CORRUPT, "has 7 bytes, less than the 8");
    temp_write(&dir, "bad.safetensors", "\x09\0\0\0\0\0\0\0{}      ", 16);
    refused("bad.safetensors", ZS_ERR_CORRUPT, "header's length, 9 bytes, goes past");
    temp_write(&dir, "bad.safetensors", "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    refused("bad.safetensors", ZS_ERR_CORRUPT, "is over the limit of 100000000");
    temp_write(&dir, "bad.safetensors", "version https://git-lfs", 23);
    refused("bad.safetensors", ZS_ERR_CORRUPT, "is a git-lfs pointer");
    refused("missing.safetensors", ZS_ERR_IO, "No such file");
    char *path = temp_path(&dir, "fifo");
    assert_int_equal(mkfifo(path, 0600), 0);
    refused("fifo", ZS_ERR_ARG, "is not a regular file");
    free(path);
}

static void make_index(const char *text)
{
    char *path = temp_path(&dir, "model");
    mkdir(path, 0777);
    free(path);
    temp_write(&dir, "model/model.safetensors.index.json", text, strlen(text));
}

static void test_sharded(void **state)
{
    make_index("{}");
    refused("model", ZS_ERR_CORRUPT, "weight_map is missing");
    make_index("{\"weight_map\":{\"a\":\"../x.safetensors\"}}");
    refused("model", ZS_ERR_CORRUPT, "tensor \"a\" must be mapped to a file name beside");
    make_index("{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\","
               "\"c\":\"1.safetensors\"},\"metadata\":{\"total_size\":3}}");
    refused("model", ZS_ERR_IO, "model/1.safetensors: No such file");
    make_file("model/1.safetensors",
              "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]},"
              "\"c\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
              2);
    make_file("model/2.safetensors",
              "{\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1);
    zs_st *st = open_ok("model");
    assert_int_equal(zs_st_count(st), 3);
    assert_string_equal(zs_st_at(st, 0)->name, "c");
    assert_string_equal(zs_st_at(st, 2)->name, "b");
    assert_int_equal(zs_st_find(st, "b")->file, 1);
    unsigned char byte = 9;
    assert_int_equal(zs_st_read(st, zs_st_find(st, "a"), 0, 1, &byte), ZS_OK);
    assert_int_equal(byte, 1);
    zs_st_close(&st);
    st = open_ok("model/model.safetensors.index.json");
    assert_int_equal(zs_st_count(st), 3);
    zs_st_close(&st);
    make_index("{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
    refused("model", ZS_ERR_CORRUPT, "does not list tensor \"c\" of ");
    make_index("{\"weight_map\":{\"a\":\"2.safetensors\",\"b\":\"2.safetensors\","
               "\"c\":\"1.safetensors\"}}");
    refused("model", ZS_ERR_CORRUPT, "tensor \"a\" is not in 2.safetensors but in 1.safetensors");
    make_index("{\"weight_map\":{\"d\":\"2.safetensors\",\"b\":\"2.safetensors\"}}");
    refused("model", ZS_ERR_CORRUPT, "tensor \"d\" is not in 2.safetensors");
    make_file("model/2.safetensors",
              "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1);
    make_index("{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
    refused("model", ZS_ERR_CORRUPT, "tensor \"a\" is both in ");
    /* As in transformers, a single file goes before an index. */
    make_file("model/model.safetensors", "{}", 0);
    st = open_ok("model");
    assert_int_equal(zs_st_count(st), 0);
    zs_st_close(&st);
    char *path = temp_path(&dir, "empty");
    assert_int_equal(mkdir(path, 0777), 0);
    refused("empty", ZS_ERR_IO, "has neither model.safetensors nor");
    free(path);
}

static void test_write(void **state)
{
    char a[] = "a", b[] = "b \"quoted\"", c[] = "c";
    zs_st_tensor tensors[] = {
        {.name = a, .dtype = ZS_ST_F32, .ndim = 2, .shape = {2, 3}},
        {.name = b, .dtype = ZS_ST_F32, .ndim = 0},
        {.name = c, .dtype = ZS_ST_F32, .ndim = 1, .shape = {0}},
    };
    zs_st_tensor other[3];
    memcpy(other, tensors, sizeof other);
    zs_st_writer *first, *second;
    char *path = temp_path(&dir, "out.safetensors"),
         *unfinished = temp_path(&dir, "out.safetensors.tmp");
    const float values[] = {1, 2, 3, 4, 5, 6};
    assert_int_equal(zs_st_plan(path, other, 3, 0, &second), ZS_ERR_IO);
    assert_non_null(strstr(zs_last_error(), "out.safetensors.tmp: No such file"));
    assert_int_equal(zs_st_plan(path, tensors, 3, 1, &first), ZS_OK);
    assert_int_equal(zs_st_plan(path, other, 3, 0, &second), ZS_OK);
    assert_int_equal(tensors[0].bytes, 24);
    assert_int_equal(tensors[0].offset % 8, 0);
    assert_int_equal(tensors[1].offset, tensors[0].offset + 24);
    assert_int_equal(zs_st_write(second, &other[0], 4, 2, values + 4), ZS_OK);
    assert_int_equal(zs_st_write(second, &other[1], 0, 1, values + 5), ZS_OK);
    assert_int_equal(zs_st_write(second, &other[0], 4, 3, values), ZS_ERR_ARG);
    assert_int_equal(zs_st_finish(&second, 0), ZS_OK);
    assert_int_equal(zs_st_write(first, &tensors[0], 0, 4, values), ZS_OK);
    assert_int_equal(access(path, F_OK), -1);
    assert_int_equal(zs_st_finish(&first, 1), ZS_OK);
    assert_int_equal(access(unfinished, F_OK), -1);
    zs_st *st = open_ok("out.safetensors");
    float got[6];
    assert_int_equal(zs_st_read(st, zs_st_find(st, "a"), 0, 6, got), ZS_OK);
    assert_memory_equal(got, values, sizeof values);
    assert_int_equal(zs_st_read(st, zs_st_find(st, "b \"quoted\""), 0, 1, got), ZS_OK);
    assert_true(got[0] == 6);
    assert_string_equal(zs_st_metadata(st, "format"), "pt");
    zs_st_close(&st);

    /* Another size planned, a name twice, an impossible place. */
    assert_int_equal(zs_st_plan(path, tensors, 3, 1, &first), ZS_OK);
    assert_int_equal(zs_st_plan(path, other, 2, 0, &second), ZS_ERR_MISMATCH);
    assert_non_null(strstr(zs_last_error(), "do all ranks see the same directory?"));
    zs_st_discard(&first);
    assert_null(first);
    zs_st_discard(&first);
    assert_int_equal(access(unfinished, F_OK), -1);
    tensors[2].name = a;
    assert_int_equal(zs_st_plan(path, tensors, 3, 1, &first), ZS_ERR_ARG);
    assert_non_null(strstr(zs_last_error(), "tensor \"a\" is there twice"));
    tensors[2].name = c;
    tensors[2].shape[0] = INT64_MAX;
    assert_int_equal(zs_st_plan(path, tensors, 3, 1, &first), ZS_ERR_ARG);
    assert_non_null(strstr(zs_last_error(), "tensor \"c\" has a shape"));
    tensors[2].shape[0] = (int64_t)1 << 50;
    assert_int_not_equal(zs_st_plan(path, tensors, 3, 1, &first), ZS_OK);
    assert_null(first);
    assert_int_equal(access(unfinished, F_OK), -1);
    free(path);
    path = temp_path(&dir, "no/such/place.safetensors");
    assert_int_equal(zs_st_plan(path, other, 3, 1, &first), ZS_ERR_IO);
    free(path);
    free(unfinished);
}

static void test_directories(void **state)
{
    char *path = temp_path(&dir, "x/y//z/"), *file = temp_path(&dir, "file/under");
    assert_int_equal(zs_dir_make(path), ZS_OK);
    assert_int_equal(zs_dir_make(path), ZS_OK);
    assert_int_equal(access(path, W_OK), 0);
    temp_write(&dir, "file", "x", 1);
    assert_int_equal(zs_dir_make(file), ZS_ERR_IO);
    assert_non_null(strstr(zs_last_error(), "file/under cannot be made or written: Not a direct"));
    assert_int_equal(zs_dir_make(""), ZS_ERR_IO);
    free(path);
    free(file);
}

static void test_cases(void **state)
{
    char *cases = data_path("safetensors_cases");
    if (!cases)
        skip();
    DIR *listing = opendir(cases);
    struct dirent *entry;
    int good = 0, bad = 0;
    while ((entry = readdir(listing))) {
        char *path;
        if (!strstr(entry->d_name, ".safetensors"))
            continue;
        assert_true(asprintf(&path, "%s/%s", cases, entry->d_name) > 0);
        int ok = !strncmp(entry->d_name, "ok_", 3) || !strncmp(entry->d_name, "derived_ok_", 11);
        zs_st *st;
        zs_status status = zs_st_open(path, &st);
        if (status != (ok ? ZS_OK : ZS_ERR_CORRUPT))
            fail_msg("%s: %s", entry->d_name, status ? zs_last_error() : "accepted");
        if (!ok)
            assert_non_null(strstr(zs_last_error(), entry->d_name));
        good += ok;
        bad += !ok;
        zs_st_close(&st);
        free(path);
    }
    closedir(listing);
    assert_int_equal(good, 8);
    assert_int_equal(bad, 14);
    free(cases);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_read, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_bad_headers, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_sharded, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_write, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_directories, set_up, tear_down),
        cmocka_unit_test(test_cases),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
