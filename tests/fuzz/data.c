/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cli/data.h"
#include "fuzz/fuzz.h"
#include "unit/temp.h"

enum { VOCAB = 100, POSITIONS = 8 };

const char *const fuzz_words[] = {"0",
                                  "2",
                                  "9223372036854775807",
                                  "{",
                                  "}",
                                  "[",
                                  "]",
                                  ",",
                                  "\"I32\"",
                                  "\"I64\"",
                                  "[2,3]",
                                  "[3,2]",
                                  "[6]",
                                  "[0,3]",
                                  "\"labels\"",
                                  "\"input_ids\"",
                                  "\"position_ids\"",
                                  "\x9c\xff\xff\xff",
                                  "\x05\x00",
                                  NULL};

size_t fuzz_seed(size_t i, uint8_t *out)
{
    static const char *const headers[] = {
        "{\"input_ids\":{\"dtype\":\"I32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
        "\"labels\":{\"dtype\":\"I32\",\"shape\":[2,3],\"data_offsets\":[24,48]},"
        "\"position_ids\":{\"dtype\":\"I32\",\"shape\":[2,3],\"data_offsets\":[48,72]}}",
        "{\"input_ids\":{\"dtype\":\"I32\",\"shape\":[3,6],\"data_offsets\":[0,72]}}",
    };
    static const uint8_t values[18] = {1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0, 1, 0};
    if (i >= sizeof headers / sizeof *headers)
        return 0;
    uint8_t *data;
    size_t length = fuzz_safetensors(headers[i], 72, out, &data);
    for (size_t k = 0; k < 18; k++)
        data[4 * k] = values[k];
    return length;
}

static temp_dir dir;

static void clean_up(void)
{
    temp_remove(&dir);
}

/* What was accepted at open must keep its promises row by row. */
static void check_rows(const zs_data *data)
{
    uint64_t rows = zs_data_rows(data), identity;
    size_t seq = (size_t)zs_data_seq(data);
    int32_t *ids = malloc(3 * seq * sizeof *ids);
    if (!ids || !seq || !rows || zs_data_identity(data, &identity))
        abort();
    for (uint64_t row = 0; row < rows; row++) {
        if (zs_data_read(data, row, 1, ids, ids + seq, ids + 2 * seq))
            continue;
        for (size_t k = 0; k < seq; k++)
            if (ids[k] < 0 || ids[k] >= VOCAB || ids[seq + k] < ZS_LABEL_NONE ||
                ids[seq + k] >= VOCAB || ids[2 * seq + k] < 0 || ids[2 * seq + k] >= POSITIONS)
                abort();
    }
    free(ids);
}

static void try_file(int fd, const char *path, const uint8_t *head, size_t head_size,
                     const uint8_t *rest, size_t rest_size)
{
    if (ftruncate(fd, 0) != 0 || pwrite(fd, head, head_size, 0) != (ssize_t)head_size ||
        pwrite(fd, rest, rest_size, (off_t)head_size) != (ssize_t)rest_size)
        abort();
    for (int scan = 0; scan < 2; scan++) {
        const zs_data_options options = {.path = path,
                                         .option = "--data",
                                         .vocab = VOCAB,
                                         .max_positions = POSITIONS,
                                         .scan = scan};
        zs_data *data;
        if (zs_data_open(&options, &data)) {
            if (data || !*zs_last_error())
                abort();
            continue;
        }
        check_rows(data);
        zs_data_close(&data);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char *path;
    static int fd;
    uint8_t length[8] = {0};
    size_t end = size;
    if (!path) {
        char target[40];
        temp_make(&dir);
        atexit(clean_up);
        fd = memfd_create("tokens", MFD_CLOEXEC);
        snprintf(target, sizeof target, "/proc/self/fd/%d", fd);
        path = temp_path(&dir, "tokens.safetensors");
        if (fd < 0 || symlink(target, path) != 0)
            abort();
    }
    try_file(fd, path, data, 0, data, size);
    /* Again with the header's length put right, so that what is behind that check is reached. */
    while (end > 8 && data[end - 1] != '}')
        end--;
    if (end > 8) {
        for (int i = 0; i < 8; i++)
            length[i] = (uint8_t)((end - 8) >> (8 * i));
        try_file(fd, path, length, 8, data + 8, size - 8);
    }
    return 0;
}
