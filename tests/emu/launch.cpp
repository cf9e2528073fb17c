/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of kernels: which ones CUDA refuses, and the way to the stream. */
#include <map>
#include <mutex>

#include "tests/emu/emu.h"
#include "tests/emu/schedule.h"

static std::mutex lock;
/* Bytes of dynamic shared memory. */
static std::map<const void *, size_t> &opted_in = *new std::map<const void *, size_t>;

static size_t shared_limit(const void *kernel)
{
    std::lock_guard<std::mutex> guard(lock);
    auto found = opted_in.find(kernel);
    return found == opted_in.end() ? EMU_DEFAULT_SHARED : found->second;
}

extern "C" cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute,
                                            int value)
{
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
        (size_t)value > EMU_MAX_SHARED)
        return emu_failed(cudaErrorInvalidValue);
    std::lock_guard<std::mutex> guard(lock);
    opted_in[kernel] = (size_t)value > EMU_DEFAULT_SHARED ? (size_t)value : EMU_DEFAULT_SHARED;
    return cudaSuccess;
}

extern "C" cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *kernel)
{
    *out = {};
    out->maxThreadsPerBlock = EMU_MAX_THREADS;
    out->maxDynamicSharedSizeBytes = (int)shared_limit(kernel);
    return cudaSuccess;
}

static cudaError_t check(const emu_launched &launch)
{
    const dim3 grid = launch.grid, block = launch.block;
    const uint64_t threads = (uint64_t)block.x * block.y * block.z;
    const int device = emu_stream_device(launch.stream);
    if (emu_sticky(device) != cudaSuccess)
        return emu_sticky(device);
    if (device != emu_device())
        return cudaErrorInvalidResourceHandle;
    if (!threads || threads > EMU_MAX_THREADS || block.z > 64 || !grid.x || !grid.y || !grid.z ||
        grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    if (launch.shared_bytes > shared_limit(launch.kernel))
        return cudaErrorInvalidValue;
    return emu_fails(EMU_LAUNCH, device) ? cudaErrorLaunchOutOfResources : cudaSuccess;
}

bool emu_launch_allowed(const emu_launched &launch)
{
    const cudaError_t error = check(launch);
    if (error != cudaSuccess)
        emu_failed(error);
    return error == cudaSuccess;
}

void emu_launch_queue(const emu_launched &launch, std::function<void()> thread)
{
    const size_t limit = shared_limit(launch.kernel);
    const int device = emu_stream_device(launch.stream);
    const emu_record record = {
        "kernel",
        emu_fields("\"name\":\"%s\",\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"numbers\":[%s]",
                   launch.name, launch.grid.x, launch.grid.y, launch.grid.z, launch.block.x,
                   launch.block.y, launch.block.z, launch.numbers.c_str())};
    if (emu_fails(EMU_ILLEGAL, device)) {
        emu_enqueue(launch.stream, record,
                    [device] { emu_end_device(device, cudaErrorIllegalAddress); });
        return;
    }
    emu_enqueue(launch.stream, record, [launch, limit, thread] {
        emu_grid grid = {};
        grid.kernel = launch.name;
        grid.grid = launch.grid;
        grid.block = launch.block;
        grid.dynamic_shared = launch.shared_bytes;
        grid.shared_limit = limit;
        grid.thread = [](void *argument) { (*static_cast<std::function<void()> *>(argument))(); };
        grid.argument = const_cast<std::function<void()> *>(&thread);
        emu_run_grid(grid);
    });
}
