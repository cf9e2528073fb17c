/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "model/files.h"
#include "model/json.h"
#include "model/safetensors.h"

struct zs_st_writer {
    char *path, *unfinished;
    int fd;
};

static zs_status write_bytes(const zs_st_writer *w, uint64_t offset, const void *src,
                             uint64_t bytes)
{
    const char *from = src;
    while (bytes) {
        ssize_t put = pwrite(w->fd, from, ZS_MIN(bytes, (uint64_t)1 << 30), (off_t)offset);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return zs_fail(put < 0 && errno == ENOSPC ? ZS_ERR_NOSPACE : ZS_ERR_IO,
                           "cannot write %s at byte %llu: %s", w->unfinished,
                           (unsigned long long)offset, put < 0 ? strerror(errno) : "nothing taken");
        from += put;
        offset += (uint64_t)put;
        bytes -= (uint64_t)put;
    }
    return ZS_OK;
}

/* Sizes and offsets (from the end of the header) of the tensors, and their entries in root. */
static zs_status lay_out(const char *path, zs_st_tensor *tensors, size_t count, json_t *root,
                         uint64_t *data_bytes)
{
    uint64_t at = 0;
    for (size_t i = 0; i < count; i++) {
        zs_st_tensor *t = &tensors[i];
        zs_json_watch();
        json_t *shape = json_array();
        t->numel = 1;
        int bad = t->ndim < 0 || t->ndim > ZS_MAX_DIMS || !zs_st_dtype_size(t->dtype);
        for (int d = 0; !bad && d < t->ndim; d++) {
            bad = t->shape[d] < 0 || zs_mul_overflow(t->numel, (uint64_t)t->shape[d], &t->numel) ||
                  json_array_append_new(shape, json_integer(t->shape[d])) != 0;
        }
        bad = bad || zs_mul_overflow(t->numel, zs_st_dtype_size(t->dtype), &t->bytes) ||
              t->bytes > INT64_MAX / 2 - at;
        if (bad || json_object_get(root, t->name)) {
            const int lacks_memory = zs_json_lacks_memory();
            json_decref(shape);
            if (lacks_memory)
                return zs_fail(ZS_ERR_NOMEM, "%s: no memory for the entry of tensor \"%.200s\"",
                               path, t->name);
            return zs_fail(ZS_ERR_ARG, "%s: tensor \"%.200s\" %s", path, t->name,
                           bad ? "has a shape or dtype that cannot be written" : "is there twice");
        }
        t->file = 0;
        t->offset = at;
        at += t->bytes;
        json_t *entry =
            json_pack("{s:s, s:o, s:[I, I]}", "dtype", zs_st_dtype_name(t->dtype), "shape", shape,
                      "data_offsets", (json_int_t)t->offset, (json_int_t)at);
        if (!entry || json_object_set_new(root, t->name, entry) != 0)
            return zs_json_lacks_memory()
                       ? zs_fail(ZS_ERR_NOMEM, "%s: no memory for the entry of tensor \"%.200s\"",
                                 path, t->name)
                       : zs_fail(ZS_ERR_ARG, "%s: tensor \"%.200s\" has a name that is not UTF-8",
                                 path, t->name);
    }
    *data_bytes = at;
    return ZS_OK;
}

/* The header as it is in the file: length, JSON, spaces up to a multiple of 8. */
static zs_status make_header(const char *path, const json_t *root, unsigned char **out,
                             uint64_t *bytes)
{
    size_t length = json_dumpb(root, NULL, 0, JSON_COMPACT);
    uint64_t padded = zs_round_up(length, 8);
    *bytes = 8 + padded;
    *out = malloc((size_t)*bytes);
    if (!length || !*out)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the header of %s", path);
    memset(*out, ' ', (size_t)*bytes);
    for (int i = 0; i < 8; i++)
        (*out)[i] = (unsigned char)(padded >> (8 * i));
    /* It needs memory of its own, each time. */
    if (json_dumpb(root, (char *)*out + 8, length, JSON_COMPACT) != length)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the header of %s", path);
    return ZS_OK;
}

static zs_status allocate(const zs_st_writer *w, uint64_t bytes)
{
    if (fallocate(w->fd, 0, 0, (off_t)bytes) == 0)
        return ZS_OK;
    int error = errno;
    if ((error == EOPNOTSUPP || error == ENOSYS) && ftruncate(w->fd, (off_t)bytes) == 0)
        return ZS_OK;
    struct statvfs fs;
    if (error == ENOSPC && fstatvfs(w->fd, &fs) == 0)
        return zs_fail(ZS_ERR_NOSPACE,
                       "%s needs %" PRIu64 " bytes, but only %" PRIu64 " are free: free some space",
                       w->path, bytes, (uint64_t)fs.f_bavail * fs.f_frsize);
    return zs_fail(ZS_ERR_IO, "cannot make %s of %" PRIu64 " bytes: %s", w->unfinished, bytes,
                   strerror(error));
}

