/* SPDX-License-Identifier: Apache-2.0 */
/* Commit and resume: what is resident goes into slots that the superblock in force does not
 * (or an older one that is kept) name, then a superblock names them. */
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/status.h"
#include "base/util.h"
#include "offload/states_internal.h"

_Static_assert((int)ZS_STATES_COMMITS_MOST == (int)ZS_STORE_SLOTS_MOST, "as many as superblocks");

static zs_status need_store(const zs_states *states)
{
    if (!states->has_store)
        return zs_fail(ZS_ERR_MISUSE, "there is no store to commit to or resume from: give a state "
                                      "directory");
    return ZS_OK;
}

static unsigned resident(const zs_states *states, size_t chunk)
{
    return ZS_ALL_ARRAYS & ~zs_states_streamed(states, states->geometry.chunks[chunk].shard);
}

/* A master of the caller's own may have changed without our knowing. */
static int aliased(const zs_states *states, size_t chunk)
{
    return states->shards[states->geometry.chunks[chunk].shard].master != NULL;
}

static int never_written(const zs_states *states, size_t chunk)
{
    return states->chunks[chunk].current == ZS_STORE_NO_SLOT;
}

/* The chunk's streamed arrays are where the commit will name them: only what is resident has to
 * follow. */
static int moved(const zs_states *states, size_t chunk)
{
    return !never_written(states, chunk) &&
           (states->config.slots == 1 ||
            !(states->chunks[chunk].guarded >> states->chunks[chunk].current & 1));
}

void zs_states_guard(zs_states *states)
{
    const zs_store *store = &states->store;
    for (size_t c = 0; c < states->geometry.chunk_count; c++)
        states->chunks[c].guarded = 0;
    for (int i = 0; i < store->area_count; i++) {
        if (!zs_store_guards(store, i))
            continue;
        for (size_t c = 0; c < states->geometry.chunk_count; c++)
            states->chunks[c].guarded |= 1u << store->super[i].slots[c].slot;
    }
}

static int to_be_written(const zs_states *states, size_t chunk)
{
    if (never_written(states, chunk))
        return 1;
    return resident(states, chunk) && (states->chunks[chunk].dirty || aliased(states, chunk));
}

static void commit_shape(zs_states *states, size_t chunk, zs_shape *out)
{
    if (moved(states, chunk)) {
        out->room = resident(states, chunk);
        return;
    }
    out->room = ZS_ALL_ARRAYS;
    out->read = ZS_ALL_ARRAYS & ~resident(states, chunk);
}

static zs_status commit_chunk(zs_states *states, zs_entry *entry, void *arg)
{
    const zs_store_chunk *at = &states->geometry.chunks[entry->chunk];
    zs_chunk_state *chunk = &states->chunks[entry->chunk];
    unsigned arrays = resident(states, entry->chunk);
    size_t bytes = at->numel * sizeof(float);
    for (int a = 0; a < ZS_STORE_ARRAYS; a++) {
        if (!(arrays >> a & 1))
            continue;
        char *here = (char *)zs_entry_array(states, entry, a);
        const float *source = states->resident[at->shard * ZS_STORE_ARRAYS + a];
        ZS_CHECK(zs_states_copy(states, here, source + at->first, bytes));
        memset(here + bytes, 0, entry->stride - bytes);
    }
    if (!chunk->dirty && !never_written(states, entry->chunk) &&
        (states->config.slots == 1 || !moved(states, entry->chunk)) &&
        zs_crc32c(0, zs_entry_array(states, entry, 0), bytes) == chunk->crc[0])
        return ZS_OK; /* the caller's master is as it was committed */
    ZS_CHECK(zs_entry_write(states, entry, entry->mask, zs_chunk_target(states, chunk)));
    chunk->dirty = 0;
    return ZS_OK;
}

