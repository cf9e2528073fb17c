/* SPDX-License-Identifier: Apache-2.0 */
/* Streams, events and copies of the emulation; see emu.h. What is queued and recorded is never
 * freed: its way back to an allocator would be an order between threads that CUDA does not promise.
 */
#include <atomic>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <linux/futex.h>
#include <mutex>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "tests/emu/emu.h"

/* Zeros, for ever. */
static void *keep(size_t bytes)
{
    constexpr size_t CHUNK = 1 << 20;
    static thread_local char *chunk;
    static thread_local size_t left;
    bytes = (bytes + 15) & ~(size_t)15;
    if (bytes > left) {
        void *ptr =
            mmap(nullptr, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (ptr == MAP_FAILED)
            emu_die("no memory for a stream's operations");
        chunk = (char *)ptr;
        left = CHUNK;
    }
    char *out = chunk;
    chunk += bytes;
    left -= bytes;
    return out;
}

/* ---- streams and events ---- */

/* Not a condition variable, whose mutex orders both ways. */
struct Record {
    std::atomic<int> done;
    uint64_t number;
};

static void wake(std::atomic<int> *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

static void sleep_while(std::atomic<int> *word, int value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

static void finish(Record *record)
{
    record->done.store(1, std::memory_order_release);
    wake(&record->done);
}

static void await(Record *record)
{
    while (!record->done.load(std::memory_order_acquire))
        sleep_while(&record->done, 0);
}

static Record *new_record()
{
    static std::atomic<uint64_t> made;
    Record *record = new (keep(sizeof(Record))) Record;
    record->number = made.fetch_add(1, std::memory_order_relaxed) + 1;
    return record;
}

struct CUevent_st {
    int device;
    Record *record;
};

struct CUstream_st {
    struct Node {
        std::function<void()> run;
        bool always; /* also on a device that ended, and when dry */
        std::atomic<Node *> next;
    };
    int device;
    uint64_t number;
    std::mutex producers;
    std::atomic<int> pushed{0}; /* not a semaphore: that would order later pushes before this one */
    Node *first = new_node({}, true), *last = first;
    std::thread thread;

    static Node *new_node(std::function<void()> run, bool always)
    {
        return new (keep(sizeof(Node))) Node{std::move(run), always, {nullptr}};
    }

    CUstream_st(int device, uint64_t number) : device(device), number(number)
    {
        thread = std::thread([this] { work(); });
    }

    /* No run: the end. */
    void push(std::function<void()> run, bool always)
    {
        std::lock_guard<std::mutex> guard(producers);
        Node *node = new_node(std::move(run), always);
        last->next.store(node, std::memory_order_release);
        last = node;
        pushed.fetch_add(1, std::memory_order_relaxed);
        wake(&pushed);
    }

    Node *next_of(Node *node)
    {
        for (;;) {
            const int seen = pushed.load(std::memory_order_relaxed);
            std::atomic_signal_fence(std::memory_order_seq_cst);
            if (Node *next = node->next.load(std::memory_order_acquire))
                return next;
            sleep_while(&pushed, seen);
        }
    }

    void work()
    {
        static const size_t jitter = emu_setting("ZS_EMU_JITTER", 0);
        unsigned state = (unsigned)(number * 7919 + jitter);
        for (Node *node = first;;) {
            node = next_of(node);
            if (!node->run)
                return;
            if (jitter) {
                state = state * 1664525u + 1013904223u;
                usleep((state >> 16) % (unsigned)jitter);
            }
            if (node->always || (!emu_dry() && emu_sticky(device) == cudaSuccess))
                node->run();
            node->run = nullptr;
        }
    }
};

static std::mutex streams_lock;
static std::vector<cudaStream_t> &streams = *new std::vector<cudaStream_t>;

/* ---- what is queued ---- */

std::string emu_fields(const char *format, ...)
{
    char text[1024];
    if (!emu_recording())
        return {};
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return text;
}

static void check(cudaStream_t stream)
{
    if (!stream)
        emu_die("the default stream is used, which waits for all others");
}

void emu_enqueue(cudaStream_t stream, const emu_record &record, std::function<void()> run)
{
    check(stream);
    if (emu_recording())
        emu_write_record(stream->device, stream->number, record);
    stream->push(std::move(run), false);
}

int emu_stream_device(cudaStream_t stream)
{
    check(stream);
    return stream->device;
}

uint64_t emu_stream_number(cudaStream_t stream)
{
    check(stream);
    return stream->number;
}

/* What is done when the stream has come this far. */
static Record *mark(cudaStream_t stream)
{
    Record *record = new_record();
    stream->push([record] { finish(record); }, true);
    return record;
}

void emu_synchronize(int device)
{
    std::vector<Record *> marks;
    {
        /* Others may close their streams meanwhile. */
        std::lock_guard<std::mutex> guard(streams_lock);
        for (auto stream : streams)
            if (stream->device == device)
                marks.push_back(mark(stream));
    }
    for (Record *each : marks)
        await(each);
}

static cudaError_t of_device(int device)
{
    const cudaError_t error = emu_sticky(device);
    return error == cudaSuccess ? cudaSuccess : emu_failed(error);
}

/* ---- streams ---- */

extern "C" cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int)
{
    static std::atomic<uint64_t> made;
    const int device = emu_device();
    if (of_device(device) != cudaSuccess)
        return of_device(device);
    if (emu_fails(EMU_STREAM, device))
        return emu_failed(cudaErrorMemoryAllocation);
    if (flags != cudaStreamNonBlocking)
        emu_die("a stream without cudaStreamNonBlocking waits for the default stream");
    *stream = new CUstream_st(device, made.fetch_add(1, std::memory_order_relaxed) + 1);
    emu_object_count(EMU_STREAMS, 1);
    std::lock_guard<std::mutex> guard(streams_lock);
    streams.push_back(*stream);
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

extern "C" cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    check(stream);
    if (emu_recording())
        emu_write_record(
            stream->device, 0,
            {"stream_sync", emu_fields("\"of\":%llu", (unsigned long long)stream->number)});
    if (!emu_fails(EMU_STREAM_SYNC, stream->device))
        await(mark(stream));
    return of_device(stream->device);
}

extern "C" cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    check(stream);
    {
        std::lock_guard<std::mutex> guard(streams_lock);
        for (auto &each : streams)
            if (each == stream) {
                each = streams.back();
                streams.pop_back();
                break;
            }
    }
    const int device = stream->device;
    stream->push(nullptr, true);
    stream->thread.join();
    delete stream;
    emu_object_count(EMU_STREAMS, -1);
    return of_device(device);
}

extern "C" cudaError_t cudaDeviceSynchronize(void)
{
    emu_synchronize(emu_device());
    return of_device(emu_device());
}

/* ---- events ---- */

extern "C" cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    const int device = emu_device();
    if (of_device(device) != cudaSuccess)
        return of_device(device);
    if (emu_fails(EMU_EVENT, device))
        return emu_failed(cudaErrorMemoryAllocation);
    *event = new CUevent_st{device, nullptr};
    emu_object_count(EMU_EVENTS, 1);
    return cudaSuccess;
}

