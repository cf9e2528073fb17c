/* SPDX-License-Identifier: Apache-2.0 */
/* Inside libzspill-cuda.so: the host's functions, and how CUDA's errors become statuses. */
#ifndef ZS_DEVICE_CUDA_CUDA_H
#define ZS_DEVICE_CUDA_CUDA_H

#include <cuda_runtime_api.h>

#include "base/status.h"
#include "device/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct zs_cuda_device {
    zs_device base;
    int ordinal;
    zs_stream *first; /* what NULL stands for: never CUDA's default stream, which waits for all */
} zs_cuda_device;

/* Set by the entry, before any other function of the plug-in. */
extern const zs_cuda_host *zs_cuda_host_table;

/* code cudaSuccess: ZS_OK. Else the status and message "what: <CUDA's name and text>"; the error is
 * taken out of CUDA's per-thread state, so that the next call does not report it again. */
zs_status zs_cuda_status(cudaError_t code, const char *what);

/* CUDA's present device belongs to the thread, and any thread may call: before each use. */
zs_status zs_cuda_enter(const zs_device *device);

/* Loads kernels (ZS_KERNEL) onto the present device, before training starts: what is loaded at its
 * first launch may wait for other streams, which NCCL's kernels do not survive. */
zs_status zs_cuda_load(const void *const *kernels, size_t count);

/* Of this plug-in. */
const zs_cuda_plugin *zs_cuda_plugin_table(void);

zs_status zs_cuda_device_count(int *out);
zs_status zs_cuda_device_info(int ordinal, zs_cuda_info *out);
zs_status zs_cuda_device_open(int ordinal, zs_device **out);

#ifdef __cplusplus
}
#endif

#endif
