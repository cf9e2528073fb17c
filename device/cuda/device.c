/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA device: everything here is queued on streams and returns at once, but for allocation,
 * which happens before training starts, and the two calls that say that they wait. */
#include <stdlib.h>
#include <string.h>

#include "device/cuda/cuda.h"

struct zs_stream {
    cudaStream_t native;
    int borrowed;
};

struct zs_event {
    cudaEvent_t native;
};

zs_status zs_cuda_status(cudaError_t code, const char *what)
{
    if (code == cudaSuccess)
        return ZS_OK;
    (void)cudaGetLastError();
    const zs_status status = code == cudaErrorMemoryAllocation ? ZS_ERR_NOMEM : ZS_ERR_DEVICE;
    return zs_fail(status, "%s: %s (%s)", what, cudaGetErrorString(code), cudaGetErrorName(code));
}

zs_status zs_cuda_enter(const zs_device *device)
{
    const zs_cuda_device *d = (const zs_cuda_device *)device;
    return zs_cuda_status(cudaSetDevice(d->ordinal), "choosing the CUDA device");
}

zs_status zs_cuda_load(const void *const *kernels, size_t count)
{
    struct cudaFuncAttributes attributes;
    for (size_t i = 0; i < count; i++)
        ZS_CHECK(zs_cuda_status(cudaFuncGetAttributes(&attributes, kernels[i]),
                                "loading a kernel (does the device's architecture fit?)"));
    return ZS_OK;
}

static cudaStream_t native(const zs_device *device, const zs_stream *stream)
{
    return stream ? stream->native : ((const zs_cuda_device *)device)->first->native;
}

/* ---- memory ---- */

static zs_status cuda_alloc(zs_device *device, size_t bytes, void **out)
{
    *out = NULL;
    if (!bytes)
        return ZS_OK;
    zs_status status = zs_cuda_enter(device);
    if (status != ZS_OK)
        return status;
    void *ptr = NULL;
    const cudaStream_t stream = native(device, NULL);
    ZS_TRY(zs_cuda_status(cudaMalloc(&ptr, bytes), "allocating device memory"));
    ZS_TRY(zs_cuda_status(cudaMemsetAsync(ptr, 0, bytes, stream), "clearing device memory"));
    /* Whoever uses it first may do so on another stream. */
    ZS_TRY(zs_cuda_status(cudaStreamSynchronize(stream), "clearing device memory"));
    *out = ptr;
    return ZS_OK;
fail:
    if (ptr)
        (void)cudaFree(ptr);
    return status;
}

static void cuda_free(zs_device *device, void *ptr, size_t bytes)
{
    (void)bytes;
    if (ptr && zs_cuda_enter(device) == ZS_OK)
        (void)cudaFree(ptr);
}

static zs_status cuda_host_alloc(zs_device *device, size_t bytes, void **out)
{
    *out = NULL;
    ZS_CHECK(zs_cuda_enter(device));
    void *ptr;
    ZS_CHECK(zs_cuda_host_table->host_alloc(bytes, &ptr));
    if (ptr) {
        zs_status status = zs_cuda_status(
            cudaHostRegister(ptr, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
            "pinning host memory (ulimit -l limits it)");
        if (status != ZS_OK) {
            zs_cuda_host_table->host_free(ptr, bytes);
            return status;
        }
    }
    *out = ptr;
    return ZS_OK;
}

static void cuda_host_free(zs_device *device, void *ptr, size_t bytes)
{
    if (!ptr)
        return;
    if (zs_cuda_enter(device) == ZS_OK)
        (void)cudaHostUnregister(ptr);
    zs_cuda_host_table->host_free(ptr, bytes);
}

static zs_status cuda_mem_info(zs_device *device, size_t *free_bytes, size_t *total_bytes)
{
    ZS_CHECK(zs_cuda_enter(device));
    return zs_cuda_status(cudaMemGetInfo(free_bytes, total_bytes), "asking for free device memory");
}

/* ---- streams and events ---- */

static zs_status cuda_stream_open(zs_device *device, zs_stream **out)
{
    *out = NULL;
    ZS_CHECK(zs_cuda_enter(device));
    zs_stream *stream = malloc(sizeof *stream);
    if (!stream)
        return zs_fail(ZS_ERR_NOMEM, "CUDA stream: out of memory");
    stream->borrowed = 0;
    zs_status status = zs_cuda_status(
        cudaStreamCreateWithFlags(&stream->native, cudaStreamNonBlocking), "making a CUDA stream");
    if (status == ZS_OK)
        *out = stream;
    else
        free(stream);
    return status;
}

static zs_status cuda_stream_wrap(zs_device *device, void *wrapped, zs_stream **out)
{
    (void)device;
    *out = malloc(sizeof **out);
    if (!*out)
        return zs_fail(ZS_ERR_NOMEM, "CUDA stream: out of memory");
    **out = (zs_stream){.native = wrapped, .borrowed = 1};
    return ZS_OK;
}

static void cuda_stream_close(zs_device *device, zs_stream *stream)
{
    if (!stream)
        return;
    if (!stream->borrowed && zs_cuda_enter(device) == ZS_OK)
        (void)cudaStreamDestroy(stream->native);
    free(stream);
}

static zs_status cuda_stream_sync(zs_device *device, zs_stream *stream)
{
    ZS_CHECK(zs_cuda_enter(device));
    return zs_cuda_status(cudaStreamSynchronize(native(device, stream)),
                          "waiting for a CUDA stream");
}

static void *cuda_stream_native(zs_device *device, zs_stream *stream)
{
    return native(device, stream);
}

static zs_status cuda_event_open(zs_device *device, zs_event **out)
{
    *out = NULL;
    ZS_CHECK(zs_cuda_enter(device));
    zs_event *event = malloc(sizeof *event);
    if (!event)
        return zs_fail(ZS_ERR_NOMEM, "CUDA event: out of memory");
    zs_status status = zs_cuda_status(
        cudaEventCreateWithFlags(&event->native, cudaEventDisableTiming), "making a CUDA event");
    if (status == ZS_OK)
        *out = event;
    else
        free(event);
    return status;
}

static void cuda_event_close(zs_device *device, zs_event *event)
{
    if (!event)
        return;
    if (zs_cuda_enter(device) == ZS_OK)
        (void)cudaEventDestroy(event->native);
    free(event);
}

static zs_status cuda_event_record(zs_device *device, zs_event *event, zs_stream *stream)
{
    ZS_CHECK(zs_cuda_enter(device));
    return zs_cuda_status(cudaEventRecord(event->native, native(device, stream)),
                          "recording a CUDA event");
}

static zs_status cuda_event_wait(zs_device *device, zs_event *event, zs_stream *stream)
{
    ZS_CHECK(zs_cuda_enter(device));
    return zs_cuda_status(cudaStreamWaitEvent(native(device, stream), event->native, 0),
                          "letting a CUDA stream wait for an event");
}

static zs_status cuda_event_sync(zs_device *device, zs_event *event)
{
    ZS_CHECK(zs_cuda_enter(device));
    return zs_cuda_status(cudaEventSynchronize(event->native), "waiting for a CUDA event");
}

static zs_status cuda_event_done(zs_device *device, zs_event *event, int *done)
{
    ZS_CHECK(zs_cuda_enter(device));
    const cudaError_t code = cudaEventQuery(event->native);
    *done = code != cudaErrorNotReady;
    if (*done)
        return zs_cuda_status(code, "asking for a CUDA event");
    (void)cudaGetLastError();
    return ZS_OK;
}

/* ---- copies ---- */

static zs_status cuda_copy(zs_device *device, void *dst, const void *src, size_t bytes,
                           zs_stream *stream)
{
    if (!bytes || dst == src)
        return ZS_OK;
    ZS_CHECK(zs_cuda_enter(device));
    return zs_cuda_status(
        cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, native(device, stream)),
        "queueing a copy");
}

