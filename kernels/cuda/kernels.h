/* SPDX-License-Identifier: Apache-2.0 */
/* The launchers of this directory's .cu files, for C. Each queues its kernel on stream, of the
 * present device (zs_cuda_enter), and returns; pointers are checked by the caller. Pointers are
 * device memory or pinned host memory; nothing here assumes which. */
#ifndef ZS_KERNELS_CUDA_KERNELS_H
#define ZS_KERNELS_CUDA_KERNELS_H

#include "device/cuda/cuda.h"
#include "kernels/math.h"

enum {
    ZS_CUDA_RUNS = 64,    /* in one launch of Adam */
    ZS_CUDA_COEFS = 32,   /* in one launch of Adam */
    ZS_CUDA_SOURCES = 64, /* the largest world */
    ZS_CUDA_THREADS = 256,
    /* Elements of one access: 16 bytes of fp32. */
    ZS_CUDA_GROUP = 4,
    ZS_CUDA_ADAM_TILE = ZS_CUDA_THREADS * ZS_CUDA_GROUP
};

/* Where groups begin and whether they may be accessed whole. */
typedef struct zs_cuda_align {
    uint32_t shift; /* 0 to 3: element i is in group (i + shift) / 4 */
    int vector;     /* 1: the groups of all arrays are aligned */
} zs_cuda_align;

/* Elements [first, end). Blocks of threads take tiles: groups of one run, from its first one. */
typedef struct zs_cuda_run {
    uint64_t first, end;
    uint32_t tile; /* number of its first tile */
    uint32_t coef; /* index */
} zs_cuda_run;

/* What one launch of Adam works through: a parameter of the kernel, so that nothing has to stay
 * until it runs. At most 4 KiB with the others (CUDA's limit up to compute capability 6). */
typedef struct zs_cuda_runs {
    uint32_t run_count, tiles;
    zs_cuda_run run[ZS_CUDA_RUNS];
    zs_adam_coef coef[ZS_CUDA_COEFS];
} zs_cuda_runs;

/* The only pointers that reach a kernel within a struct. */
typedef struct zs_cuda_sources {
    const void *at[ZS_CUDA_SOURCES];
} zs_cuda_sources;

#ifdef __cplusplus
extern "C" {
#endif

/* blocks: most blocks of threads of a launch; they work through the tiles in turn. */
zs_status zs_cuda_adam(cudaStream_t stream, unsigned blocks, const zs_adam_arrays *arrays,
                       zs_cuda_align align, const zs_cuda_runs *runs);
/* dst and src differ in dtype. */
zs_status zs_cuda_cast(cudaStream_t stream, unsigned blocks, void *dst, zs_dtype dst_dtype,
                       const void *src, zs_dtype src_dtype, uint64_t n, zs_cuda_align align);
zs_status zs_cuda_add(cudaStream_t stream, unsigned blocks, void *dst, zs_dtype dst_dtype,
                      const void *src, zs_dtype src_dtype, uint64_t n, zs_cuda_align align);
zs_status zs_cuda_sum_sources(cudaStream_t stream, unsigned blocks, void *dst, zs_dtype dtype,
                              const zs_cuda_sources *src, unsigned sources, uint64_t n,
                              zs_cuda_align align);
/* partial[b] = sum of squares of block b of ZS_SUM_BLOCK elements */
zs_status zs_cuda_sum_squares(cudaStream_t stream, const void *x, zs_dtype dtype, uint64_t n,
                              double *partial);
/* *out = (more ? *out : 0) + x[0] + x[1] + ... in order */
zs_status zs_cuda_sum_doubles(cudaStream_t stream, const double *x, uint64_t count, int more,
                              double *out);
zs_status zs_cuda_clip(cudaStream_t stream, const zs_clip_config *config, const double *sums,
                       uint64_t count, zs_clip *out);

/* Loads the kernels of each file onto the present device, which otherwise happens at their first
 * launch and may then wait for other streams. */
zs_status zs_cuda_load_adam(void);
zs_status zs_cuda_load_elementwise(void);
zs_status zs_cuda_load_norm(void);

#ifdef __cplusplus
}
#endif

#endif
