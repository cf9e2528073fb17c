/* SPDX-License-Identifier: Apache-2.0 */
/* Rows and the threads that share one: a warp (then a block works on several rows), or the block
 * for long rows. All of a team come to its reductions, and all get the result: sums are a tree
 * whose shape depends on the row's length alone. */
#ifndef ZS_KERNELS_CUDA_NN_TEAM_H
#define ZS_KERNELS_CUDA_NN_TEAM_H

#include "kernels/cuda/group.h"
#include "kernels/cuda/nn.h"

enum {
    NN_THREADS = 256,
    NN_WARP = 32,
    NN_WARPS = NN_THREADS / NN_WARP,
    NN_SHORT = 1024 /* rows up to here are a warp's */
};

struct nn_sum {
    static __device__ __forceinline__ float of(float a, float b)
    {
        return a + b;
    }
};

struct nn_max {
    static __device__ __forceinline__ float of(float a, float b)
    {
        return b > a ? b : a;
    }
};

template <int TEAM> static __device__ __forceinline__ uint64_t team_row()
{
    return (uint64_t)blockIdx.x * (NN_THREADS / TEAM) + threadIdx.x / TEAM;
}

template <int TEAM> static __device__ __forceinline__ int team_lane()
{
    return (int)(threadIdx.x % TEAM);
}

template <int TEAM, class Op> static __device__ __forceinline__ float team_reduce(float x)
{
#pragma unroll
    for (int distance = NN_WARP / 2; distance > 0; distance /= 2)
        x = Op::of(x, __shfl_xor_sync(~0u, x, distance));
    if constexpr (TEAM > NN_WARP) {
        ZS_SHARED(float, parts, NN_WARPS);
        if (threadIdx.x % NN_WARP == 0)
            parts[threadIdx.x / NN_WARP] = x;
        __syncthreads();
        x = parts[0];
        for (int warp = 1; warp < NN_WARPS; warp++)
            x = Op::of(x, parts[warp]);
        __syncthreads(); /* before the next reduction writes there */
    }
    return x;
}

static inline unsigned team_blocks(uint64_t rows, int n)
{
    const unsigned each = n <= NN_SHORT ? NN_WARPS : 1;
    return (unsigned)((rows + each - 1) / each);
}

#endif
