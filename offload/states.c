/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "offload/lanes.h"

enum {
    CHUNK_STEP = 4096, /* chunk_numel is a multiple: its arrays then are whole pages */
    CHUNK_MOST = 1024 * 1024,
    RING_CHUNKS = 4, /* when chunk_numel is chosen; at least RING_LEAST always */
    RING_LEAST = 3
};
#define RING_SMALL (12ull << 20)
#define RING_LARGE (256ull << 20)

unsigned zs_states_streamed(const zs_states *states, size_t shard)
{
    unsigned mask = 0;
    for (int a = 0; a < ZS_STORE_ARRAYS; a++)
        if (!states->resident[shard * ZS_STORE_ARRAYS + a])
            mask |= 1u << a;
    return mask;
}

int zs_states_spills_working(const zs_states *states, size_t shard)
{
    return states->config.params && !states->shards[shard].master;
}

zs_status zs_states_copy(zs_states *states, void *dst, const void *src, uint64_t bytes)
{
    zs_device *device = states->config.device;
    ZS_CHECK(device->ops->copy(device, dst, src, bytes, states->config.stream));
    return device->ops->stream_sync(device, states->config.stream);
}

void *zs_states_native(const zs_states *states)
{
    zs_device *device = states->config.device;
    return device->ops->stream_native(device, states->config.stream);
}

zs_status zs_states_usable(const zs_states *states)
{
    if (states->broken)
        return zs_fail(ZS_ERR_MISUSE,
                       "a step or commit of rank %d failed half-way: resume the last commit, or "
                       "close and open again",
                       states->config.rank);
    return ZS_OK;
}

/* ---- open ---- */

static zs_status check_config(const zs_states_config *config)
{
    if (config->tier == ZS_TIER_NVME && !config->dir)
        return zs_fail(ZS_ERR_ARG, "states on nvme need a directory for their store");
    if ((config->dir || config->params) && !config->io)
        return zs_fail(ZS_ERR_ARG, "states with a store or spilled parameters need an I/O engine");
    if (config->chunk_numel % CHUNK_STEP)
        return zs_fail(ZS_ERR_ARG, "chunk_numel %llu is not a multiple of %d",
                       (unsigned long long)config->chunk_numel, CHUNK_STEP);
    if (config->slots < 0 || config->slots > ZS_STORE_SLOTS_MOST)
        return zs_fail(ZS_ERR_ARG, "%d slots for each chunk: 1 to %d are possible", config->slots,
                       ZS_STORE_SLOTS_MOST);
    if (config->world < 1 || config->rank < 0 || config->rank >= config->world)
        return zs_fail(ZS_ERR_ARG, "rank %d of a world of %d", config->rank, config->world);
    uint64_t total = 0;
    for (size_t s = 0; s < config->shard_count; s++)
        if (__builtin_add_overflow(total, config->shards[s].numel, &total) ||
            total > INT64_MAX / 64)
            return zs_fail(ZS_ERR_ARG, "shard %zu: %llu elements are more than any machine holds",
                           s, (unsigned long long)config->shards[s].numel);
    return ZS_OK;
}

/* Bytes of a step's ring entry, for each element of a shard. */
static uint64_t element_bytes(const zs_states_config *config, const zs_states_shard *shard)
{
    uint64_t bytes = 0;
    if (config->tier == ZS_TIER_NVME)
        bytes += sizeof(float) * (shard->master ? 2 : 3);
    if (config->params && !shard->master)
        bytes += zs_dtype_size(shard->working_dtype);
    /* Commit and resume of what is resident pass through the ring, too. */
    return config->dir ? ZS_MAX(bytes, (uint64_t)ZS_STORE_ARRAYS * sizeof(float)) : bytes;
}

