/* SPDX-License-Identifier: Apache-2.0 */
/* Adam, chunk by chunk, over states that an accelerator's memory does not hold. A lane is what one
 * chunk needs on its way: staging memory and marks.
 *
 *   a device's lane   home -> staging (stream in), Adam (the states' stream), staging -> home (out)
 *   a host's lane     gradient -> staging (out), Adam on the calling thread and its pool,
 *                     working copy staging -> device (in)
 *
 * Home is pinned host memory: the ring, or the states themselves. Several lanes are under way at
 * once; only what goes to disk is waited for, chunk by chunk. Both sides give the same bits. */
#ifndef ZS_OFFLOAD_LANES_H
#define ZS_OFFLOAD_LANES_H

#include "offload/states_internal.h"

/* One chunk's part of a step. */
typedef struct zs_chunk_job {
    size_t number;
    const zs_states_input *input;
    zs_entry *entry;     /* in the ring; NULL: all of it is resident */
    zs_adam_arrays home; /* where its arrays are kept; working: NULL or where it goes */
    int spills;          /* the working copy goes on to the parameter file */
} zs_chunk_job;

/* ---- step.c ---- */

/* Adam over arrays, which hold what job's home does. */
zs_status zs_job_adam(zs_states *states, const zs_chunk_job *job, zs_math *math, void *stream,
                      const zs_adam_arrays *arrays);
/* Queues writing what the job left in its entry. */
zs_status zs_job_store(zs_states *states, const zs_chunk_job *job);

/* ---- lanes.c ---- */

/* states->lanes stays NULL where none are needed. Ledger purpose: "adam staging". */
zs_status zs_lanes_open(zs_states *states);
void zs_lanes_close(zs_states *states);
/* Before the first and after the last chunk of a step. */
zs_status zs_lanes_begin(zs_states *states);
zs_status zs_lanes_end(zs_states *states);
/* Sends job on its way. */
zs_status zs_lanes_start(zs_states *states, const zs_chunk_job *job);
/* Brings one to its end, the oldest; *landed 0: none was under way. */
zs_status zs_lanes_land(zs_states *states, int *landed);
/* Waits for all, whatever comes of it. */
void zs_lanes_abandon(zs_states *states);

#endif
