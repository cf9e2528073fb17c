/* SPDX-License-Identifier: Apache-2.0 */
#include "offload/param_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"

struct zs_param_file {
    zs_io *io;
    zs_file *file;
    zs_ledger *ledger;
    uint64_t booked;
    uint64_t *offset; /* of each shard, and the end */
    uint64_t *extent;
    size_t count;
};

static zs_status lay_out(zs_param_file *file, const uint64_t *shard_bytes)
{
    uint64_t at = 0;
    file->offset = calloc(file->count + 1, sizeof *file->offset);
    file->extent = calloc(file->count + 1, sizeof *file->extent);
    if (!file->offset || !file->extent)
        return zs_fail(ZS_ERR_NOMEM, "no memory for %zu parameter extents", file->count);
    for (size_t i = 0; i < file->count; i++) {
        if (shard_bytes[i] > INT64_MAX / 2 - at)
            return zs_fail(ZS_ERR_ARG, "parameter shard %zu: %llu bytes are more than a file holds",
                           i, (unsigned long long)shard_bytes[i]);
        file->offset[i] = at;
        file->extent[i] = zs_round_up(shard_bytes[i], ZS_IO_ALIGN);
        at += file->extent[i];
    }
    file->offset[file->count] = at;
    return ZS_OK;
}

zs_status zs_param_file_open(const char *dir, int rank, zs_io *io, zs_ledger *ledger,
                             const uint64_t *shard_bytes, size_t count, zs_param_file **out)
{
    zs_status status;
    char *path = NULL;
    int made_dir = 0;
    *out = NULL;
    zs_param_file *file = calloc(1, sizeof *file);
    if (!file)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the parameter file");
    file->io = io;
    file->ledger = ledger;
    file->count = count;
    ZS_TRY(lay_out(file, shard_bytes));
    if (mkdir(dir, 0777) == 0) {
        made_dir = 1;
    } else if (errno != EEXIST) {
        status =
            zs_fail(ZS_ERR_IO, "parameter directory '%s' cannot be made: %s", dir, strerror(errno));
        goto fail;
    }
    /* A name of our own: nobody can have it open, and it is gone in a moment. */
    if (asprintf(&path, "%s/zspill-rank%05d-%ld-%p.params", dir, rank, (long)getpid(),
                 (void *)file) < 0) {
        path = NULL;
        status = zs_fail(ZS_ERR_NOMEM, "no memory for the parameter file's path");
        goto fail;
    }
    ZS_TRY(zs_file_open(io, path, ZS_FILE_CREATE, file->offset[count], &file->file));
    if (unlink(path) < 0) {
        status =
            zs_fail(ZS_ERR_IO, "parameter file '%s' cannot be unlinked: %s", path, strerror(errno));
        goto fail;
    }
    ZS_TRY(zs_ledger_add(ledger, ZS_TIER_NVME, "parameters", (int64_t)file->offset[count]));
    file->booked = file->offset[count];
    free(path);
    *out = file;
    return ZS_OK;
fail:
    free(path);
    zs_param_file_close(&file);
    if (made_dir)
        (void)rmdir(dir);
    return status;
}

void zs_param_file_close(zs_param_file **out)
{
    zs_param_file *file = *out;
    if (!file)
        return;
    *out = NULL;
    zs_file_close(&file->file);
    if (file->booked)
        (void)zs_ledger_add(file->ledger, ZS_TIER_NVME, "parameters", -(int64_t)file->booked);
    free(file->offset);
    free(file->extent);
    free(file);
}

uint64_t zs_param_file_extent(const zs_param_file *file, size_t shard)
{
    return file->extent[shard];
}

zs_status zs_param_file_read(zs_param_file *file, size_t shard, void *buf, zs_io_req *req)
{
    if (shard >= file->count)
        return zs_fail(ZS_ERR_ARG, "parameter shard %zu of %zu", shard, file->count);
    if (!file->extent[shard])
        return ZS_OK;
    return zs_io_read(file->io, file->file, file->offset[shard], buf, file->extent[shard], req);
}

zs_status zs_param_file_write(zs_param_file *file, size_t shard, uint64_t offset, const void *buf,
                              size_t bytes, zs_io_req *req)
{
    uint64_t length = zs_round_up(bytes, ZS_IO_ALIGN);
    if (shard >= file->count)
        return zs_fail(ZS_ERR_ARG, "parameter shard %zu of %zu", shard, file->count);
    if (offset % ZS_IO_ALIGN || offset > file->extent[shard] ||
        length > file->extent[shard] - offset)
        return zs_fail(ZS_ERR_ARG, "parameter shard %zu: bytes %llu to %llu of %llu", shard,
                       (unsigned long long)offset, (unsigned long long)(offset + length),
                       (unsigned long long)file->extent[shard]);
    if (!length)
        return ZS_OK;
    return zs_io_write(file->io, file->file, file->offset[shard] + offset, buf, length, req);
}
