/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/data.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { ROWS = 3, SEQ = 4, VOCAB = 300, POSITIONS = 64 };

static char path[64];

static void write_file(const char *suffix, const void *a, size_t a_bytes, const void *b,
                       size_t b_bytes)
{
    snprintf(path, sizeof(path), "/tmp/zspill-data-%ld%s", (long)getpid(), suffix);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(a, 1, a_bytes, file), a_bytes);
    assert_int_equal(fwrite(b, 1, b_bytes, file), b_bytes);
    fclose(file);
}

/* A safetensors file: header text behind its length, then the values. */
static void write_tokens(const char *header, const int32_t *values, size_t count)
{
    unsigned char head[512] = {0};
    size_t length = strlen(header);
    head[0] = (unsigned char)(length & 255);
    head[1] = (unsigned char)(length >> 8);
    memcpy(head + 8, header, length);
    write_file(".safetensors", head, 8 + length, values, count * sizeof(*values));
}

#define TENSOR(name, begin, end)                                                                   \
    "\"" name "\":{\"dtype\":\"I32\",\"shape\":[3,4],\"data_offsets\":[" begin "," end "]}"
#define IDS TENSOR("input_ids", "0", "48")

static zs_status open_with(int seq_len, int vocab, int positions, zs_data **out)
{
    const zs_data_options options = {.path = path,
                                     .option = "--data",
                                     .seq_len = seq_len,
                                     .vocab = vocab,
                                     .max_positions = positions,
                                     .scan = 1};
    return zs_data_open(&options, out);
}

static void refuse(int seq_len, int vocab, int positions, const char *message)
{
    zs_data *data;
    assert_int_not_equal(open_with(seq_len, vocab, positions, &data), ZS_OK);
    assert_null(data);
    if (!strstr(zs_last_error(), message) || !strstr(zs_last_error(), path))
        fail_msg("'%s' has not '%s'", zs_last_error(), message);
    unlink(path);
}

static void test_tokens(void **state)
{
    int32_t values[3 * ROWS * SEQ], ids[8], labels[8], positions[8];
    zs_data *data;
    (void)state;
    for (int i = 0; i < ROWS * SEQ; i++) {
        values[i] = 10 + i;
        values[ROWS * SEQ + i] = i % 3 ? i : ZS_LABEL_NONE;
        values[2 * ROWS * SEQ + i] = i % 2;
    }
    write_tokens("{" IDS
                 "," TENSOR("labels", "48", "96") "," TENSOR("position_ids", "96", "144") "}",
                 values, 36);
    assert_int_equal(open_with(0, VOCAB, POSITIONS, &data), ZS_OK);
    assert_int_equal(zs_data_rows(data), ROWS);
    assert_int_equal(zs_data_seq(data), SEQ);
    assert_true(zs_data_has_positions(data));
    assert_int_equal(zs_data_read(data, 1, 2, ids, labels, positions), ZS_OK);
    assert_memory_equal(ids, values + 4, sizeof(ids));
    assert_memory_equal(labels, values + 16, sizeof(labels));
    assert_memory_equal(positions, values + 28, sizeof(positions));
    zs_data_close(&data);
    unlink(path);
}

static void test_tokens_alone(void **state)
{
    int32_t values[ROWS * SEQ], ids[SEQ], labels[SEQ], positions[SEQ];
    uint64_t one, other;
    zs_data *data;
    (void)state;
    for (int i = 0; i < ROWS * SEQ; i++)
        values[i] = i;
    write_tokens("{" IDS "}", values, 12);
    assert_int_equal(open_with(SEQ, VOCAB, POSITIONS, &data), ZS_OK);
    assert_false(zs_data_has_positions(data));
    assert_int_equal(zs_data_read(data, 2, 1, ids, labels, positions), ZS_OK);
    assert_memory_equal(ids, values + 8, sizeof(ids));
    assert_memory_equal(labels, ids, sizeof(ids));
    for (int i = 0; i < SEQ; i++)
        assert_int_equal(positions[i], i);
    assert_int_equal(zs_data_identity(data, &one), ZS_OK);
    zs_data_close(&data);
    values[5]++;
    write_tokens("{" IDS "}", values, 12);
    assert_int_equal(open_with(0, VOCAB, POSITIONS, &data), ZS_OK);
    assert_int_equal(zs_data_identity(data, &other), ZS_OK);
    assert_true(one != other);
    zs_data_close(&data);
    unlink(path);
}

static void test_text(void **state)
{
    int32_t ids[6], labels[6];
    zs_data *data;
    (void)state;
    write_file(".txt", "abcdefg\xffhi", 10, "", 0);
    assert_int_equal(open_with(3, 256, POSITIONS, &data), ZS_OK);
    assert_int_equal(zs_data_rows(data), 3);
    assert_int_equal(zs_data_read(data, 1, 2, ids, labels, NULL), ZS_OK);
    const int32_t want[] = {'d', 'e', 'f', 'g', 255, 'h'};
    assert_memory_equal(ids, want, sizeof(want));
    assert_memory_equal(labels, want, sizeof(want));
    zs_data_close(&data);
    assert_int_equal(open_with(0, 256, 5, &data), ZS_OK);
    assert_int_equal(zs_data_seq(data), 5);
    zs_data_close(&data);
    unlink(path);
}

