/* SPDX-License-Identifier: Apache-2.0 */
#include "zero/saved.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "zero/layout.h"

struct zs_saved {
    const char *dir;
    const zs_manifest *m;
    const zs_log *log;
    uint64_t commit;
    zs_saved_point kept[ZS_STORE_SLOTS_MOST];
    int kept_count;
    zs_store_reader *reader; /* of rank `open` */
    int open;
    zs_layout *layouts; /* [m->flat_count] */
    int *locks;         /* [m->world], NULL: none */
};

static zs_status path_of(const zs_saved *s, int rank, char **out)
{
    *out = zs_store_path(s->dir, s->m->generation, rank);
    if (!*out)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a store's path");
    if (access(*out, F_OK) == 0)
        return ZS_OK;
    const zs_status status = zs_fail(
        ZS_ERR_CORRUPT,
        "store '%s', which the manifest beside it names as rank %d's, cannot be opened: %s: "
        "restore the file from a copy",
        *out, rank, strerror(errno));
    free(*out);
    *out = NULL;
    return status;
}

/* The first superblock in force must be the manifest's; both hold for the other then. */
static zs_status check(const zs_saved *s, int rank, const zs_store *store)
{
    if (store->committed < 0)
        return zs_fail(ZS_ERR_CORRUPT,
                       "store '%s' holds no commit: restore the file from a copy, or start afresh "
                       "in an empty directory",
                       store->path);
    const zs_superblock *super = &store->super[store->committed];
    if (super->run != s->m->run || super->world != s->m->world || super->rank != rank)
        return zs_fail(ZS_ERR_MISMATCH,
                       "store '%s' belongs to another run than the manifest beside it (it is rank "
                       "%d of %d, run %016llx, not rank %d of %d, run %016llx): restore the files "
                       "of all ranks from one copy",
                       store->path, super->rank, super->world, (unsigned long long)super->run, rank,
                       s->m->world, (unsigned long long)s->m->run);
    return zs_store_check_clean(store);
}

/* The superblocks of one file, checked; for zs_store_close after success. */
static zs_status peek(const zs_saved *s, int rank, zs_store *store)
{
    char *path;
    ZS_CHECK(path_of(s, rank, &path));
    zs_status status = zs_store_peek(path, s->log, store);
    free(path);
    ZS_CHECK(status);
    status = check(s, rank, store);
    if (status != ZS_OK)
        zs_store_close(store);
    return status;
}

/* The newest commit that all ranks have. */
static zs_status choose_newest(zs_saved *s)
{
    uint64_t commits[ZS_STORE_SLOTS_MOST], wanted;
    zs_store store;
    s->commit = UINT64_MAX;
    do {
        wanted = s->commit;
        for (int r = 0; r < s->m->world; r++) {
            ZS_CHECK(peek(s, r, &store));
            const int count = zs_store_commits(&store, commits);
            zs_store_close(&store);
            int i = 0;
            while (i < count && commits[i] > s->commit)
                i++;
            if (i == count)
                return zs_fail(
                    ZS_ERR_CORRUPT,
                    "the stores in '%s' have no commit in common: rank %d lacks number %llu: "
                    "restore the files of all ranks from one copy",
                    s->dir, r, (unsigned long long)s->commit);
            s->commit = commits[i];
        }
    } while (s->commit != wanted);
    return ZS_OK;
}

/* With that one in force, what all ranks keep. */
static zs_status list_kept(zs_saved *s)
{
    for (int r = 0; r < s->m->world; r++) {
        uint64_t commits[ZS_STORE_SLOTS_MOST];
        zs_store store;
        int both = 0;
        ZS_CHECK(peek(s, r, &store));
        store.committed = zs_store_find(&store, s->commit);
        const int count = zs_store_kept(&store, commits);
        for (int i = 0; r == 0 && i < count; i++) {
            const zs_superblock *super = &store.super[zs_store_find(&store, commits[i])];
            s->kept[s->kept_count++] = (zs_saved_point){commits[i], super->step};
        }
        for (int i = 0; i < s->kept_count; i++)
            for (int j = 0; j < count; j++)
                if (s->kept[i].commit == commits[j])
                    s->kept[both++] = s->kept[i];
        s->kept_count = both;
        zs_store_close(&store);
    }
    return ZS_OK;
}

static zs_status choose_commit(zs_saved *s, uint64_t commit)
{
    ZS_CHECK(choose_newest(s));
    ZS_CHECK(list_kept(s));
    uint64_t numbers[ZS_STORE_SLOTS_MOST];
    for (int i = 0; i < s->kept_count; i++) {
        numbers[i] = s->kept[i].commit;
        if (numbers[i] == commit)
            s->commit = commit;
    }
    return !commit || s->commit == commit
               ? ZS_OK
               : zs_store_fail_not_kept(s->dir, commit, numbers, s->kept_count);
}

