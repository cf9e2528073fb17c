/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "model/files.h"
#include "model/json.h"
#include "model/weights.h"

enum { PIECE_BYTES = 4 << 20, CONFIG_BYTES_MAX = 4 << 20, NAME_BYTES = 64 };
static const uint64_t shard_bytes_default = 5000000000u; /* as transformers 4 */
static const char single_name[] = "model.safetensors";
static const char index_name[] = "model.safetensors.index.json";

/* One weights file. */
typedef struct shard {
    char name[NAME_BYTES];
    size_t first, count; /* of the tensors */
    zs_st_writer *writer;
} shard;

typedef struct save {
    const zs_weights_source *values;
    zs_comm *comm;
    const char *dir, *source;
    zs_dtype dtype;
    const zs_weight *weights;
    size_t count;
    uint64_t shard_bytes;  /* most of a file that holds several tensors */
    zs_st_tensor *tensors; /* [count] */
    shard *shards;
    size_t shard_count;
    uint64_t total;
    json_t *config; /* rank 0: what config.json will hold */
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
    zs_json_watch();
    for (size_t i = 0; i < ZS_COUNT(keys); i++)
        if (json_object_get(s->config, keys[i])) {
            json_object_set_new(s->config, keys[i], json_string(names[s->dtype]));
            set = 1;
        }
    /* torch_dtype is what every version of transformers reads. */
    if (!set)
        json_object_set_new(s->config, "torch_dtype", json_string(names[s->dtype]));
    if (zs_json_lacks_memory())
        status = zs_fail(ZS_ERR_NOMEM, "no memory for the values of config.json");
fail:
    free(path);
    return status;
}

/* Takes text over; NULL: there was no memory for it. */
static zs_status write_text(const save *s, const char *name, char *text)
{
    zs_status status = ZS_OK;
    char *path = NULL;
    if (!text)
        return zs_fail(ZS_ERR_NOMEM, "no memory for %s", name);
    ZS_TRY(join(&path, s->dir, name));
    size_t length = strlen(text);
    text[length] = '\n'; /* in place of the terminator, which is not written */
    ZS_TRY(zs_file_write(path, text, length + 1));
fail:
    free(text);
    free(path);
    return status;
}

static zs_status write_config(const save *s)
{
    char *text = NULL;
    /* The fewest digits that keep every number: 1e-05, not 1.0000000000000001e-05. */
    for (size_t digits = 15; digits <= 17; digits++) {
        free(text);
        text = json_dumps(s->config, JSON_INDENT(2) | JSON_REAL_PRECISION(digits));
        json_t *again = NULL;
        if (text)
            (void)zs_json_parse(text, strlen(text), "config.json", &again);
        int same = json_equal(s->config, again);
        json_decref(again);
        if (same)
            break;
    }
    return write_text(s, "config.json", text);
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

/* ---- files of weights ---- */

/* Tensors in order, a new file where the next one would not fit. */
static void cut(save *s)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < s->count; i++) {
        uint64_t size = zs_dtype_size(s->dtype);
        for (int d = 0; d < s->weights[i].ndim; d++)
            size *= (uint64_t)s->weights[i].shape[d];
        if (!s->shard_count || (bytes && bytes + size > s->shard_bytes)) {
            s->shards[s->shard_count++].first = i;
            bytes = 0;
        }
        s->shards[s->shard_count - 1].count++;
        bytes += size;
        s->total += size;
    }
    for (size_t n = 0; n < s->shard_count; n++) {
        char *name = s->shards[n].name;
        if (s->shard_count == 1)
            snprintf(name, NAME_BYTES, "%s", single_name);
        else
            snprintf(name, NAME_BYTES, "model-%05zu-of-%05zu.safetensors", n + 1, s->shard_count);
    }
}

