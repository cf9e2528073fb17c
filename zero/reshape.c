/* SPDX-License-Identifier: Apache-2.0 */
/* Taking over state that another world, stage, dtype or chunk length left: parameters are found by
 * name in the old flat buffers, and each rank reads the chunks that hold its own parts, from
 * whichever ranks' files they are in. */
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "offload/reader.h"
#include "zero/engine.h"

typedef struct old_state {
    zs_engine *e;
    const zs_manifest *m;
    uint64_t commit;
    zs_store_reader *reader; /* of rank `open` */
    int open;
    zs_layout *layouts; /* [m->flat_count] */
} old_state;

/* The numbers of the commits in one old file, newest first. */
static zs_status peek(const old_state *old, int rank, uint64_t commits[2], int *count)
{
    const zs_engine *e = old->e;
    zs_store store;
    char *path = zs_store_path(e->config.state_dir, old->m->generation, rank);
    if (!path)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a store's path");
    zs_status status = zs_store_peek(path, &e->log, &store);
    *count = 0;
    if (status == ZS_OK) {
        for (int i = 0; i < 2; i++)
            if (store.whole[i] && store.super[i].world == old->m->world)
                commits[(*count)++] = store.super[i].commit;
        if (*count == 2 && commits[0] < commits[1]) {
            const uint64_t newer = commits[1];
            commits[1] = commits[0];
            commits[0] = newer;
        }
        if (!*count)
            status = zs_fail(ZS_ERR_CORRUPT,
                             "store '%s' holds no commit of a world of %d: restore "
                             "the file from a copy",
                             path, old->m->world);
        zs_store_close(&store);
    }
    free(path);
    return status;
}

/* The newest commit that all old ranks have. */
static zs_status choose_commit(old_state *old)
{
    uint64_t commits[2];
    int count;
    for (int r = 0; r < old->m->world; r++) {
        ZS_CHECK(peek(old, r, commits, &count));
        if (r == 0 || commits[0] < old->commit)
            old->commit = commits[0];
    }
    for (int r = 0; r < old->m->world; r++) {
        ZS_CHECK(peek(old, r, commits, &count));
        if (commits[0] != old->commit && !(count == 2 && commits[1] == old->commit))
            return zs_fail(
                ZS_ERR_CORRUPT,
                "the stores in '%s' have no commit in common: rank %d lacks number %llu: "
                "restore the files of all ranks from one copy",
                old->e->config.state_dir, r, (unsigned long long)old->commit);
    }
    return ZS_OK;
}

static zs_status open_rank(old_state *old, int rank)
{
    if (old->reader && old->open == rank)
        return ZS_OK;
    zs_store_reader_close(&old->reader);
    char *path = zs_store_path(old->e->config.state_dir, old->m->generation, rank);
    if (!path)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a store's path");
    zs_status status = zs_store_reader_open(path, old->commit, &old->e->log, &old->reader);
    free(path);
    old->open = rank;
    return status;
}

/* n elements of rank's shard, of all three arrays, to `at` of a new shard. */
static zs_status move(old_state *old, int rank, size_t from_shard, uint64_t from, size_t to_shard,
                      uint64_t to, uint64_t n)
{
    zs_engine *e = old->e;
    ZS_CHECK(open_rank(old, rank));
    while (n) {
        const uint64_t piece = ZS_MIN(n, (uint64_t)ZS_SCRATCH);
        for (zs_array a = ZS_MASTER; a <= ZS_EXP_AVG_SQ; a++) {
            ZS_CHECK(zs_store_reader_read(old->reader, from_shard, a, from, piece, e->scratch));
            ZS_CHECK(zs_states_write(e->states, to_shard, a, to, piece, e->scratch));
        }
        from += piece;
        to += piece;
        n -= piece;
    }
    return ZS_OK;
}

/* Elements [first, first + count) of parameter p of the old flat, wherever they are. */
static zs_status move_param(old_state *old, size_t flat, size_t p, uint64_t first, uint64_t count,
                            size_t to_shard, uint64_t to)
{
    const zs_layout *layout = &old->layouts[flat];
    if (old->m->replicated)
        return move(old, 0, flat, layout->offset[p] + first, to_shard, to, count);
    for (int r = 0; r < old->m->world && count; r++) {
        const zs_layout_part part = zs_layout_locate(layout, p, r);
        const uint64_t lo = ZS_MAX(part.first, first);
        const uint64_t hi = ZS_MIN(part.first + part.count, first + count);
        if (lo < hi)
            ZS_CHECK(move(old, r, flat, part.shard_offset + (lo - part.first), to_shard,
                          to + (lo - first), hi - lo));
    }
    return ZS_OK;
}

static zs_status find_param(const old_state *old, const zs_param_info *p, size_t *flat, size_t *at)
{
    for (*flat = 0; *flat < old->m->flat_count; ++*flat) {
        const zs_manifest_flat *f = &old->m->flats[*flat];
        for (*at = 0; *at < f->count; ++*at) {
            if (strcmp(f->names[*at], p->name) != 0)
                continue;
            if (f->numels[*at] == p->numel)
                return ZS_OK;
            return zs_fail(ZS_ERR_MISMATCH,
                           "parameter '%s' has %llu elements, and %llu in the state in '%s'",
                           p->name, (unsigned long long)p->numel,
                           (unsigned long long)f->numels[*at], old->e->config.state_dir);
        }
    }
    return zs_fail(ZS_ERR_MISMATCH,
                   "parameter '%s' is not in the state in '%s': resume with the "
                   "model it was made with",
                   p->name, old->e->config.state_dir);
}

static zs_status move_all(old_state *old)
{
    zs_engine *e = old->e;
    for (size_t i = 0; i < e->flat_count; i++) {
        const zs_flat *f = &e->flats[i];
        for (size_t j = 0; f->trainable && j < f->count; j++) {
            uint64_t first, count, held_at;
            size_t flat = 0, at = 0;
            ZS_CHECK(find_param(old, &e->params[f->params[j]], &flat, &at));
            zs_flat_locate(f, j, zs_flat_held_begin(e, f), zs_flat_held_numel(e, f), &first, &count,
                           &held_at);
            ZS_CHECK(move_param(old, flat, at, first, count, f->state_shard, held_at));
        }
    }
    return zs_states_flush(e->states);
}

zs_status zs_reshape_load(zs_engine *e, void *user, size_t *user_bytes)
{
    zs_status status;
    old_state old = {.e = e, .m = e->manifest, .open = -1};
    old.layouts = calloc(old.m->flat_count + 1, sizeof *old.layouts);
    if (!old.layouts)
        return zs_fail(ZS_ERR_NOMEM, "no memory for %zu layouts", old.m->flat_count);
    for (size_t f = 0; f < old.m->flat_count; f++)
        ZS_TRY(zs_layout_init(&old.layouts[f], old.m->flats[f].numels, old.m->flats[f].count,
                              old.m->world));
    ZS_TRY(choose_commit(&old));
    ZS_TRY(move_all(&old));
    ZS_TRY(open_rank(&old, 0));
    const zs_superblock *super = zs_store_reader_super(old.reader);
    ZS_TRY(zs_state_decode(e, super->header, super->header_bytes, user, user_bytes));
    status = zs_weights_from_masters(e);
fail:
    zs_store_reader_close(&old.reader);
    for (size_t f = 0; f < old.m->flat_count; f++)
        zs_layout_free(&old.layouts[f]);
    free(old.layouts);
    return status;
}