/* Chunk length and ring size from each other, the shards and what was asked. */
static zs_status choose_sizes(zs_states *states, uint64_t stored_chunk, uint64_t *ring_bytes)
{
    zs_states_config *config = &states->config;
    uint64_t longest = 0, total = 0, per_element = 0;
    for (size_t s = 0; s < states->shard_count; s++) {
        uint64_t bytes = element_bytes(config, &states->shards[s]);
        longest = ZS_MAX(longest, states->shards[s].numel);
        total += zs_round_up(states->shards[s].numel, CHUNK_STEP) * bytes;
        per_element = ZS_MAX(per_element, bytes);
    }
    uint64_t ring = config->buffer_bytes;
    if (!ring)
        ring = ZS_MIN(ZS_MAX(total / 8, RING_SMALL), RING_LARGE);
    if (!config->chunk_numel)
        config->chunk_numel = stored_chunk;
    if (!config->chunk_numel) {
        uint64_t chunk = per_element ? ring / RING_CHUNKS / per_element : CHUNK_MOST;
        chunk = ZS_MIN(ZS_MIN(chunk, (uint64_t)CHUNK_MOST), zs_round_up(longest, CHUNK_STEP));
        config->chunk_numel = ZS_MAX(chunk / CHUNK_STEP * CHUNK_STEP, (uint64_t)CHUNK_STEP);
    }
    uint64_t chunk =
        ZS_MIN(config->chunk_numel, ZS_MAX(zs_round_up(longest, CHUNK_STEP), CHUNK_STEP));
    uint64_t least = ZS_MIN(RING_LEAST * chunk * per_element, total);
    if (ring < least) {
        if (config->buffer_bytes)
            return zs_fail(ZS_ERR_ARG,
                           "buffer_bytes %llu does not hold %d chunks of %llu elements: give at "
                           "least %llu bytes, or smaller chunks",
                           (unsigned long long)ring, RING_LEAST, (unsigned long long)chunk,
                           (unsigned long long)least);
        ring = least;
    }
    *ring_bytes = zs_round_up(ZS_MIN(ring, total), ZS_PAGE);
    return ZS_OK;
}

static zs_status open_tables(zs_states *states)
{
    const zs_store_geometry *geometry = &states->geometry;
    states->first_chunk = calloc(states->shard_count + 1, sizeof *states->first_chunk);
    states->chunks = calloc(geometry->chunk_count + 1, sizeof *states->chunks);
    states->order = calloc(geometry->chunk_count + 1, sizeof *states->order);
    states->entries = calloc(ZS_RING_ENTRIES, sizeof *states->entries);
    states->resident = calloc(states->shard_count * ZS_STORE_ARRAYS + 1, sizeof *states->resident);
    if (!states->first_chunk || !states->chunks || !states->order || !states->entries ||
        !states->resident)
        return zs_fail(ZS_ERR_NOMEM, "optimizer states: no memory for tables of %zu chunks",
                       geometry->chunk_count);
    size_t c = 0;
    for (size_t s = 0; s < states->shard_count; s++) {
        states->first_chunk[s] = c;
        while (c < geometry->chunk_count && geometry->chunks[c].shard == s)
            c++;
    }
    states->first_chunk[states->shard_count] = c;
    for (c = 0; c < geometry->chunk_count; c++)
        states->chunks[c].current = ZS_STORE_NO_SLOT;
    return ZS_OK;
}

static zs_status open_resident(zs_states *states)
{
    zs_states_config *config = &states->config;
    for (size_t s = 0; s < states->shard_count; s++)
        states->resident[s * ZS_STORE_ARRAYS] = states->shards[s].master;
    if (config->tier == ZS_TIER_NVME)
        return ZS_OK;
    for (int a = 0; a < ZS_STORE_ARRAYS; a++) {
        uint64_t numel = 0;
        for (size_t s = 0; s < states->shard_count; s++)
            if (a || !states->shards[s].master)
                numel += states->shards[s].numel;
        ZS_CHECK(zs_mem_alloc(config->device, config->ledger, config->tier, "optimizer states",
                              numel * sizeof(float), &states->memory[a]));
        float *at = states->memory[a].ptr;
        for (size_t s = 0; s < states->shard_count; s++)
            if (at && (a || !states->shards[s].master)) {
                states->resident[s * ZS_STORE_ARRAYS + a] = at;
                at += states->shards[s].numel;
            }
    }
    return ZS_OK;
}

static zs_status open_store(zs_states *states, uint64_t *stored_chunk)
{
    zs_states_config *config = &states->config;
    ZS_CHECK(
        zs_store_lock(config->dir, config->generation, config->rank, config->log, &states->store));
    states->has_store = 1;
    zs_store *store = &states->store;
    if (config->abandon)
        zs_store_abandon(store);
    if (!store->exists)
        return ZS_OK;
    if (!config->resume)
        return zs_fail(ZS_ERR_EXISTS,
                       "store '%s' holds step %llu of an earlier run: resume it, or use another "
                       "directory",
                       store->path, (unsigned long long)store->super[store->committed].step);
    *stored_chunk = store->super[store->committed].chunk_numel;
    if (!*stored_chunk || *stored_chunk % CHUNK_STEP)
        return zs_fail(ZS_ERR_CORRUPT,
                       "store '%s' has chunks of %llu elements, not a multiple of "
                       "%d: it was not written by zspill",
                       store->path, (unsigned long long)*stored_chunk, CHUNK_STEP);
    return ZS_OK;
}

/* What lies on disk, in the ledger: the states proper, and what the other slots, padding and
 * superblocks take beside them. */
