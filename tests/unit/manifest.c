/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include "base/crc32c.h"
#include "temp.h"
#include "zero/manifest.h"

static const char whole[] =
    "zspill manifest 2\nfingerprint 1f\nrun a5\ngeneration 2\nworld 3\nchunk_numel 4096\nslots 2\n"
    "replicated 0\nflats 2\nflat 2 fp32\nparam 10 a b\nparam 4096 c\nflat 1 bf16\nparam 7 d\n";

/* text with the checksum line that belongs to it. */
static char *sealed(const char *text)
{
    const size_t length = strlen(text);
    char *out = malloc(length + 32);
    if (!out)
        abort();
    memcpy(out, text, length);
    sprintf(out + length, "crc32c %x\n", zs_crc32c(0, text, length));
    return out;
}

static void refuse_text(const char *text, const char *says)
{
    zs_manifest *m = (zs_manifest *)&m;
    assert_int_equal(zs_manifest_parse(text, "here", &m), ZS_ERR_CORRUPT);
    assert_null(m);
    check_message("manifest 'here'");
    check_message(says);
}

/* whole with its line number line (from 1) replaced. */
static void refuse_line(size_t line, const char *with, const char *says)
{
    const char *at = whole;
    char text[sizeof whole + 200];
    for (size_t i = 1; i < line; i++)
        at = strchr(at, '\n') + 1;
    const char *rest = strchr(at, '\n') + 1;
    snprintf(text, sizeof text, "%.*s%s\n%s", (int)(at - whole), whole, with, rest);
    char *full = sealed(text);
    refuse_text(full, says);
    free(full);
}

static void test_parse(void **state)
{
    zs_manifest *m;
    char *text = sealed(whole);
    assert_int_equal(zs_manifest_parse(text, "here", &m), ZS_OK);
    free(text);
    assert_int_equal(m->fingerprint, 0x1f);
    assert_int_equal(m->run, 0xa5);
    assert_int_equal(m->generation, 2);
    assert_int_equal(m->world, 3);
    assert_int_equal(m->chunk_numel, 4096);
    assert_int_equal(m->slots, 2);
    assert_int_equal(m->replicated, 0);
    assert_int_equal(m->flat_count, 2);
    assert_int_equal(m->flats[0].count, 2);
    assert_int_equal(m->flats[0].dtype, ZS_FP32);
    assert_string_equal(m->flats[0].names[0], "a b");
    assert_int_equal(m->flats[0].numels[1], 4096);
    assert_int_equal(m->flats[1].dtype, ZS_BF16);
    assert_string_equal(m->flats[1].names[0], "d");
    zs_manifest_free(&m);
    assert_null(m);
}

static void test_round_trip(void **state)
{
    temp_dir dir;
    zs_io *io;
    zs_manifest *m, *again;
    char *text = sealed(whole);
    temp_make(&dir);
    assert_int_equal(zs_io_open(ZS_IO_POSIX, 4, NULL, &io), ZS_OK);
    assert_int_equal(zs_manifest_load(dir.path, &again), ZS_OK);
    assert_null(again);
    assert_int_equal(zs_manifest_load("/nonexistent/dir", &again), ZS_OK);
    assert_null(again);
    assert_int_equal(zs_manifest_parse(text, "here", &m), ZS_OK);
    assert_int_equal(zs_manifest_save(dir.path, io, m), ZS_OK);
    m->generation = 3;
    assert_int_equal(zs_manifest_save(dir.path, io, m), ZS_OK);
    assert_int_equal(zs_manifest_load(dir.path, &again), ZS_OK);
    assert_non_null(again);
    assert_int_equal(again->generation, 3);
    assert_int_equal(again->run, m->run);
    assert_int_equal(again->fingerprint, m->fingerprint);
    assert_true(zs_manifest_same_shape(m, again));
    again->flats[0].numels[0]++;
    assert_false(zs_manifest_same_shape(m, again));
    again->flats[0].numels[0]--;
    again->slots = 1;
    assert_false(zs_manifest_same_shape(m, again));
    again->slots = 2;
    again->flats[1].names[0][0] = 'e';
    assert_false(zs_manifest_same_shape(m, again));
    zs_manifest_free(&again);
    zs_manifest_free(&m);

    temp_write(&dir, "zspill.manifest", text, strlen(text) / 2);
    assert_int_equal(zs_manifest_load(dir.path, &again), ZS_ERR_CORRUPT);
    check_message("/zspill.manifest'");
    assert_null(again);
    temp_write(&dir, "zspill.manifest", "", 0);
    assert_int_equal(zs_manifest_load(dir.path, &again), ZS_ERR_CORRUPT);
    check_message("does not begin with 'zspill manifest 2'");
    zs_io_close(&io);
    temp_remove(&dir);
    free(text);
}

