/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the model share: commit_model.c (what ranks do), commit_recover.c (what a crash
 * leaves and a resume finds), commit_form.c (which states count as one). */
#ifndef ZS_TESTS_COMMIT_INTERNAL_H
#define ZS_TESTS_COMMIT_INTERNAL_H

#include "property/commit_model.h"

#include <stdio.h>

enum { NONE = 15, OLD = 254, TORN = 255 };

/* Where a rank is. B_ are barriers: agreements of all ranks. */
enum {
    DEAD,
    OPEN, /* rank 0: has the lock and the manifest */
    B_LOCK,
    SWEEP, /* rank 0: removes what no manifest names */
    MAKE,
    MAKE_FLUSH,
    MAKE_DIR,
    SYNC,
    B_OPEN,
    IDLE,
    STEP,
    MARK_STEP, /* one slot: says that it will be written over */
    MARK_STEP_FLUSH,
    WRITE,
    MARK_WRITE,
    MARK_WRITE_FLUSH,
    FLUSH,
    B_DATA,
    SUPER,
    SUPER_FLUSH,
    B_SUPER,
    RENAME,
    RENAME_DIR,
    B_MANIFEST,
    CLEAN
};

/* ---- commit_model.c ---- */

extern model_config config;
extern state now; /* the state being expanded */
extern char label[120];
extern int tracing;

#define SAY(...)                                                                                   \
    do {                                                                                           \
        if (tracing)                                                                               \
            snprintf(label, sizeof label, __VA_ARGS__);                                            \
    } while (0)

int is(mutation m);
/* What is emitted next is a violation. Returns 0. */
int fail(const char *why);
/* A state that follows `now`. */
void emit(state *s);

/* Of a chunk, and of superblocks. */
int area_count(void);
/* The newer of two superblocks of a file has the greater one. */
int order_of(const superblock *super);
/* As offload/store_areas.c; force: area of the superblock in force. */
u8 next_area(const content *f, u8 force);
int guards(const content *f, u8 force, u8 area);

/* ---- commit_recover.c ---- */

typedef enum start { SAME, RESHAPE, OVER } start;
/* A job begins. back: it goes on from the back-th of the older commits kept; 0: from the newest. */
void restart(start how, int back);
void power_cut(void);

/* ---- commit_form.c ---- */

/* One form for states that differ in names only, and in what nobody can find any more. */
void normalise(state *s);

#endif
