/* SPDX-License-Identifier: Apache-2.0 */
/* Devices, errors, and what tests steer and read; see control.h. Relaxed atomics throughout: none
 * of this orders a program's threads. */
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "tests/emu/emu.h"

size_t emu_used(int device);
size_t emu_peak(int device);
void emu_set_capacity(size_t bytes);

void emu_die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("emulated CUDA: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

size_t emu_setting(const char *name, size_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, nullptr, 0) : otherwise;
}

bool emu_dry()
{
    static const bool dry = emu_setting("ZS_EMU_DRY", 0) != 0;
    return dry;
}

/* ---- failures ---- */

static const char *const call_names[EMU_CALLS] = {
    "malloc",      "host_register", "stream",     "event",       "launch",
    "copy",        "memset",        "illegal",    "stream_wait", "event_sync",
    "stream_sync", "nccl",          "nccl_async", "nccl_hang",   "cublas",
};

struct Counter {
    std::atomic<uint64_t> calls, failing; /* the number of the call that fails, 0: none */
};

/* [0]: of all devices together. */
static Counter counters[EMU_CALLS][EMU_MAX_DEVICES + 1];

static Counter &counter(emu_call call, int device)
{
    return counters[call][device == EMU_ANY_DEVICE ? 0 : device + 1];
}

static void fail(emu_call call, int device, uint64_t nth)
{
    Counter &c = counter(call, device);
    c.failing.store(nth ? c.calls.load(std::memory_order_relaxed) + nth : 0,
                    std::memory_order_relaxed);
}

static uint64_t calls(emu_call call, int device)
{
    return counter(call, device).calls.load(std::memory_order_relaxed);
}

/* "malloc@1:3,launch:10" */
static bool read_failures(const char *text)
{
    while (text && *text) {
        const size_t length = strcspn(text, "@:,");
        int call = 0, device = EMU_ANY_DEVICE;
        while (call < EMU_CALLS &&
               (strlen(call_names[call]) != length || strncmp(call_names[call], text, length) != 0))
            call++;
        char *end = const_cast<char *>(text) + length;
        if (*end == '@')
            device = (int)strtol(end + 1, &end, 10);
        if (call == EMU_CALLS || device < EMU_ANY_DEVICE || device >= EMU_MAX_DEVICES ||
            *end != ':')
            emu_die("ZS_EMU_FAIL: '%s' is not WHAT[@DEVICE]:N", text);
        fail((emu_call)call, device, strtoull(end + 1, &end, 10));
        if (*end && *end != ',')
            emu_die("ZS_EMU_FAIL: '%s' is not WHAT[@DEVICE]:N", text);
        text = *end ? end + 1 : end;
    }
    return true;
}

bool emu_fails(emu_call call, int device)
{
    static const bool read = read_failures(getenv("ZS_EMU_FAIL"));
    static const size_t skipped = emu_setting("ZS_EMU_SKIP_WAIT", 0);
    static const bool skip =
        skipped ? (fail(EMU_STREAM_WAIT, EMU_ANY_DEVICE, skipped), true) : false;
    (void)read, (void)skip;
    bool fails = false;
    for (int of : {(int)EMU_ANY_DEVICE, device}) {
        Counter &c = counter(call, of);
        const uint64_t number = c.calls.fetch_add(1, std::memory_order_relaxed) + 1;
        fails |= number == c.failing.load(std::memory_order_relaxed);
    }
    return fails;
}

/* ---- devices ---- */

static thread_local int current_device;
static thread_local cudaError_t last_error;
static std::atomic<int> ended[EMU_MAX_DEVICES];

cudaError_t emu_failed(cudaError_t error)
{
    return last_error = error;
}

int emu_device()
{
    return current_device;
}

cudaError_t emu_sticky(int device)
{
    return (cudaError_t)ended[device].load(std::memory_order_relaxed);
}

void emu_end_device(int device, cudaError_t error)
{
    ended[device].store(error, std::memory_order_relaxed);
}