static zs_status plan(save *s, int create)
{
    for (size_t n = 0; n < s->shard_count; n++) {
        shard *file = &s->shards[n];
        char *path;
        ZS_CHECK(join(&path, s->dir, file->name));
        zs_status status =
            zs_st_plan(path, s->tensors + file->first, file->count, create, &file->writer);
        free(path);
        ZS_CHECK(status);
    }
    return ZS_OK;
}

static zs_status write_index(const save *s)
{
    zs_json_watch();
    json_t *map = json_object();
    for (size_t n = 0; n < s->shard_count; n++)
        for (size_t i = 0; i < s->shards[n].count; i++)
            json_object_set_new(map, s->tensors[s->shards[n].first + i].name,
                                json_string(s->shards[n].name));
    json_t *root = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)s->total,
                             "weight_map", map);
    char *text = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    if (zs_json_lacks_memory()) {
        free(text);
        text = NULL;
    }
    json_decref(root);
    return write_text(s, index_name, text);
}

static zs_status remove_file(const save *s, const char *name)
{
    char *path;
    ZS_CHECK(join(&path, s->dir, name));
    zs_status status = zs_file_remove(path);
    free(path);
    return status;
}

static int is_ours(const save *s, const char *name)
{
    for (size_t n = 0; n < s->shard_count; n++)
        if (!strcmp(s->shards[n].name, name))
            return 1;
    return 0;
}

/* Weights of an earlier save that was cut otherwise, or cut short. */
static zs_status remove_strays(const save *s)
{
    zs_status status = ZS_OK;
    DIR *listing = opendir(s->dir);
    struct dirent *entry;
    if (!listing)
        return zs_fail(ZS_ERR_IO, "cannot list %s: %s", s->dir, strerror(errno));
    while (!status && (entry = readdir(listing))) {
        static const char pattern[] = "model-00001-of-00001.safetensors";
        unsigned part, parts;
        int end = 0;
        (void)sscanf(entry->d_name, "model-%5u-of-%5u.safetensors%n", &part, &parts, &end);
        if (end != sizeof pattern - 1)
            continue;
        const char *rest = entry->d_name + end;
        if ((!*rest || !strcmp(rest, ".tmp")) && !is_ours(s, entry->d_name))
            status = remove_file(s, entry->d_name);
    }
    closedir(listing);
    return status;
}

/* What every rank needs, and on rank 0 the directory and the unfinished files. */
static zs_status prepare(save *s)
{
    static const zs_st_dtype stored[] = {ZS_ST_F32, ZS_ST_BF16, ZS_ST_F16}; /* by zs_dtype */
    int root = zs_comm_rank(s->comm) == 0;
    s->tensors = calloc(s->count + 1, sizeof *s->tensors);
    s->shards = calloc(s->count + 1, sizeof *s->shards);
    if (!s->tensors || !s->shards)
        return zs_fail(ZS_ERR_NOMEM, "no memory to save %zu weights", s->count);
    for (size_t i = 0; i < s->count; i++) {
        zs_st_tensor *t = &s->tensors[i];
        t->name = (char *)s->weights[i].name; /* only read by the writer */
        t->dtype = stored[s->dtype];
        t->ndim = s->weights[i].ndim;
        memcpy(t->shape, s->weights[i].shape, sizeof s->weights[i].shape);
    }
    cut(s);
    if (!root)
        return ZS_OK;
    ZS_CHECK(make_config(s));
    ZS_CHECK(zs_dir_make(s->dir));
    return plan(s, 1);
}

static zs_status write_owned(const save *s)
{
    zs_status status = ZS_OK;
    const shard *file = s->shards;
    void *piece = malloc(PIECE_BYTES);
    if (!piece)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a buffer of %d bytes", PIECE_BYTES);
    for (size_t i = 0; i < s->count; i++) {
        uint64_t first, left;
        if (i == file->first + file->count)
            file++;
        ZS_TRY(s->values->range(s->values->cookie, i, &first, &left));
        while (left) {
            uint64_t now = ZS_MIN(left, PIECE_BYTES / zs_dtype_size(s->dtype));
            ZS_TRY(s->values->read(s->values->cookie, i, first, now, s->dtype, piece));
            ZS_TRY(zs_st_write(file->writer, &s->tensors[i], first, now, piece));
            first += now;
            left -= now;
        }
    }
fail:
    free(piece);
    return status;
}

