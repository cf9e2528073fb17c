/* SPDX-License-Identifier: Apache-2.0 */
/* Sums over a warp or a block of threads, the same for all of its threads, in one order. */
#ifndef ZS_KERNELS_CUDA_NN_SUM_H
#define ZS_KERNELS_CUDA_NN_SUM_H

#include "kernels/cuda/group.h"
#include "kernels/cuda/nn.h"

enum { ZS_CUDA_LANES = 32, ZS_CUDA_WARPS_MOST = 16 };

struct zs_add_op {
    __device__ __forceinline__ float operator()(float a, float b) const
    {
        return a + b;
    }
};

struct zs_max_op {
    __device__ __forceinline__ float operator()(float a, float b) const
    {
        return fmaxf(a, b);
    }
};

template <class Op> static __device__ __forceinline__ float zs_warp_fold(float x, Op op)
{
#pragma unroll
    for (int by = ZS_CUDA_LANES / 2; by > 0; by /= 2)
        x = op(x, __shfl_xor_sync(0xffffffffu, x, by));
    return x;
}

template <class Op>
static __device__ __forceinline__ float zs_block_fold(float x, float *room, Op op)
{
    const int warps = (int)blockDim.x / ZS_CUDA_LANES;
    x = zs_warp_fold(x, op);
    if (warps == 1)
        return x;
    if (threadIdx.x % ZS_CUDA_LANES == 0)
        room[threadIdx.x / ZS_CUDA_LANES] = x;
    __syncthreads();
    x = room[0];
    for (int w = 1; w < warps; w++)
        x = op(x, room[w]);
    __syncthreads();
    return x;
}

static __device__ __forceinline__ float zs_warp_sum(float x)
{
    return zs_warp_fold(x, zs_add_op());
}

static __device__ __forceinline__ float zs_warp_max(float x)
{
    return zs_warp_fold(x, zs_max_op());
}

/* room: ZS_CUDA_WARPS_MOST shared elements, free again afterwards. blockDim.x is a multiple of 32.
 */
static __device__ __forceinline__ float zs_block_sum(float x, float *room)
{
    return zs_block_fold(x, room, zs_add_op());
}

static __device__ __forceinline__ float zs_block_max(float x, float *room)
{
    return zs_block_fold(x, room, zs_max_op());
}

/* Threads for rows of n elements: a few elements each, at most `most`. */
static inline unsigned zs_row_threads(int n, unsigned most)
{
    const unsigned lanes = ZS_CUDA_LANES;
    const unsigned threads = ((unsigned)n / 4 + lanes - 1) / lanes * lanes;
    return threads < lanes ? lanes : threads > most ? most : threads;
}

#endif
