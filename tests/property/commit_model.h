/* SPDX-License-Identifier: Apache-2.0 */
/* The commit protocol as states and what may follow each. commit.c visits all of them. */
#ifndef ZS_TESTS_COMMIT_MODEL_H
#define ZS_TESTS_COMMIT_MODEL_H

#include <stdint.h>

enum { RANKS = 3, CHUNKS = 2, GENS = 2, SLOTS = 4, OLDER = SLOTS - 2 };
enum { DURABLE, SEEN };

typedef uint8_t u8;

/* number 0: there is none, or it is torn. */
typedef struct superblock {
    u8 number, dirty, pos, slot[CHUNKS], val[CHUNKS];
} superblock;

typedef struct content {
    superblock area[SLOTS];
    u8 slot[CHUNKS][SLOTS];
} content;

typedef struct file {
    content side[2]; /* DURABLE, SEEN */
} file;

typedef struct rank {
    u8 pc, at;
    u8 failed;
    u8 area; /* of the superblock in force */
    u8 to;   /* of the one that is being written */
    u8 cur[CHUNKS];
} rank;

/* Bytes only, so that equal states are equal memory. */
typedef struct state {
    rank rank[RANKS];
    file file[GENS][RANKS];
    u8 named[2][GENS][RANKS], manifest[2];
    u8 running, world, own, force; /* generation of the job's files; of the manifest's */
    u8 pos, val[CHUNKS], mask, number, found, last_id;
    u8 acked, inflight, reshaped;   /* what a resume may find */
    u8 older[OLDER], older_force;   /* what it must find beside that, and in which generation */
    u8 risk;                        /* one slot: something may have been written over */
    u8 late, late_chunk, late_slot; /* rank + 1 of a write of an ended process, still under way */
    u8 late_val;
} state;

typedef enum mutation {
    AS_BUILT,
    DATA_NOT_FLUSHED,
    DATA_NOT_AGREED,
    SUPER_NOT_FLUSHED,
    SUPER_NOT_AGREED,
    SLOT_IN_PLACE,
    SUPER_IN_PLACE,
    NEWEST_OF_EACH,
    NEWEST_STAYS,
    NUMBER_IS_STEP,
    NUMBER_AGAIN,
    RESUME_NOT_FLUSHED,
    MANIFEST_FIRST,
    SWITCH_FIRST,
    CLEAN_FIRST,
    MANIFEST_NOT_FLUSHED,
    MAKE_DIR_NOT_FLUSHED,
    RENAME_DIR_NOT_FLUSHED,
    OPEN_DIR_NOT_FLUSHED,
    OPEN_NOT_LOCKED,
    LATE_WRITES,
    /* with three slots */
    OLDER_NOT_GUARDED,
    NEWER_REPLACED,
    ABANDONED_STAYS,
    OLDEST_OFFERED,
    BACK_IN_FORCE,
    BACK_NUMBER,
    /* with one slot */
    NOT_MARKED,
    MARK_NOT_FLUSHED,
    DIRTY_TAKEN,
    BEFORE_DIRTY_TAKEN,
    NEWEST_ONLY,
    MUTATIONS
} mutation;

typedef struct model_config {
    mutation mutation;
    u8 worlds[GENS]; /* ranks of each generation; 0: there is no change of shape */
    u8 chunks;
    u8 slots; /* of each chunk: 1, 2, or 2 + the older commits kept */
    u8 over;  /* runs that start over in the same directory, too */
} model_config;

/* violation NULL: a state that may be. */
typedef void (*model_visit)(const state *next, const char *violation);

const char *model_name(mutation m);
const char *model_what(mutation m);
/* Slots with which the mutation makes a difference. */
u8 model_slots(mutation m);
void model_begin(const model_config *config, state *first);
/* Calls each with every state that may follow s, in the same order each time; with trace,
 * model_label then says what happened. */
void model_expand(const state *s, int trace, model_visit each);
const char *model_label(void);

#endif
