/* SPDX-License-Identifier: Apache-2.0 */
/* zspill inspect: what a model directory, a safetensors file or a checkpoint holds. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/util.h"
#include "cli/arguments.h"
#include "cli/cli.h"
#include "cli/verify.h"
#include "model/config.h"
#include "model/safetensors.h"
#include "model/weights.h"
#include "offload/store.h"
#include "zero/manifest.h"
#include "zero/saved.h"
#include "zspill.h"

static int failed(void)
{
    zs_cli_error("%s", zs_last_error());
    return ZS_EXIT_FAILED;
}

static char *join(const char *dir, const char *name)
{
    char *path;
    return asprintf(&path, "%s/%s", dir, name) < 0 ? NULL : path;
}

static int has_file(const char *dir, const char *name)
{
    char *path = join(dir, name);
    int there = path && access(path, F_OK) == 0;
    free(path);
    return there;
}

/* "8030261248 (8.03 billion)" */
static void print_count(const char *label, uint64_t count)
{
    static const char *const words[] = {"", "thousand", "million", "billion", "trillion"};
    double scaled = (double)count;
    size_t word = 0;
    while (scaled >= 1000 && word + 1 < ZS_COUNT(words)) {
        scaled /= 1000;
        word++;
    }
    printf("%-13s%llu", label, (unsigned long long)count);
    if (word)
        printf(" (%.2f %s)", scaled, words[word]);
    printf("\n");
}

/* Text out of a file, in at least width columns, without what could steer a terminal; at most 300
 * bytes. */
static void print_text(const char *text, int width)
{
    int printed = 0;
    for (; text[printed] && printed < 300; printed++)
        putchar((unsigned char)text[printed] < 32 || text[printed] == 127 ? '?' : text[printed]);
    if (text[printed])
        fputs("...", stdout);
    for (; printed < width; printed++)
        putchar(' ');
}

/* ---- safetensors ---- */

static void print_tensor(const zs_st_tensor *t, int width)
{
    char shape[200] = "", bytes[16];
    size_t at = 0;
    for (int i = 0; i < t->ndim; i++)
        at += (size_t)snprintf(shape + at, sizeof shape - at, "%s%lld", i ? ", " : "",
                               (long long)t->shape[i]);
    printf("  ");
    print_text(t->name, width);
    printf("  %-7s  %10s  [%s]\n", zs_st_dtype_name(t->dtype), zs_format_bytes(t->bytes, bytes),
           shape);
}

static void print_totals(const zs_st *st)
{
    uint64_t numel[ZS_ST_DTYPES] = {0}, bytes[ZS_ST_DTYPES] = {0};
    char text[16];
    for (size_t i = 0; i < zs_st_count(st); i++) {
        const zs_st_tensor *t = zs_st_at(st, i);
        numel[t->dtype] += t->numel;
        bytes[t->dtype] += t->bytes;
    }
    printf("tensors      %zu\n", zs_st_count(st));
    for (int d = 0; d < ZS_ST_DTYPES; d++)
        if (numel[d])
            printf("  %-8s   %llu elements, %s\n", zs_st_dtype_name((zs_st_dtype)d),
                   (unsigned long long)numel[d], zs_format_bytes(bytes[d], text));
}

static void print_files(const zs_st *st)
{
    const char *path;
    uint64_t bytes;
    char text[16];
    printf("files\n");
    for (int i = 0; (path = zs_st_file(st, i, &bytes)); i++) {
        const char *slash = strrchr(path, '/');
        printf("  %s  %s\n", slash ? slash + 1 : path, zs_format_bytes(bytes, text));
    }
}

static int inspect_tensors(const char *path)
{
    zs_st *st;
    int width = 0;
    const char *key, *value = NULL;
    if (zs_st_open(path, &st))
        return failed();
    printf("safetensors  %s\n", path);
    print_files(st);
    for (size_t i = 0; (key = zs_st_metadata_at(st, i, &value)); i++) {
        fputs(i ? "             " : "metadata     ", stdout);
        print_text(key, 0);
        fputs(" = ", stdout);
        print_text(value, 0);
        putchar('\n');
    }
    print_totals(st);
    for (size_t i = 0; i < zs_st_count(st); i++)
        width = ZS_MAX(width, (int)strlen(zs_st_at(st, i)->name));
    for (size_t i = 0; i < zs_st_count(st); i++)
        print_tensor(zs_st_at(st, i), ZS_MIN(width, 64));
    zs_st_close(&st);
    return ZS_EXIT_OK;
}

/* ---- model directory ---- */

