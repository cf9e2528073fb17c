/* SPDX-License-Identifier: Apache-2.0 */
/* Loads and stores of the element types, streaming (what is read once need not stay in caches):
 * one element, or a group of ZS_CUDA_GROUP in one access. Typed, since element.h's memcpy tells
 * nvcc nothing about alignment. */
#ifndef ZS_KERNELS_CUDA_GROUP_H
#define ZS_KERNELS_CUDA_GROUP_H

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/element.h"

struct zs_fp32 {
    typedef float memory;
    typedef float4 group;
    static __host__ __device__ float widen(float x)
    {
        return x;
    }
    static __host__ __device__ float narrow(float x)
    {
        return x;
    }
};

struct zs_bf16 {
    typedef unsigned short memory;
    typedef ushort4 group;
    static __host__ __device__ float widen(unsigned short x)
    {
        return zs_fp32_from_bf16(x);
    }
    static __host__ __device__ unsigned short narrow(float x)
    {
        return zs_bf16_from_fp32(x);
    }
};

struct zs_fp16 {
    typedef unsigned short memory;
    typedef ushort4 group;
    static __host__ __device__ float widen(unsigned short x)
    {
        return zs_fp32_from_fp16(x);
    }
    static __host__ __device__ unsigned short narrow(float x)
    {
        return zs_fp16_from_fp32(x);
    }
};

template <class T> static __device__ __forceinline__ float zs_get(const typename T::memory *x)
{
    return T::widen(__ldcs(x));
}

template <class T> static __device__ __forceinline__ void zs_put(typename T::memory *x, float value)
{
    __stcs(x, T::narrow(value));
}

template <class T>
static __device__ __forceinline__ void zs_get_group(const typename T::memory *x, float out[4])
{
    const typename T::group g = __ldcs(reinterpret_cast<const typename T::group *>(x));
    out[0] = T::widen(g.x);
    out[1] = T::widen(g.y);
    out[2] = T::widen(g.z);
    out[3] = T::widen(g.w);
}

template <class T>
static __device__ __forceinline__ void zs_put_group(typename T::memory *x, const float in[4])
{
    typename T::group g;
    g.x = T::narrow(in[0]);
    g.y = T::narrow(in[1]);
    g.z = T::narrow(in[2]);
    g.w = T::narrow(in[3]);
    __stcs(reinterpret_cast<typename T::group *>(x), g);
}

#define ZS_CUDA_ROW(launcher, ...)                                                                 \
    {                                                                                              \
        launcher<__VA_ARGS__, zs_fp32>, launcher<__VA_ARGS__, zs_bf16>,                            \
            launcher<__VA_ARGS__, zs_fp16>                                                         \
    }
/* A table of launcher<A, B>, by zs_dtype of A and of B. */
#define ZS_CUDA_TABLE(launcher)                                                                    \
    {                                                                                              \
        ZS_CUDA_ROW(launcher, zs_fp32), ZS_CUDA_ROW(launcher, zs_bf16),                            \
            ZS_CUDA_ROW(launcher, zs_fp16)                                                         \
    }

#endif