extern "C" cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    const int device = event->device;
    delete event;
    emu_object_count(EMU_EVENTS, -1);
    return of_device(device);
}

static std::string event_field(const Record *record)
{
    return emu_fields("\"event\":%llu", (unsigned long long)record->number);
}

extern "C" cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    check(stream);
    if (of_device(stream->device) != cudaSuccess)
        return of_device(stream->device);
    if (event->device != stream->device)
        return emu_failed(cudaErrorInvalidResourceHandle);
    Record *record = event->record = new_record();
    if (emu_recording())
        emu_write_record(stream->device, stream->number, {"record", event_field(record)});
    stream->push([record] { finish(record); }, true);
    return cudaSuccess;
}

extern "C" cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    check(stream);
    if (of_device(stream->device) != cudaSuccess)
        return of_device(stream->device);
    Record *record = event->record;
    if (!record)
        emu_die("a stream waits for an event that was never recorded, which does nothing");
    if (emu_fails(EMU_STREAM_WAIT, stream->device))
        return cudaSuccess;
    if (emu_recording())
        emu_write_record(stream->device, stream->number, {"wait", event_field(record)});
    stream->push([record] { await(record); }, true);
    return cudaSuccess;
}

extern "C" cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    Record *record = event->record;
    if (!record)
        return of_device(event->device);
    if (emu_recording())
        emu_write_record(event->device, 0, {"event_sync", event_field(record)});
    if (!emu_fails(EMU_EVENT_SYNC, event->device))
        await(record);
    return of_device(event->device);
}

extern "C" cudaError_t cudaEventQuery(cudaEvent_t event)
{
    if (of_device(event->device) != cudaSuccess)
        return of_device(event->device);
    return !event->record || event->record->done.load(std::memory_order_acquire)
               ? cudaSuccess
               : emu_failed(cudaErrorNotReady);
}

/* ---- copies ---- */

/* To or from bytes of device memory or pinned memory. */
static cudaError_t queue_copy(void *dst, const void *src, size_t bytes, cudaStream_t stream)
{
    const bool to_device = emu_is_device(dst), from_device = emu_is_device(src);
    void *to = emu_range(dst, bytes, "the destination of cudaMemcpyAsync");
    const void *from = emu_range(src, bytes, "the source of cudaMemcpyAsync");
    const int device = emu_stream_device(stream);
    if (of_device(device) != cudaSuccess)
        return of_device(device);
    if (emu_fails(EMU_COPY, device))
        return emu_failed(cudaErrorInvalidValue);
    emu_count_bytes(to_device && from_device ? EMU_ON_DEVICE
                    : to_device              ? EMU_TO_DEVICE
                                             : EMU_TO_HOST,
                    bytes);
    emu_enqueue(stream,
                {"copy", emu_fields("\"kind\":\"%c2%c\",\"bytes\":%zu", from_device ? 'd' : 'h',
                                    to_device ? 'd' : 'h', bytes)},
                [=] { memmove(to, from, bytes); });
    return cudaSuccess;
}

extern "C" cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes,
                                       enum cudaMemcpyKind kind, cudaStream_t stream)
{
    const bool to_device = emu_is_device(dst), from_device = emu_is_device(src);
    if (kind != cudaMemcpyDefault &&
        (to_device != (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) ||
         from_device != (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice)))
        emu_die("cudaMemcpyAsync: the kind does not match the pointers");
    return bytes ? queue_copy(dst, src, bytes, stream) : cudaSuccess;
}

extern "C" cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    const int device = emu_stream_device(stream);
    void *to = emu_range(dst, bytes, "cudaMemsetAsync");
    if (of_device(device) != cudaSuccess)
        return of_device(device);
    if (device != emu_device())
        return emu_failed(cudaErrorInvalidResourceHandle);
    if (emu_fails(EMU_MEMSET, device))
        return emu_failed(cudaErrorInvalidValue);
    emu_count_bytes(EMU_CLEARED, bytes);
    emu_enqueue(stream, {"memset", emu_fields("\"bytes\":%zu", bytes)},
                [=] { memset(to, value, bytes); });
    return cudaSuccess;
}
