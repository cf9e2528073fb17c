/* SPDX-License-Identifier: Apache-2.0 */
/* The gradient norm and what follows from it, in the host's order: 8 lanes over each block of
 * ZS_SUM_BLOCK elements, then the blocks one after the other. No atomics. */
#include "kernels/cuda/group.h"

enum {
    LANES = 8,
    SQUARES_THREADS = 128,
    EACH = 16, /* elements that a thread fetches ahead */
    SQUARES_TILE = SQUARES_THREADS * EACH,
    SUM_THREADS = 256,
    SUM_TILE = 2048
};

/* A lane's additions follow from each other: all threads fetch the next tile while eight of them
 * add up this one. */
template <class T>
__global__ void __launch_bounds__(SQUARES_THREADS)
    sum_squares(const typename T::memory *x, uint64_t n, double *partial)
{
    ZS_SHARED(float, tile, 2 * SQUARES_TILE);
    const uint64_t first = (uint64_t)blockIdx.x * ZS_SUM_BLOCK;
    const uint32_t count =
        n - first < ZS_SUM_BLOCK ? (uint32_t)(n - first) : (uint32_t)ZS_SUM_BLOCK;
    const uint32_t tiles = (count + SQUARES_TILE - 1) / SQUARES_TILE;
    double sum = 0;
    for (uint32_t t = 0; t <= tiles; t++) {
        float next[EACH];
        /* Tile t is fetched, tile t - 1 added. */
        if (t < tiles)
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const uint32_t i = t * SQUARES_TILE + e * SQUARES_THREADS + threadIdx.x;
                next[e] = i < count ? zs_get<T>(x + first + i) : 0.0f;
            }
        if (t > 0 && threadIdx.x < LANES) {
            const float *from = tile + (t - 1) % 2 * SQUARES_TILE;
            /* What lies behind the end is zero, and adding its square changes no bit. */
#pragma unroll 16
            for (int i = threadIdx.x; i < SQUARES_TILE; i += LANES) {
                const double value = from[i];
                sum += value * value;
            }
        }
        if (t < tiles)
#pragma unroll
            for (int e = 0; e < EACH; e++)
                tile[t % 2 * SQUARES_TILE + e * SQUARES_THREADS + threadIdx.x] = next[e];
        __syncthreads();
    }
    if (threadIdx.x < LANES) {
#pragma unroll
        for (int width = LANES / 2; width > 0; width /= 2)
            sum += __shfl_down_sync((1u << LANES) - 1, sum, width, LANES);
        if (threadIdx.x == 0)
            partial[blockIdx.x] = sum;
    }
}

/* One thread adds what the others fetch. */
static __device__ __forceinline__ double add_up(const double *x, uint64_t count, double sum,
                                                double *tile)
{
    for (uint64_t first = 0; first < count; first += SUM_TILE) {
        const int part = count - first < SUM_TILE ? (int)(count - first) : SUM_TILE;
        for (int i = threadIdx.x; i < part; i += SUM_THREADS)
            tile[i] = x[first + i];
        __syncthreads();
        if (threadIdx.x == 0)
            for (int i = 0; i < part; i++)
                sum += tile[i];
        __syncthreads();
    }
    return sum;
}

__global__ void __launch_bounds__(SUM_THREADS)
    sum_doubles(const double *x, uint64_t count, int more, double *out)
{
    ZS_SHARED(double, tile, SUM_TILE);
    const double sum = add_up(x, count, more ? *out : 0.0, tile);
    if (threadIdx.x == 0)
        *out = sum;
}

__global__ void __launch_bounds__(SUM_THREADS)
    clip(const zs_clip_config config, const double *sums, uint64_t count, zs_clip *out)
{
    ZS_SHARED(double, tile, SUM_TILE);
    const double sum = add_up(sums, count, 0.0, tile);
    if (threadIdx.x == 0)
        *out = zs_clip_element(&config, sum);
}

/* ---- launches ---- */

template <class T>
static void squares_launch(cudaStream_t stream, const void *x, uint64_t n, double *partial)
{
    const unsigned blocks = (unsigned)((n + ZS_SUM_BLOCK - 1) / ZS_SUM_BLOCK);
    ZS_LAUNCH((sum_squares<T>), blocks, SQUARES_THREADS, 0, stream,
              static_cast<const typename T::memory *>(x), n, partial);
}

zs_status zs_cuda_sum_squares(cudaStream_t stream, const void *x, zs_dtype dtype, uint64_t n,
                              double *partial)
{
    static void (*const launch[ZS_DTYPES])(cudaStream_t, const void *, uint64_t, double *) = {
        squares_launch<zs_fp32>, squares_launch<zs_bf16>, squares_launch<zs_fp16>};
    launch[dtype](stream, x, n, partial);
    return zs_launched("sum_squares");
}

zs_status zs_cuda_sum_doubles(cudaStream_t stream, const double *x, uint64_t count, int more,
                              double *out)
{
    ZS_LAUNCH(sum_doubles, 1, SUM_THREADS, 0, stream, x, count, more, out);
    return zs_launched("sum_doubles");
}

zs_status zs_cuda_clip(cudaStream_t stream, const zs_clip_config *config, const double *sums,
                       uint64_t count, zs_clip *out)
{
    ZS_LAUNCH(clip, 1, SUM_THREADS, 0, stream, *config, sums, count, out);
    return zs_launched("clip");
}

zs_status zs_cuda_load_norm(void)
{
    static const void *const kernels[] = {
        ZS_KERNEL(sum_squares<zs_fp32>), ZS_KERNEL(sum_squares<zs_bf16>),
        ZS_KERNEL(sum_squares<zs_fp16>), ZS_KERNEL(sum_doubles), ZS_KERNEL(clip)};
    return zs_cuda_load(kernels, sizeof kernels / sizeof kernels[0]);
}
