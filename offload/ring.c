/* SPDX-License-Identifier: Apache-2.0 */
/* The ring: chunks on their way from disk through Adam and back. Entries are placed first fit, so
 * that small shards take little room, and given up oldest first, so that the end of one sweep is
 * still there when the next one starts from it. */
#include <stdio.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/status.h"
#include "base/util.h"
#include "offload/lanes.h"

static const char *const array_names[ZS_STORE_ARRAYS] = {"master", "exp_avg", "exp_avg_sq"};

static unsigned position(unsigned mask, int array)
{
    return (unsigned)__builtin_popcount(mask & ((1u << array) - 1));
}

float *zs_entry_array(const zs_states *states, const zs_entry *entry, int array)
{
    return (float *)((char *)states->ring.ptr + entry->offset +
                     position(entry->mask, array) * entry->stride);
}

void *zs_entry_working(const zs_states *states, const zs_entry *entry)
{
    return (char *)states->ring.ptr + entry->offset +
           position(entry->mask, ZS_STORE_ARRAYS) * entry->stride;
}

uint64_t zs_ring_entry_bytes(const zs_states *states, size_t chunk, unsigned mask, int working)
{
    const zs_store_chunk *at = &states->geometry.chunks[chunk];
    uint64_t bytes = (unsigned)__builtin_popcount(mask) * at->stride;
    if (working)
        bytes += zs_round_up(at->numel * zs_dtype_size(states->shards[at->shard].working_dtype),
                             ZS_IO_ALIGN);
    return bytes;
}

int zs_chunk_target(const zs_states *states, const zs_chunk_state *chunk)
{
    if (states->config.slots == 1)
        return 0;
    if (chunk->current != ZS_STORE_NO_SLOT && !(chunk->guarded >> chunk->current & 1))
        return chunk->current;
    /* There is one more than there are commits to guard. */
    return __builtin_ctz(~chunk->guarded);
}

zs_entry *zs_ring_find(zs_states *states, size_t chunk)
{
    for (size_t i = 0; i < ZS_RING_ENTRIES; i++) {
        zs_entry *entry = &states->entries[i];
        if (entry->state != ZS_ENTRY_FREE && entry->keep && entry->chunk == chunk)
            return entry;
    }
    return NULL;
}

static zs_entry *first_in_turn(zs_states *states, int any, zs_entry_state state)
{
    zs_entry *first = NULL;
    for (size_t i = 0; i < ZS_RING_ENTRIES; i++) {
        zs_entry *entry = &states->entries[i];
        if (entry->state == ZS_ENTRY_FREE || (!any && entry->state != state))
            continue;
        if (!first || entry->turn < first->turn)
            first = entry;
    }
    return first;
}

zs_entry *zs_ring_first(zs_states *states)
{
    return first_in_turn(states, 0, ZS_ENTRY_WAITING);
}

static zs_status wait_for(zs_states *states, zs_io_req *req)
{
    double begin = zs_now();
    uint64_t span = states->config.trace && req->pending ? zs_trace_now() : 0;
    zs_status status = zs_io_wait(states->config.io, req);
    states->wait_seconds += zs_now() - begin;
    if (span)
        zs_trace_span(states->config.trace, states->config.rank, "nvme", "wait", span,
                      zs_trace_now());
    return status;
}

zs_status zs_ring_finish(zs_states *states, zs_entry *entry)
{
    zs_status read = wait_for(states, &entry->read);
    zs_status write = wait_for(states, &entry->write);
    if (write != ZS_OK)
        states->broken = 1; /* what the entry held is not on disk */
    return read != ZS_OK ? read : write;
}

zs_status zs_ring_settle(zs_states *states)
{
    zs_status first = ZS_OK;
    for (size_t i = 0; states->entries && i < ZS_RING_ENTRIES; i++) {
        zs_entry *entry = &states->entries[i];
        if (entry->state == ZS_ENTRY_FREE || first != ZS_OK)
            continue;
        first = zs_ring_finish(states, entry);
    }
    return first;
}

void zs_ring_drop(zs_states *states)
{
    zs_lanes_abandon(states);
    for (size_t i = 0; states->entries && i < ZS_RING_ENTRIES; i++) {
        zs_entry *entry = &states->entries[i];
        if (entry->state != ZS_ENTRY_FREE)
            (void)zs_ring_finish(states, entry);
        memset(entry, 0, sizeof *entry);
    }
    states->sweep_open = 0;
}

