/* SPDX-License-Identifier: Apache-2.0 */
/* How the scratch memory of kernels/nn_device.h is divided. */
#ifndef ZS_KERNELS_NN_ROOMS_H
#define ZS_KERNELS_NN_ROOMS_H

#include "base/util.h"
#include "kernels/nn_device.h"

enum {
    ZS_NN_WORKSPACE = 32 << 20, /* bytes; what cuBLAS recommends since compute capability 9 */
    ZS_NN_COLUMN_TILES = 1024,  /* most partial sums of a column */
    ZS_NN_SCORES = 8 << 20      /* scores held at once, if one pair has not more: 32 MiB, which stay
                                   in a large GPU's cache */
};

/* A pair is a row and a kv head. */
typedef struct zs_nn_rooms {
    int group, pairs; /* queries of a key; pairs worked on at once */
    size_t queries;   /* of a tile and pair, all heads of the group */
    /* Elements before each in the room: two arrays [pair][queries][tile], the output's sums
     * [pair][queries][dim], and their maximum and denominator [pair][queries]. */
    size_t scores[2], sums, max, denominator, numel;
} zs_nn_rooms;

static inline void zs_nn_rooms_make(int rows, int seq, int heads, int kv_heads, int dim, int tile,
                                    zs_nn_rooms *out)
{
    const int edge = ZS_MIN(tile, seq), group = heads / kv_heads;
    const size_t queries = (size_t)edge * (size_t)group, scores = queries * (size_t)edge;
    const size_t all = (size_t)rows * (size_t)kv_heads;
    const size_t pairs = ZS_MIN(ZS_MAX((size_t)ZS_NN_SCORES / scores, (size_t)1), all);
    const size_t each = zs_round_up(pairs * scores, 64);
    *out = (zs_nn_rooms){.group = group, .pairs = (int)pairs, .queries = queries};
    out->scores[1] = each;
    out->sums = 2 * each;
    out->max = out->sums + zs_round_up(pairs * queries * (size_t)dim, 64);
    out->denominator = out->max + zs_round_up(pairs * queries, 64);
    out->numel = out->denominator + zs_round_up(pairs * queries, 64);
}

#endif
