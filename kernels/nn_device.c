/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes that both sides of the border have to agree on. */
#include "kernels/nn_rooms.h"

size_t zs_nn_device_room(int widest)
{
    return ZS_NN_WORKSPACE + (size_t)ZS_NN_COLUMN_TILES * (size_t)widest * sizeof(float);
}

size_t zs_nn_attention_room(int rows, int seq, int heads, int kv_heads, int dim, int tile)
{
    zs_nn_rooms rooms;
    zs_nn_rooms_make(rows, seq, heads, kv_heads, dim, tile, &rooms);
    return rooms.numel;
}