zs_status zs_states_commit_prepare(zs_states *states)
{
    zs_pass pass = {.order = states->order, .shape = commit_shape, .process = commit_chunk};
    ZS_CHECK(need_store(states));
    ZS_CHECK(zs_states_usable(states));
    zs_status status = zs_states_flush(states);
    for (size_t c = 0; c < states->geometry.chunk_count; c++)
        if (to_be_written(states, c))
            states->order[pass.count++] = c;
    if (status == ZS_OK && pass.count) {
        /* What prefetch began stays: a pass takes up only what it queued itself. */
        for (size_t i = 0; i < ZS_RING_ENTRIES; i++)
            if (states->entries[i].state == ZS_ENTRY_WAITING)
                states->entries[i].state = ZS_ENTRY_DONE;
        status = zs_pass_run(states, &pass);
    }
    if (status == ZS_OK)
        status = zs_ring_settle(states);
    if (status == ZS_OK)
        status = zs_store_check_present(&states->store);
    if (status == ZS_OK)
        status = zs_file_sync(states->config.io, states->store.file);
    if (status != ZS_OK) {
        states->broken = 1;
        zs_ring_abandon(states);
    }
    return status;
}

zs_status zs_states_commit_publish(zs_states *states, uint64_t commit, uint64_t step,
                                   const void *header, size_t header_bytes)
{
    zs_status status;
    ZS_CHECK(need_store(states));
    ZS_CHECK(zs_states_usable(states));
    if (header_bytes > ZS_STATES_HEADER_MAX)
        return zs_fail(ZS_ERR_ARG, "a header of %zu bytes does not fit: at most %d", header_bytes,
                       ZS_STATES_HEADER_MAX);
    zs_store *store = &states->store;
    const zs_store_geometry *geometry = &states->geometry;
    zs_superblock super = {.fingerprint = states->config.fingerprint,
                           .lineage = states->lineage,
                           .commit = commit,
                           .run = states->config.run,
                           .slot_count = states->config.slots,
                           .sequence = 1,
                           .step = step,
                           .chunk_numel = geometry->chunk_numel,
                           .rank = geometry->rank,
                           .world = geometry->world,
                           .shard_count = geometry->shard_count,
                           .chunk_count = geometry->chunk_count,
                           .header_bytes = header_bytes};
    for (int i = 0; i < store->area_count; i++)
        if (store->whole[i])
            super.sequence = ZS_MAX(super.sequence, store->super[i].sequence + 1);
    super.shards = calloc(geometry->shard_count + 1, sizeof *super.shards);
    super.slots = calloc(geometry->chunk_count + 1, sizeof *super.slots);
    super.header = malloc(header_bytes + 1);
    if (!super.shards || !super.slots || !super.header) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory for a superblock of %zu chunks",
                         geometry->chunk_count);
        goto fail;
    }
    if (geometry->shard_count)
        memcpy(super.shards, geometry->shards, geometry->shard_count * sizeof *super.shards);
    if (header_bytes)
        memcpy(super.header, header, header_bytes);
    for (size_t c = 0; c < geometry->chunk_count; c++) {
        const zs_chunk_state *chunk = &states->chunks[c];
        if (never_written(states, c)) {
            status = zs_fail(ZS_ERR_MISUSE, "publish without prepare: chunk %zu is not written", c);
            goto fail;
        }
        super.slots[c].slot = chunk->current;
        memcpy(super.slots[c].crc, chunk->crc, sizeof chunk->crc);
    }
    status = zs_store_publish(store, &super);
    if (status != ZS_OK) {
        /* It may or may not have reached the disk: no slot may be written again. */
        states->broken = 1;
        return status;
    }
    zs_states_guard(states);
    return ZS_OK;
fail:
    zs_superblock_free(&super);
    return status;
}

static zs_status check_run(const zs_states *states, const zs_superblock *super)
{
    if (super->run != states->config.run)
        return zs_fail(ZS_ERR_MISMATCH,
                       "store '%s' belongs to another run than the manifest beside it (%016llx, "
                       "not %016llx): restore the files of all ranks from one copy",
                       states->store.path, (unsigned long long)super->run,
                       (unsigned long long)states->config.run);
    return ZS_OK;
}

zs_status zs_states_committed(zs_states *states, uint64_t commits[ZS_STATES_COMMITS_MOST],
                              int *count)
{
    ZS_CHECK(need_store(states));
    const zs_store *store = &states->store;
    *count = 0;
    if (store->committed < 0)
        return ZS_OK;
    ZS_CHECK(check_run(states, &store->super[store->committed]));
    ZS_CHECK(zs_store_check_clean(store));
    *count = zs_store_commits(store, commits);
    return ZS_OK;
}