static zs_status finish_files(save *s, int commit)
{
    zs_status status = ZS_OK;
    for (size_t n = 0; n < s->shard_count; n++) {
        zs_status one = zs_st_finish(&s->shards[n].writer, commit);
        status = status ? status : one;
    }
    return status;
}

/* Shards that no index will name. Keeps the message. */
static void forget_files(const save *s)
{
    char path[PATH_MAX];
    for (size_t n = 0; n < s->shard_count; n++) {
        snprintf(path, sizeof path, "%s/%s", s->dir, s->shards[n].name);
        (void)unlink(path);
    }
}

/* One file: its rename is last, and loaders prefer it to any index. Several: no index names them
 * until all are there, and the one file of an earlier save goes only then. */
static zs_status finish(save *s)
{
    int several = s->shard_count > 1;
    ZS_CHECK(write_config(s));
    ZS_CHECK(copy_companions(s));
    if (several)
        ZS_CHECK(remove_file(s, index_name));
    zs_status status = finish_files(s, 1);
    if (status == ZS_OK && several)
        status = write_index(s);
    if (status != ZS_OK) {
        if (several)
            forget_files(s);
        return status;
    }
    ZS_CHECK(remove_file(s, several ? single_name : index_name));
    return remove_strays(s);
}

zs_status zs_weights_save_from(const zs_weights_source *values, zs_comm *comm, const char *dir,
                               const char *source, zs_dtype dtype, uint64_t shard_bytes,
                               const zs_weight *weights, size_t count)
{
    zs_status status = ZS_OK;
    save s = {.values = values,
              .comm = comm,
              .dir = dir,
              .source = source,
              .dtype = dtype,
              .shard_bytes = shard_bytes ? shard_bytes : shard_bytes_default,
              .weights = weights,
              .count = count};
    int root = zs_comm_rank(comm) == 0;
    ZS_TRY(agree(&s, prepare(&s)));
    ZS_TRY(agree(&s, root ? ZS_OK : plan(&s, 0)));
    status = write_owned(&s);
    if (!root && !status)
        status = finish_files(&s, 0);
    ZS_TRY(agree(&s, status));
    ZS_TRY(agree(&s, root ? finish(&s) : ZS_OK));
fail:
    for (size_t n = 0; s.shards && n < s.shard_count; n++)
        if (root)
            zs_st_discard(&s.shards[n].writer);
    if (!root && s.shards)
        finish_files(&s, 0);
    json_decref(s.config);
    free(s.tensors);
    free(s.shards);
    return status;
}

typedef struct engine_values {
    zs_engine *engine;
    const zs_param *params;
} engine_values;

static zs_status engine_range(void *cookie, size_t i, uint64_t *first, uint64_t *count)
{
    const engine_values *v = cookie;
    return zs_param_owned(v->engine, v->params[i], first, count);
}

static zs_status engine_read(void *cookie, size_t i, uint64_t first, uint64_t count, zs_dtype dtype,
                             void *dst)
{
    const engine_values *v = cookie;
    return zs_param_read(v->engine, v->params[i], ZS_WEIGHT, first, count, dtype, dst);
}

zs_status zs_weights_save(zs_engine *engine, zs_comm *comm, const char *dir, const char *source,
                          zs_dtype dtype, uint64_t shard_bytes, const zs_weight *weights,
                          const zs_param *params, size_t count)
{
    engine_values values = {engine, params};
    const zs_weights_source from = {&values, engine_range, engine_read};
    return zs_weights_save_from(&from, comm, dir, source, dtype, shard_bytes, weights, count);
}
