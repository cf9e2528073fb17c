/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fuzz/fuzz.h"
#include "model/safetensors.h"
#include "unit/temp.h"

const char *const fuzz_words[] = {"null",
                                  "0",
                                  "{",
                                  "}",
                                  "[",
                                  "]",
                                  ",",
                                  ":",
                                  "\"",
                                  "\"..\"",
                                  "/",
                                  "\\u0000",
                                  "\"1.safetensors\"",
                                  "\"2.safetensors\"",
                                  "\"weight_map\":",
                                  "\"a\":",
                                  "\"c\":",
                                  NULL};

size_t fuzz_seed(size_t i, uint8_t *out)
{
    static const char seed[] = "{\"metadata\":{\"total_size\":2},\"weight_map\":{"
                               "\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}";
    if (i)
        return 0;
    memcpy(out, seed, sizeof seed - 1);
    return sizeof seed - 1;
}

static temp_dir dir;

static void clean_up(void)
{
    temp_remove(&dir);
}

static void make_shard(const char *name, char tensor)
{
    char bytes[80];
    int length =
        snprintf(bytes + 8, sizeof bytes - 8,
                 "{\"%c\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", tensor);
    memset(bytes, 0, 8);
    bytes[0] = (char)length;
    temp_write(&dir, name, bytes, 8 + (size_t)length + 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char *path;
    static int fd;
    zs_st *st;
    if (!path) {
        temp_make(&dir);
        atexit(clean_up);
        make_shard("1.safetensors", 'a');
        make_shard("2.safetensors", 'b');
        /* In memory: file systems may flush a file that is written over. */
        char target[40];
        fd = memfd_create("index", MFD_CLOEXEC);
        snprintf(target, sizeof target, "/proc/self/fd/%d", fd);
        path = temp_path(&dir, "model.safetensors.index.json");
        if (fd < 0 || symlink(target, path) != 0)
            abort();
    }
    if (ftruncate(fd, 0) != 0 || pwrite(fd, data, size, 0) != (ssize_t)size)
        abort();
    if (zs_st_open(path, &st)) {
        if (st || !*zs_last_error())
            abort();
        return 0;
    }
    if (zs_st_count(st) > 2)
        abort();
    zs_st_close(&st);
    return 0;
}