static zs_status find_commit(const zs_states *states, uint64_t commit, int *found)
{
    const zs_store *store = &states->store;
    *found = zs_store_find(store, commit);
    if (*found < 0)
        return zs_fail(ZS_ERR_ARG, "store '%s' holds no commit %llu", store->path,
                       (unsigned long long)commit);
    return zs_superblock_check(&store->super[*found], &states->geometry, store->path);
}

zs_status zs_states_adopt(zs_states *states, uint64_t commit)
{
    int found;
    ZS_CHECK(need_store(states));
    ZS_CHECK(find_commit(states, commit, &found));
    /* A process may have ended between writing this and flushing it. */
    ZS_CHECK(zs_file_sync(states->config.io, states->store.file));
    states->store.committed = found;
    zs_states_guard(states);
    return ZS_OK;
}

static void resume_shape(zs_states *states, size_t chunk, zs_shape *out)
{
    out->room = out->read = ZS_ALL_ARRAYS;
}

static zs_status resume_chunk(zs_states *states, zs_entry *entry, void *arg)
{
    const zs_store_chunk *at = &states->geometry.chunks[entry->chunk];
    for (int a = 0; a < ZS_STORE_ARRAYS; a++) {
        float *home = states->resident[at->shard * ZS_STORE_ARRAYS + a];
        if (home)
            ZS_CHECK(zs_states_copy(states, home + at->first, zs_entry_array(states, entry, a),
                                    at->numel * sizeof(float)));
    }
    return ZS_OK;
}

static zs_status fail_not_kept(const zs_store *store, uint64_t commit)
{
    uint64_t kept[ZS_STORE_SLOTS_MOST];
    return zs_store_fail_not_kept(store->path, commit, kept, zs_store_kept(store, kept));
}

/* The superblock of a commit that can be taken up. */
static zs_status find_resumable(zs_states *states, uint64_t commit, const zs_superblock **out)
{
    ZS_CHECK(need_store(states));
    zs_store *store = &states->store;
    int found;
    ZS_CHECK(find_commit(states, commit, &found));
    if (!zs_store_guards(store, found))
        return fail_not_kept(store, commit);
    const zs_superblock *super = &store->super[found];
    if (super->fingerprint != states->config.fingerprint)
        return zs_fail(
            ZS_ERR_MISMATCH,
            "store '%s' belongs to a run with fingerprint %016llx, this one has %016llx: "
            "resume with the model, data and options it was made with, or use another "
            "directory",
            store->path, (unsigned long long)super->fingerprint,
            (unsigned long long)states->config.fingerprint);
    ZS_CHECK(check_run(states, super));
    *out = super;
    return zs_store_check_clean(store);
}

static void give_header(const zs_superblock *super, void *header, size_t *header_bytes)
{
    if (header)
        memcpy(header, super->header, ZS_MIN(*header_bytes, super->header_bytes));
    *header_bytes = super->header_bytes;
}

zs_status zs_states_header(zs_states *states, uint64_t commit, void *header, size_t *header_bytes)
{
    const zs_superblock *super = NULL;
    ZS_CHECK(find_resumable(states, commit, &super));
    give_header(super, header, header_bytes);
    return ZS_OK;
}

zs_status zs_states_resume(zs_states *states, uint64_t commit, void *header, size_t *header_bytes)
{
    const zs_superblock *super = NULL;
    ZS_CHECK(find_resumable(states, commit, &super));

    /* From here on what was in memory is gone, whatever comes. */
    zs_ring_abandon(states);
    states->broken = 1;
    zs_pass pass = {.order = states->order, .shape = resume_shape, .process = resume_chunk};
    for (size_t c = 0; c < states->geometry.chunk_count; c++) {
        zs_chunk_state *chunk = &states->chunks[c];
        chunk->current = super->slots[c].slot;
        chunk->dirty = 0;
        memcpy(chunk->crc, super->slots[c].crc, sizeof chunk->crc);
        states->order[pass.count++] = c;
    }
    ZS_CHECK(zs_pass_run(states, &pass));
    states->lineage = super->lineage;
    give_header(super, header, header_bytes);
    states->broken = 0;
    return ZS_OK;
}
