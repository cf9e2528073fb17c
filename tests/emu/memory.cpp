/* SPDX-License-Identifier: Apache-2.0 */
/* Devices and memory of the emulation; see emu.h. */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>

#include "tests/emu/emu.h"

void emu_die(const char *what)
{
    fprintf(stderr, "emulated CUDA: %s\n", what);
    abort();
}

size_t emu_setting(const char *name, size_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, nullptr, 0) : otherwise;
}

static thread_local int current_device;
static thread_local cudaError_t last_error;

cudaError_t emu_failed(cudaError_t error)
{
    return last_error = error;
}

/* ---- devices ---- */

static int device_count()
{
    static const int count = (int)emu_setting("ZS_EMU_DEVICES", 4);
    return count;
}

extern "C" cudaError_t cudaGetDeviceCount(int *count)
{
    *count = device_count();
    return *count ? cudaSuccess : emu_failed(cudaErrorNoDevice);
}

extern "C" cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= device_count())
        return emu_failed(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

extern "C" cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

extern "C" const char *cudaGetErrorName(cudaError_t error)
{
    switch (error) {
    case cudaSuccess:
        return "cudaSuccess";
    case cudaErrorInvalidValue:
        return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
        return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
        return "cudaErrorInvalidConfiguration";
    case cudaErrorNoDevice:
        return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice:
        return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
        return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
        return "cudaErrorNotReady";
    case cudaErrorIllegalAddress:
        return "cudaErrorIllegalAddress";
    case cudaErrorHostMemoryAlreadyRegistered:
        return "cudaErrorHostMemoryAlreadyRegistered";
    case cudaErrorHostMemoryNotRegistered:
        return "cudaErrorHostMemoryNotRegistered";
    case cudaErrorLaunchFailure:
        return "cudaErrorLaunchFailure";
    }
    return "cudaErrorUnknown";
}

extern "C" const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the emulation";
}

/* ---- memory ---- */

static size_t capacity()
{
    static const size_t bytes = emu_setting("ZS_EMU_MEMORY", (size_t)1 << 30);
    return bytes;
}

struct Allocation {
    size_t bytes;
    int device;
};

static std::mutex memory_lock;
static std::map<char *, Allocation> allocations;
static std::map<char *, size_t> pinned;
static size_t window_used, peak;
static std::map<int, size_t> used;

/* Ranges are never handed out again, so that a use after free stays one. */
static size_t window_bytes()
{
    return capacity() * 4 * (size_t)device_count();
}

static char *map_window(int protection)
{
    void *ptr = mmap(nullptr, window_bytes(), protection,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (ptr == MAP_FAILED)
        emu_die("cannot map the window of device memory");
    return (char *)ptr;
}

static char *window()
{
    static char *ptr = map_window(PROT_NONE);
    return ptr;
}

static char *twin()
{
    static char *ptr = map_window(PROT_READ | PROT_WRITE);
    return ptr;
}

bool emu_is_device(const void *ptr)
{
    return (const char *)ptr >= window() && (const char *)ptr < window() + window_bytes();
}

static bool is_pinned(const void *ptr)
{
    std::lock_guard<std::mutex> guard(memory_lock);
    auto after = pinned.upper_bound((char *)ptr);
    if (after == pinned.begin())
        return false;
    --after;
    return (const char *)ptr < after->first + after->second;
}

void *emu_pointer(const void *ptr)
{
    if (!ptr)
        return nullptr;
    if (emu_is_device(ptr))
        return twin() + ((const char *)ptr - window());
    if (!is_pinned(ptr))
        emu_die("a kernel or copy got host memory that is not pinned");
    return (void *)ptr;
}

size_t emu_peak_bytes()
{
    std::lock_guard<std::mutex> guard(memory_lock);
    return peak;
}

extern "C" cudaError_t cudaMalloc(void **ptr, size_t bytes)
{
    std::lock_guard<std::mutex> guard(memory_lock);
    if (bytes > capacity() || used[current_device] > capacity() - bytes)
        return emu_failed(cudaErrorMemoryAllocation);
    /* A page behind each, and room to find an overrun in. */
    size_t offset = window_used;
    window_used += (bytes + 4096 + 255) & ~(size_t)255;
    if (window_used > window_bytes())
        emu_die("the window of device memory is used up: raise ZS_EMU_MEMORY");
    *ptr = window() + offset;
    allocations[(char *)*ptr] = {bytes, current_device};
    used[current_device] += bytes;
    size_t total = 0;
    for (auto &each : used)
        total += each.second;
    peak = total > peak ? total : peak;
    memset(twin() + offset, 0xff, bytes); /* fresh memory is NaN */
    return cudaSuccess;
}

extern "C" cudaError_t cudaFree(void *ptr)
{
    if (!ptr)
        return cudaSuccess;
    emu_synchronize();
    std::lock_guard<std::mutex> guard(memory_lock);
    auto found = allocations.find((char *)ptr);
    if (found == allocations.end())
        emu_die("cudaFree of a pointer that cudaMalloc did not give");
    used[found->second.device] -= found->second.bytes;
    char *real = twin() + ((char *)ptr - window());
    memset(real, 0xff, found->second.bytes);
    allocations.erase(found);
    return cudaSuccess;
}

extern "C" cudaError_t cudaHostRegister(void *ptr, size_t bytes, unsigned)
{
    std::lock_guard<std::mutex> guard(memory_lock);
    if (!bytes || !pinned.emplace((char *)ptr, bytes).second)
        return emu_failed(bytes ? cudaErrorHostMemoryAlreadyRegistered : cudaErrorInvalidValue);
    return cudaSuccess;
}

extern "C" cudaError_t cudaHostUnregister(void *ptr)
{
    emu_synchronize();
    std::lock_guard<std::mutex> guard(memory_lock);
    return pinned.erase((char *)ptr) ? cudaSuccess : emu_failed(cudaErrorHostMemoryNotRegistered);
}

extern "C" cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    std::lock_guard<std::mutex> guard(memory_lock);
    *free_bytes = capacity() - used[current_device];
    *total = capacity();
    return cudaSuccess;
}

extern "C" cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    if (device < 0 || device >= device_count())
        return emu_failed(cudaErrorInvalidDevice);
    *prop = {};
    snprintf(prop->name, sizeof prop->name, "emulated on the CPU");
    prop->totalGlobalMem = capacity();
    prop->major = 9;
    prop->multiProcessorCount = 4;
    return cudaSuccess;
}