static zs_status book(zs_states *states)
{
    uint64_t live = 0;
    if (states->config.tier == ZS_TIER_NVME)
        for (size_t s = 0; s < states->shard_count; s++)
            live += states->shards[s].numel * sizeof(float) * (states->shards[s].master ? 2 : 3);
    ZS_CHECK(zs_ledger_add(states->config.ledger, ZS_TIER_NVME, "optimizer states", (int64_t)live));
    states->booked_states = live;
    uint64_t rest = states->geometry.file_bytes - live;
    ZS_CHECK(zs_ledger_add(states->config.ledger, ZS_TIER_NVME, "store", (int64_t)rest));
    states->booked_store = rest;
    return ZS_OK;
}

static zs_status open_layout(zs_states *states, uint64_t stored_chunk, uint64_t *ring_bytes)
{
    ZS_CHECK(choose_sizes(states, stored_chunk, ring_bytes));
    zs_store_shard *shards = calloc(states->shard_count + 1, sizeof *shards);
    if (!shards)
        return zs_fail(ZS_ERR_NOMEM, "optimizer states: no memory for a table of %zu shards",
                       states->shard_count);
    for (size_t s = 0; s < states->shard_count; s++)
        shards[s] = (zs_store_shard){states->shards[s].numel, states->shards[s].working_dtype};
    zs_status status = zs_store_geometry_make(states->config.rank, states->config.world,
                                              states->config.slots, states->config.chunk_numel,
                                              shards, states->shard_count, &states->geometry);
    free(shards);
    return status;
}

zs_status zs_states_open(const zs_states_config *config, zs_states **out)
{
    zs_status status;
    uint64_t stored_chunk = 0, ring_bytes = 0;
    *out = NULL;
    ZS_CHECK(check_config(config));
    zs_states *states = calloc(1, sizeof *states);
    if (!states)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the optimizer states of %zu shards",
                       config->shard_count);
    states->config = *config;
    if (!states->config.host_math)
        states->config.host_math = config->math;
    if (!states->config.slots)
        states->config.slots = 2;
    states->shard_count = config->shard_count;
    states->store.lock_fd = -1;
    states->backwards = 1; /* the first sweep then runs forwards */
    states->shards = calloc(config->shard_count + 1, sizeof *states->shards);
    if (!states->shards) {
        status = zs_fail(ZS_ERR_NOMEM, "optimizer states: no memory for a table of %zu shards",
                         config->shard_count);
        goto fail;
    }
    if (config->shard_count)
        memcpy(states->shards, config->shards, config->shard_count * sizeof *states->shards);
    states->config.shards = states->shards;
    if (config->dir)
        ZS_TRY(open_store(states, &stored_chunk));
    ZS_TRY(open_layout(states, stored_chunk, &ring_bytes));
    ZS_TRY(open_tables(states));
    ZS_TRY(open_resident(states));
    ZS_TRY(zs_lanes_open(states));
    if (config->dir) {
        zs_store *store = &states->store;
        ZS_TRY(zs_store_allocate(store, &states->geometry, config->io, config->device,
                                 config->ledger));
        ZS_TRY(book(states));
        states->lineage = 1;
        if (store->committed >= 0)
            states->lineage += store->super[store->committed].lineage;
        zs_states_guard(states);
    }
    if (config->dir || config->params) {
        ZS_TRY(zs_mem_alloc(config->device, config->ledger, ZS_TIER_HOST, "optimizer ring",
                            ring_bytes, &states->ring));
        if (ring_bytes) {
            ZS_TRY(zs_io_register(config->io, states->ring.ptr, states->ring.bytes));
            states->registered = 1;
        }
    }
    *out = states;
    return ZS_OK;
fail:
    zs_states_close(&states);
    return status;
}

uint64_t zs_states_chunk_numel(const zs_states *states)
{
    return states->config.chunk_numel;
}

void zs_states_close(zs_states **out)
{
    zs_states *states = *out;
    if (!states)
        return;
    *out = NULL;
    zs_ledger *ledger = states->config.ledger;
    zs_ring_abandon(states);
    zs_lanes_close(states);
    if (states->registered)
        zs_io_unregister(states->config.io, states->ring.ptr);
    zs_mem_free(&states->ring);
    if (states->has_store)
        zs_store_close(&states->store);
    if (states->booked_states)
        (void)zs_ledger_add(ledger, ZS_TIER_NVME, "optimizer states",
                            -(int64_t)states->booked_states);
    if (states->booked_store)
        (void)zs_ledger_add(ledger, ZS_TIER_NVME, "store", -(int64_t)states->booked_store);
    for (int a = 0; a < ZS_STORE_ARRAYS; a++)
        zs_mem_free(&states->memory[a]);
    zs_store_geometry_free(&states->geometry);
    free(states->shards);
    free(states->first_chunk);
    free(states->chunks);
    free(states->resident);
    free(states->entries);
    free(states->order);
    free(states->cut);
    free(states);
}

