/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/engine/harness_gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

enum { ARENA = 3 << 20, READS = 8192 };

/* Each put and get has memory of its own: what is used again would have to be waited for. */
struct job_gpu {
    zs_device *device;
    zs_stream *stream;
    char *host, *memory;
    size_t host_used, memory_used;
    struct {
        const void *at;
        size_t bytes;
    } reads[READS];
    size_t read_count;
};

zs_status job_gpu_open(const char *name, int rank, job_gpu **out)
{
    zs_status status;
    char full[64];
    job_gpu *gpu = calloc(1, sizeof *gpu);
    snprintf(full, sizeof full, "%s:%d", name, rank);
    ZS_TRY(zs_device_open(full, &gpu->device));
    const zs_device_ops *ops = gpu->device->ops;
    ZS_TRY(ops->stream_open(gpu->device, &gpu->stream));
    ZS_TRY(ops->host_alloc(gpu->device, ARENA, (void **)&gpu->host));
    ZS_TRY(ops->alloc(gpu->device, ARENA, (void **)&gpu->memory));
    *out = gpu;
    return ZS_OK;
fail:
    job_gpu_close(&gpu);
    *out = NULL;
    return status;
}

void job_gpu_close(job_gpu **out)
{
    job_gpu *gpu = *out;
    *out = NULL;
    if (!gpu)
        return;
    if (gpu->device) {
        const zs_device_ops *ops = gpu->device->ops;
        ops->stream_close(gpu->device, gpu->stream);
        ops->free(gpu->device, gpu->memory, ARENA);
        ops->host_free(gpu->device, gpu->host, ARENA);
    }
    zs_device_close(&gpu->device);
    free(gpu);
}

zs_device *job_gpu_device(job_gpu *gpu)
{
    return gpu->device;
}

void *job_gpu_stream(job_gpu *gpu)
{
    return gpu->device->ops->stream_native(gpu->device, gpu->stream);
}

static void *take(char *arena, size_t *used, size_t bytes)
{
    const size_t at = *used;
    *used += zs_round_up(bytes + 1, 256);
    if (*used > ARENA) {
        fprintf(stderr, "the harness needs a larger arena\n");
        abort();
    }
    return arena + at;
}

zs_status job_gpu_put(job_gpu *gpu, const void *data, size_t bytes, void *to, void **out)
{
    void *from = take(gpu->host, &gpu->host_used, bytes);
    memcpy(from, data, bytes);
    *out = to ? to : take(gpu->memory, &gpu->memory_used, bytes);
    return gpu->device->ops->copy(gpu->device, *out, from, bytes, gpu->stream);
}

zs_status job_gpu_get(job_gpu *gpu, const void *from, size_t bytes, const void **out)
{
    void *to = take(gpu->host, &gpu->host_used, bytes);
    *out = to;
    if (gpu->read_count == READS)
        abort();
    gpu->reads[gpu->read_count].at = to;
    gpu->reads[gpu->read_count++].bytes = bytes;
    return gpu->device->ops->copy(gpu->device, to, from, bytes, gpu->stream);
}

zs_status job_gpu_wait(job_gpu *gpu)
{
    return gpu->device->ops->stream_sync(gpu->device, gpu->stream);
}

uint64_t job_gpu_seen(const job_gpu *gpu)
{
    uint64_t h = ZS_HASH_START;
    for (size_t i = 0; i < gpu->read_count; i++)
        h = zs_hash_bytes(h, gpu->reads[i].at, gpu->reads[i].bytes);
    return h;
}