static void print_config(const zs_model_config *c)
{
    printf("architecture %s\n", c->model_type);
    printf("  hidden %d, layers %d, intermediate %d, vocabulary %d, positions %d\n", c->hidden,
           c->layers, c->intermediate, c->vocab, c->max_positions);
    printf("  heads %d of %d, key and value heads %d\n", c->heads, c->head_dim, c->kv_heads);
    printf("  rope theta %g", c->rope_theta);
    if (c->rope_type == ZS_ROPE_LINEAR)
        printf(", linear scaling by %g", c->rope_factor);
    if (c->rope_type == ZS_ROPE_LLAMA3)
        printf(", llama3 scaling by %g from %d positions", c->rope_factor,
               c->rope_original_positions);
    printf("\n  embeddings %s%s%s%s%s\n", c->tied ? "tied" : "not tied",
           c->qkv_bias ? ", bias of q, k, v" : "", c->o_bias ? " and o" : "",
           c->mlp_bias ? ", bias of the MLP" : "", c->qk_norm ? ", norm of q and k" : "");
    if (c->sliding_window)
        printf("  sliding window %d: sequences must not be longer\n", c->sliding_window);
    print_count("parameters", zs_model_config_numel(c));
    printf("dtype        %s\n", zs_dtype_name(c->dtype));
}

/* Whether the files hold what the configuration asks for. */
static int check_weights(const zs_st *st, const char *dir, const zs_model_config *config)
{
    zs_weight *weights;
    size_t count;
    if (zs_model_weights(config, &weights, &count))
        return failed();
    zs_status status = zs_weights_check(st, dir, weights, count);
    free(weights);
    if (status)
        return failed();
    printf("weights      all %zu are there, with the shapes of config.json\n", count);
    return ZS_EXIT_OK;
}

static int inspect_model(const char *dir)
{
    zs_model_config config;
    zs_st *st = NULL;
    int code = ZS_EXIT_OK, known = 0;
    char *path = join(dir, "config.json");
    if (!path) {
        zs_cli_error("no memory for the path of config.json in %s", dir);
        return ZS_EXIT_FAILED;
    }
    printf("model        %s\n", dir);
    if (zs_model_config_load(path, &config))
        code = failed();
    else
        known = 1;
    free(path);
    if (known)
        print_config(&config);
    if (zs_st_open(dir, &st))
        return failed();
    print_files(st);
    print_totals(st);
    if (known)
        code = check_weights(st, dir, &config);
    zs_st_close(&st);
    return code;
}

/* ---- checkpoint ---- */

static int is_state_name(const char *name)
{
    size_t length = strlen(name);
    return length > 6 && !strcmp(name + length - 6, ".state");
}

static int state_filter(const struct dirent *entry)
{
    return !strncmp(entry->d_name, "zspill-rank", 11) && is_state_name(entry->d_name);
}

static void log_warning(void *cookie, zs_log_level level, const char *text)
{
    (void)cookie;
    (void)level;
    zs_cli_error("%s", text);
}

static void print_superblock(const zs_store *store, int area)
{
    printf("    superblock %c  ", 'A' + area);
    if (store->damaged[area])
        printf("damaged\n");
    else if (!store->whole[area])
        printf("empty\n");
    else
        printf("step %llu, sequence %llu, %zu bytes of engine state%s\n",
               (unsigned long long)store->super[area].step,
               (unsigned long long)store->super[area].sequence, store->super[area].header_bytes,
               area != store->committed   ? ""
               : store->super[area].dirty ? " (in force, but being written over)"
                                          : " (in force)");
}

/* *elements grows by what the file holds. */
static int inspect_state(const char *path, uint64_t *elements)
{
    const zs_log log = {.fn = log_warning, .level = ZS_LOG_ERROR};
    zs_store store;
    struct stat info;
    char bytes[16];
    if (zs_store_peek(path, &log, &store))
        return failed();
    const char *slash = strrchr(path, '/');
    uint64_t size = stat(path, &info) == 0 ? (uint64_t)info.st_size : 0;
    printf("  %s  %s\n", slash ? slash + 1 : path, zs_format_bytes(size, bytes));
    if (store.committed < 0)
        printf("    nothing is committed yet\n");
    else {
        const zs_superblock *super = &store.super[store.committed];
        uint64_t numel = 0;
        for (size_t i = 0; i < super->shard_count; i++)
            numel += super->shards[i].numel;
        printf("    rank %d of %d, lineage %llu, fingerprint %016llx\n", super->rank, super->world,
               (unsigned long long)super->lineage, (unsigned long long)super->fingerprint);
        printf("    %zu shards, %llu elements, %zu chunks of at most %llu\n", super->shard_count,
               (unsigned long long)numel, super->chunk_count,
               (unsigned long long)super->chunk_numel);
        *elements += numel;
    }
    for (int area = 0; area < store.area_count; area++)
        print_superblock(&store, area);
    zs_store_close(&store);
    return ZS_EXIT_OK;
}

