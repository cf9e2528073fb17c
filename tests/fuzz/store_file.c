/* SPDX-License-Identifier: Apache-2.0 */
/* A whole store file: what opens it, and what reads its chunks. An input is the label (64 bytes),
 * the length of superblock A (2 bytes), A, and B; they are put where they belong, and the chunks
 * behind them are always the same. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/crc32c.h"
#include "fuzz/fuzz.h"
#include "offload/reader.h"
#include "unit/temp.h"

enum {
    LABEL = 64,
    AREA = 12288, /* what the seed's geometry makes of a superblock */
    CHUNKS_AT = 4096 + 2 * AREA,
    CHUNK_PAGES = 2 * 3 * 3, /* slots, arrays, chunks: of a page each */
    FILE_BYTES = CHUNKS_AT + CHUNK_PAGES * 4096,
    /* docs/format.md */
    LABEL_CRC = 32,
    SUPER_LENGTH = 12,
    SUPER_CRC = 16,
    SUPER_FIXED = 128,
};

const char *const fuzz_words[] = {"ZSPSUPER",     "\x80",         "\xff\xff\xff\xff",
                                  "\x7f\xff\xff", "\x01",         "\x10\x10\x10\x10",
                                  "\xff\xff",     "\x40\x01\x02", NULL};

static void put(uint8_t *at, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> (8 * i));
}

/* The content of every page of the chunks. */
static void fill_page(float page[1024])
{
    for (int i = 0; i < 1024; i++)
        page[i] = (float)i;
}

static size_t make_superblock(uint64_t sequence, uint8_t *out)
{
    static unsigned char header[] = "header";
    zs_store_shard shards[] = {
        {.numel = 900}, {.numel = 0}, {.numel = 7, .dtype = ZS_BF16}, {.numel = 1024}};
    const size_t chunk_shards[] = {0, 2, 3};
    zs_store_slot slots[3];
    float page[1024];
    fill_page(page);
    for (size_t c = 0; c < 3; c++) {
        slots[c].slot = (int)(sequence + c) % 2;
        for (int a = 0; a < 3; a++)
            slots[c].crc[a] = zs_crc32c(0, page, shards[chunk_shards[c]].numel * sizeof(float));
    }
    const zs_superblock super = {.fingerprint = 1,
                                 .sequence = sequence,
                                 .commit = sequence,
                                 .step = sequence,
                                 .chunk_numel = 4096,
                                 .slot_count = 2,
                                 .world = 2,
                                 .shards = shards,
                                 .shard_count = 4,
                                 .slots = slots,
                                 .chunk_count = 3,
                                 .header = header,
                                 .header_bytes = sizeof header};
    zs_superblock_encode(&super, out);
    return (size_t)zs_superblock_bytes(&super);
}

size_t fuzz_seed(size_t i, uint8_t *out)
{
    if (i)
        return 0;
    memset(out, 0, LABEL);
    memcpy(out, "zspill states 1\n", 16);
    put(out + 16, AREA, 8);
    put(out + 24, FILE_BYTES, 8);
    put(out + LABEL_CRC, zs_crc32c(0, out, LABEL_CRC), 4);
    size_t a = make_superblock(5, out + LABEL + 2);
    put(out + LABEL, a, 2);
    return LABEL + 2 + a + make_superblock(6, out + LABEL + 2 + a);
}

static temp_dir dir;

static void clean_up(void)
{
    temp_remove(&dir);
}

/* A name of a store in dir for a file in memory. */
static int make_file(char **path)
{
    char target[40];
    float page[1024];
    temp_make(&dir);
    atexit(clean_up);
    int fd = memfd_create("store", MFD_CLOEXEC);
    snprintf(target, sizeof target, "/proc/self/fd/%d", fd);
    *path = zs_store_path(dir.path, 1, 0);
    if (fd < 0 || !*path || symlink(target, *path) != 0 || ftruncate(fd, FILE_BYTES) != 0)
        abort();
    fill_page(page);
    for (int i = 0; i < CHUNK_PAGES; i++)
        if (pwrite(fd, page, sizeof page, CHUNKS_AT + 4096 * i) != (ssize_t)sizeof page)
            abort();
    return fd;
}

