/* SPDX-License-Identifier: Apache-2.0 */
#include "model/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "model/json.h"

enum {
    HEADER_BYTES_MAX = 100 * 1000 * 1000, /* as the reference implementation */
    INDEX_BYTES_MAX = 100 * 1000 * 1000,
    LENGTH_BYTES = 8
};

typedef struct st_file {
    char *path;
    int fd;
    uint64_t bytes;
} st_file;

struct zs_st {
    st_file *files;
    int file_count;
    zs_st_tensor *tensors;
    size_t count;
    const zs_st_tensor **by_name;
    json_t *metadata; /* of the first file; NULL: none */
};

static const struct {
    const char *name;
    size_t size;
} dtypes[ZS_ST_DTYPES] = {
    [ZS_ST_BOOL] = {"BOOL", 1},       [ZS_ST_U8] = {"U8", 1},           [ZS_ST_I8] = {"I8", 1},
    [ZS_ST_F8_E4M3] = {"F8_E4M3", 1}, [ZS_ST_F8_E5M2] = {"F8_E5M2", 1}, [ZS_ST_I16] = {"I16", 2},
    [ZS_ST_U16] = {"U16", 2},         [ZS_ST_F16] = {"F16", 2},         [ZS_ST_BF16] = {"BF16", 2},
    [ZS_ST_I32] = {"I32", 4},         [ZS_ST_U32] = {"U32", 4},         [ZS_ST_F32] = {"F32", 4},
    [ZS_ST_F64] = {"F64", 8},         [ZS_ST_I64] = {"I64", 8},         [ZS_ST_U64] = {"U64", 8},
    [ZS_ST_F8_E8M0] = {"F8_E8M0", 1}, [ZS_ST_C64] = {"C64", 8},
};

size_t zs_st_dtype_size(zs_st_dtype dtype)
{
    return (unsigned)dtype < ZS_ST_DTYPES ? dtypes[dtype].size : 0;
}

const char *zs_st_dtype_name(zs_st_dtype dtype)
{
    return (unsigned)dtype < ZS_ST_DTYPES ? dtypes[dtype].name : "?";
}

static zs_status bad_tensor(const st_file *file, const char *name, const char *what)
{
    return zs_fail(ZS_ERR_CORRUPT, "%s: tensor \"%.200s\" %s", file->path, name, what);
}