static zs_status cuda_zero(zs_device *device, void *dst, size_t bytes, zs_stream *stream)
{
    if (!bytes)
        return ZS_OK;
    ZS_CHECK(zs_cuda_enter(device));
    return zs_cuda_status(cudaMemsetAsync(dst, 0, bytes, native(device, stream)),
                          "queueing a fill with zeros");
}

/* ---- open and close ---- */

static void cuda_close(zs_device *device)
{
    zs_cuda_device *d = (zs_cuda_device *)device;
    cuda_stream_close(device, d->first);
    free(d);
}

static const zs_device_ops cuda_ops = {
    .name = "cuda",
    .alloc = cuda_alloc,
    .free = cuda_free,
    .host_alloc = cuda_host_alloc,
    .host_free = cuda_host_free,
    .stream_open = cuda_stream_open,
    .stream_wrap = cuda_stream_wrap,
    .stream_close = cuda_stream_close,
    .stream_sync = cuda_stream_sync,
    .event_open = cuda_event_open,
    .event_close = cuda_event_close,
    .event_record = cuda_event_record,
    .event_wait = cuda_event_wait,
    .event_sync = cuda_event_sync,
    .event_done = cuda_event_done,
    .stream_native = cuda_stream_native,
    .copy = cuda_copy,
    .zero = cuda_zero,
    .mem_info = cuda_mem_info,
    .close = cuda_close,
};

zs_status zs_cuda_device_count(int *out)
{
    *out = 0;
    cudaError_t code = cudaGetDeviceCount(out);
    if (code == cudaErrorNoDevice) {
        (void)cudaGetLastError();
        return ZS_OK;
    }
    if (code == cudaErrorInsufficientDriver) {
        (void)cudaGetLastError();
        return zs_fail(
            ZS_ERR_UNSUPPORTED,
            "this machine has no NVIDIA driver, or one that is too old for " ZS_CUDA_BUILD
            ": install a newer one, or use the CPU");
    }
    return zs_cuda_status(code, "counting CUDA devices");
}

zs_status zs_cuda_device_info(int ordinal, zs_cuda_info *out)
{
    struct cudaDeviceProp prop;
    memset(out, 0, sizeof *out);
    ZS_CHECK(zs_cuda_status(cudaGetDeviceProperties(&prop, ordinal), "asking for a CUDA device"));
    memcpy(out->name, prop.name, ZS_CUDA_NAME_MAX - 1);
    out->major = prop.major;
    out->minor = prop.minor;
    out->total_bytes = prop.totalGlobalMem;
    out->multiprocessors = prop.multiProcessorCount;
    return ZS_OK;
}

zs_status zs_cuda_device_open(int ordinal, zs_device **out)
{
    *out = NULL;
    zs_cuda_device *d = calloc(1, sizeof *d);
    if (!d)
        return zs_fail(ZS_ERR_NOMEM, "CUDA device %d: out of memory", ordinal);
    d->base = (zs_device){.ops = &cuda_ops, .cuda = zs_cuda_plugin_table()};
    d->ordinal = ordinal;
    zs_status status = cuda_stream_open(&d->base, &d->first);
    if (status != ZS_OK) {
        free(d);
        return zs_fail_prefix(status, "CUDA device %d: ", ordinal);
    }
    *out = &d->base;
    return ZS_OK;
}
