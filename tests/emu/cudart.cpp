/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA's run time on the CPU; see emu.h. Environment: ZS_EMU_MEMORY (bytes of a device, 1 GiB),
 * ZS_EMU_DEVICES (4), ZS_EMU_JITTER (each operation is late by up to that many microseconds). */
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <semaphore.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "tests/emu/emu.h"

void emu_die(const char *what)
{
    fprintf(stderr, "emulated CUDA: %s\n", what);
    abort();
}

static size_t setting(const char *name, size_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, nullptr, 0) : otherwise;
}

static thread_local int current_device;
static thread_local cudaError_t last_error;

static cudaError_t failed(cudaError_t error)
{
    return last_error = error;
}

/* ---- devices ---- */

static int device_count()
{
    static const int count = (int)setting("ZS_EMU_DEVICES", 4);
    return count;
}

extern "C" cudaError_t cudaGetDeviceCount(int *count)
{
    *count = device_count();
    return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}

extern "C" cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= device_count())
        return failed(cudaErrorInvalidDevice);
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
    static const size_t bytes = setting("ZS_EMU_MEMORY", (size_t)1 << 30);
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

static bool is_device(const void *ptr)
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
    if (is_device(ptr))
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
        return failed(cudaErrorMemoryAllocation);
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

static void synchronize_all();

extern "C" cudaError_t cudaFree(void *ptr)
{
    if (!ptr)
        return cudaSuccess;
    synchronize_all();
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
        return failed(bytes ? cudaErrorHostMemoryAlreadyRegistered : cudaErrorInvalidValue);
    return cudaSuccess;
}

extern "C" cudaError_t cudaHostUnregister(void *ptr)
{
    synchronize_all();
    std::lock_guard<std::mutex> guard(memory_lock);
    return pinned.erase((char *)ptr) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
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
        return failed(cudaErrorInvalidDevice);
    *prop = {};
    snprintf(prop->name, sizeof prop->name, "emulated on the CPU");
    prop->totalGlobalMem = capacity();
    prop->major = 9;
    prop->multiProcessorCount = 4;
    return cudaSuccess;
}

/* ---- streams and events ---- */

struct Record {
    std::atomic<bool> done{false};
};

static void await(const Record *record)
{
    while (!record->done.load(std::memory_order_acquire))
        usleep(20);
}

struct CUevent_st {
    Record *record = nullptr;
};

struct CUstream_st {
    struct Node {
        std::function<void()> *operation;
        std::atomic<Node *> next{nullptr};
    };
    std::mutex producers;
    sem_t ready;
    Node *first = new Node{nullptr, {nullptr}}, *last = first;
    std::thread thread;

    CUstream_st()
    {
        sem_init(&ready, 0, 0);
        thread = std::thread([this] { run(); });
    }

    void push(std::function<void()> operation)
    {
        std::lock_guard<std::mutex> guard(producers);
        Node *node = new Node{new std::function<void()>(std::move(operation)), {nullptr}};
        last->next.store(node, std::memory_order_release);
        last = node;
        sem_post(&ready);
    }

    /* Nodes are kept: handing them back would be an order between the stream and its producer. */
    void run()
    {
        static const size_t jitter = setting("ZS_EMU_JITTER", 0);
        unsigned state = (unsigned)(size_t)this ^ (unsigned)jitter;
        for (Node *node = first;;) {
            while (sem_wait(&ready)) {
            }
            Node *next;
            while (!(next = node->next.load(std::memory_order_acquire))) {
            }
            node = next;
            if (!*node->operation)
                return;
            if (jitter) {
                state = state * 1664525u + 1013904223u;
                usleep((state >> 16) % (unsigned)jitter);
            }
            (*node->operation)();
            delete node->operation;
        }
    }
};

static std::mutex streams_lock;
static std::vector<cudaStream_t> streams;

void emu_enqueue(cudaStream_t stream, std::function<void()> operation)
{
    if (!stream)
        emu_die("the default stream is used, which waits for all others");
    stream->push(std::move(operation));
}

extern "C" cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    *stream = new CUstream_st;
    std::lock_guard<std::mutex> guard(streams_lock);
    streams.push_back(*stream);
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    Record *record = new Record; /* kept, like nodes */
    emu_enqueue(stream, [record] { record->done.store(true, std::memory_order_release); });
    await(record);
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    cudaStreamSynchronize(stream);
    {
        std::lock_guard<std::mutex> guard(streams_lock);
        for (auto &each : streams)
            if (each == stream) {
                each = streams.back();
                streams.pop_back();
                break;
            }
    }
    stream->push(nullptr);
    stream->thread.join();
    return cudaSuccess;
}

static void synchronize_all()
{
    std::vector<cudaStream_t> all;
    {
        std::lock_guard<std::mutex> guard(streams_lock);
        all = streams;
    }
    for (auto stream : all)
        cudaStreamSynchronize(stream);
}

extern "C" cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    *event = new CUevent_st;
    return cudaSuccess;
}

extern "C" cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

extern "C" cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    Record *record = event->record = new Record;
    emu_enqueue(stream, [record] { record->done.store(true, std::memory_order_release); });
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    Record *record = event->record;
    if (!record)
        emu_die("a stream waits for an event that was never recorded, which does nothing");
    emu_enqueue(stream, [record] { await(record); });
    return cudaSuccess;
}

extern "C" cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    if (event->record)
        await(event->record);
    return cudaSuccess;
}

extern "C" cudaError_t cudaEventQuery(cudaEvent_t event)
{
    return !event->record || event->record->done.load(std::memory_order_acquire)
               ? cudaSuccess
               : failed(cudaErrorNotReady);
}

/* ---- copies ---- */

extern "C" cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes,
                                       enum cudaMemcpyKind kind, cudaStream_t stream)
{
    const bool to_device = is_device(dst), from_device = is_device(src);
    if ((kind == cudaMemcpyHostToDevice && (!to_device || from_device)) ||
        (kind == cudaMemcpyDeviceToHost && (to_device || !from_device)) ||
        (kind == cudaMemcpyDeviceToDevice && (!to_device || !from_device)))
        emu_die("cudaMemcpyAsync: the kind does not match the pointers");
    void *to = emu_pointer(dst), *from = emu_pointer(src);
    emu_enqueue(stream, [=] { memcpy(to, from, bytes); });
    return cudaSuccess;
}

extern "C" cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    void *to = emu_pointer(dst);
    emu_enqueue(stream, [=] { memset(to, value, bytes); });
    return cudaSuccess;
}
