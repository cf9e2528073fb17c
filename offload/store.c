/* SPDX-License-Identifier: Apache-2.0 */
#include "offload/store.h"

#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/status.h"
#include "base/util.h"

/* docs/format.md has the table these follow. */
enum {
    SUPER_MAGIC = 0,
    SUPER_VERSION = 8,
    SUPER_BYTES = 12,
    SUPER_CRC = 16,
    SUPER_HEADER_BYTES = 20,
    SUPER_FINGERPRINT = 24,
    SUPER_WORLD = 32,
    SUPER_RANK = 36,
    SUPER_LINEAGE = 40,
    SUPER_SEQUENCE = 48,
    SUPER_STEP = 56,
    SUPER_CHUNK_NUMEL = 64,
    SUPER_SHARDS = 72,
    SUPER_CHUNKS = 80,
    SUPER_COMMIT = 88,
    SUPER_RUN = 96,
    SUPER_SLOTS = 104,
    SUPER_DIRTY = 108,
    SUPER_FIXED = 128,
    SHARD_RECORD = 16,
    CHUNK_RECORD = 16
};

static const char super_magic[8] = {'Z', 'S', 'P', 'S', 'U', 'P', 'E', 'R'};

static void put32(unsigned char *at, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        at[i] = (unsigned char)(value >> (8 * i));
}

static void put64(unsigned char *at, uint64_t value)
{
    put32(at, (uint32_t)value);
    put32(at + 4, (uint32_t)(value >> 32));
}