/* ---- read and write ---- */

static zs_status check_range(const zs_states *states, size_t shard, zs_array array, uint64_t first,
                             uint64_t count)
{
    if (array < ZS_MASTER || array > ZS_EXP_AVG_SQ)
        return zs_fail(ZS_ERR_ARG, "array %d is not one of the states", (int)array);
    if (shard >= states->shard_count)
        return zs_fail(ZS_ERR_ARG, "shard %zu of %zu", shard, states->shard_count);
    if (first > states->shards[shard].numel || count > states->shards[shard].numel - first)
        return zs_fail(ZS_ERR_ARG, "elements %llu to %llu of shard %zu, which has %llu",
                       (unsigned long long)first, (unsigned long long)(first + count), shard,
                       (unsigned long long)states->shards[shard].numel);
    return ZS_OK;
}

/* The entry of chunk with arrays in it, whatever else has to leave the ring for that. */
static zs_status window(zs_states *states, size_t chunk, unsigned arrays, zs_entry **out)
{
    size_t shard = states->geometry.chunks[chunk].shard;
    zs_entry *entry = zs_ring_find(states, chunk);
    if (!entry) {
        ZS_CHECK(zs_ring_take(states, chunk, zs_states_streamed(states, shard),
                              zs_states_spills_working(states, shard), ZS_EVICT_ANY, &entry));
        if (!entry)
            return zs_fail(ZS_ERR_INTERNAL, "chunk %zu does not fit into the empty ring", chunk);
        entry->keep = 1;
        entry->state = ZS_ENTRY_DONE;
    }
    zs_status status = ZS_OK;
    if (arrays & ~entry->valid)
        status = zs_entry_read(states, entry, arrays & ~entry->valid);
    if (status == ZS_OK)
        status = zs_entry_ready(states, entry);
    if (status != ZS_OK) {
        zs_ring_abandon(states);
        return status;
    }
    *out = entry;
    return ZS_OK;
}

zs_status zs_states_flush(zs_states *states)
{
    for (size_t i = 0; i < ZS_RING_ENTRIES; i++) {
        zs_entry *entry = &states->entries[i];
        if (entry->state == ZS_ENTRY_FREE || !entry->dirty)
            continue;
        entry->dirty = 0;
        zs_status status = zs_entry_write(states, entry, entry->mask,
                                          zs_chunk_target(states, &states->chunks[entry->chunk]));
        if (status != ZS_OK) {
            states->broken = 1;
            return status;
        }
    }
    return ZS_OK;
}

static zs_status transfer(zs_states *states, size_t shard, int a, uint64_t first, uint64_t count,
                          float *dst, const float *src)
{
    float *resident = states->resident[shard * ZS_STORE_ARRAYS + a];
    size_t chunk = states->first_chunk[shard] + first / states->geometry.chunk_numel;
    for (uint64_t done = 0; done < count; chunk++) {
        const zs_store_chunk *at = &states->geometry.chunks[chunk];
        uint64_t n = ZS_MIN(count - done, at->first + at->numel - (first + done));
        float *here;
        zs_entry *entry = NULL;
        if (resident) {
            here = resident + first + done;
        } else {
            ZS_CHECK(
                window(states, chunk, src ? zs_states_streamed(states, shard) : 1u << a, &entry));
            here = zs_entry_array(states, entry, a) + (first + done - at->first);
        }
        if (src && entry && !entry->dirty) {
            ZS_CHECK(zs_states_flush(states)); /* the window moves on */
            ZS_CHECK(zs_ring_finish(states, entry));
            entry->dirty = 1;
        }
        if (src) {
            states->chunks[chunk].dirty |= !entry;
            ZS_CHECK(zs_states_copy(states, here, src + done, n * sizeof(float)));
        } else {
            ZS_CHECK(zs_states_copy(states, dst + done, here, n * sizeof(float)));
        }
        done += n;
    }
    return ZS_OK;
}

zs_status zs_states_read(zs_states *states, size_t shard, zs_array array, uint64_t first,
                         uint64_t count, float *dst)
{
    ZS_CHECK(zs_states_usable(states));
    ZS_CHECK(check_range(states, shard, array, first, count));
    return transfer(states, shard, (int)array - ZS_MASTER, first, count, dst, NULL);
}

zs_status zs_states_write(zs_states *states, size_t shard, zs_array array, uint64_t first,
                          uint64_t count, const float *src)
{
    ZS_CHECK(zs_states_usable(states));
    ZS_CHECK(check_range(states, shard, array, first, count));
    return transfer(states, shard, (int)array - ZS_MASTER, first, count, NULL, src);
}