static zs_status read_bytes(const st_file *file, uint64_t offset, void *dst, uint64_t bytes)
{
    char *to = dst;
    while (bytes) {
        ssize_t got = pread(file->fd, to, ZS_MIN(bytes, (uint64_t)1 << 30), (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return zs_fail(ZS_ERR_IO, "cannot read %s at byte %llu: %s", file->path,
                           (unsigned long long)offset, strerror(errno));
        if (got == 0)
            return zs_fail(ZS_ERR_IO, "%s became shorter while it was read: no byte %llu any more",
                           file->path, (unsigned long long)offset);
        to += got;
        offset += (uint64_t)got;
        bytes -= (uint64_t)got;
    }
    return ZS_OK;
}

/* ---- header ---- */

static zs_status parse_dtype(const st_file *file, const char *name, const json_t *value,
                             zs_st_tensor *t)
{
    const char *text = json_string_value(value);
    for (int i = 0; text && i < ZS_ST_DTYPES; i++)
        if (!strcmp(text, dtypes[i].name)) {
            t->dtype = (zs_st_dtype)i;
            return ZS_OK;
        }
    char what[120];
    snprintf(what, sizeof what, "has the unknown dtype \"%.60s\"", text ? text : "(not a string)");
    return bad_tensor(file, name, what);
}

/* t's name, dtype, shape; offset (from the end of the header) and bytes. */
static zs_status parse_tensor(const st_file *file, const char *name, const json_t *value,
                              zs_st_tensor *t)
{
    const json_t *shape = json_object_get(value, "shape");
    const json_t *offsets = json_object_get(value, "data_offsets");
    ZS_CHECK(parse_dtype(file, name, json_object_get(value, "dtype"), t));
    if (!json_is_array(shape))
        return bad_tensor(file, name, "has no shape list");
    if (json_array_size(shape) > ZS_MAX_DIMS)
        return bad_tensor(file, name, "has more than the 8 dimensions that are supported");
    t->ndim = (int)json_array_size(shape);
    t->numel = 1;
    for (int i = 0; i < t->ndim; i++) {
        const json_t *extent = json_array_get(shape, (size_t)i);
        t->shape[i] = json_integer_value(extent);
        if (!json_is_integer(extent) || t->shape[i] < 0)
            return bad_tensor(file, name, "has a shape with something else than counts");
        if (zs_mul_overflow(t->numel, (uint64_t)t->shape[i], &t->numel))
            return bad_tensor(file, name, "has a shape that overflows 64 bits");
    }
    if (zs_mul_overflow(t->numel, dtypes[t->dtype].size, &t->bytes))
        return bad_tensor(file, name, "has a shape that overflows 64 bits");
    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end) ||
        json_integer_value(begin) < 0 || json_integer_value(end) < json_integer_value(begin))
        return bad_tensor(file, name, "has data_offsets that are not [begin, end]");
    t->offset = (uint64_t)json_integer_value(begin);
    uint64_t length = (uint64_t)json_integer_value(end) - t->offset;
    if (length != t->bytes) {
        char what[160];
        snprintf(what, sizeof what,
                 "has data_offsets of %llu bytes, but its shape and dtype take %llu",
                 (unsigned long long)length, (unsigned long long)t->bytes);
        return bad_tensor(file, name, what);
    }
    t->name = strdup(name);
    if (!t->name)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the tensors of %s", file->path);
    return ZS_OK;
}

static int by_offset(const void *a, const void *b)
{
    const zs_st_tensor *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* The data must be covered by tensors without holes, overlaps or a rest. */
static zs_status place_tensors(const st_file *file, uint64_t data_start, zs_st_tensor *tensors,
                               size_t count)
{
    uint64_t at = 0, data_bytes = file->bytes - data_start;
    char what[160];
    qsort(tensors, count, sizeof *tensors, by_offset);
    for (size_t i = 0; i < count; i++) {
        zs_st_tensor *t = &tensors[i];
        if (t->offset != at) {
            snprintf(what, sizeof what,
                     "begins at byte %llu of the data where %llu was expected: tensors overlap or "
                     "leave a hole",
                     (unsigned long long)t->offset, (unsigned long long)at);
            return bad_tensor(file, t->name, what);
        }
        if (t->bytes > data_bytes - at) {
            snprintf(what, sizeof what,
                     "ends at byte %llu of the data, but the file ends at %llu: it is truncated",
                     (unsigned long long)(t->offset + t->bytes), (unsigned long long)data_bytes);
            return bad_tensor(file, t->name, what);
        }
        at += t->bytes;
        t->offset += data_start;
    }
    if (at != data_bytes)
        return zs_fail(ZS_ERR_CORRUPT, "%s: %llu bytes after the last tensor belong to nothing",
                       file->path, (unsigned long long)(data_bytes - at));
    return ZS_OK;
}

static zs_status check_metadata(const st_file *file, const json_t *metadata)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata))
        return zs_fail(ZS_ERR_CORRUPT, "%s: __metadata__ must be an object of strings", file->path);
    json_object_foreach((json_t *)metadata, key, value) if (!json_is_string(value)) return zs_fail(
        ZS_ERR_CORRUPT, "%s: __metadata__ key \"%.100s\" must hold a string", file->path, key);
    return ZS_OK;
}

