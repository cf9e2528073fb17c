/* SPDX-License-Identifier: Apache-2.0 */
/* A few shards with states, gradients and runs made up from their numbers, in any tier; and the
 * same computed on plain arrays, to compare with. */
#ifndef ZS_TESTS_STATES_RIG_H
#define ZS_TESTS_STATES_RIG_H

#include "offload/states.h"

enum { RIG_SHARDS = 6 };

typedef struct rig_config {
    zs_tier tier;
    zs_io_engine engine;
    int threads;
    uint64_t chunk, buffer;
    int aliased; /* the master of fp32 shards is the caller's */
    int params;  /* working copies (of what is not aliased) live in a parameter file */
    int no_store;
    const char *dir;
    int resume;
    int slots; /* 0: 2 */
    uint64_t run;
    int rank, world; /* world 0: 1 */
    uint64_t fingerprint;
    uint64_t scale; /* shards are so many times as long; 0: 1 */
    zs_log log;
    zs_status (*open_io)(zs_io **out); /* in place of engine */
} rig_config;

typedef struct rig {
    rig_config config;
    zs_ledger *ledger;
    zs_device *device;
    zs_pool *pool;
    zs_math *math;
    zs_io *io;
    zs_param_file *params;
    zs_states *states;
    zs_states_shard shards[RIG_SHARDS];
    float *own_master[RIG_SHARDS];
    void *working[RIG_SHARDS];
    void *grad[RIG_SHARDS];
    uint64_t step;
    zs_tier_traffic traffic[ZS_TIERS]; /* of the last step */
} rig;

/* States and working copies on plain arrays, after `step` steps. */
typedef struct rig_reference {
    uint64_t scale, step;
    float *array[RIG_SHARDS][3];
    void *working[RIG_SHARDS];
} rig_reference;

uint64_t rig_numel(uint64_t scale, size_t shard);

/* Opens everything. On failure the states are not open (the message is zs_last_error()) and
 * rig_close has still to be called. */
zs_status rig_open(rig *r, const rig_config *config);
void rig_close(rig *r);
/* Writes the starting masters; step becomes 0. */
zs_status rig_load(rig *r);
/* The step after r->step. */
zs_status rig_step(rig *r);
/* Prepare and publish r->step, with a header that names it. */
zs_status rig_commit(rig *r);
/* Takes up the newest commit, r->step becomes its; *found 0: there is none. */
zs_status rig_resume(rig *r, int *found);

void rig_reference_open(rig_reference *ref, uint64_t scale);
void rig_reference_close(rig_reference *ref);
/* Steps until step `to`, never back. */
void rig_reference_advance(rig_reference *ref, uint64_t to);

/* 0 when all bits are those of ref; else *what says which differ. */
int rig_differs(rig *r, const rig_reference *ref, char what[128]);

#endif