static void lay_out(int fd, const uint8_t *label, const uint8_t *const super[2],
                    const size_t bytes[2])
{
    static uint8_t head[CHUNKS_AT];
    memset(head, 0, sizeof head);
    memcpy(head, label, LABEL);
    for (int i = 0; i < 2; i++)
        memcpy(head + 4096 + i * AREA, super[i], bytes[i] < AREA ? bytes[i] : AREA);
    if (pwrite(fd, head, sizeof head, 0) != (ssize_t)sizeof head)
        abort();
}

/* What a reader lets in must be readable or refused, array by array. Returns how many were read. */
static int read_commit(const char *path, uint64_t commit)
{
    static float out[FILE_BYTES / sizeof(float)];
    zs_store_reader *reader;
    int arrays = 0;
    if (zs_store_reader_open(path, commit, NULL, &reader)) {
        if (reader || !*zs_last_error())
            abort();
        return 0;
    }
    const zs_superblock *super = zs_store_reader_super(reader);
    for (size_t s = 0; s < super->shard_count; s++) {
        uint64_t numel = super->shards[s].numel;
        if (numel > FILE_BYTES / sizeof(float))
            abort();
        for (int a = ZS_MASTER; a <= ZS_EXP_AVG_SQ; a++)
            if (!zs_store_reader_read(reader, s, (zs_array)a, 0, numel, out))
                arrays++;
            else if (!*zs_last_error())
                abort();
    }
    zs_store_reader_close(&reader);
    return arrays;
}

static int try_store(const char *path)
{
    zs_store store;
    if (zs_store_lock(dir.path, 1, 0, NULL, &store)) {
        if (store.path || !*zs_last_error())
            abort();
        return 0;
    }
    uint64_t commits[2];
    int count = 0, arrays = 0;
    for (int i = 0; i < 2; i++)
        if (store.whole[i])
            commits[count++] = store.super[i].commit;
    if (!count != !store.exists)
        abort();
    zs_store_close(&store);
    while (count)
        arrays += read_commit(path, commits[--count]);
    return arrays;
}

static void seal(uint8_t *super, size_t bytes)
{
    static const uint8_t zero[4];
    if (bytes < SUPER_FIXED)
        return;
    put(super + SUPER_LENGTH, bytes, 4);
    uint32_t crc = zs_crc32c(0, super, SUPER_CRC);
    crc = zs_crc32c(crc, zero, sizeof zero);
    put(super + SUPER_CRC, zs_crc32c(crc, super + SUPER_CRC + 4, bytes - SUPER_CRC - 4), 4);
}

static int try_input(int fd, const char *path, const uint8_t *data, size_t size)
{
    const uint8_t *first = data + LABEL + 2;
    const size_t room = size - LABEL - 2, length = data[LABEL] | (size_t)data[LABEL + 1] << 8;
    const size_t a = length < room ? length : room;
    lay_out(fd, data, (const uint8_t *const[2]){first, first + a}, (const size_t[2]){a, room - a});
    return try_store(path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char *path;
    static int fd;
    if (!path) {
        static uint8_t seed[FUZZ_SEED_MAX];
        fd = make_file(&path);
        /* Both commits, four shards, three arrays: else nothing below would mean anything. */
        if (try_input(fd, path, seed, fuzz_seed(0, seed)) != 2 * 4 * 3)
            abort();
    }
    if (size < LABEL + 2)
        return 0;
    (void)try_input(fd, path, data, size);
    /* Again with lengths and checksums put right, so that what is behind these checks is reached.
     */
    uint8_t *copy = malloc(size);
    if (!copy)
        abort();
    memcpy(copy, data, size);
    uint8_t *first = copy + LABEL + 2;
    const size_t room = size - LABEL - 2, length = copy[LABEL] | (size_t)copy[LABEL + 1] << 8;
    const size_t a = length < room ? length : room;
    put(copy + LABEL_CRC, zs_crc32c(0, copy, LABEL_CRC), 4);
    seal(first, a);
    seal(first + a, room - a);
    (void)try_input(fd, path, copy, size);
    free(copy);
    return 0;
}