void zs_ring_abandon(zs_states *states)
{
    char message[512];
    snprintf(message, sizeof message, "%s", zs_last_error());
    zs_ring_drop(states);
    (void)zs_fail(ZS_OK, "%s", message);
}

/* Lowest offset where bytes fit between the entries that are there. */
static int place(const zs_states *states, uint64_t bytes, uint64_t *offset)
{
    uint64_t at = 0;
    for (int moved = 1; moved;) {
        moved = 0;
        for (size_t i = 0; i < ZS_RING_ENTRIES; i++) {
            const zs_entry *entry = &states->entries[i];
            if (entry->state != ZS_ENTRY_FREE && at < entry->offset + entry->bytes &&
                entry->offset < at + bytes) {
                at = entry->offset + entry->bytes;
                moved = 1;
            }
        }
    }
    *offset = at;
    return at + bytes <= states->ring.bytes;
}

zs_status zs_ring_take(zs_states *states, size_t chunk, unsigned mask, int working, zs_evict evict,
                       zs_entry **out)
{
    uint64_t bytes = zs_ring_entry_bytes(states, chunk, mask, working), offset;
    *out = NULL;
    for (;;) {
        zs_entry *entry = NULL;
        for (size_t i = 0; i < ZS_RING_ENTRIES && !entry; i++)
            if (states->entries[i].state == ZS_ENTRY_FREE)
                entry = &states->entries[i];
        if (entry && place(states, bytes, &offset)) {
            *entry = (zs_entry){.state = ZS_ENTRY_WAITING,
                                .mask = mask,
                                .chunk = chunk,
                                .stride = states->geometry.chunks[chunk].stride,
                                .offset = offset,
                                .bytes = bytes,
                                .turn = ++states->turn};
            *out = entry;
            return ZS_OK;
        }
        if (evict == ZS_EVICT_NONE)
            return ZS_OK;
        zs_entry *victim = first_in_turn(states, evict == ZS_EVICT_ANY, ZS_ENTRY_DONE);
        if (!victim || (evict == ZS_EVICT_FINISHED &&
                        (victim->write.pending || victim->dirty || victim->under_way)))
            return ZS_OK;
        if (victim->dirty)
            ZS_CHECK(zs_states_flush(states));
        ZS_CHECK(zs_ring_finish(states, victim));
        victim->state = ZS_ENTRY_FREE;
    }
}

/* ---- to and from the file ---- */

/* Arrays that lie side by side in the ring and in the slot alike go as one transfer. */
static zs_status transfer(zs_states *states, zs_entry *entry, unsigned arrays, int slot, int write)
{
    const zs_store_chunk *chunk = &states->geometry.chunks[entry->chunk];
    for (int a = 0; a < ZS_STORE_ARRAYS;) {
        int n = 0;
        while (a + n < ZS_STORE_ARRAYS && (arrays >> (a + n) & 1))
            n++;
        if (!n) {
            a++;
            continue;
        }
        uint64_t offset = zs_store_slot_offset(chunk, slot) + (uint64_t)a * chunk->stride;
        size_t bytes = (size_t)n * chunk->stride;
        float *at = zs_entry_array(states, entry, a);
        if (write) {
            states->written_bytes += bytes;
            ZS_CHECK(zs_io_write(states->config.io, states->store.file, offset, at, bytes,
                                 &entry->write));
        } else {
            states->read_bytes += bytes;
            ZS_CHECK(
                zs_io_read(states->config.io, states->store.file, offset, at, bytes, &entry->read));
        }
        a += n;
    }
    return ZS_OK;
}

zs_status zs_entry_read(zs_states *states, zs_entry *entry, unsigned arrays)
{
    const zs_chunk_state *chunk = &states->chunks[entry->chunk];
    entry->valid |= arrays;
    if (chunk->current == ZS_STORE_NO_SLOT) {
        for (int a = 0; a < ZS_STORE_ARRAYS; a++)
            if (arrays >> a & 1)
                memset(zs_entry_array(states, entry, a), 0, entry->stride);
        return ZS_OK;
    }
    entry->unchecked |= arrays;
    return transfer(states, entry, arrays, chunk->current, 0);
}

typedef struct crc_job {
    const zs_states *states;
    const zs_entry *entry;
    int array[ZS_STORE_ARRAYS];
    uint32_t crc[ZS_STORE_ARRAYS];
} crc_job;

static void crc_one(void *arg, size_t index, int worker)
{
    crc_job *job = arg;
    const zs_store_chunk *chunk = &job->states->geometry.chunks[job->entry->chunk];
    int a = job->array[index];
    job->crc[a] =
        zs_crc32c(0, zs_entry_array(job->states, job->entry, a), chunk->numel * sizeof(float));
}