static int print_manifest(const char *dir)
{
    zs_manifest *m;
    uint64_t params = 0;
    if (zs_manifest_load(dir, &m))
        return failed();
    if (!m) {
        printf("manifest     none: nothing is committed by all ranks\n");
        return ZS_EXIT_OK;
    }
    for (size_t f = 0; f < m->flat_count; f++)
        params += m->flats[f].count;
    printf("manifest     generation %llu, %d rank(s), %s, %llu parameters in %zu flat buffers, %d "
           "slot(s) a chunk\n",
           (unsigned long long)m->generation, m->world, m->replicated ? "replicated" : "sharded",
           (unsigned long long)params, m->flat_count, m->slots);
    zs_manifest_free(&m);
    return ZS_EXIT_OK;
}

/* What there is to go back to. */
static void print_commits(const char *dir)
{
    const zs_log log = {.fn = log_warning, .level = ZS_LOG_ERROR};
    zs_manifest *m;
    zs_saved *saved;
    int count;
    if (zs_manifest_load(dir, &m) || !m)
        return; /* print_manifest has said so */
    if (zs_saved_open(dir, m, 1, &log, 0, &saved)) {
        printf("commits      cannot be told: %s\n", zs_last_error());
    } else {
        const zs_saved_point *kept = zs_saved_kept(saved, &count);
        printf("commits\n");
        for (int i = 0; i < count; i++)
            printf("  %llu  step %llu%s\n", (unsigned long long)kept[i].commit,
                   (unsigned long long)kept[i].step, i ? "" : " (newest)");
    }
    zs_saved_close(&saved);
    zs_manifest_free(&m);
}

static int inspect_checkpoint(const char *dir, struct dirent **names, int count)
{
    int code = ZS_EXIT_OK;
    uint64_t elements = 0;
    printf("checkpoint   %s\n", dir);
    if (print_manifest(dir))
        code = ZS_EXIT_FAILED;
    print_commits(dir);
    printf("files\n");
    for (int i = 0; i < count; i++) {
        char *path = join(dir, names[i]->d_name);
        if (!path || inspect_state(path, &elements))
            code = ZS_EXIT_FAILED;
        free(path);
    }
    print_count("elements", elements);
    return code;
}

/* *code is set when dir holds state files. */
static int try_checkpoint(const char *dir, int *code)
{
    struct dirent **names = NULL;
    int count = scandir(dir, &names, state_filter, alphasort);
    if (count > 0)
        *code = inspect_checkpoint(dir, names, count);
    for (int i = 0; i < count; i++)
        free(names[i]);
    free(names);
    return count > 0;
}

static int verify_path(const char *path, uint64_t commit)
{
    struct stat info;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode))
        return zs_verify_state(path, commit);
    if (is_state_name(path))
        return zs_verify_file(path, commit);
    zs_cli_error("%s is neither a directory of checkpoint files nor one of them: only those have "
                 "checksums to verify",
                 path);
    return ZS_EXIT_FAILED;
}

int zs_cli_inspect(int argc, char **argv)
{
    static const char usage[] =
        "usage: zspill inspect PATH\n"
        "       zspill inspect --verify [--commit N] PATH\n"
        "PATH: a model directory, a .safetensors file or index, or a directory of checkpoint files "
        "or one of\nthem. --verify compares every checksum of the latter: exit code 1 when one is "
        "wrong.\n--commit: not of the newest commit, but of this one of those listed.\n";
    struct stat info;
    int verify = 0, code;
    uint64_t elements = 0;
    const char *path = NULL, *commit = NULL;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
            fputs(usage, stdout);
            return ZS_EXIT_OK;
        }
        if (!strcmp(argv[i], "--verify"))
            verify = 1;
        else if (!strcmp(argv[i], "--commit") && i + 1 < argc)
            commit = argv[++i];
        else if (!path && strncmp(argv[i], "--", 2))
            path = argv[i];
        else
            argc = 0;
    }
    const long long number = zs_arguments_number("commit", commit, 1, INT64_MAX, 0);
    if (!argc || !path || number < 0 || (commit && !verify)) {
        fputs(usage, stderr);
        return ZS_EXIT_USAGE;
    }
    if (verify)
        return verify_path(path, (uint64_t)number);
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
        if (has_file(path, "config.json"))
            return inspect_model(path);
        if (try_checkpoint(path, &code))
            return code;
    } else if (is_state_name(path)) {
        printf("checkpoint\n");
        return inspect_state(path, &elements);
    }
    return inspect_tensors(path);
}
