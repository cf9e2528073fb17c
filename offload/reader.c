/* SPDX-License-Identifier: Apache-2.0 */
#include "offload/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/status.h"
#include "base/util.h"

struct zs_store_reader {
    char *path;
    int fd;
    zs_store store; /* superblocks as zs_store_peek found them */
    const zs_superblock *super;
    zs_store_geometry geometry;
    /* the chunk that is in memory, for each array */
    float *data[ZS_STORE_ARRAYS];
    size_t chunk[ZS_STORE_ARRAYS];
};

static const size_t NONE = (size_t)-1;

static zs_status find_commit(zs_store_reader *r, uint64_t commit)
{
    const int found = zs_store_find(&r->store, commit);
    if (found < 0)
        return zs_fail(ZS_ERR_CORRUPT, "store '%s' holds no whole commit %llu", r->path,
                       (unsigned long long)commit);
    r->super = &r->store.super[found];
    return ZS_OK;
}

zs_status zs_store_reader_open(const char *path, uint64_t commit, const zs_log *log,
                               zs_store_reader **out)
{
    zs_status status;
    zs_store_reader *r = calloc(1, sizeof *r);
    *out = NULL;
    if (!r)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a reader of store '%s'", path);
    r->fd = -1;
    r->store.lock_fd = -1;
    for (int a = 0; a < ZS_STORE_ARRAYS; a++)
        r->chunk[a] = NONE;
    r->path = strdup(path);
    if (!r->path) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory for a reader of store '%s'", path);
        goto fail;
    }
    ZS_TRY(zs_store_peek(path, log, &r->store));
    ZS_TRY(zs_store_check_clean(&r->store));
    ZS_TRY(find_commit(r, commit));
    ZS_TRY(zs_store_geometry_make(r->super->rank, r->super->world, r->super->slot_count,
                                  r->super->chunk_numel, r->super->shards, r->super->shard_count,
                                  &r->geometry));
    if (r->geometry.chunk_count != r->super->chunk_count) {
        status = zs_fail(ZS_ERR_CORRUPT, "store '%s' lists %zu chunks where its shards make %zu",
                         path, r->super->chunk_count, r->geometry.chunk_count);
        goto fail;
    }
    struct stat st;
    r->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (r->fd < 0 || fstat(r->fd, &st) < 0) {
        status = zs_fail(ZS_ERR_IO, "store '%s' cannot be opened: %s", path, strerror(errno));
        goto fail;
    }
    /* No chunk is then larger than what can be read. */
    if (r->geometry.file_bytes > (uint64_t)st.st_size) {
        status = zs_fail(ZS_ERR_CORRUPT,
                         "store '%s' has %llu bytes where its chunks take %llu: it was truncated: "
                         "restore the file from a copy",
                         path, (unsigned long long)st.st_size,
                         (unsigned long long)r->geometry.file_bytes);
        goto fail;
    }
    *out = r;
    return ZS_OK;
fail:
    zs_store_reader_close(&r);
    return status;
}

void zs_store_reader_close(zs_store_reader **reader)
{
    zs_store_reader *r = reader ? *reader : NULL;
    if (!r)
        return;
    *reader = NULL;
    if (r->fd >= 0)
        close(r->fd);
    for (int a = 0; a < ZS_STORE_ARRAYS; a++)
        free(r->data[a]);
    zs_store_geometry_free(&r->geometry);
    zs_store_close(&r->store);
    free(r->path);
    free(r);
}

const zs_superblock *zs_store_reader_super(const zs_store_reader *r)
{
    return r->super;
}

const char *zs_store_reader_path(const zs_store_reader *r)
{
    return r->path;
}

const zs_store_geometry *zs_store_reader_geometry(const zs_store_reader *r)
{
    return &r->geometry;
}

