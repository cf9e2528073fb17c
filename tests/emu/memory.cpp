/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory and pinned memory of the emulation; see emu.h. Compiled without sanitizers, and
 * with a lock that they do not see: the tables are no order between a program's threads. */
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <sched.h>
#include <sys/mman.h>

#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#endif

#include "tests/emu/emu.h"

namespace
{
constexpr size_t PAGE = 4096;
constexpr size_t ALIGNMENT = 256; /* CUDA's */
constexpr size_t LEAST_WINDOW = (size_t)64 << 30;

struct Allocation {
    size_t bytes;
    int device;
    bool pinned; /* host memory */
};

struct Guard {
    static std::atomic_flag flag;
    Guard()
    {
        while (flag.test_and_set(std::memory_order_acquire))
            sched_yield();
    }
    ~Guard()
    {
        flag.clear(std::memory_order_release);
    }
};
std::atomic_flag Guard::flag = ATOMIC_FLAG_INIT;

/* A half of window_bytes is the window, the other its twin. Ranges are never handed out again, so
 * that a use after free stays one. */
size_t window_bytes, window_used, capacity_bytes;
char *window, *twin;
std::map<char *, Allocation> *live;
size_t used[EMU_MAX_DEVICES], peak[EMU_MAX_DEVICES];

void map_window()
{
    int devices;
    if (cudaGetDeviceCount(&devices) != cudaSuccess)
        devices = 1;
    capacity_bytes = emu_setting("ZS_EMU_MEMORY", (size_t)1 << 30);
    window_bytes = std::max(LEAST_WINDOW, capacity_bytes * 2 * (size_t)devices);
    void *ptr = mmap(nullptr, 2 * window_bytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (ptr == MAP_FAILED)
        emu_die("cannot map the window of device memory");
    window = (char *)ptr;
    twin = window + window_bytes;
    live = new std::map<char *, Allocation>;
}

void prepare()
{
    static const bool mapped = (map_window(), true);
    (void)mapped;
}

/* The allocation that holds ptr. Device memory may end there: kernels get the ends of arrays. */
const std::pair<char *const, Allocation> *find(const void *ptr)
{
    auto after = live->upper_bound((char *)ptr);
    if (after == live->begin())
        return nullptr;
    --after;
    const char *end = after->first + after->second.bytes + !after->second.pinned;
    return (const char *)ptr < end ? &*after : nullptr;
}

char *twin_of(const void *ptr)
{
    return twin + ((const char *)ptr - window);
}

bool in(const char *start, const void *ptr)
{
    return (const char *)ptr >= start && (const char *)ptr < start + window_bytes;
}
} // namespace

bool emu_is_device(const void *ptr)
{
    prepare();
    return in(window, ptr);
}

static void *reach(const void *ptr, size_t bytes, bool any_device, const char *what)
{
    if (!ptr)
        return nullptr;
    const bool device = emu_is_device(ptr);
    Guard guard;
    auto found = find(ptr);
    if (!found && !device)
        emu_die("%s got host memory that is not pinned (%p)", what, ptr);
    if (!found)
        emu_die("%s got device memory that was freed or never allocated", what);
    const char *end = found->first + found->second.bytes;
    if ((size_t)(end - (const char *)ptr) < bytes)
        emu_die("%s of %zu bytes runs %zu past the end of an allocation of %zu", what, bytes,
                bytes - (size_t)(end - (const char *)ptr), found->second.bytes);
    if (device && !any_device && found->second.device != emu_device())
        emu_die("%s on device %d got memory of device %d", what, emu_device(),
                found->second.device);
    return device ? twin_of(ptr) : (void *)ptr;
}

void *emu_pointer(const void *ptr)
{
    return reach(ptr, 0, false, "a kernel");
}

void *emu_range(const void *ptr, size_t bytes, const char *what)
{
    return reach(ptr, bytes, true, what);
}

void *emu_pointer_in_memory(const void *ptr)
{
    return emu_is_device(ptr) ? twin_of(ptr) : (void *)ptr;
}

size_t emu_used(int device)
{
    return used[device];
}

size_t emu_peak(int device)
{
    return peak[device];
}

void emu_set_capacity(size_t bytes)
{
    prepare();
    capacity_bytes = bytes;
}

extern "C" cudaError_t cudaMalloc(void **ptr, size_t bytes)
{
    const int device = emu_device();
    if (emu_sticky(device) != cudaSuccess)
        return emu_failed(emu_sticky(device));
    if (emu_fails(EMU_MALLOC, device))
        return emu_failed(cudaErrorMemoryAllocation);
    if (!bytes) {
        *ptr = nullptr;
        return cudaSuccess;
    }
    prepare();
    Guard guard;
    if (bytes > capacity_bytes || used[device] > capacity_bytes - bytes)
        return emu_failed(cudaErrorMemoryAllocation);
    /* Up to the end of a page, behind which none can be touched. */
    const size_t rounded = (bytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
    const size_t pages = (rounded + PAGE - 1) & ~(PAGE - 1);
    if (pages + PAGE > window_bytes - window_used)
        emu_die("the window of device memory is used up: raise ZS_EMU_MEMORY");
    char *out = window + window_used + pages - rounded, *real = twin + window_used;
    if (mprotect(real, pages, PROT_READ | PROT_WRITE) != 0)
        emu_die("no memory for the device's");
    window_used += pages + PAGE;
    if (!emu_dry())
        memset(real, 0xff, pages); /* fresh memory is NaN */
#ifdef EMU_ASAN
    __asan_poison_memory_region(real, pages);
    __asan_unpoison_memory_region(twin_of(out), bytes);
#endif
    (*live)[out] = {bytes, device, false};
    used[device] += bytes;
    peak[device] = std::max(peak[device], used[device]);
    emu_object_count(EMU_ALLOCATIONS, 1);
    *ptr = out;
    return cudaSuccess;
}

extern "C" cudaError_t cudaFree(void *ptr)
{
    if (!ptr)
        return cudaSuccess;
    int device;
    prepare();
    {
        Guard guard;
        auto found = live->find((char *)ptr);
        if (found == live->end() || found->second.pinned)
            emu_die("cudaFree of a pointer that cudaMalloc did not give, or of a freed one");
        device = found->second.device;
    }
    emu_synchronize(device);
    Guard guard;
    auto found = live->find((char *)ptr);
    used[device] -= found->second.bytes;
    char *first = (char *)((uintptr_t)twin_of(ptr) & ~(PAGE - 1));
    const size_t pages =
        (size_t)(twin_of(ptr) + found->second.bytes - first + PAGE - 1) & ~(PAGE - 1);
    madvise(first, pages, MADV_DONTNEED);
    mprotect(first, pages, PROT_NONE);
    live->erase(found);
    emu_object_count(EMU_ALLOCATIONS, -1);
    return emu_sticky(device) == cudaSuccess ? cudaSuccess : emu_failed(emu_sticky(device));
}

extern "C" cudaError_t cudaHostRegister(void *ptr, size_t bytes, unsigned flags)
{
    if (emu_sticky(emu_device()) != cudaSuccess)
        return emu_failed(emu_sticky(emu_device()));
    if (emu_fails(EMU_HOST_REGISTER, emu_device()))
        return emu_failed(cudaErrorMemoryAllocation);
    if (!bytes || !ptr)
        return emu_failed(cudaErrorInvalidValue);
    if (!(flags & cudaHostRegisterPortable) || !(flags & cudaHostRegisterMapped))
        emu_die("cudaHostRegister without portable and mapped: other devices and kernels could "
                "not use the memory");
    prepare();
    Guard guard;
    auto next = live->lower_bound((char *)ptr);
    auto found = find(ptr);
    if ((next != live->end() && next->first < (char *)ptr + bytes) ||
        (found && found->first + found->second.bytes > (char *)ptr))
        return emu_failed(cudaErrorHostMemoryAlreadyRegistered);
    (*live)[(char *)ptr] = {bytes, 0, true};
    emu_object_count(EMU_PINNED, 1);
    return cudaSuccess;
}

extern "C" cudaError_t cudaHostUnregister(void *ptr)
{
    emu_synchronize(emu_device());
    prepare();
    Guard guard;
    auto found = live->find((char *)ptr);
    if (found == live->end() || !found->second.pinned)
        return emu_failed(cudaErrorHostMemoryNotRegistered);
    live->erase(found);
    emu_object_count(EMU_PINNED, -1);
    return cudaSuccess;
}

extern "C" cudaError_t cudaHostGetDevicePointer(void **out, void *ptr, unsigned)
{
    prepare();
    Guard guard;
    auto found = find(ptr);
    if (!found || !found->second.pinned)
        return emu_failed(cudaErrorInvalidValue);
    *out = ptr;
    return cudaSuccess;
}

extern "C" cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    const int device = emu_device();
    if (emu_sticky(device) != cudaSuccess)
        return emu_failed(emu_sticky(device));
    prepare();
    Guard guard;
    *free_bytes = capacity_bytes > used[device] ? capacity_bytes - used[device] : 0;
    *total = capacity_bytes;
    return cudaSuccess;
}

extern "C" cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *ptr)
{
    prepare();
    Guard guard;
    auto found = find(ptr);
    *out = {};
    out->type = !found                 ? cudaMemoryTypeUnregistered
                : found->second.pinned ? cudaMemoryTypeHost
                                       : cudaMemoryTypeDevice;
    out->device = found ? found->second.device : -2;
    out->devicePointer = found ? (void *)ptr : nullptr;
    out->hostPointer = found && found->second.pinned ? (void *)ptr : nullptr;
    return cudaSuccess;
}
