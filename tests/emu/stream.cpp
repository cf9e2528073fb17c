/* SPDX-License-Identifier: Apache-2.0 */
/* Streams, events and copies of the emulation; see emu.h. What is queued and recorded is never
 * freed: its way back to an allocator would be an order between threads that CUDA does not promise.
 */
#include <atomic>
#include <climits>
#include <cstring>
#include <linux/futex.h>
#include <mutex>
#include <semaphore.h>
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
};

static void finish(Record *record)
{
    record->done.store(1, std::memory_order_release);
    syscall(SYS_futex, &record->done, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

static void await(Record *record)
{
    while (!record->done.load(std::memory_order_acquire))
        syscall(SYS_futex, &record->done, FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
}

static Record *new_record()
{
    return new (keep(sizeof(Record))) Record;
}

struct CUevent_st {
    Record *record = nullptr;
};

struct CUstream_st {
    struct Node {
        std::function<void()> operation;
        std::atomic<Node *> next{nullptr};
    };
    std::mutex producers;
    sem_t ready;
    Node *first = new_node({}), *last = first;
    std::thread thread;

    static Node *new_node(std::function<void()> operation)
    {
        return new (keep(sizeof(Node))) Node{std::move(operation), {nullptr}};
    }

    CUstream_st()
    {
        sem_init(&ready, 0, 0);
        thread = std::thread([this] { run(); });
    }

    void push(std::function<void()> operation)
    {
        std::lock_guard<std::mutex> guard(producers);
        Node *node = new_node(std::move(operation));
        last->next.store(node, std::memory_order_release);
        last = node;
        sem_post(&ready);
    }

    void run()
    {
        static const size_t jitter = emu_setting("ZS_EMU_JITTER", 0);
        unsigned state = (unsigned)(size_t)this ^ (unsigned)jitter;
        for (Node *node = first;;) {
            while (sem_wait(&ready)) {
            }
            Node *next;
            while (!(next = node->next.load(std::memory_order_acquire))) {
            }
            node = next;
            if (!node->operation)
                return;
            if (jitter) {
                state = state * 1664525u + 1013904223u;
                usleep((state >> 16) % (unsigned)jitter);
            }
            node->operation();
            node->operation = nullptr;
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
    Record *record = new_record();
    emu_enqueue(stream, [record] { finish(record); });
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
    sem_destroy(&stream->ready);
    delete stream;
    return cudaSuccess;
}

void emu_synchronize()
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
    Record *record = event->record = new_record();
    emu_enqueue(stream, [record] { finish(record); });
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
               : emu_failed(cudaErrorNotReady);
}

/* ---- copies ---- */

extern "C" cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes,
                                       enum cudaMemcpyKind kind, cudaStream_t stream)
{
    const bool to_device = emu_is_device(dst), from_device = emu_is_device(src);
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
