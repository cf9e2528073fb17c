/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "fuzz/fuzz.h"
#include "offload/store.h"

/* Where docs/format.md puts the checksum and the length of a superblock. */
enum { CRC_AT = 16, LENGTH_AT = 12 };

const char *const fuzz_words[] = {
    "ZSPSUPER", "\xff\xff\xff\xff", "\x7f\xff\xff\xff", "\x01", "\x80", "\x10\x10\x10\x10", NULL};

size_t fuzz_seed(size_t i, uint8_t *out)
{
    zs_store_shard shards[] = {{.numel = 5000}, {.numel = 4096, .dtype = ZS_BF16}, {.numel = 0}};
    zs_store_slot slots[] = {{.slot = 1, .crc = {1, 2, 3}}, {.slot = 0}, {.slot = 1}};
    unsigned char header[] = "header";
    zs_superblock super = {.fingerprint = 1,
                           .sequence = 3,
                           .step = 2,
                           .chunk_numel = 4096,
                           .world = 2,
                           .shards = shards,
                           .shard_count = 3,
                           .slots = slots,
                           .chunk_count = 3,
                           .header = header,
                           .header_bytes = sizeof header};
    if (i == 1) { /* as a store that keeps older commits has it */
        super.slot_count = 4;
        slots[0].slot = 3;
    }
    if (i > 1)
        return 0;
    zs_superblock_encode(&super, out);
    return (size_t)zs_superblock_bytes(&super);
}

static void put32(uint8_t *at, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(value >> (8 * i));
}

static void try_superblock(const uint8_t *data, size_t size)
{
    zs_superblock super;
    if (zs_superblock_decode(data, size, &super)) {
        if (super.shards || super.slots || super.header || !*zs_last_error())
            abort();
        return;
    }
    for (size_t i = 0; i < super.chunk_count; i++)
        if (super.slots[i].slot < 0 || super.slots[i].slot >= super.slot_count)
            abort();
    uint64_t bytes = zs_superblock_bytes(&super);
    if (bytes > size)
        abort();
    unsigned char *again = malloc((size_t)bytes);
    if (!again)
        abort();
    zs_superblock_encode(&super, again);
    free(again);
    zs_superblock_free(&super);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t zero[4];
    try_superblock(data, size);
    if (size < 128)
        return 0;
    /* Again with length and checksum put right, so that what is behind these checks is reached. */
    uint8_t *copy = malloc(size);
    if (!copy)
        abort();
    memcpy(copy, data, size);
    put32(copy + LENGTH_AT, (uint32_t)size);
    uint32_t crc = zs_crc32c(0, copy, CRC_AT);
    crc = zs_crc32c(crc, zero, sizeof zero);
    put32(copy + CRC_AT, zs_crc32c(crc, copy + CRC_AT + 4, size - CRC_AT - 4));
    try_superblock(copy, size);
    free(copy);
    return 0;
}