static void test_bad_tokens(void **state)
{
    int32_t values[3 * ROWS * SEQ] = {0};
    (void)state;
    values[6] = VOCAB;
    write_tokens("{" IDS "}", values, 12);
    refuse(0, VOCAB, POSITIONS,
           "id 300 in row 1, column 2 is outside the model's vocabulary of 300");
    values[6] = -1;
    write_tokens("{" IDS "}", values, 12);
    refuse(0, VOCAB, POSITIONS, "id -1 in row 1, column 2");
    values[6] = 0;
    values[23] = -99;
    write_tokens("{" IDS "," TENSOR("labels", "48", "96") "}", values, 24);
    refuse(0, VOCAB, POSITIONS, "label -99 in row 2, column 3 is outside the model's vocabulary");
    values[23] = POSITIONS;
    write_tokens("{" IDS "," TENSOR("position_ids", "48", "96") "}", values, 24);
    refuse(0, VOCAB, POSITIONS, "position 64 in row 2, column 3 is outside the model's positions");
    values[23] = 0;
    write_tokens("{" TENSOR("ids", "0", "48") "}", values, 12);
    refuse(0, VOCAB, POSITIONS, "has no tensor 'input_ids'");
    write_tokens("{" IDS "," TENSOR("attention_mask", "48", "96") "}", values, 24);
    refuse(0, VOCAB, POSITIONS, "tensor 'attention_mask' is not known in token files");
    write_tokens("{\"input_ids\":{\"dtype\":\"I64\",\"shape\":[3,2],\"data_offsets\":[0,48]}}",
                 values, 12);
    refuse(0, VOCAB, POSITIONS, "tensor 'input_ids' is I64: token files hold I32");
    write_tokens("{\"input_ids\":{\"dtype\":\"I32\",\"shape\":[12],\"data_offsets\":[0,48]}}",
                 values, 12);
    refuse(0, VOCAB, POSITIONS, "has 1 dimensions: it must be [rows, seq]");
    write_tokens("{" IDS
                 ",\"labels\":{\"dtype\":\"I32\",\"shape\":[4,3],\"data_offsets\":[48,96]}}",
                 values, 24);
    refuse(0, VOCAB, POSITIONS, "tensor 'labels' is [4, 3] but input_ids is [3, 4]");
    write_tokens("{\"input_ids\":{\"dtype\":\"I32\",\"shape\":[0,4],\"data_offsets\":[0,0]}}",
                 values, 0);
    refuse(0, VOCAB, POSITIONS, "is empty: input_ids is [0, 4]");
    write_tokens("{" IDS "}", values, 12);
    refuse(5, VOCAB, POSITIONS, "has rows of 4 tokens, not --seq-len 5");
    write_tokens("{" IDS "}", values, 12);
    refuse(0, VOCAB, 3, "has rows of 4 tokens but the model has 3 positions");
    write_tokens("{" IDS "}", values, 11);
    refuse(0, VOCAB, POSITIONS, "--data");
}

static void test_bad_text(void **state)
{
    zs_data *data;
    (void)state;
    write_file(".txt", "", 0, "", 0);
    refuse(0, VOCAB, POSITIONS, "is empty");
    write_file(".txt", "abc", 3, "", 0);
    refuse(4, VOCAB, POSITIONS, "has 3 bytes, fewer than one row of 4");
    write_file(".txt", "abcdef", 6, "", 0);
    refuse(2, 255, POSITIONS, "needs a vocabulary of 256, the model has 255");
    write_file(".txt", "abcdef", 6, "", 0);
    assert_int_not_equal(open_with(65, VOCAB, POSITIONS, &data), ZS_OK);
    assert_string_equal(zs_last_error(), "--seq-len 65 is longer than the model's 64 positions");
    unlink(path);
    refuse(0, VOCAB, POSITIONS, "No such file");
    snprintf(path, sizeof(path), "/tmp");
    assert_int_not_equal(open_with(0, VOCAB, POSITIONS, &data), ZS_OK);
    assert_non_null(strstr(zs_last_error(), "is not a file"));
}

static void test_file_order(void **state)
{
    (void)state;
    for (uint64_t place = 0; place < 20; place++)
        assert_int_equal(zs_data_order(7, 0, 5, place), place % 7);
}

/* Each row once an epoch; epochs, seeds and file order differ. */
static void test_shuffled(void **state)
{
    static const uint64_t sizes[] = {1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097};
    unsigned char seen[4097];
    (void)state;
    for (size_t s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        uint64_t rows = sizes[s], moved = 0, changed = 0, other_seed = 0;
        for (uint64_t epoch = 0; epoch < 3; epoch++) {
            memset(seen, 0, sizeof(seen));
            for (uint64_t i = 0; i < rows; i++) {
                uint64_t row = zs_data_order(rows, 1, 9, epoch * rows + i);
                assert_true(row < rows);
                assert_false(seen[row]);
                seen[row] = 1;
                moved += row != i;
                changed += row != zs_data_order(rows, 1, 9, i);
                other_seed += row != zs_data_order(rows, 1, 10, epoch * rows + i);
            }
        }
        if (rows >= 16)
            assert_true(moved > rows && changed > rows && other_seed > rows);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokens),   cmocka_unit_test(test_tokens_alone),
        cmocka_unit_test(test_text),     cmocka_unit_test(test_bad_tokens),
        cmocka_unit_test(test_bad_text), cmocka_unit_test(test_file_order),
        cmocka_unit_test(test_shuffled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