static zs_status read_all(const zs_store_reader *r, void *to, size_t bytes, uint64_t offset)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(r->fd, (char *)to + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return zs_fail(ZS_ERR_IO, "store '%s': reading %zu bytes at %llu: %s", r->path, bytes,
                           (unsigned long long)offset, strerror(errno));
        if (n == 0)
            return zs_fail(ZS_ERR_CORRUPT,
                           "store '%s' ends at %llu, inside what it should hold: "
                           "restore the file from a copy",
                           r->path, (unsigned long long)(offset + done));
        done += (size_t)n;
    }
    return ZS_OK;
}

/* In elements; shards may be shorter than chunk_numel. */
static uint64_t longest_chunk(const zs_store_geometry *geometry)
{
    uint64_t longest = 1;
    for (size_t c = 0; c < geometry->chunk_count; c++)
        longest = ZS_MAX(longest, geometry->chunks[c].numel);
    return longest;
}

/* Brings one array of a chunk into memory. */
static zs_status load(zs_store_reader *r, size_t chunk, int array)
{
    static const char *const names[] = {"master", "exp_avg", "exp_avg_sq"};
    const zs_store_chunk *c = &r->geometry.chunks[chunk];
    const zs_store_slot *slot = &r->super->slots[chunk];
    const size_t bytes = c->numel * sizeof(float);
    const uint64_t offset = zs_store_slot_offset(c, slot->slot) + (uint64_t)array * c->stride;
    if (r->chunk[array] == chunk)
        return ZS_OK;
    r->chunk[array] = NONE;
    if (!r->data[array])
        r->data[array] = malloc(longest_chunk(&r->geometry) * sizeof(float));
    if (!r->data[array])
        return zs_fail(ZS_ERR_NOMEM, "store '%s': no memory for a chunk of %llu elements", r->path,
                       (unsigned long long)longest_chunk(&r->geometry));
    ZS_CHECK(read_all(r, r->data[array], bytes, offset));
    if (zs_crc32c(0, r->data[array], bytes) != slot->crc[array])
        return zs_fail(ZS_ERR_CORRUPT,
                       "store '%s': chunk %zu, %s, at offset %llu: the checksum is wrong: restore "
                       "the file from a copy",
                       r->path, chunk, names[array], (unsigned long long)offset);
    r->chunk[array] = chunk;
    return ZS_OK;
}

zs_status zs_store_reader_check(zs_store_reader *r, size_t chunk, zs_array array)
{
    return load(r, chunk, (int)array - ZS_MASTER);
}

static size_t find_chunk(const zs_store_reader *r, size_t shard, uint64_t element)
{
    size_t lo = 0, hi = r->geometry.chunk_count;
    while (lo < hi) {
        const size_t mid = lo + (hi - lo) / 2;
        const zs_store_chunk *c = &r->geometry.chunks[mid];
        if (c->shard < shard || (c->shard == shard && c->first + c->numel <= element))
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

zs_status zs_store_reader_read(zs_store_reader *r, size_t shard, zs_array array, uint64_t first,
                               uint64_t count, float *dst)
{
    if (shard >= r->super->shard_count || first > r->super->shards[shard].numel ||
        count > r->super->shards[shard].numel - first || array < ZS_MASTER || array > ZS_EXP_AVG_SQ)
        return zs_fail(ZS_ERR_MISMATCH,
                       "store '%s': elements %llu to %llu of shard %zu are not there: it was made "
                       "in another shape than its manifest says",
                       r->path, (unsigned long long)first, (unsigned long long)(first + count),
                       shard);
    const int a = (int)array - ZS_MASTER;
    while (count) {
        const size_t chunk = find_chunk(r, shard, first);
        const zs_store_chunk *c = &r->geometry.chunks[chunk];
        ZS_CHECK(load(r, chunk, a));
        const uint64_t n = ZS_MIN(count, c->first + c->numel - first);
        memcpy(dst, r->data[a] + (first - c->first), n * sizeof *dst);
        dst += n;
        first += n;
        count -= n;
    }
    return ZS_OK;
}
