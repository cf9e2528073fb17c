/* SPDX-License-Identifier: Apache-2.0 */
/* What the harness's ranks do on an accelerator in place of computing: copies on the caller's
 * stream. Nothing waits for it before the end, so that only the engine's own waits order it. */
#ifndef ZS_TESTS_ENGINE_HARNESS_GPU_H
#define ZS_TESTS_ENGINE_HARNESS_GPU_H

#include "device/device.h"
#include "zspill.h"

typedef struct job_gpu job_gpu;

zs_status job_gpu_open(const char *name, int rank, job_gpu **out);
void job_gpu_close(job_gpu **gpu);
zs_device *job_gpu_device(job_gpu *gpu);
/* The stream for zs_engine_config. */
void *job_gpu_stream(job_gpu *gpu);
/* Queues writing bytes to `to` of the device (NULL: to memory of its own). *out: that place. */
zs_status job_gpu_put(job_gpu *gpu, const void *data, size_t bytes, void *to, void **out);
/* Queues reading bytes of device memory; *out is valid after job_gpu_wait. */
zs_status job_gpu_get(job_gpu *gpu, const void *from, size_t bytes, const void **out);
zs_status job_gpu_wait(job_gpu *gpu);
/* Hash of all that was read, in order, after job_gpu_wait. */
uint64_t job_gpu_seen(const job_gpu *gpu);

#endif
