/* SPDX-License-Identifier: Apache-2.0 */
/* Where memory lives and work is queued. The host device does everything at once and in order; an
 * accelerator's runs streams, and events order them. */
#ifndef ZS_DEVICE_DEVICE_H
#define ZS_DEVICE_DEVICE_H

#include "base/ledger.h"
#include "zspill.h"

typedef struct zs_stream zs_stream; /* NULL: the device's first stream */
typedef struct zs_event zs_event;

typedef struct zs_device_ops {
    const char *name; /* "host", "cuda" */
    /* Device memory, zeroed, page-aligned. */
    zs_status (*alloc)(zs_device *device, size_t bytes, void **out);
    void (*free)(zs_device *device, void *ptr, size_t bytes);
    /* Host memory that the device copies from and to at full speed: zeroed, page-aligned (huge
     * pages where possible), MADV_DONTFORK. */
    zs_status (*host_alloc)(zs_device *device, size_t bytes, void **out);
    void (*host_free)(zs_device *device, void *ptr, size_t bytes);
    zs_status (*stream_open)(zs_device *device, zs_stream **out);
    /* The caller's own stream (cudaStream_t), which stream_close leaves open. */
    zs_status (*stream_wrap)(zs_device *device, void *native, zs_stream **out);
    void (*stream_close)(zs_device *device, zs_stream *stream);
    zs_status (*stream_sync)(zs_device *device, zs_stream *stream);
    zs_status (*event_open)(zs_device *device, zs_event **out);
    void (*event_close)(zs_device *device, zs_event *event);
    zs_status (*event_record)(zs_device *device, zs_event *event, zs_stream *stream);
    zs_status (*event_wait)(zs_device *device, zs_event *event, zs_stream *stream);
    /* The calling thread waits for what was recorded last; not at all when nothing was. */
    zs_status (*event_sync)(zs_device *device, zs_event *event);
    /* *done: 1 when event_sync would not wait. */
    zs_status (*event_done)(zs_device *device, zs_event *event, int *done);
    /* The stream as the device's kernels and libraries take it (cudaStream_t); NULL on the host. */
    void *(*stream_native)(zs_device *device, zs_stream *stream);
    /* Either side may be device memory or memory of host_alloc; other host memory only where
     * host_access is set. */
    zs_status (*copy)(zs_device *device, void *dst, const void *src, size_t bytes,
                      zs_stream *stream);
    zs_status (*zero)(zs_device *device, void *dst, size_t bytes, zs_stream *stream);
    /* Bytes of device memory that are free, and that there are. */
    zs_status (*mem_info)(zs_device *device, size_t *free_bytes, size_t *total_bytes);
    void (*close)(zs_device *device);
} zs_device_ops;

struct zs_device {
    const zs_device_ops *ops;
    int host_access; /* 1: the host may read and write device memory, and work is done when its call
                        returns */
    const struct zs_cuda_plugin *cuda; /* device/cuda.h; NULL: not a CUDA device */
    /* backends extend this */
};

zs_status zs_device_open_host(zs_device **out);

/* An allocation together with its line in the ledger. Zero it before first use; free takes zeroed
 * ones. */
typedef struct zs_mem {
    void *ptr;
    size_t bytes;
    zs_tier tier; /* device or host */
    char purpose[40];
    zs_device *device;
    zs_ledger *ledger;
} zs_mem;

/* bytes 0: ptr stays NULL. On failure ZS_ERR_NOMEM names purpose, bytes and tier. */
zs_status zs_mem_alloc(zs_device *device, zs_ledger *ledger, zs_tier tier, const char *purpose,
                       size_t bytes, zs_mem *out);
void zs_mem_free(zs_mem *mem);

#endif
