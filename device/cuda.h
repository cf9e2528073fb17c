/* SPDX-License-Identifier: Apache-2.0 */
/* The border between libzspill and libzspill-cuda.so, which is opened when a CUDA device is asked
 * for. The plug-in is everything that needs NVIDIA's libraries or compiler: device/cuda,
 * kernels/cuda, NCCL and cuBLAS. Both sides are made from one source tree: the version changes with
 * any of the structs that cross. */
#ifndef ZS_DEVICE_CUDA_H
#define ZS_DEVICE_CUDA_H

#include <stdarg.h>

#include "device/device.h"

struct zs_math;      /* kernels/math.h */
struct zs_nn_device; /* kernels/nn_device.h */
struct zs_nn_device_config;
struct zs_piece; /* zero/bulk.h */
typedef struct zs_nccl zs_nccl;

#define ZS_CUDA_ENTRY "zs_cuda_entry_1"
enum { ZS_CUDA_VERSION = 4, ZS_CUDA_NAME_MAX = 64, ZS_NCCL_ID_BYTES = 128 };

/* What the plug-in takes from libzspill, so that messages and memory have one home. */
typedef struct zs_cuda_host {
    uint32_t version; /* ZS_CUDA_VERSION */
    zs_status (*vfail)(zs_status status, const char *format, va_list args);
    zs_status (*vfail_prefix)(zs_status status, const char *format, va_list args);
    /* The host device's memory: what the plug-in pins. */
    zs_status (*host_alloc)(size_t bytes, void **out);
    void (*host_free)(void *ptr, size_t bytes);
    /* zs_mem_alloc and zs_mem_free. */
    zs_status (*mem_alloc)(zs_device *device, zs_ledger *ledger, zs_tier tier, const char *purpose,
                           size_t bytes, zs_mem *out);
    void (*mem_free)(zs_mem *mem);
} zs_cuda_host;

typedef struct zs_cuda_info {
    char name[ZS_CUDA_NAME_MAX]; /* "NVIDIA H100 80GB HBM3" */
    int major, minor;            /* compute capability */
    size_t total_bytes;
    int multiprocessors;
} zs_cuda_info;

typedef struct zs_cuda_plugin {
    uint32_t version;
    const char *build; /* "CUDA 13.0, sm_80 sm_90 sm_100" or "emulation" */
    zs_status (*device_count)(int *out);
    zs_status (*device_info)(int ordinal, zs_cuda_info *out);
    zs_status (*device_open)(int ordinal, zs_device **out);
    /* device, which is one of device_open, and ledger are borrowed. Loads the kernels and takes
     * 32 KiB of device memory; one thread at a time may use it, on any streams of the device. */
    zs_status (*math_open)(zs_device *device, zs_ledger *ledger, struct zs_math **out);
    /* The decoder's kernels on a stream of device, which is borrowed. Loads them and cuBLAS; one
     * thread at a time may use it. */
    zs_status (*nn_open)(zs_device *device, const struct zs_nn_device_config *config,
                         struct zs_nn_device **out);
    /* Collectives between devices, in zero/nccl. One rank makes the id, all open with it, at the
     * same time. Pieces are queued on stream as one operation. Calls for one communicator come one
     * after another, from any thread. */
    zs_status (*nccl_id)(unsigned char id[ZS_NCCL_ID_BYTES]);
    zs_status (*nccl_open)(zs_device *device, int rank, int world,
                           const unsigned char id[ZS_NCCL_ID_BYTES], zs_nccl **out);
    zs_status (*nccl_all_gather)(zs_nccl *nccl, const struct zs_piece *pieces, size_t count,
                                 zs_stream *stream);
    zs_status (*nccl_reduce_scatter)(zs_nccl *nccl, const struct zs_piece *pieces, size_t count,
                                     zs_dtype dtype, zs_stream *stream);
    /* What went wrong since, on the devices. */
    zs_status (*nccl_check)(zs_nccl *nccl);
    /* Ends what is queued, whatever the other ranks do; nothing more can be. */
    void (*nccl_abort)(zs_nccl *nccl);
    void (*nccl_close)(zs_nccl *nccl);
} zs_cuda_plugin;

/* What ZS_CUDA_ENTRY names. NULL: host->version is not the plug-in's. host must stay. */
typedef const zs_cuda_plugin *(*zs_cuda_entry)(const zs_cuda_host *host);

/* Opens the plug-in (ZSPILL_CUDA_LIB overrides where it is looked for). ZS_ERR_UNSUPPORTED: there
 * is none, it is of another version, or its libraries cannot be loaded. Static. */
zs_status zs_cuda_open(const zs_cuda_plugin **out);
/* Device ordinal, 0 up, of the plug-in. ZS_ERR_ARG names how many there are. */
zs_status zs_device_open_cuda(int ordinal, zs_device **out);

#endif
