/* SPDX-License-Identifier: Apache-2.0 */
/* The one geometry: how the parameters of a unit lie in its flat buffers and how those are cut into
 * shards.
 *
 * A unit has one flat buffer for each (dtype, trainable) that occurs in it. In a flat buffer
 * parameters follow each other in order, each starting at a multiple of ZS_LAYOUT_ALIGN elements;
 * the whole is padded so that world shards of equal length, again a multiple of ZS_LAYOUT_ALIGN,
 * cover it. Rank r's shard is [r * shard, (r + 1) * shard). */
#ifndef ZS_ZERO_LAYOUT_H
#define ZS_ZERO_LAYOUT_H

#include "zspill.h"

enum { ZS_LAYOUT_ALIGN = 32 }; /* elements: 64 bytes of bf16 */

typedef struct zs_layout {
    int world;
    size_t count;     /* parameters */
    uint64_t *offset; /* [count], elements from the start of the flat buffer */
    uint64_t *numel;  /* [count] */
    uint64_t shard;   /* elements of each rank's shard */
    uint64_t padded;  /* world * shard */
    uint64_t used;    /* sum of numel */
} zs_layout;

/* ZS_ERR_ARG on world outside 1..64 or a size that overflows. */
zs_status zs_layout_init(zs_layout *layout, const uint64_t *numel, size_t count, int world);
void zs_layout_free(zs_layout *layout);

/* The part of parameter p that lies in rank's shard. Elements [first, first + count) of the
 * parameter are elements [shard_offset, ...) of the shard. count may be 0. */
typedef struct zs_layout_part {
    uint64_t first, count, shard_offset;
} zs_layout_part;
zs_layout_part zs_layout_locate(const zs_layout *layout, size_t p, int rank);

#endif