static zs_status parse_header(zs_st *st, int number, json_t *root, uint64_t data_start)
{
    const st_file *file = &st->files[number];
    const char *key;
    json_t *value;
    size_t first = st->count, entries = json_object_size(root);
    zs_st_tensor *grown = realloc(st->tensors, (first + entries + 1) * sizeof *grown);
    if (!grown)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the %zu tensors of %s", entries, file->path);
    st->tensors = grown;
    json_object_foreach(root, key, value)
    {
        if (!strcmp(key, "__metadata__")) {
            ZS_CHECK(check_metadata(file, value));
            if (number == 0)
                st->metadata = json_incref(value);
            continue;
        }
        zs_st_tensor *t = &st->tensors[st->count];
        memset(t, 0, sizeof *t);
        t->file = number;
        ZS_CHECK(parse_tensor(file, key, value, t));
        st->count++;
    }
    return place_tensors(file, data_start, st->tensors + first, st->count - first);
}

static zs_status read_header(zs_st *st, int number)
{
    zs_status status = ZS_OK;
    const st_file *file = &st->files[number];
    unsigned char length[LENGTH_BYTES];
    uint64_t bytes = 0;
    char *text = NULL;
    json_t *root = NULL;
    if (file->bytes < LENGTH_BYTES)
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s has %llu bytes, less than the 8 that start a safetensors file",
                       file->path, (unsigned long long)file->bytes);
    ZS_CHECK(read_bytes(file, 0, length, sizeof length));
    for (int i = LENGTH_BYTES - 1; i >= 0; i--)
        bytes = bytes << 8 | length[i];
    if (!memcmp(length, "version ", 8))
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s is a git-lfs pointer, not the file itself: fetch it with git lfs pull",
                       file->path);
    if (bytes > HEADER_BYTES_MAX)
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s: the header's length, %llu bytes, is over the limit of %d: not a "
                       "safetensors file?",
                       file->path, (unsigned long long)bytes, HEADER_BYTES_MAX);
    if (bytes > file->bytes - LENGTH_BYTES)
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s: the header's length, %llu bytes, goes past the file's end: the file "
                       "is truncated",
                       file->path, (unsigned long long)bytes);
    text = malloc((size_t)bytes + 1);
    if (!text)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the header of %s", file->path);
    ZS_TRY(read_bytes(file, LENGTH_BYTES, text, bytes));
    if (!bytes || text[0] != '{') {
        status = zs_fail(ZS_ERR_CORRUPT, "%s: the header does not begin with {", file->path);
        goto fail;
    }
    ZS_TRY(zs_json_parse(text, (size_t)bytes, file->path, &root));
    ZS_TRY(parse_header(st, number, root, LENGTH_BYTES + bytes));
fail:
    json_decref(root);
    free(text);
    return status;
}

/* ---- files ---- */

/* Takes path over, also when it fails. */
static zs_status add_file(zs_st *st, char *path)
{
    struct stat info;
    if (!path)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the files of a model");
    st_file *grown = realloc(st->files, ((size_t)st->file_count + 1) * sizeof *grown);
    if (!grown) {
        free(path);
        return zs_fail(ZS_ERR_NOMEM, "no memory for the files of a model");
    }
    st->files = grown;
    st_file *file = &st->files[st->file_count++];
    file->path = path;
    /* O_NONBLOCK: a FIFO by that name must not hang the open. */
    file->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->fd < 0)
        return zs_fail(ZS_ERR_IO, "cannot open %s: %s", path, strerror(errno));
    if (fstat(file->fd, &info) != 0)
        return zs_fail(ZS_ERR_IO, "cannot stat %s: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return zs_fail(ZS_ERR_ARG, "%s is not a regular file", path);
    file->bytes = (uint64_t)info.st_size;
    return read_header(st, st->file_count - 1);
}

static char *join(const char *dir, size_t dir_length, const char *name)
{
    char *path = malloc(dir_length + strlen(name) + 2);
    if (path)
        sprintf(path, "%.*s/%s", (int)dir_length, dir, name);
    return path;
}

