/* SPDX-License-Identifier: Apache-2.0 */
/* The host as a device: memory is anonymous mappings, work is done when the call returns. Streams
 * and events therefore have nothing to remember. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "device/device.h"
#include "device/host.h"

enum { HUGE_PAGE = 2 * 1024 * 1024 };

struct zs_stream {
    zs_device *device;
};

struct zs_event {
    zs_device *device;
};

static zs_status map(size_t bytes, int fork_too, void **out)
{
    void *ptr;

    *out = NULL;
    if (!bytes)
        return ZS_OK;
    ptr = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ptr == MAP_FAILED)
        return zs_fail(ZS_ERR_NOMEM, "mapping %zu bytes: %s", bytes, strerror(errno));
    /* Both are wishes: a kernel without them serves as well, only slower. */
    if (bytes >= HUGE_PAGE)
        (void)madvise(ptr, bytes, MADV_HUGEPAGE);
    if (!fork_too)
        (void)madvise(ptr, bytes, MADV_DONTFORK);
    *out = ptr;
    return ZS_OK;
}

static zs_status host_alloc_device(zs_device *device, size_t bytes, void **out)
{
    return map(bytes, 1, out);
}

zs_status zs_host_alloc(size_t bytes, void **out)
{
    return map(bytes, 0, out);
}

void zs_host_free(void *ptr, size_t bytes)
{
    if (ptr)
        munmap(ptr, bytes);
}

static zs_status host_alloc_host(zs_device *device, size_t bytes, void **out)
{
    return zs_host_alloc(bytes, out);
}

static void host_unmap(zs_device *device, void *ptr, size_t bytes)
{
    zs_host_free(ptr, bytes);
}

static zs_status host_stream_open(zs_device *device, zs_stream **out)
{
    *out = calloc(1, sizeof **out);
    if (!*out)
        return zs_fail(ZS_ERR_NOMEM, "host stream: out of memory");
    (*out)->device = device;
    return ZS_OK;
}

static zs_status host_stream_wrap(zs_device *device, void *native, zs_stream **out)
{
    *out = NULL;
    return zs_fail(ZS_ERR_ARG, "stream %p: the host has none of its own; pass NULL", native);
}

static void host_stream_close(zs_device *device, zs_stream *stream)
{
    free(stream);
}

static zs_status host_stream_sync(zs_device *device, zs_stream *stream)
{
    return ZS_OK;
}

static zs_status host_event_open(zs_device *device, zs_event **out)
{
    *out = calloc(1, sizeof **out);
    if (!*out)
        return zs_fail(ZS_ERR_NOMEM, "host event: out of memory");
    (*out)->device = device;
    return ZS_OK;
}

static void host_event_close(zs_device *device, zs_event *event)
{
    free(event);
}

static zs_status host_event_touch(zs_device *device, zs_event *event, zs_stream *stream)
{
    return ZS_OK;
}

static zs_status host_event_sync(zs_device *device, zs_event *event)
{
    return ZS_OK;
}

static zs_status host_event_done(zs_device *device, zs_event *event, int *done)
{
    *done = 1;
    return ZS_OK;
}

static void *host_stream_native(zs_device *device, zs_stream *stream)
{
    return NULL;
}

static zs_status host_copy(zs_device *device, void *dst, const void *src, size_t bytes,
                           zs_stream *stream)
{
    if (bytes && dst != src)
        memmove(dst, src, bytes);
    return ZS_OK;
}

static zs_status host_zero(zs_device *device, void *dst, size_t bytes, zs_stream *stream)
{
    if (bytes)
        memset(dst, 0, bytes);
    return ZS_OK;
}

static zs_status host_mem_info(zs_device *device, size_t *free_bytes, size_t *total_bytes)
{
    const long page = sysconf(_SC_PAGESIZE), pages = sysconf(_SC_PHYS_PAGES);
    const long available = sysconf(_SC_AVPHYS_PAGES);
    if (page < 1 || pages < 0 || available < 0)
        return zs_fail(ZS_ERR_INTERNAL, "host: the size of memory is not known: %s",
                       strerror(errno));
    *free_bytes = (size_t)available * (size_t)page;
    *total_bytes = (size_t)pages * (size_t)page;
    return ZS_OK;
}

static void host_close(zs_device *device)
{
    free(device);
}

static const zs_device_ops host_ops = {
    .name = "host",
    .alloc = host_alloc_device,
    .free = host_unmap,
    .host_alloc = host_alloc_host,
    .host_free = host_unmap,
    .stream_open = host_stream_open,
    .stream_wrap = host_stream_wrap,
    .stream_close = host_stream_close,
    .stream_sync = host_stream_sync,
    .event_open = host_event_open,
    .event_close = host_event_close,
    .event_record = host_event_touch,
    .event_wait = host_event_touch,
    .event_sync = host_event_sync,
    .event_done = host_event_done,
    .stream_native = host_stream_native,
    .copy = host_copy,
    .zero = host_zero,
    .mem_info = host_mem_info,
    .close = host_close,
};

zs_status zs_device_open_host(zs_device **out)
{
    *out = calloc(1, sizeof **out);
    if (!*out)
        return zs_fail(ZS_ERR_NOMEM, "host device: out of memory");
    **out = (zs_device){.ops = &host_ops, .host_access = 1};
    return ZS_OK;
}
