/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"
#include "base/util.h"
#include "model/files.h"
#include "model/json.h"
#include "model/weights.h"

enum { PIECE_BYTES = 4 << 20, CONFIG_BYTES_MAX = 4 << 20 };

typedef struct save {
    zs_engine *engine;
    zs_comm *comm;
    const char *dir, *source;
    zs_dtype dtype;
    const zs_weight *weights;
    const zs_param *params;
    size_t count;
    char *weights_path;    /* dir/model.safetensors */
    zs_st_tensor *tensors; /* [count] */
    json_t *config;        /* rank 0: what config.json will hold */
    zs_st_writer *writer;
} save;

/* Collective. All ranks go on, or all stop: those that failed with their own status and message. */
static zs_status agree(const save *s, zs_status local)
{
    int world = zs_comm_world(s->comm), rank = zs_comm_rank(s->comm);
    char message[1024];
    double first = local ? world - rank : 0;
    snprintf(message, sizeof message, "%s", zs_last_error());
    zs_status status = zs_comm_all_reduce(s->comm, "save of the model", ZS_OP_MAX, &first, 1);
    if (local)
        return zs_fail(local, "%s", message);
    if (status || first == 0)
        return status;
    return zs_fail(ZS_ERR_COMM, "rank %d failed to save the model to %s: see its message",
                   world - (int)first, s->dir);
}

static zs_status join(char **out, const char *dir, const char *name)
{
    if (asprintf(out, "%s/%s", dir, name) >= 0)
        return ZS_OK;
    *out = NULL;
    return zs_fail(ZS_ERR_NOMEM, "no memory for the path %s/%s", dir, name);
}

