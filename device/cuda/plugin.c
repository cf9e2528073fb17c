/* SPDX-License-Identifier: Apache-2.0 */
/* The one entry of libzspill-cuda.so, and its side of messages. */
#include "device/cuda/cuda.h"
#include "kernels/cuda/math.h"
#include "kernels/cuda/nn.h"
#include "zero/nccl/nccl.h"

const zs_cuda_host *zs_cuda_host_table;

zs_status zs_fail(zs_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    zs_cuda_host_table->vfail(status, format, args);
    va_end(args);
    return status;
}

zs_status zs_fail_prefix(zs_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    zs_cuda_host_table->vfail_prefix(status, format, args);
    va_end(args);
    return status;
}

static const zs_cuda_plugin plugin = {
    .version = ZS_CUDA_VERSION,
    .build = ZS_CUDA_BUILD,
    .device_count = zs_cuda_device_count,
    .device_info = zs_cuda_device_info,
    .device_open = zs_cuda_device_open,
    .math_open = zs_cuda_math_open,
    .nn_open = zs_cuda_nn_open,
    .nccl_id = zs_nccl_id,
    .nccl_open = zs_nccl_open,
    .nccl_all_gather = zs_nccl_all_gather,
    .nccl_reduce_scatter = zs_nccl_reduce_scatter,
    .nccl_check = zs_nccl_check,
    .nccl_abort = zs_nccl_abort,
    .nccl_close = zs_nccl_close,
};

const zs_cuda_plugin *zs_cuda_plugin_table(void)
{
    return &plugin;
}

ZS_API const zs_cuda_plugin *zs_cuda_entry_1(const zs_cuda_host *host);

const zs_cuda_plugin *zs_cuda_entry_1(const zs_cuda_host *host)
{
    if (host->version != ZS_CUDA_VERSION)
        return NULL;
    zs_cuda_host_table = host;
    return &plugin;
}