static zs_status lock_all(zs_saved *s)
{
    s->locks = malloc((size_t)s->m->world * sizeof *s->locks);
    if (!s->locks)
        return zs_fail(ZS_ERR_NOMEM, "no memory for %d locks", s->m->world);
    for (int r = 0; r < s->m->world; r++)
        s->locks[r] = -1;
    for (int r = 0; r < s->m->world; r++) {
        char *path;
        ZS_CHECK(path_of(s, r, &path));
        const zs_status status = zs_store_share(path, &s->locks[r]);
        free(path);
        ZS_CHECK(status);
    }
    return ZS_OK;
}

zs_status zs_saved_open(const char *dir, const zs_manifest *manifest, int lock, const zs_log *log,
                        uint64_t commit, zs_saved **out)
{
    zs_status status;
    zs_saved *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s)
        return zs_fail(ZS_ERR_NOMEM, "no memory to read the state in '%s'", dir);
    s->dir = dir;
    s->m = manifest;
    s->log = log;
    s->open = -1;
    s->layouts = calloc(manifest->flat_count + 1, sizeof *s->layouts);
    if (!s->layouts) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory for %zu layouts", manifest->flat_count);
        goto fail;
    }
    for (size_t f = 0; f < manifest->flat_count; f++)
        ZS_TRY(zs_layout_init(&s->layouts[f], manifest->flats[f].numels, manifest->flats[f].count,
                              manifest->world));
    if (lock)
        ZS_TRY(lock_all(s)); /* nobody commits any more */
    ZS_TRY(choose_commit(s, commit));
    *out = s;
    return ZS_OK;
fail:
    zs_saved_close(&s);
    return status;
}

void zs_saved_close(zs_saved **saved)
{
    zs_saved *s = saved ? *saved : NULL;
    if (!s)
        return;
    *saved = NULL;
    zs_store_reader_close(&s->reader);
    for (int r = 0; s->locks && r < s->m->world; r++)
        if (s->locks[r] >= 0)
            close(s->locks[r]);
    free(s->locks);
    for (size_t f = 0; s->layouts && f < s->m->flat_count; f++)
        zs_layout_free(&s->layouts[f]);
    free(s->layouts);
    free(s);
}

uint64_t zs_saved_commit(const zs_saved *s)
{
    return s->commit;
}

const zs_saved_point *zs_saved_kept(const zs_saved *s, int *count)
{
    *count = s->kept_count;
    return s->kept;
}

zs_status zs_saved_rank(zs_saved *s, int rank, zs_store_reader **out)
{
    zs_status status = ZS_OK;
    if (!s->reader || s->open != rank) {
        char *path;
        zs_store_reader_close(&s->reader);
        ZS_CHECK(path_of(s, rank, &path));
        status = zs_store_reader_open(path, s->commit, s->log, &s->reader);
        free(path);
        s->open = rank;
    }
    *out = s->reader;
    return status;
}

zs_status zs_saved_header(zs_saved *s, const void **header, size_t *bytes)
{
    zs_store_reader *reader;
    ZS_CHECK(zs_saved_rank(s, 0, &reader));
    const zs_superblock *super = zs_store_reader_super(reader);
    *header = super->header;
    *bytes = super->header_bytes;
    return ZS_OK;
}

zs_status zs_saved_find(const zs_saved *s, const char *name, uint64_t numel, zs_saved_param *out)
{
    return zs_manifest_find(s->m, s->dir, name, numel, &out->flat, &out->at);
}

/* Which rank's file holds element first, where there, and how many from it on. */
static uint64_t locate(const zs_saved *s, zs_saved_param p, uint64_t first, int *rank, uint64_t *at)
{
    const zs_layout *layout = &s->layouts[p.flat];
    const uint64_t place = layout->offset[p.at] + first, left = layout->numel[p.at] - first;
    *rank = 0;
    *at = place;
    if (s->m->replicated)
        return left;
    *rank = (int)(place / layout->shard);
    *at = place % layout->shard;
    return ZS_MIN(left, layout->shard - *at);
}

uint64_t zs_saved_span(const zs_saved *s, zs_saved_param param, uint64_t first, uint64_t count)
{
    int rank;
    uint64_t at;
    return count ? ZS_MIN(count, locate(s, param, first, &rank, &at)) : 0;
}

zs_status zs_saved_read(zs_saved *s, zs_saved_param param, zs_array array, uint64_t first,
                        uint64_t count, float *dst)
{
    while (count) {
        zs_store_reader *reader;
        uint64_t at;
        int rank;
        const uint64_t n = ZS_MIN(count, locate(s, param, first, &rank, &at));
        ZS_CHECK(zs_saved_rank(s, rank, &reader));
        ZS_CHECK(zs_store_reader_read(reader, param.flat, array, at, n, dst));
        first += n;
        count -= n;
        dst += n;
    }
    return ZS_OK;
}
