/* SPDX-License-Identifier: Apache-2.0 */
/* A whole store file: what opens it, and what reads its chunks. An input is the label (64 bytes),
 * the length of superblock A (2 bytes), A, the length of B, B, and C; they are put where they
 * belong (C only where the label says that there are three), and the chunks behind them are always
 * the same. */
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
    AREAS = 3,    /* at most */
    HEAD = 4096 + AREAS * AREA,
    CHUNK_PAGES = AREAS * 3 * 3, /* slots, arrays, chunks: of a page each */
    FILE_BYTES = HEAD + CHUNK_PAGES * 4096,
    /* docs/format.md */
    LABEL_MORE = 20,
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

static size_t make_superblock(int slot_count, uint64_t sequence, uint8_t *out)
{
    static unsigned char header[] = "header";
    zs_store_shard shards[] = {
        {.numel = 900}, {.numel = 0}, {.numel = 7, .dtype = ZS_BF16}, {.numel = 1024}};
    const size_t chunk_shards[] = {0, 2, 3};
    zs_store_slot slots[3];
    float page[1024];
    fill_page(page);
    for (size_t c = 0; c < 3; c++) {
        slots[c].slot = (int)(sequence + c) % slot_count;
        for (int a = 0; a < 3; a++)
            slots[c].crc[a] = zs_crc32c(0, page, shards[chunk_shards[c]].numel * sizeof(float));
    }
    const zs_superblock super = {.fingerprint = 1,
                                 .sequence = sequence,
                                 .commit = sequence,
                                 .step = sequence,
                                 .chunk_numel = 4096,
                                 .slot_count = slot_count,
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
    const int areas = 2 + (int)i;
    size_t at = LABEL;
    if (areas > AREAS)
        return 0;
    memset(out, 0, LABEL);
    memcpy(out, "zspill states 1\n", 16);
    put(out + 16, AREA, 4);
    put(out + LABEL_MORE, i, 4);
    put(out + 24, FILE_BYTES, 8);
    put(out + LABEL_CRC, zs_crc32c(0, out, LABEL_CRC), 4);
    for (int area = 0; area < areas; area++) {
        const int last = area == AREAS - 1;
        const size_t bytes = make_superblock(areas, 5 + (uint64_t)area, out + at + (last ? 0 : 2));
        if (!last)
            put(out + at, bytes, 2);
        at += bytes + (last ? 0 : 2);
    }
    return at;
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
        if (pwrite(fd, page, sizeof page, HEAD + 4096 * i) != (ssize_t)sizeof page)
            abort();
    return fd;
}

typedef struct parts {
    uint8_t *super[AREAS];
    size_t bytes[AREAS];
} parts;

static parts cut(uint8_t *data, size_t size)
{
    parts p = {0};
    size_t at = LABEL;
    for (int i = 0; i < AREAS && at < size; i++) {
        size_t bytes = size - at;
        if (i < AREAS - 1 && bytes >= 2) {
            const size_t length = data[at] | (size_t)data[at + 1] << 8;
            at += 2;
            bytes = length < size - at ? length : size - at;
        }
        p.super[i] = data + at;
        p.bytes[i] = bytes;
        at += bytes;
    }
    return p;
}

static void lay_out(int fd, const uint8_t *label, const parts *p)
{
    static uint8_t head[HEAD];
    float page[1024];
    memset(head, 0, sizeof head);
    memcpy(head, label, LABEL);
    const int areas = label[LABEL_MORE] ? AREAS : 2;
    for (int i = 0; i < areas; i++)
        if (p->bytes[i])
            memcpy(head + 4096 + i * AREA, p->super[i], p->bytes[i] < AREA ? p->bytes[i] : AREA);
    fill_page(page);
    for (size_t at = 4096 + (size_t)areas * AREA; at < HEAD; at += sizeof page)
        memcpy(head + at, page, sizeof page);
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
    uint64_t commits[ZS_STORE_SLOTS_MOST];
    int count = 0, arrays = 0;
    for (int i = 0; i < store.area_count; i++)
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

static int try_input(int fd, const char *path, uint8_t *data, size_t size)
{
    const parts p = cut(data, size);
    lay_out(fd, data, &p);
    return try_store(path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char *path;
    static int fd;
    if (!path) {
        static uint8_t seed[FUZZ_SEED_MAX];
        fd = make_file(&path);
        /* All commits, four shards, three arrays: else nothing below would mean anything. */
        for (size_t i = 0; i < 2; i++)
            if (try_input(fd, path, seed, fuzz_seed(i, seed)) != (2 + (int)i) * 4 * 3)
                abort();
    }
    if (size < LABEL)
        return 0;
    uint8_t *copy = malloc(size);
    if (!copy)
        abort();
    memcpy(copy, data, size);
    (void)try_input(fd, path, copy, size);
    /* Again with lengths and checksums put right, so that what is behind these checks is reached.
     */
    const parts p = cut(copy, size);
    put(copy + LABEL_CRC, zs_crc32c(0, copy, LABEL_CRC), 4);
    for (int i = 0; i < AREAS; i++)
        seal(p.super[i], p.bytes[i]);
    (void)try_input(fd, path, copy, size);
    free(copy);
    return 0;
}
