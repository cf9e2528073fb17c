/* SPDX-License-Identifier: Apache-2.0 */
/* One commit of a state directory, whatever world and shape it was made in: parameters by
 * name, elements by range, read from whichever ranks' files they are in. Changes nothing; holds no
 * lock unless asked. */
#ifndef ZS_ZERO_SAVED_H
#define ZS_ZERO_SAVED_H

#include "base/log.h"
#include "offload/reader.h"
#include "zero/manifest.h"

typedef struct zs_saved zs_saved;

/* dir, manifest (of dir) and log are borrowed. lock: 1: until close no process may train in dir,
 * and it is ZS_ERR_LOCKED when one does. commit: one of those kept, 0: the newest. Every rank's
 * file must be there, belong to the manifest's run and hold the commit. */
zs_status zs_saved_open(const char *dir, const zs_manifest *manifest, int lock, const zs_log *log,
                        uint64_t commit, zs_saved **out);
void zs_saved_close(zs_saved **saved);
uint64_t zs_saved_commit(const zs_saved *saved);

/* The commits that all ranks keep, newest first; valid until close. */
typedef struct zs_saved_point {
    uint64_t commit, step;
} zs_saved_point;
const zs_saved_point *zs_saved_kept(const zs_saved *saved, int *count);

/* One rank's file at that commit; valid until the next call with this saved. */
zs_status zs_saved_rank(zs_saved *saved, int rank, zs_store_reader **out);

/* What the engine kept beside that commit (zero/header.h), which is the same on all ranks; valid
 * until the next call with this saved. */
zs_status zs_saved_header(zs_saved *saved, const void **header, size_t *bytes);

typedef struct zs_saved_param {
    size_t flat, at; /* in the manifest */
} zs_saved_param;
/* ZS_ERR_MISMATCH when there is none of that name, or it has another number of elements. */
zs_status zs_saved_find(const zs_saved *saved, const char *name, uint64_t numel,
                        zs_saved_param *out);
/* How many elements from first on, at most count, lie in one file: reading several arrays in such
 * pieces opens each file once. */
uint64_t zs_saved_span(const zs_saved *saved, zs_saved_param param, uint64_t first, uint64_t count);
/* Elements [first, first + count) of an array (master, exp_avg, exp_avg_sq). */
zs_status zs_saved_read(zs_saved *saved, zs_saved_param param, zs_array array, uint64_t first,
                        uint64_t count, float *dst);

#endif
