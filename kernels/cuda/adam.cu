/* SPDX-License-Identifier: Apache-2.0 */
/* Adam over the runs of a chunk, in place: each element is read and written once. */
#include "kernels/cuda/group.h"

/* Blocks of threads on a multiprocessor at once: 1024 threads with 56 bytes on their way each. */
enum { ADAM_RESIDENT = 4 };

template <class G, class W>
static __device__ __forceinline__ void
adam_one(const zs_adam_coef *c, uint64_t i, float *master, float *exp_avg, float *exp_avg_sq,
         const typename G::memory *grad, typename W::memory *working)
{
    float w = zs_get<zs_fp32>(master + i);
    float m = zs_get<zs_fp32>(exp_avg + i);
    float v = zs_get<zs_fp32>(exp_avg_sq + i);
    zs_adam_element(c, zs_get<G>(grad + i), &w, &m, &v);
    zs_put<zs_fp32>(master + i, w);
    zs_put<zs_fp32>(exp_avg + i, m);
    zs_put<zs_fp32>(exp_avg_sq + i, v);
    if (working)
        zs_put<W>(working + i, w);
}

template <class G, class W>
static __device__ __forceinline__ void
adam_group(const zs_adam_coef *c, uint64_t i, float *master, float *exp_avg, float *exp_avg_sq,
           const typename G::memory *grad, typename W::memory *working)
{
    float w[ZS_CUDA_GROUP], m[ZS_CUDA_GROUP], v[ZS_CUDA_GROUP], g[ZS_CUDA_GROUP];
    zs_get_group<zs_fp32>(master + i, w);
    zs_get_group<zs_fp32>(exp_avg + i, m);
    zs_get_group<zs_fp32>(exp_avg_sq + i, v);
    zs_get_group<G>(grad + i, g);
#pragma unroll
    for (int j = 0; j < ZS_CUDA_GROUP; j++)
        zs_adam_element(c, g[j], &w[j], &m[j], &v[j]);
    zs_put_group<zs_fp32>(master + i, w);
    zs_put_group<zs_fp32>(exp_avg + i, m);
    zs_put_group<zs_fp32>(exp_avg_sq + i, v);
    if (working)
        zs_put_group<W>(working + i, w);
}

template <class G, class W>
__global__ void __launch_bounds__(ZS_CUDA_THREADS, ADAM_RESIDENT)
    adam(float *master, float *exp_avg, float *exp_avg_sq, const typename G::memory *grad,
         typename W::memory *working, const float *grad_scale, const int *skip,
         const zs_cuda_align align, const __grid_constant__ zs_cuda_runs runs)
{
    if (skip && *skip)
        return;
    uint32_t r = 0;
    for (uint32_t tile = blockIdx.x; tile < runs.tiles; tile += gridDim.x) {
        while (r + 1 < runs.run_count && runs.run[r + 1].tile <= tile)
            r++;
        zs_adam_coef coef = runs.coef[runs.run[r].coef];
        if (grad_scale)
            coef.grad_scale = *grad_scale;
        /* In elements shifted such that groups begin at multiples. */
        const uint64_t first = runs.run[r].first + align.shift;
        const uint64_t end = runs.run[r].end + align.shift;
        const uint64_t tile_in_run = tile - runs.run[r].tile;
        const uint64_t begin =
            (first / ZS_CUDA_GROUP + tile_in_run * ZS_CUDA_THREADS + threadIdx.x) * ZS_CUDA_GROUP;
        if (align.vector && begin >= first && begin + ZS_CUDA_GROUP <= end)
            adam_group<G, W>(&coef, begin - align.shift, master, exp_avg, exp_avg_sq, grad,
                             working);
        else
            for (uint64_t i = begin; i < begin + ZS_CUDA_GROUP; i++)
                if (i >= first && i < end)
                    adam_one<G, W>(&coef, i - align.shift, master, exp_avg, exp_avg_sq, grad,
                                   working);
    }
}

template <class G, class W>
static void adam_launch(cudaStream_t stream, unsigned blocks, const zs_adam_arrays *a,
                        zs_cuda_align align, const zs_cuda_runs *runs)
{
    ZS_LAUNCH((adam<G, W>), blocks, ZS_CUDA_THREADS, 0, stream, a->master, a->exp_avg,
              a->exp_avg_sq, static_cast<const typename G::memory *>(a->grad),
              static_cast<typename W::memory *>(a->working), a->grad_scale, a->skip, align, *runs);
}

zs_status zs_cuda_adam(cudaStream_t stream, unsigned blocks, const zs_adam_arrays *arrays,
                       zs_cuda_align align, const zs_cuda_runs *runs)
{
    static void (*const launch[ZS_DTYPES][ZS_DTYPES])(
        cudaStream_t, unsigned, const zs_adam_arrays *, zs_cuda_align, const zs_cuda_runs *) =
        ZS_CUDA_TABLE(adam_launch);
    launch[arrays->grad_dtype][arrays->working_dtype](
        stream, blocks < runs->tiles ? blocks : runs->tiles, arrays, align, runs);
    return zs_launched("adam");
}

zs_status zs_cuda_load_adam(void)
{
    static const void *const kernels[] = {
        ZS_KERNEL(adam<zs_fp32, zs_fp32>), ZS_KERNEL(adam<zs_fp32, zs_bf16>),
        ZS_KERNEL(adam<zs_fp32, zs_fp16>), ZS_KERNEL(adam<zs_bf16, zs_fp32>),
        ZS_KERNEL(adam<zs_bf16, zs_bf16>), ZS_KERNEL(adam<zs_bf16, zs_fp16>),
        ZS_KERNEL(adam<zs_fp16, zs_fp32>), ZS_KERNEL(adam<zs_fp16, zs_bf16>),
        ZS_KERNEL(adam<zs_fp16, zs_fp16>)};
    return zs_cuda_load(kernels, sizeof kernels / sizeof kernels[0]);
}