static void test_damaged_lines(void **state)
{
    static const char *const keys[] = {
        "fingerprint", "run",  "generation", "world", "chunk_numel", "slots", "replicated",
        "flats",       "flat", "param",      "param", "flat",        "param"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char with[80], says[80];
        snprintf(says, sizeof says, "line %zu: '%s' and a number are missing", i + 2, keys[i]);
        refuse_line(i + 2, "", says);
        refuse_line(i + 2, "nonsense 1", says);
        snprintf(with, sizeof with, "%s", keys[i]);
        refuse_line(i + 2, with, says);
        snprintf(with, sizeof with, "%s x", keys[i]);
        refuse_line(i + 2, with, says);
        snprintf(with, sizeof with, "%s -1 fp32", keys[i]);
        refuse_line(i + 2, with, says);
        snprintf(with, sizeof with, "%s 99999999999999999999999 fp32", keys[i]);
        refuse_line(i + 2, with, says);
    }
    refuse_line(1, "zspill manifest 1", "another version of zspill wrote it");
    refuse_line(1, "{}", "does not begin with 'zspill manifest 2'");
    refuse_line(4, "generation 0", "generation must not be 0");
    refuse_line(5, "world 0", "world, slots and generation must not be 0");
    refuse_line(5, "world 65", "world is 65; at most 64 is possible");
    refuse_line(7, "slots 0", "must not be 0");
    refuse_line(7, "slots 17", "slots is 17; at most 16");
    refuse_line(8, "replicated 2", "replicated is 2; at most 1");
    refuse_line(10, "flat 2 fp8", "dtype 'fp8' is not known");
}

static void test_huge_counts(void **state)
{
    refuse_line(9, "flats 16777217", "flats is 16777217; at most 16777216");
    refuse_line(9, "flats 16777216", "16777216 flat buffers do not fit into what follows");
    refuse_line(10, "flat 18446744073709551615 fp32",
                "18446744073709551615 parameters do not fit into what follows");
    refuse_line(10, "flat 4 fp32", "'param' and a number are missing");
    refuse_line(10, "flat 1 fp32", "'flat' and a number are missing");
}

static void test_truncated(void **state)
{
    char *text = sealed(whole);
    for (size_t length = strlen(text); length--;) {
        zs_manifest *m;
        text[length] = 0;
        assert_int_equal(zs_manifest_parse(text, "here", &m), ZS_ERR_CORRUPT);
        assert_null(m);
        check_message("manifest 'here'");
    }
    free(text);
}

static void test_checksum(void **state)
{
    char *text = sealed(whole), *more = NULL;
    /* A digit that still parses. */
    *strstr(text, "4096") = '8';
    refuse_text(text, "its checksum is wrong: restore the file from a copy");
    free(text);
    text = sealed(whole);
    if (asprintf(&more, "%sparam 1 e\n", text) < 0)
        abort();
    refuse_text(more, "its checksum is wrong");
    free(more);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parse),         cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_damaged_lines), cmocka_unit_test(test_huge_counts),
        cmocka_unit_test(test_truncated),     cmocka_unit_test(test_checksum),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
