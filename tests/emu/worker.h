/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the scheduler: schedule.cpp runs a block, grid.cpp gives it blocks. */
#ifndef ZS_EMU_WORKER_H
#define ZS_EMU_WORKER_H

#include "tests/emu/schedule.h"

#ifdef EMU_TSAN
#include <sanitizer/tsan_interface.h>
#endif

constexpr size_t STACK_BYTES = 128 << 10;
constexpr size_t PAGE = 4096;
constexpr size_t RED_ZONE = 64;
constexpr int MAX_SITES = 64;
constexpr size_t SHARED_BYTES = EMU_MAX_SHARED + (MAX_SITES + 1) * RED_ZONE;
constexpr int WARPS = EMU_MAX_THREADS / EMU_WARP;
constexpr int ORDER_POINTS = 1024;
constexpr int SPARE_FIBERS = 8; /* under ThreadSanitizer: the least that take turns */
constexpr size_t MAX_WORKERS = 64;
/* A block has the memory of the one LANES before it, and is ordered after that one only. */
#ifdef EMU_TSAN
constexpr unsigned LANES = 2;
#else
constexpr unsigned LANES = 1;
#endif

struct Fiber {
    void *stack_pointer;
    char *stack;
    void *tsan;
    void *fake_stack;
    Fiber *next_free;
    uint3 thread;
    int linear;
    int line; /* of what it waits in, 0: it does not */
    bool fenced;
    size_t launch; /* of its worker, that it last had a part in */
};

/* Lanes that meet; one for each lowest lane of a mask. Two turns of values: a lane may be at the
 * next meeting while another still reads. */
struct Meeting {
    uint32_t mask, arrived;
    int line, turn;
    void *order[2];
    uint64_t values[2][EMU_WARP];
};

struct Warp {
    uint32_t lanes, exited;
    Meeting meetings[EMU_WARP];
};

/* A thread of the CPU that runs blocks. */
struct Worker {
    const emu_grid *grid;
    int threads, next, done;
    int arrived, line; /* at the block's barrier */
    unsigned turn;
    void *barrier_order[2];
    int order[EMU_MAX_THREADS];
    Fiber *running[EMU_MAX_THREADS]; /* by linear thread index */
    Fiber *ready[EMU_MAX_THREADS];
    int ready_first, ready_count;
    Warp warps[WARPS];
    Fiber *free_first, *free_last;
    int free_count, fibers;
    void *stack_pointer, *tsan, *fake_stack;
    const void *stack_bottom;
    size_t stack_size;
    char *shared; /* of the present block: one of shareds */
    size_t shared_used, static_bytes;
    struct {
        const void *site;
        size_t offset;
    } sites[MAX_SITES];
    int site_count;
    unsigned order_used;
    char order_points[ORDER_POINTS * 8];
    char *shareds[LANES];
    unsigned blocks; /* begun so far */
    size_t launches;
    char begin, ends[LANES][2][8];
    Worker *next_idle;
};

/* Of the present thread. */
extern __thread Worker *emu_worker __attribute__((tls_model("initial-exec")));

void emu_run_block(Worker *w);
/* Keeps that many fibers. */
void emu_trim_fibers(Worker *w, int most);

/* ThreadSanitizer's order between threads. */
static inline void release(void *point)
{
#ifdef EMU_TSAN
    __tsan_release(point);
#endif
    (void)point;
}

static inline void acquire(void *point)
{
#ifdef EMU_TSAN
    __tsan_acquire(point);
#endif
    (void)point;
}

#endif
