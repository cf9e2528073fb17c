/* SPDX-License-Identifier: Apache-2.0 */
/* cast, add and sum_sources. A thread has several groups in flight: half of the types are narrow.
 */
#include "kernels/cuda/group.h"

enum { GROUPS = 4, TILE = ZS_CUDA_THREADS * ZS_CUDA_GROUP * GROUPS };

/* Element i of the result, from what the operation reads. */
template <class D, class S> struct op_cast {
    typename D::memory *dst;
    const typename S::memory *src;
    __device__ __forceinline__ void group(uint64_t i, float out[ZS_CUDA_GROUP]) const
    {
        zs_get_group<S>(src + i, out);
    }
    __device__ __forceinline__ float one(uint64_t i) const
    {
        return zs_get<S>(src + i);
    }
};

template <class D, class S> struct op_add {
    typename D::memory *dst;
    const typename S::memory *src;
    __device__ __forceinline__ void group(uint64_t i, float out[ZS_CUDA_GROUP]) const
    {
        float addend[ZS_CUDA_GROUP];
        zs_get_group<D>(dst + i, out);
        zs_get_group<S>(src + i, addend);
#pragma unroll
        for (int j = 0; j < ZS_CUDA_GROUP; j++)
            out[j] += addend[j];
    }
    __device__ __forceinline__ float one(uint64_t i) const
    {
        return zs_get<D>(dst + i) + zs_get<S>(src + i);
    }
};

/* sources in order, in fp32; dst may be one of them, since an element is read before it is written.
 */
template <class D> struct op_sum {
    typename D::memory *dst;
    const zs_cuda_sources *src;
    unsigned sources;
    __device__ __forceinline__ const typename D::memory *at(unsigned s) const
    {
        return static_cast<const typename D::memory *>(src->at[s]);
    }
    __device__ __forceinline__ void group(uint64_t i, float out[ZS_CUDA_GROUP]) const
    {
        zs_get_group<D>(at(0) + i, out);
        for (unsigned s = 1; s < sources; s++) {
            float addend[ZS_CUDA_GROUP];
            zs_get_group<D>(at(s) + i, addend);
#pragma unroll
            for (int j = 0; j < ZS_CUDA_GROUP; j++)
                out[j] += addend[j];
        }
    }
    __device__ __forceinline__ float one(uint64_t i) const
    {
        float sum = zs_get<D>(at(0) + i);
        for (unsigned s = 1; s < sources; s++)
            sum += zs_get<D>(at(s) + i);
        return sum;
    }
};

template <class D, class Op>
static __device__ __forceinline__ void each(const Op op, uint64_t n, const zs_cuda_align align)
{
    const uint64_t end = n + align.shift;
    for (uint64_t tile = (uint64_t)blockIdx.x * TILE; tile < end;
         tile += (uint64_t)gridDim.x * TILE) {
        const uint64_t begin = tile + threadIdx.x * ZS_CUDA_GROUP;
        const uint64_t stride = ZS_CUDA_THREADS * ZS_CUDA_GROUP;
        if (align.vector && tile >= align.shift && tile + TILE <= end) {
            float value[GROUPS][ZS_CUDA_GROUP];
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                op.group(begin + g * stride - align.shift, value[g]);
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
                zs_put_group<D>(op.dst + (begin + g * stride - align.shift), value[g]);
            continue;
        }
        /* The first tile, the last one, and arrays whose groups are not aligned: neighbouring
         * threads take neighbouring elements. */
        for (uint64_t i = tile + threadIdx.x; i < tile + TILE; i += ZS_CUDA_THREADS)
            if (i >= align.shift && i < end)
                zs_put<D>(op.dst + (i - align.shift), op.one(i - align.shift));
    }
}

template <class D, class S>
__global__ void __launch_bounds__(ZS_CUDA_THREADS)
    cast(typename D::memory *dst, const typename S::memory *src, uint64_t n,
         const zs_cuda_align align)
{
    each<D>(op_cast<D, S>{dst, src}, n, align);
}

template <class D, class S>
__global__ void __launch_bounds__(ZS_CUDA_THREADS)
    add(typename D::memory *dst, const typename S::memory *src, uint64_t n,
        const zs_cuda_align align)
{
    each<D>(op_add<D, S>{dst, src}, n, align);
}

template <class D>
__global__ void __launch_bounds__(ZS_CUDA_THREADS)
    sum_sources(typename D::memory *dst, const __grid_constant__ zs_cuda_sources src,
                unsigned sources, uint64_t n, const zs_cuda_align align)
{
    each<D>(op_sum<D>{dst, &src, sources}, n, align);
}

/* ---- launches ---- */

static unsigned grid(unsigned blocks, uint64_t n, zs_cuda_align align)
{
    const uint64_t tiles = (n + align.shift + TILE - 1) / TILE;
    return tiles < blocks ? (unsigned)tiles : blocks;
}