static zs_status open_unfinished(zs_st_writer *w, int create, const void *header,
                                 uint64_t header_bytes, uint64_t bytes)
{
    struct stat info;
    w->fd = open(w->unfinished,
                 create ? O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC : O_RDWR | O_CLOEXEC, 0666);
    if (w->fd < 0)
        return zs_fail(ZS_ERR_IO, "cannot write %s: %s", w->unfinished, strerror(errno));
    if (create) {
        ZS_CHECK(allocate(w, bytes));
        return write_bytes(w, 0, header, header_bytes);
    }
    if (fstat(w->fd, &info) != 0 || (uint64_t)info.st_size != bytes)
        return zs_fail(ZS_ERR_MISMATCH,
                       "%s does not have the %" PRIu64
                       " bytes that this rank planned: do all ranks see the same directory?",
                       w->unfinished, bytes);
    return ZS_OK;
}

static void free_writer(zs_st_writer *w)
{
    if (w->fd >= 0)
        close(w->fd);
    free(w->path);
    free(w->unfinished);
    free(w);
}

zs_status zs_st_plan(const char *path, zs_st_tensor *tensors, size_t count, int create,
                     zs_st_writer **out)
{
    return zs_st_plan_with(path, NULL, 0, tensors, count, create, out);
}

zs_status zs_st_plan_with(const char *path, const zs_st_entry *metadata, size_t entries,
                          zs_st_tensor *tensors, size_t count, int create, zs_st_writer **out)
{
    zs_status status = ZS_OK;
    unsigned char *header = NULL;
    uint64_t header_bytes = 0, data_bytes = 0;
    *out = NULL;
    zs_st_writer *w = calloc(1, sizeof *w);
    json_t *root = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    if (!w || !root) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory to write %s", path);
        goto fail;
    }
    w->fd = -1;
    w->path = strdup(path);
    if (!w->path || asprintf(&w->unfinished, "%s.tmp", path) < 0) {
        w->unfinished = NULL;
        status = zs_fail(ZS_ERR_NOMEM, "no memory to write %s", path);
        goto fail;
    }
    zs_json_watch();
    for (size_t i = 0; i < entries; i++)
        if (json_object_set_new(json_object_get(root, "__metadata__"), metadata[i].key,
                                json_string(metadata[i].value)) != 0) {
            status = zs_fail(zs_json_lacks_memory() ? ZS_ERR_NOMEM : ZS_ERR_ARG,
                             "%s: metadata \"%.200s\" cannot be written%s", path, metadata[i].key,
                             zs_json_lacks_memory() ? ": no memory" : "");
            goto fail;
        }
    ZS_TRY(lay_out(path, tensors, count, root, &data_bytes));
    ZS_TRY(make_header(path, root, &header, &header_bytes));
    for (size_t i = 0; i < count; i++)
        tensors[i].offset += header_bytes;
    ZS_TRY(open_unfinished(w, create, header, header_bytes, header_bytes + data_bytes));
    *out = w;
    w = NULL;
fail:
    if (w && create)
        zs_st_discard(&w);
    else if (w)
        free_writer(w);
    free(header);
    json_decref(root);
    return status;
}

zs_status zs_st_write(zs_st_writer *writer, const zs_st_tensor *t, uint64_t first, uint64_t count,
                      const void *src)
{
    uint64_t size = zs_st_dtype_size(t->dtype);
    if (first > t->numel || count > t->numel - first)
        return zs_fail(ZS_ERR_ARG,
                       "tensor \"%.200s\" has %" PRIu64 " elements: cannot write %" PRIu64
                       " from number %" PRIu64 " on",
                       t->name, t->numel, count, first);
    return write_bytes(writer, t->offset + first * size, src, count * size);
}

zs_status zs_st_finish(zs_st_writer **writer, int commit)
{
    zs_st_writer *w = *writer;
    zs_status status = ZS_OK;
    *writer = NULL;
    if (!w)
        return ZS_OK;
    /* Ranks on other hosts have caches of their own: each flushes what it wrote. */
    if (fsync(w->fd) != 0)
        status = zs_fail(ZS_ERR_IO, "cannot flush %s: %s", w->unfinished, strerror(errno));
    if (!status && commit)
        status = zs_file_rename(w->unfinished, w->path);
    if (status && commit)
        unlink(w->unfinished);
    free_writer(w);
    return status;
}

void zs_st_discard(zs_st_writer **writer)
{
    zs_st_writer *w = *writer;
    *writer = NULL;
    if (!w)
        return;
    if (w->fd >= 0)
        unlink(w->unfinished);
    free_writer(w);
}