static void checksum(const zs_states *states, const zs_entry *entry, unsigned arrays,
                     uint32_t crc[ZS_STORE_ARRAYS])
{
    crc_job job = {.states = states, .entry = entry};
    size_t count = 0;
    for (int a = 0; a < ZS_STORE_ARRAYS; a++)
        if (arrays >> a & 1)
            job.array[count++] = a;
    if (states->config.pool)
        zs_pool_run(states->config.pool, crc_one, &job, count);
    else
        for (size_t i = 0; i < count; i++)
            crc_one(&job, i, 0);
    for (int a = 0; a < ZS_STORE_ARRAYS; a++)
        if (arrays >> a & 1)
            crc[a] = job.crc[a];
}

zs_status zs_entry_ready(zs_states *states, zs_entry *entry)
{
    ZS_CHECK(wait_for(states, &entry->read));
    if (!entry->unchecked)
        return ZS_OK;
    const zs_chunk_state *chunk = &states->chunks[entry->chunk];
    const zs_store_chunk *at = &states->geometry.chunks[entry->chunk];
    uint32_t crc[ZS_STORE_ARRAYS] = {0};
    checksum(states, entry, entry->unchecked, crc);
    for (int a = 0; a < ZS_STORE_ARRAYS; a++)
        if ((entry->unchecked >> a & 1) && crc[a] != chunk->crc[a])
            return zs_fail(
                ZS_ERR_CORRUPT,
                "store '%s': chunk %zu (shard %zu, elements %llu to %llu), %s at byte offset %llu: "
                "the checksum is %08x, it was %08x when written: the file or the disk is damaged; "
                "resume an earlier commit or restore the file from a copy",
                states->store.path, entry->chunk, at->shard, (unsigned long long)at->first,
                (unsigned long long)(at->first + at->numel), array_names[a],
                (unsigned long long)(zs_store_slot_offset(at, chunk->current) +
                                     (uint64_t)a * at->stride),
                crc[a], chunk->crc[a]);
    entry->unchecked = 0;
    return ZS_OK;
}

zs_status zs_entry_write(zs_states *states, zs_entry *entry, unsigned arrays, int slot)
{
    zs_chunk_state *chunk = &states->chunks[entry->chunk];
    ZS_CHECK(zs_store_mark(&states->store));
    checksum(states, entry, arrays, chunk->crc);
    chunk->current = slot;
    return transfer(states, entry, arrays, slot, 1);
}

/* ---- passes ---- */

/* Queues as many reads as there is room for. */
static zs_status read_ahead(zs_states *states, const zs_pass *pass, size_t *next)
{
    while (*next < pass->count) {
        size_t chunk = pass->order[*next];
        zs_shape shape = {0};
        zs_entry *entry;
        pass->shape(states, chunk, &shape);
        ZS_CHECK(zs_ring_take(states, chunk, shape.room, shape.working, ZS_EVICT_FINISHED, &entry));
        if (!entry)
            return ZS_OK;
        (*next)++;
        entry->keep = pass->keep;
        ZS_CHECK(zs_entry_read(states, entry, shape.read));
    }
    return ZS_OK;
}

zs_status zs_pass_run(zs_states *states, const zs_pass *pass)
{
    zs_status status;
    size_t next = 0;
    int landed;
    for (;;) {
        zs_io_poll(states->config.io);
        ZS_TRY(read_ahead(states, pass, &next));
        zs_io_poll(states->config.io);
        zs_entry *entry = zs_ring_first(states);
        if (entry) {
            ZS_TRY(zs_entry_ready(states, entry));
            ZS_TRY(pass->process(states, entry, pass->arg));
            entry->state = ZS_ENTRY_DONE;
            continue;
        }
        landed = 0;
        if (pass->land)
            ZS_TRY(pass->land(states, &landed));
        if (!landed && next == pass->count)
            return ZS_OK;
        if (!landed) {
            /* Nothing to compute and no room to read into: the oldest write makes some. */
            zs_entry *oldest = first_in_turn(states, 0, ZS_ENTRY_DONE);
            if (!oldest) {
                status = zs_fail(ZS_ERR_INTERNAL, "a chunk does not fit into the empty ring");
                goto fail;
            }
            ZS_TRY(zs_ring_finish(states, oldest));
            oldest->state = ZS_ENTRY_FREE;
        }
    }
fail:
    zs_ring_abandon(states);
    return status;
}
