/* SPDX-License-Identifier: Apache-2.0 */
/* How kernels are written so that they also run on the CPU: launched and given shared memory only
 * by these macros, which tests/emu defines otherwise, with pointers as parameters of their own. No
 * inline PTX. What happens to one element is kernels/element.h, shared with the host. */
#ifndef ZS_KERNELS_CUDA_LAUNCH_H
#define ZS_KERNELS_CUDA_LAUNCH_H

#ifndef ZS_LAUNCH
#include <cuda_runtime.h>
/* Errors of a launch are found by zs_launched. */
#define ZS_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                  \
    kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)
#define ZS_SHARED(type, name, count) __shared__ type name[count]
#define ZS_SHARED_DYNAMIC(type, name)                                                              \
    extern __shared__ __align__(16) unsigned char zs_shared_raw[];                                 \
    type *name = reinterpret_cast<type *>(zs_shared_raw)
#endif

#define ZS_ELEMENT static inline __host__ __device__

#include "device/cuda/cuda.h"

/* The address of a kernel (or of an instance of a template) for zs_cuda_load. */
#define ZS_KERNEL(...) reinterpret_cast<const void *>(&__VA_ARGS__)

/* After a launch. */
static inline zs_status zs_launched(const char *kernel)
{
    return zs_cuda_status(cudaGetLastError(), kernel);
}

#endif