static int is_directory(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

static int same_file(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* The source's config.json with the dtype that is saved. */
static zs_status make_config(save *s)
{
    static const char *const names[] = {"float32", "bfloat16", "float16"}; /* by zs_dtype */
    static const char *const keys[] = {"dtype", "torch_dtype"};
    zs_status status = ZS_OK;
    char *path = NULL;
    int set = 0;
    if (is_directory(s->source))
        ZS_TRY(join(&path, s->source, "config.json"));
    ZS_TRY(zs_json_load(path ? path : s->source, CONFIG_BYTES_MAX, &s->config));
    for (size_t i = 0; i < ZS_COUNT(keys); i++)
        if (json_object_get(s->config, keys[i])) {
            json_object_set_new(s->config, keys[i], json_string(names[s->dtype]));
            set = 1;
        }
    /* torch_dtype is what every version of transformers reads. */
    if (!set)
        json_object_set_new(s->config, "torch_dtype", json_string(names[s->dtype]));
fail:
    free(path);
    return status;
}

static zs_status write_config(const save *s)
{
    zs_status status = ZS_OK;
    char *text = NULL, *path = NULL;
    /* The fewest digits that keep every number: 1e-05, not 1.0000000000000001e-05. */
    for (size_t digits = 15; digits <= 17; digits++) {
        free(text);
        text = json_dumps(s->config, JSON_INDENT(2) | JSON_REAL_PRECISION(digits));
        json_t *again = text ? json_loads(text, 0, NULL) : NULL;
        int same = json_equal(s->config, again);
        json_decref(again);
        if (same)
            break;
    }
    if (!text) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory for config.json");
        goto fail;
    }
    ZS_TRY(join(&path, s->dir, "config.json"));
    size_t length = strlen(text);
    text[length] = '\n'; /* in place of the terminator, which is not written */
    ZS_TRY(zs_file_write(path, text, length + 1));
fail:
    free(text);
    free(path);
    return status;
}

static int is_companion(const char *name)
{
    static const char *const whole[] = {"special_tokens_map.json", "generation_config.json",
                                        "vocab.json", "merges.txt", "added_tokens.json"};
    static const char *const starts[] = {"tokenizer", "chat_template"};
    for (size_t i = 0; i < ZS_COUNT(whole); i++)
        if (!strcmp(name, whole[i]))
            return 1;
    for (size_t i = 0; i < ZS_COUNT(starts); i++)
        if (!strncmp(name, starts[i], strlen(starts[i])))
            return 1;
    return 0;
}

static zs_status copy_companion(const save *s, const char *name)
{
    zs_status status = ZS_OK;
    struct stat info;
    char *from = NULL, *to = NULL;
    ZS_TRY(join(&from, s->source, name));
    ZS_TRY(join(&to, s->dir, name));
    if (stat(from, &info) == 0 && S_ISREG(info.st_mode))
        ZS_TRY(zs_file_copy(from, to));
fail:
    free(from);
    free(to);
    return status;
}

static zs_status copy_companions(const save *s)
{
    if (!is_directory(s->source) || same_file(s->source, s->dir))
        return ZS_OK;
    zs_status status = ZS_OK;
    DIR *listing = opendir(s->source);
    struct dirent *entry;
    if (!listing)
        return zs_fail(ZS_ERR_IO, "cannot list %s: %s", s->source, strerror(errno));
    while (!status && (entry = readdir(listing)))
        if (is_companion(entry->d_name))
            status = copy_companion(s, entry->d_name);
    closedir(listing);
    return status;
}

/* What every rank needs, and on rank 0 the directory and the unfinished file. */
static zs_status prepare(save *s)
{
    static const zs_st_dtype stored[] = {ZS_ST_F32, ZS_ST_BF16, ZS_ST_F16}; /* by zs_dtype */
    int root = zs_comm_rank(s->comm) == 0;
    s->tensors = calloc(s->count + 1, sizeof *s->tensors);
    if (!s->tensors)
        return zs_fail(ZS_ERR_NOMEM, "no memory to save %zu weights", s->count);
    for (size_t i = 0; i < s->count; i++) {
        zs_st_tensor *t = &s->tensors[i];
        t->name = (char *)s->weights[i].name; /* only read by the writer */
        t->dtype = stored[s->dtype];
        t->ndim = s->weights[i].ndim;
        memcpy(t->shape, s->weights[i].shape, sizeof s->weights[i].shape);
    }
    ZS_CHECK(join(&s->weights_path, s->dir, "model.safetensors"));
    if (!root)
        return ZS_OK;
    ZS_CHECK(make_config(s));
    ZS_CHECK(zs_dir_make(s->dir));
    return zs_st_plan(s->weights_path, s->tensors, s->count, 1, &s->writer);
}

static zs_status write_owned(const save *s)
{
    zs_status status = ZS_OK;
    void *piece = malloc(PIECE_BYTES);
    if (!piece)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a buffer of %d bytes", PIECE_BYTES);
    for (size_t i = 0; i < s->count; i++) {
        uint64_t first, left;
        ZS_TRY(zs_param_owned(s->engine, s->params[i], &first, &left));
        while (left) {
            uint64_t now = ZS_MIN(left, PIECE_BYTES / zs_dtype_size(s->dtype));
            ZS_TRY(zs_param_read(s->engine, s->params[i], ZS_WEIGHT, first, now, s->dtype, piece));
            ZS_TRY(zs_st_write(s->writer, &s->tensors[i], first, now, piece));
            first += now;
            left -= now;
        }
    }
fail:
    free(piece);
    return status;
}

/* The weights' rename is last: once model.safetensors is there, all else is. */
static zs_status finish(save *s)
{
    ZS_CHECK(write_config(s));
    ZS_CHECK(copy_companions(s));
    return zs_st_finish(&s->writer, 1);
}

zs_status zs_weights_save(zs_engine *engine, zs_comm *comm, const char *dir, const char *source,
                          zs_dtype dtype, const zs_weight *weights, const zs_param *params,
                          size_t count)
{
    zs_status status = ZS_OK;
    save s = {engine, comm, dir, source, dtype, weights, params, count, NULL, NULL, NULL, NULL};
    int root = zs_comm_rank(comm) == 0;
    ZS_TRY(agree(&s, prepare(&s)));
    ZS_TRY(agree(&s, root ? ZS_OK : zs_st_plan(s.weights_path, s.tensors, count, 0, &s.writer)));
    status = write_owned(&s);
    if (!root && !status)
        status = zs_st_finish(&s.writer, 0);
    ZS_TRY(agree(&s, status));
    ZS_TRY(agree(&s, root ? finish(&s) : ZS_OK));
fail:
    if (root)
        zs_st_discard(&s.writer);
    else
        zs_st_finish(&s.writer, 0);
    json_decref(s.config);
    free(s.tensors);
    free(s.weights_path);
    return status;
}