static int by_name(const void *a, const void *b)
{
    const zs_st_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static zs_status sort_names(zs_st *st)
{
    st->by_name = malloc((st->count + 1) * sizeof *st->by_name);
    if (!st->by_name)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the names of %zu tensors", st->count);
    for (size_t i = 0; i < st->count; i++)
        st->by_name[i] = &st->tensors[i];
    qsort(st->by_name, st->count, sizeof *st->by_name, by_name);
    for (size_t i = 1; i < st->count; i++)
        if (!strcmp(st->by_name[i - 1]->name, st->by_name[i]->name))
            return zs_fail(ZS_ERR_CORRUPT, "tensor \"%.200s\" is both in %s and in %s",
                           st->by_name[i]->name, st->files[st->by_name[i - 1]->file].path,
                           st->files[st->by_name[i]->file].path);
    return ZS_OK;
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The shards that the index names, each once, in the order of their names. names borrows from map.
 */
static zs_status list_shards(const char *path, const json_t *map, const char ***names,
                             size_t *count)
{
    const char *key;
    json_t *value;
    size_t n = 0;
    *count = 0;
    *names = malloc((json_object_size(map) + 1) * sizeof **names);
    if (!*names)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the shards of %s", path);
    json_object_foreach((json_t *)map, key, value)
    {
        const char *name = json_string_value(value);
        if (!name || !*name || strchr(name, '/') || !strcmp(name, ".") || !strcmp(name, ".."))
            return zs_fail(ZS_ERR_CORRUPT,
                           "%s: tensor \"%.200s\" must be mapped to a file name beside the index",
                           path, key);
        (*names)[n++] = name;
    }
    qsort(*names, n, sizeof **names, by_text);
    for (size_t i = 0; i < n; i++)
        if (!i || strcmp((*names)[i], (*names)[*count - 1]) != 0)
            (*names)[(*count)++] = (*names)[i];
    return ZS_OK;
}

/* What the index says and what the shards hold must be the same. */
static zs_status check_map(const zs_st *st, const char *path, const json_t *map)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)map, key, value)
    {
        const zs_st_tensor *t = zs_st_find(st, key);
        const char *name = json_string_value(value);
        if (!t)
            return zs_fail(ZS_ERR_CORRUPT, "%s: tensor \"%.200s\" is not in %s", path, key, name);
        const char *slash = strrchr(st->files[t->file].path, '/');
        if (strcmp(slash + 1, name) != 0)
            return zs_fail(ZS_ERR_CORRUPT, "%s: tensor \"%.200s\" is not in %s but in %s", path,
                           key, name, slash + 1);
    }
    for (size_t i = 0; i < st->count; i++)
        if (!json_object_get(map, st->tensors[i].name))
            return zs_fail(ZS_ERR_CORRUPT, "%s does not list tensor \"%.200s\" of %s", path,
                           st->tensors[i].name, st->files[st->tensors[i].file].path);
    return ZS_OK;
}

static zs_status open_index(zs_st *st, const char *path)
{
    zs_status status = ZS_OK;
    const char **names = NULL;
    size_t count = 0;
    json_t *root = NULL;
    ZS_TRY(zs_json_load(path, INDEX_BYTES_MAX, &root));
    const json_t *map = json_object_get(root, "weight_map");
    if (!json_is_object(map)) {
        status = zs_fail(ZS_ERR_CORRUPT, "%s: weight_map is missing", path);
        goto fail;
    }
    ZS_TRY(list_shards(path, map, &names, &count));
    const char *slash = strrchr(path, '/');
    for (size_t i = 0; i < count; i++)
        ZS_TRY(add_file(st, slash ? join(path, (size_t)(slash - path), names[i])
                                  : join(".", 1, names[i])));
    ZS_TRY(sort_names(st));
    ZS_TRY(check_map(st, path, map));
fail:
    free(names);
    json_decref(root);
    return status;
}