typedef void (*launcher)(cudaStream_t stream, unsigned blocks, void *dst, const void *src,
                         uint64_t n, zs_cuda_align align);

template <class D, class S>
static void cast_launch(cudaStream_t stream, unsigned blocks, void *dst, const void *src,
                        uint64_t n, zs_cuda_align align)
{
    ZS_LAUNCH((cast<D, S>), blocks, ZS_CUDA_THREADS, 0, stream,
              static_cast<typename D::memory *>(dst), static_cast<const typename S::memory *>(src),
              n, align);
}

template <class D, class S>
static void add_launch(cudaStream_t stream, unsigned blocks, void *dst, const void *src, uint64_t n,
                       zs_cuda_align align)
{
    ZS_LAUNCH((add<D, S>), blocks, ZS_CUDA_THREADS, 0, stream,
              static_cast<typename D::memory *>(dst), static_cast<const typename S::memory *>(src),
              n, align);
}

zs_status zs_cuda_cast(cudaStream_t stream, unsigned blocks, void *dst, zs_dtype dst_dtype,
                       const void *src, zs_dtype src_dtype, uint64_t n, zs_cuda_align align)
{
    static const launcher launch[ZS_DTYPES][ZS_DTYPES] = {
        {NULL, cast_launch<zs_fp32, zs_bf16>, cast_launch<zs_fp32, zs_fp16>},
        {cast_launch<zs_bf16, zs_fp32>, NULL, cast_launch<zs_bf16, zs_fp16>},
        {cast_launch<zs_fp16, zs_fp32>, cast_launch<zs_fp16, zs_bf16>, NULL},
    };
    launch[dst_dtype][src_dtype](stream, grid(blocks, n, align), dst, src, n, align);
    return zs_launched("cast");
}

zs_status zs_cuda_add(cudaStream_t stream, unsigned blocks, void *dst, zs_dtype dst_dtype,
                      const void *src, zs_dtype src_dtype, uint64_t n, zs_cuda_align align)
{
    static const launcher launch[ZS_DTYPES][ZS_DTYPES] = ZS_CUDA_TABLE(add_launch);
    launch[dst_dtype][src_dtype](stream, grid(blocks, n, align), dst, src, n, align);
    return zs_launched("add");
}

template <class D>
static void sum_launch(cudaStream_t stream, unsigned blocks, void *dst, const zs_cuda_sources *src,
                       unsigned sources, uint64_t n, zs_cuda_align align)
{
    ZS_LAUNCH((sum_sources<D>), blocks, ZS_CUDA_THREADS, 0, stream,
              static_cast<typename D::memory *>(dst), *src, sources, n, align);
}

zs_status zs_cuda_sum_sources(cudaStream_t stream, unsigned blocks, void *dst, zs_dtype dtype,
                              const zs_cuda_sources *src, unsigned sources, uint64_t n,
                              zs_cuda_align align)
{
    static void (*const launch[ZS_DTYPES])(cudaStream_t, unsigned, void *, const zs_cuda_sources *,
                                           unsigned, uint64_t, zs_cuda_align) = {
        sum_launch<zs_fp32>, sum_launch<zs_bf16>, sum_launch<zs_fp16>};
    launch[dtype](stream, grid(blocks, n, align), dst, src, sources, n, align);
    return zs_launched("sum_sources");
}

zs_status zs_cuda_load_elementwise(void)
{
    static const void *const kernels[] = {
        ZS_KERNEL(cast<zs_fp32, zs_bf16>), ZS_KERNEL(cast<zs_fp32, zs_fp16>),
        ZS_KERNEL(cast<zs_bf16, zs_fp32>), ZS_KERNEL(cast<zs_bf16, zs_fp16>),
        ZS_KERNEL(cast<zs_fp16, zs_fp32>), ZS_KERNEL(cast<zs_fp16, zs_bf16>),
        ZS_KERNEL(add<zs_fp32, zs_fp32>),  ZS_KERNEL(add<zs_fp32, zs_bf16>),
        ZS_KERNEL(add<zs_fp32, zs_fp16>),  ZS_KERNEL(add<zs_bf16, zs_fp32>),
        ZS_KERNEL(add<zs_bf16, zs_bf16>),  ZS_KERNEL(add<zs_bf16, zs_fp16>),
        ZS_KERNEL(add<zs_fp16, zs_fp32>),  ZS_KERNEL(add<zs_fp16, zs_bf16>),
        ZS_KERNEL(add<zs_fp16, zs_fp16>),  ZS_KERNEL(sum_sources<zs_fp32>),
        ZS_KERNEL(sum_sources<zs_bf16>),   ZS_KERNEL(sum_sources<zs_fp16>)};
    return zs_cuda_load(kernels, sizeof kernels / sizeof kernels[0]);
}
