/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the state store share: states.c (open, close, read, write), step.c (Adam),
 * ring.c (the chunks in memory), commit.c (commit and resume). */
#ifndef ZS_OFFLOAD_STATES_INTERNAL_H
#define ZS_OFFLOAD_STATES_INTERNAL_H

#include "offload/states.h"
#include "offload/store.h"

enum { ZS_RING_ENTRIES = 64, ZS_ALL_ARRAYS = 7, ZS_MASTER_BIT = 1 };

typedef enum zs_entry_state {
    ZS_ENTRY_FREE = 0,
    ZS_ENTRY_WAITING, /* being read, or read and to be processed */
    ZS_ENTRY_DONE     /* processed; perhaps being written */
} zs_entry_state;

/* One chunk's place in the ring: those arrays of it that are streamed, one after the other, then
 * room for its working copy. The memory belongs to the caller's thread but while read or write is
 * pending. */
typedef struct zs_entry {
    zs_entry_state state;
    int keep;           /* holds the chunk's present state: need not be read again */
    int dirty;          /* changed by zs_states_write and not yet written */
    int under_way;      /* in a lane: the device may be using it */
    unsigned mask;      /* bit a: there is room for array a */
    unsigned valid;     /* bit a: array a is there, or will be once read is done */
    unsigned unchecked; /* bit a: array a was read and its checksum not yet compared */
    size_t chunk;
    uint64_t stride, offset, bytes; /* of an array; in the ring */
    uint64_t turn;                  /* the order in which entries are worked through */
    zs_io_req read, write;
} zs_entry;

typedef struct zs_chunk_state {
    int current;      /* slot of the present state (of what is streamed of it), or ZS_STORE_NO_SLOT:
                         all zeros, nothing written yet */
    unsigned guarded; /* bit s: slot s is not to be written, as the superblock in force or one that
                         is kept names it */
    int dirty;        /* resident arrays changed since they were written to slot current */
    uint32_t crc[ZS_STORE_ARRAYS]; /* of slot current */
} zs_chunk_state;

typedef struct zs_lanes zs_lanes;

struct zs_states {
    zs_states_config config;
    zs_states_shard *shards;
    size_t shard_count;
    size_t *first_chunk; /* of each shard, and one past the last */
    zs_store_geometry geometry;
    zs_chunk_state *chunks;
    float **resident; /* [shard * 3 + array]: NULL when that array is streamed */
    zs_mem memory[ZS_STORE_ARRAYS];
    uint64_t booked_states, booked_store; /* in the ledger, tier nvme */

    zs_store store;
    int has_store;
    uint64_t lineage; /* of what is committed next: a new one unless resumed */
    int broken;       /* a step or commit failed half-way: only a resume or close is left */

    zs_lanes *lanes; /* offload/lanes.h; NULL: chunks are worked on where they are */

    zs_mem ring;
    int registered;
    zs_entry *entries;
    uint64_t turn;
    int backwards;  /* direction of the present or last sweep */
    int sweep_open; /* prefetch has begun the next sweep */
    size_t *order;  /* chunks of the pass under way */
    zs_adam_run *cut;
    size_t cut_capacity;

    /* since the last step ended, for its traffic */
    uint64_t read_bytes, written_bytes;
    double wait_seconds;
};

/* ---- states.c ---- */

/* Bit a: array a of shard is streamed through the ring. */
unsigned zs_states_streamed(const zs_states *states, size_t shard);
/* Adam over a shard writes a working copy that lives in the parameter file. */
int zs_states_spills_working(const zs_states *states, size_t shard);
/* dst = src by way of the device. */
zs_status zs_states_copy(zs_states *states, void *dst, const void *src, uint64_t bytes);
/* The states' stream as kernels take it. */
void *zs_states_native(const zs_states *states);
zs_status zs_states_usable(const zs_states *states);

/* ---- commit.c ---- */

/* Which slots may not be written, by what is in force now. */
void zs_states_guard(zs_states *states);

/* ---- ring.c ---- */

typedef enum zs_evict {
    ZS_EVICT_NONE,     /* only what is free */
    ZS_EVICT_FINISHED, /* what is processed and written */
    ZS_EVICT_ANY       /* anything, after waiting for its I/O */
} zs_evict;

float *zs_entry_array(const zs_states *states, const zs_entry *entry, int array);
void *zs_entry_working(const zs_states *states, const zs_entry *entry);
zs_entry *zs_ring_find(zs_states *states, size_t chunk);
/* The first in turn that is still to be processed, or NULL. */
zs_entry *zs_ring_first(zs_states *states);
/* Room for chunk, or *out NULL when there is none without evicting more than allowed. */
zs_status zs_ring_take(zs_states *states, size_t chunk, unsigned mask, int working, zs_evict evict,
                       zs_entry **out);
/* Bytes that such an entry takes. */
uint64_t zs_ring_entry_bytes(const zs_states *states, size_t chunk, unsigned mask, int working);
/* Waits for what entry has in flight. */
zs_status zs_ring_finish(zs_states *states, zs_entry *entry);
/* Waits for all I/O; the first error. */
zs_status zs_ring_settle(zs_states *states);
/* Waits for all I/O, whatever comes of it, and forgets all entries. */
void zs_ring_drop(zs_states *states);
/* The same, keeping the message of what went wrong before. */
void zs_ring_abandon(zs_states *states);
/* Queues reading arrays of the entry's chunk (zeros where nothing was written yet). */
zs_status zs_entry_read(zs_states *states, zs_entry *entry, unsigned arrays);
/* Waits for reading and compares checksums. */
zs_status zs_entry_ready(zs_states *states, zs_entry *entry);
/* Queues writing arrays of the entry to slot and makes that the chunk's current one. */
zs_status zs_entry_write(zs_states *states, zs_entry *entry, unsigned arrays, int slot);
/* The slot a change of chunk goes to: one that no commit needs, again and again until one does; or
 * the only one. */
int zs_chunk_target(const zs_states *states, const zs_chunk_state *chunk);

/* Of one entry in a pass: which arrays need room, which of them are read, and whether there is room
 * for a working copy. */
typedef struct zs_shape {
    unsigned room, read;
    int working;
} zs_shape;

/* One pass over chunks: reads ahead, process, writes behind. */
typedef struct zs_pass {
    void *arg;
    const size_t *order;
    size_t count;
    int keep; /* entries stay, as the chunks' present state */
    void (*shape)(zs_states *states, size_t chunk, zs_shape *out);
    zs_status (*process)(zs_states *states, zs_entry *entry, void *arg);
    /* NULL, or brings an entry to its end that process left under way; *landed 0: none was. */
    zs_status (*land)(zs_states *states, int *landed);
} zs_pass;
/* What is WAITING in the ring is processed first. After a failure nothing is in flight. */
zs_status zs_pass_run(zs_states *states, const zs_pass *pass);

#endif