static uint32_t get32(const unsigned char *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static uint64_t get64(const unsigned char *at)
{
    return get32(at) | (uint64_t)get32(at + 4) << 32;
}

uint64_t zs_store_slot_offset(const zs_store_chunk *chunk, int slot)
{
    return chunk->offset + (uint64_t)slot * ZS_STORE_ARRAYS * chunk->stride;
}

zs_status zs_store_geometry_make(int rank, int world, int slot_count, uint64_t chunk_numel,
                                 const zs_store_shard *shards, size_t shard_count,
                                 zs_store_geometry *out)
{
    *out = (zs_store_geometry){
        .rank = rank,
        .world = world,
        .slot_count = slot_count,
        .area_count = ZS_MAX(slot_count, 2),
        .chunk_numel = chunk_numel,
    };
    uint64_t count = 0, total = 0;
    for (size_t s = 0; s < shard_count; s++) {
        count += zs_div_up(shards[s].numel, chunk_numel);
        if (__builtin_add_overflow(total, shards[s].numel, &total) || total > UINT64_MAX / 64)
            return zs_fail(ZS_ERR_ARG, "shard %zu: %llu elements are more than a store can hold", s,
                           (unsigned long long)shards[s].numel);
    }
    if (count > UINT32_MAX / CHUNK_RECORD / 2)
        return zs_fail(ZS_ERR_ARG,
                       "%llu chunks of %llu elements are too many for a store: take larger chunks",
                       (unsigned long long)count, (unsigned long long)chunk_numel);
    out->shards = calloc(shard_count + 1, sizeof *out->shards);
    out->chunks = calloc(count + 1, sizeof *out->chunks);
    if (!out->shards || !out->chunks) {
        zs_store_geometry_free(out);
        return zs_fail(ZS_ERR_NOMEM, "no memory for a table of %llu chunks",
                       (unsigned long long)count);
    }
    if (shard_count)
        memcpy(out->shards, shards, shard_count * sizeof *shards);
    out->shard_count = shard_count;
    out->chunk_count = count;
    out->superblock_bytes = zs_round_up(SUPER_FIXED + (uint64_t)shard_count * SHARD_RECORD +
                                            count * CHUNK_RECORD + ZS_STORE_HEADER_MAX,
                                        ZS_PAGE);
    uint64_t at = ZS_PAGE + (uint64_t)out->area_count * out->superblock_bytes;
    zs_store_chunk *chunk = out->chunks;
    for (size_t s = 0; s < shard_count; s++)
        for (uint64_t first = 0; first < shards[s].numel; first += chunk_numel, chunk++) {
            uint64_t numel = ZS_MIN(chunk_numel, shards[s].numel - first);
            *chunk = (zs_store_chunk){.shard = s,
                                      .first = first,
                                      .numel = numel,
                                      .stride = zs_round_up(numel * sizeof(float), ZS_PAGE),
                                      .offset = at};
            at += (uint64_t)slot_count * ZS_STORE_ARRAYS * chunk->stride;
        }
    out->file_bytes = at;
    return ZS_OK;
}

void zs_store_geometry_free(zs_store_geometry *geometry)
{
    free(geometry->shards);
    free(geometry->chunks);
    *geometry = (zs_store_geometry){0};
}

uint64_t zs_superblock_bytes(const zs_superblock *super)
{
    return SUPER_FIXED + (uint64_t)super->shard_count * SHARD_RECORD +
           (uint64_t)super->chunk_count * CHUNK_RECORD + super->header_bytes;
}

static uint32_t super_crc(const unsigned char *data, uint64_t bytes)
{
    static const unsigned char zero[4];
    uint32_t crc = zs_crc32c(0, data, SUPER_CRC);
    crc = zs_crc32c(crc, zero, sizeof zero);
    return zs_crc32c(crc, data + SUPER_CRC + 4, bytes - SUPER_CRC - 4);
}

void zs_superblock_encode(const zs_superblock *super, unsigned char *out)
{
    uint64_t bytes = zs_superblock_bytes(super);
    memset(out, 0, SUPER_FIXED);
    memcpy(out + SUPER_MAGIC, super_magic, sizeof super_magic);
    put32(out + SUPER_VERSION, ZS_STORE_VERSION);
    put32(out + SUPER_BYTES, (uint32_t)bytes);
    put32(out + SUPER_HEADER_BYTES, (uint32_t)super->header_bytes);
    put64(out + SUPER_FINGERPRINT, super->fingerprint);
    put32(out + SUPER_WORLD, (uint32_t)super->world);
    put32(out + SUPER_RANK, (uint32_t)super->rank);
    put64(out + SUPER_LINEAGE, super->lineage);
    put64(out + SUPER_COMMIT, super->commit);
    put64(out + SUPER_RUN, super->run);
    put32(out + SUPER_SLOTS, (uint32_t)(super->slot_count ? super->slot_count : 2));
    put32(out + SUPER_DIRTY, (uint32_t)super->dirty);
    put64(out + SUPER_SEQUENCE, super->sequence);
    put64(out + SUPER_STEP, super->step);
    put64(out + SUPER_CHUNK_NUMEL, super->chunk_numel);
    put64(out + SUPER_SHARDS, super->shard_count);
    put64(out + SUPER_CHUNKS, super->chunk_count);
    unsigned char *at = out + SUPER_FIXED;
    for (size_t s = 0; s < super->shard_count; s++, at += SHARD_RECORD) {
        put64(at, super->shards[s].numel);
        put32(at + 8, (uint32_t)super->shards[s].dtype);
        put32(at + 12, 0);
    }
    for (size_t c = 0; c < super->chunk_count; c++, at += CHUNK_RECORD) {
        put32(at, (uint32_t)super->slots[c].slot);
        for (int a = 0; a < ZS_STORE_ARRAYS; a++)
            put32(at + 4 + 4 * a, super->slots[c].crc[a]);
    }
    if (super->header_bytes)
        memcpy(at, super->header, super->header_bytes);
    put32(out + SUPER_CRC, super_crc(out, bytes));
}

/* Whether its shards make its chunks: nothing else is ever written, and whoever goes by one must
 * not be led beyond the other. */
static int chunks_match(const zs_superblock *super)
{
    uint64_t count = 0, total = 0;
    if (!super->chunk_numel)
        return 0;
    for (size_t s = 0; s < super->shard_count; s++) {
        if (__builtin_add_overflow(total, super->shards[s].numel, &total) ||
            total > UINT64_MAX / 64)
            return 0;
        count += zs_div_up(super->shards[s].numel, super->chunk_numel);
    }
    return count == super->chunk_count;
}

zs_status zs_superblock_decode(const unsigned char *data, uint64_t bytes, zs_superblock *out)
{
    *out = (zs_superblock){0};
    if (bytes < SUPER_FIXED || memcmp(data, super_magic, sizeof super_magic) != 0)
        return zs_fail(ZS_ERR_CORRUPT, "no superblock is there");
    if (get32(data + SUPER_VERSION) != ZS_STORE_VERSION)
        return zs_fail(ZS_ERR_CORRUPT, "its format is version %u, this zspill reads version %d",
                       get32(data + SUPER_VERSION), ZS_STORE_VERSION);
    uint64_t length = get32(data + SUPER_BYTES);
    uint64_t shards = get64(data + SUPER_SHARDS), chunks = get64(data + SUPER_CHUNKS);
    uint64_t header = get32(data + SUPER_HEADER_BYTES);
    if (length > bytes || length < SUPER_FIXED || header > ZS_STORE_HEADER_MAX ||
        shards > length / SHARD_RECORD || chunks > length / CHUNK_RECORD ||
        SUPER_FIXED + shards * SHARD_RECORD + chunks * CHUNK_RECORD + header != length)
        return zs_fail(ZS_ERR_CORRUPT, "its lengths contradict each other");
    const uint64_t slots = get32(data + SUPER_SLOTS);
    if (!slots || slots > ZS_STORE_SLOTS_MOST)
        return zs_fail(ZS_ERR_CORRUPT, "it has %llu slots for each chunk; at most %d are possible",
                       (unsigned long long)slots, ZS_STORE_SLOTS_MOST);
    uint32_t stored = get32(data + SUPER_CRC), computed = super_crc(data, length);
    if (stored != computed)
        return zs_fail(ZS_ERR_CORRUPT, "its checksum is %08x, its contents give %08x", stored,
                       computed);
    out->fingerprint = get64(data + SUPER_FINGERPRINT);
    out->world = (int)get32(data + SUPER_WORLD);
    out->rank = (int)get32(data + SUPER_RANK);
    out->lineage = get64(data + SUPER_LINEAGE);
    out->commit = get64(data + SUPER_COMMIT);
    out->run = get64(data + SUPER_RUN);
    out->slot_count = (int)slots;
    out->dirty = get32(data + SUPER_DIRTY) != 0;
    out->sequence = get64(data + SUPER_SEQUENCE);
    out->step = get64(data + SUPER_STEP);
    out->chunk_numel = get64(data + SUPER_CHUNK_NUMEL);
    out->shard_count = shards;
    out->chunk_count = chunks;
    out->header_bytes = header;
    out->shards = calloc(shards + 1, sizeof *out->shards);
    out->slots = calloc(chunks + 1, sizeof *out->slots);
    out->header = malloc(header + 1);
    if (!out->shards || !out->slots || !out->header) {
        zs_superblock_free(out);
        return zs_fail(ZS_ERR_NOMEM, "no memory for a superblock of %llu bytes",
                       (unsigned long long)length);
    }
    const unsigned char *at = data + SUPER_FIXED;
    for (size_t s = 0; s < shards; s++, at += SHARD_RECORD)
        out->shards[s] = (zs_store_shard){.numel = get64(at), .dtype = (zs_dtype)get32(at + 8)};
    for (size_t c = 0; c < chunks; c++, at += CHUNK_RECORD) {
        /* Nothing else is ever written; a forged file must not become an index. */
        out->slots[c].slot = (int)(get32(at) % slots);
        for (int a = 0; a < ZS_STORE_ARRAYS; a++)
            out->slots[c].crc[a] = get32(at + 4 + 4 * a);
    }
    memcpy(out->header, at, header);
    if (!chunks_match(out)) {
        zs_superblock_free(out);
        return zs_fail(ZS_ERR_CORRUPT, "its chunks are not those of its shards");
    }
    return ZS_OK;
}

void zs_superblock_free(zs_superblock *super)
{
    free(super->shards);
    free(super->slots);
    free(super->header);
    *super = (zs_superblock){0};
}

zs_status zs_superblock_check(const zs_superblock *super, const zs_store_geometry *geometry,
                              const char *path)
{
    if (super->world != geometry->world)
        return zs_fail(
            ZS_ERR_MISMATCH,
            "store '%s' was written by a world of %d ranks, this run has %d: resume with "
            "%d ranks, or use another directory",
            path, super->world, geometry->world, super->world);
    if (super->rank != geometry->rank)
        return zs_fail(ZS_ERR_MISMATCH,
                       "store '%s' belongs to rank %d, this is rank %d: restore the file's name",
                       path, super->rank, geometry->rank);
    if (super->shard_count != geometry->shard_count)
        return zs_fail(ZS_ERR_MISMATCH,
                       "store '%s' holds %zu shards, this run has %zu: resume with the model and "
                       "stage it was made with, or use another directory",
                       path, super->shard_count, geometry->shard_count);
    for (size_t s = 0; s < super->shard_count; s++) {
        const zs_store_shard *have = &super->shards[s], *want = &geometry->shards[s];
        if (have->numel != want->numel)
            return zs_fail(ZS_ERR_MISMATCH,
                           "store '%s': shard %zu has %llu elements there and %llu in this run: "
                           "resume with the model and stage it was made with, or use another "
                           "directory",
                           path, s, (unsigned long long)have->numel,
                           (unsigned long long)want->numel);
        if (have->dtype != want->dtype)
            return zs_fail(ZS_ERR_MISMATCH,
                           "store '%s': shard %zu was trained with %s weights, this run has %s: "
                           "resume with the former, or use another directory",
                           path, s, zs_dtype_name(have->dtype), zs_dtype_name(want->dtype));
    }
    if (super->slot_count != geometry->slot_count)
        return zs_fail(
            ZS_ERR_MISMATCH,
            "store '%s' has %d slot(s) for each chunk, this run asks for %d: ask for %d, "
            "or use another directory",
            path, super->slot_count, geometry->slot_count, super->slot_count);
    if (super->chunk_numel != geometry->chunk_numel || super->chunk_count != geometry->chunk_count)
        return zs_fail(ZS_ERR_MISMATCH,
                       "store '%s' has chunks of %llu elements, this run asks for %llu: set "
                       "chunk_numel to 0 or %llu, or use another directory",
                       path, (unsigned long long)super->chunk_numel,
                       (unsigned long long)geometry->chunk_numel,
                       (unsigned long long)super->chunk_numel);
    return ZS_OK;
}