extern "C" cudaError_t cudaGetDeviceCount(int *count)
{
    static const size_t devices = emu_setting("ZS_EMU_DEVICES", 4);
    if (devices > EMU_MAX_DEVICES)
        emu_die("ZS_EMU_DEVICES is %zu, above %d", devices, (int)EMU_MAX_DEVICES);
    *count = (int)devices;
    return *count ? cudaSuccess : emu_failed(cudaErrorNoDevice);
}

static bool is_there(int device)
{
    int count;
    return cudaGetDeviceCount(&count) == cudaSuccess && device >= 0 && device < count;
}

extern "C" cudaError_t cudaSetDevice(int device)
{
    if (!is_there(device))
        return emu_failed(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

extern "C" cudaError_t cudaGetDevice(int *device)
{
    *device = current_device;
    return cudaSuccess;
}

extern "C" cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    size_t free_bytes;
    if (!is_there(device))
        return emu_failed(cudaErrorInvalidDevice);
    *prop = {};
    snprintf(prop->name, sizeof prop->name, "emulated on the CPU");
    (void)cudaMemGetInfo(&free_bytes, &prop->totalGlobalMem);
    prop->major = 9;
    prop->multiProcessorCount = 4;
    return cudaSuccess;
}

extern "C" cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    if (!is_there(device))
        return emu_failed(cudaErrorInvalidDevice);
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
        *value = 4;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
        *value = 9;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
        *value = 0;
        return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = 227 << 10;
        return cudaSuccess;
    }
    return emu_failed(cudaErrorInvalidValue);
}

/* ---- errors ---- */

extern "C" cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = last_error, of_device = emu_sticky(current_device);
    last_error = cudaSuccess;
    return of_device != cudaSuccess ? of_device : error;
}

extern "C" cudaError_t cudaPeekAtLastError(void)
{
    const cudaError_t of_device = emu_sticky(current_device);
    return of_device != cudaSuccess ? of_device : last_error;
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
};

extern "C" const char *cudaGetErrorName(cudaError_t error)
{
    for (auto &each : errors)
        if (each.error == error)
            return each.name;
    return "unrecognized error code";
}

extern "C" const char *cudaGetErrorString(cudaError_t error)
{
    for (auto &each : errors)
        if (each.error == error)
            return each.text;
    return "unrecognized error code";
}

/* ---- what is counted ---- */

static std::atomic<uint64_t> bytes[EMU_TRAFFICS];
static std::atomic<long> objects[EMU_OBJECTS];

void emu_count_bytes(emu_traffic traffic, size_t count)
{
    bytes[traffic].fetch_add(count, std::memory_order_relaxed);
}

void emu_object_count(emu_object object, int change)
{
    objects[object].fetch_add(change, std::memory_order_relaxed);
}

static uint64_t get_bytes(emu_traffic traffic)
{
    return bytes[traffic].load(std::memory_order_relaxed);
}

static size_t open_objects()
{
    size_t sum = 0;
    for (auto &each : objects)
        sum += (size_t)each.load(std::memory_order_relaxed);
    return sum;
}

/* At the end of the process. */
__attribute__((destructor)) static void report_leaks()
{
    if (!emu_setting("ZS_EMU_LEAKS", 0) || !open_objects())
        return;
    const char *const names[EMU_OBJECTS] = {"allocations", "pinned ranges", "streams",
                                            "events",      "communicators", "cuBLAS handles"};
    fputs("emulated CUDA: left open at the end:", stderr);
    for (int i = 0; i < EMU_OBJECTS; i++)
        if (objects[i].load(std::memory_order_relaxed))
            fprintf(stderr, " %ld %s", objects[i].load(std::memory_order_relaxed), names[i]);
    fputc('\n', stderr);
    fflush(nullptr);
    _exit(EMU_LEAK_EXIT);
}

extern "C" __attribute__((visibility("default"))) const emu_control emu_control_table = {
    fail, calls, get_bytes, emu_used, emu_peak, emu_set_capacity, open_objects,
};