static zs_status open_single(zs_st *st, const char *path)
{
    ZS_CHECK(add_file(st, strdup(path)));
    return sort_names(st);
}

static zs_status open_directory(zs_st *st, const char *dir)
{
    zs_status status = ZS_OK;
    char *single = join(dir, strlen(dir), "model.safetensors");
    char *index = join(dir, strlen(dir), "model.safetensors.index.json");
    if (!single || !index)
        status = zs_fail(ZS_ERR_NOMEM, "no memory for the path %s", dir);
    else if (access(single, F_OK) == 0)
        status = open_single(st, single);
    else if (access(index, F_OK) == 0)
        status = open_index(st, index);
    else
        status = zs_fail(ZS_ERR_IO,
                         "%s has neither model.safetensors nor model.safetensors.index.json (other "
                         "weight formats are not read: convert them to safetensors)",
                         dir);
    free(single);
    free(index);
    return status;
}

zs_status zs_st_open(const char *path, zs_st **out)
{
    zs_status status = ZS_OK;
    struct stat info;
    size_t length = strlen(path);
    *out = NULL;
    if (stat(path, &info) != 0)
        return zs_fail(ZS_ERR_IO, "cannot open %s: %s", path, strerror(errno));
    zs_st *st = calloc(1, sizeof *st);
    if (!st)
        return zs_fail(ZS_ERR_NOMEM, "no memory to open %s", path);
    if (S_ISDIR(info.st_mode))
        ZS_TRY(open_directory(st, path));
    else if (length > 5 && !strcmp(path + length - 5, ".json"))
        ZS_TRY(open_index(st, path));
    else
        ZS_TRY(open_single(st, path));
    *out = st;
    return ZS_OK;
fail:
    zs_st_close(&st);
    return status;
}

void zs_st_close(zs_st **pointer)
{
    zs_st *st = *pointer;
    *pointer = NULL;
    if (!st)
        return;
    for (int i = 0; i < st->file_count; i++) {
        if (st->files[i].fd >= 0)
            close(st->files[i].fd);
        free(st->files[i].path);
    }
    for (size_t i = 0; i < st->count; i++)
        free(st->tensors[i].name);
    json_decref(st->metadata);
    free(st->by_name);
    free(st->tensors);
    free(st->files);
    free(st);
}

size_t zs_st_count(const zs_st *st)
{
    return st->count;
}

const zs_st_tensor *zs_st_at(const zs_st *st, size_t i)
{
    return &st->tensors[i];
}

const zs_st_tensor *zs_st_find(const zs_st *st, const char *name)
{
    size_t low = 0, high = st->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, st->by_name[middle]->name);
        if (!order)
            return st->by_name[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

const char *zs_st_file(const zs_st *st, int file, uint64_t *bytes)
{
    if (file < 0 || file >= st->file_count)
        return NULL;
    *bytes = st->files[file].bytes;
    return st->files[file].path;
}

const char *zs_st_metadata_at(const zs_st *st, size_t i, const char **value)
{
    void *at = json_object_iter(st->metadata);
    while (at && i--)
        at = json_object_iter_next(st->metadata, at);
    if (!at)
        return NULL;
    *value = json_string_value(json_object_iter_value(at));
    return json_object_iter_key(at);
}

const char *zs_st_metadata(const zs_st *st, const char *key)
{
    return json_string_value(json_object_get(st->metadata, key));
}

zs_status zs_st_read(const zs_st *st, const zs_st_tensor *t, uint64_t first, uint64_t count,
                     void *dst)
{
    uint64_t size = dtypes[t->dtype].size;
    if (first > t->numel || count > t->numel - first)
        return zs_fail(ZS_ERR_ARG,
                       "tensor \"%.200s\" has %llu elements: cannot read %llu from number %llu on",
                       t->name, (unsigned long long)t->numel, (unsigned long long)count,
                       (unsigned long long)first);
    return read_bytes(&st->files[t->file], t->offset + first * size, dst, count * size);
}
