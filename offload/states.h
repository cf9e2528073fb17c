/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's optimizer states (master, exp_avg, exp_avg_sq), wherever they live, the streaming Adam
 * over them, and the store file they are committed to. Knows shards as numbered flat arrays, not
 * which rank or parameter they belong to.
 *
 * Each shard is cut into chunks of chunk_numel elements (the last one shorter). The store keeps two
 * slots for each chunk, and one more for each older commit that stays; a step writes only slots
 * that none of these commits names. (Or it keeps one, and says in the superblock when what was
 * committed is being written over.) With tier nvme the store is where the states live; with the
 * other tiers it is written at commit only.
 */
#ifndef ZS_OFFLOAD_STATES_H
#define ZS_OFFLOAD_STATES_H

#include "base/ledger.h"
#include "base/log.h"
#include "device/device.h"
#include "io/io.h"
#include "kernels/math.h"
#include "offload/param_file.h"
#include "zspill.h"

typedef struct zs_states zs_states;

typedef struct zs_states_shard {
    uint64_t numel; /* padded; 0 is allowed */
    zs_dtype working_dtype;
    float *master; /* the caller's resident fp32 working copy that also is the master (not owned,
                      must stay), or NULL: zs_states keeps a master of its own in its tier */
    size_t param_shard; /* number in params, when the working copy lives there */
} zs_states_shard;

typedef struct zs_states_config {
    zs_tier tier;
    const char *dir; /* of the store file; NULL: no store (tiers device and host only) */
    int rank, world;
    uint64_t buffer_bytes; /* of the ring; 0: chosen */
    uint64_t chunk_numel;  /* multiple of 4096; 0: chosen */
    uint64_t fingerprint;
    uint64_t run; /* of the run, drawn by lot: the store's must be the same */
    int slots;    /* of each chunk in the store: 2, or 2 + the older commits kept, or 1; 0 is taken
                     as 2 */
    uint64_t generation; /* of the store file: 1, 2, ...; 0 is taken as 1 */
    int abandon;         /* 1: what a store file of this name holds is not in force: start over */
    int resume; /* 0: an existing store is ZS_ERR_EXISTS; 1: kept until the first commit replaces it
                 */
    zs_io *io;  /* borrowed, as all below; may be NULL when dir is NULL and params is NULL */
    zs_device *device;
    zs_stream *stream;  /* of the device, that all that touches the states is queued on */
    zs_math *math;      /* of the device */
    zs_math *host_math; /* for host memory; NULL: math, where the host is the device */
    /* On an accelerator: which inputs' grad and working are in memory of its host_alloc, not of
     * its own, and where Adam over states on tiers host and nvme runs. */
    int far_grads, far_working;
    zs_adam_side adam;
    zs_pool *pool; /* that math works with, for checksums; NULL: the calling thread's work */
    zs_ledger *ledger;
    const zs_log *log;
    zs_trace *trace;
    zs_param_file *params; /* NULL: working copies are resident */
    const zs_states_shard *shards;
    size_t shard_count;
} zs_states_config;

/* Allocates everything, on disk too (allocated whole, space checked; the message says how many
 * bytes are needed and free). States start as zeros. Ledger purposes: "optimizer states" (in the
 * tier), "optimizer ring" (host), "adam staging" (device and host, where an accelerator's memory
 * does not hold the states). */
zs_status zs_states_open(const zs_states_config *config, zs_states **out);
/* Waits for I/O in flight. A store that was never committed is removed. */
void zs_states_close(zs_states **states);

/* Elements of a chunk, as chosen. */
uint64_t zs_states_chunk_numel(const zs_states *states);

/* What a step needs for one shard. */
typedef struct zs_states_input {
    const void *grad; /* numel elements, resident */
    zs_dtype grad_dtype;
    void *working; /* resident working copy, numel elements, or NULL (none, or in params) */
    const zs_adam_run
        *runs; /* in increasing order, not overlapping; elements in none are left alone */
    size_t run_count;
    /* Of a zs_clip that the device decides: read when Adam runs. NULL: the runs' own, and no skip.
     * Only where Adam works in place. */
    const float *grad_scale;
    const int *skip;
} zs_states_input;

/* Adam over all shards, inputs[shard_count]. On failure what was committed last is intact, the
 * states in use are not defined. traffic and adam_seconds are added to. */
zs_status zs_states_step(zs_states *states, const zs_states_input *inputs,
                         zs_tier_traffic traffic[ZS_TIERS], double *adam_seconds);
/* Starts fetching what the next step needs first. Never needed, never wrong. */
zs_status zs_states_prefetch(zs_states *states);

/* Elements [first, first + count) of an array (master, exp_avg, exp_avg_sq) of a shard; dst and src
 * are memory that the device copies from and to. Cheapest in increasing order; write goes through a
 * one-chunk window, so call zs_states_flush after the last of a row of writes. */
zs_status zs_states_read(zs_states *states, size_t shard, zs_array array, uint64_t first,
                         uint64_t count, float *dst);
zs_status zs_states_write(zs_states *states, size_t shard, zs_array array, uint64_t first,
                          uint64_t count, const float *src);
zs_status zs_states_flush(zs_states *states);

/* Commit in two halves, so that ranks can agree in between. header: what the engine keeps beside
 * the states, opaque here, at most ZS_STATES_HEADER_MAX bytes. prepare writes and flushes every
 * chunk that is not yet durable; publish writes and flushes the superblock that is not the
 * committed one: from then on this step is what a resume finds. */
enum { ZS_STATES_HEADER_MAX = 8192 };
zs_status zs_states_commit_prepare(zs_states *states);
/* commit: the caller's number for it, the same on all ranks and growing; step: for people. */
zs_status zs_states_commit_publish(zs_states *states, uint64_t commit, uint64_t step,
                                   const void *header, size_t header_bytes);

/* What could be in force: the numbers of the commits that are there, newest first (*count 0: none),
 * for the ranks to agree on one. */
enum { ZS_STATES_COMMITS_MOST = 2 + ZS_KEEP_MOST };
zs_status zs_states_committed(zs_states *states, uint64_t commits[ZS_STATES_COMMITS_MOST],
                              int *count);
/* Makes that commit the one in force, durably: until the next one is published, what it and the
 * older ones that are kept name is not written. The present state is not touched. */
zs_status zs_states_adopt(zs_states *states, uint64_t commit);
/* Takes up that commit, the one in force or an older one that is kept (ZS_ERR_ARG: it is neither).
 * Which one is in force stays as it is until the next is published. Checks fingerprint, geometry
 * and checksums, and leaves master and moments as committed (resident ones are loaded). header gets
 * at most *header_bytes bytes; *header_bytes becomes the number stored. */
zs_status zs_states_resume(zs_states *states, uint64_t commit, void *header, size_t *header_bytes);
/* The header alone: what zs_states_resume would refuse, but for checksums, is refused here; nothing
 * changes. */
zs_status zs_states_header(zs_states *states, uint64_t commit, void *header, size_t *header_bytes);

#endif
