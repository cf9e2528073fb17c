/* SPDX-License-Identifier: Apache-2.0 */
/* The manifest of a state directory: which generation of store files is in force, and which
 * parameter lies where in them. One small text file for all ranks, replaced by rename. Without one
 * there is no state. docs/format.md describes it. */
#ifndef ZS_ZERO_MANIFEST_H
#define ZS_ZERO_MANIFEST_H

#include <stddef.h>
#include <stdint.h>

#include "io/io.h"
#include "zspill.h"

/* A flat buffer of trained parameters, in the order of the stores' shards. */
typedef struct zs_manifest_flat {
    zs_dtype dtype; /* of the working copy */
    size_t count;
    char **names;
    uint64_t *numels;
} zs_manifest_flat;

typedef struct zs_manifest {
    uint64_t fingerprint;
    uint64_t run;        /* drawn by lot for each run; its store files carry it, too */
    uint64_t generation; /* 1, 2, ... */
    int world;
    uint64_t chunk_numel;
    int slots;      /* of each chunk: 2 and one more for each older commit kept, or 1 */
    int replicated; /* 1: every rank's store holds all (stage 0); 0: its shard */
    zs_manifest_flat *flats;
    size_t flat_count;
} zs_manifest;

/* *out NULL when dir has no manifest (or does not exist). One that is not whole is ZS_ERR_CORRUPT.
 */
zs_status zs_manifest_load(const char *dir, zs_manifest **out);
/* Parses text (NUL-terminated); where is for messages. */
zs_status zs_manifest_parse(const char *text, const char *where, zs_manifest **out);
/* Written beside, flushed, renamed, directory flushed: there is always an old or a new one. */
zs_status zs_manifest_save(const char *dir, zs_io *io, const zs_manifest *manifest);
void zs_manifest_free(zs_manifest **manifest);
/* Where a parameter is: flats[*flat].names[*at]. ZS_ERR_MISMATCH when there is none of that name,
 * or it has another number of elements; dir is for messages. */
zs_status zs_manifest_find(const zs_manifest *manifest, const char *dir, const char *name,
                           uint64_t numel, size_t *flat, size_t *at);
/* World, replication, chunks and flat buffers are the same: the same store files serve. */
int zs_manifest_same_shape(const zs_manifest *a, const zs_manifest *b);

#endif
