/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fuzz/fuzz.h"
#include "model/safetensors.h"

const char *const fuzz_words[] = {"0",
                                  "-1",
                                  "4294967296",
                                  "9223372036854775807",
                                  "{",
                                  "}",
                                  "[",
                                  "]",
                                  ",",
                                  ":",
                                  "\"",
                                  "null",
                                  "\\u0000",
                                  "[0,8]",
                                  "[8,8]",
                                  "\"F64\"",
                                  "\"shape\":",
                                  "\"dtype\":",
                                  "\"data_offsets\":",
                                  "\"__metadata__\":",
                                  "\"a\":",
                                  NULL};

size_t fuzz_seed(size_t i, uint8_t *out)
{
    static const char *const headers[] = {
        "{\"__metadata__\":{\"format\":\"pt\"},"
        "\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[16,24]}}  ",
        "{\"x\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[23,24]},"
        "\"y\":{\"dtype\":\"I64\",\"shape\":[0],\"data_offsets\":[23,23]},"
        "\"z\":{\"dtype\":\"BOOL\",\"shape\":[1,23,1],\"data_offsets\":[0,23]}}",
    };
    if (i >= sizeof headers / sizeof *headers)
        return 0;
    uint8_t *data;
    return fuzz_safetensors(headers[i], 24, out, &data);
}

static void check_tensor(const zs_st *st, const zs_st_tensor *t)
{
    uint64_t bytes;
    const char *path = zs_st_file(st, t->file, &bytes);
    if (!path || t->offset > bytes || t->bytes > bytes - t->offset ||
        t->bytes != t->numel * zs_st_dtype_size(t->dtype) || zs_st_find(st, t->name) != t)
        abort();
    void *data = malloc((size_t)t->bytes + 1);
    if (!data || zs_st_read(st, t, 0, t->numel, data) ||
        zs_st_read(st, t, t->numel, 1, data) != ZS_ERR_ARG)
        abort();
    free(data);
}

static void try_file(const uint8_t *head, size_t head_size, const uint8_t *rest, size_t rest_size)
{
    static int fd = -1;
    char path[40];
    zs_st *st;
    if (fd < 0)
        fd = memfd_create("input", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, head, head_size, 0) != (ssize_t)head_size ||
        pwrite(fd, rest, rest_size, (off_t)head_size) != (ssize_t)rest_size)
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (zs_st_open(path, &st)) {
        if (st || !strstr(zs_last_error(), path))
            abort();
        return;
    }
    for (size_t i = 0; i < zs_st_count(st); i++)
        check_tensor(st, zs_st_at(st, i));
    zs_st_close(&st);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t length[8] = {0};
    size_t end = size;
    try_file(data, 0, data, size);
    /* Again with the header's length put right, so that what is behind that check is reached. */
    while (end > 8 && data[end - 1] != '}')
        end--;
    if (end > 8) {
        for (int i = 0; i < 8; i++)
            length[i] = (uint8_t)((end - 8) >> (8 * i));
        try_file(length, 8, data + 8, size - 8);
    }
    return 0;
}
