/* SPDX-License-Identifier: Apache-2.0 */
/* Deals a grid's blocks to threads of the CPU. Compiled without sanitizers, like schedule.cpp. */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <sched.h>

#include "tests/emu/worker.h"

/* Workers whose thread has ended, for the next one: a sanitizer's fibers are dear. */
static Worker *idle;
static char idle_lock; /* not a mutex, which sanitizers watch */
static pthread_key_t worker_key;
static pthread_once_t worker_once = PTHREAD_ONCE_INIT;

static void lock_idle()
{
    while (__atomic_test_and_set(&idle_lock, __ATOMIC_ACQUIRE))
        sched_yield();
}

static void unlock_idle()
{
    __atomic_clear(&idle_lock, __ATOMIC_RELEASE);
}

static void give_worker(void *ptr)
{
    Worker *w = (Worker *)ptr;
    lock_idle();
    w->next_idle = idle;
    idle = w;
    unlock_idle();
}

static void make_worker_key()
{
    pthread_key_create(&worker_key, give_worker);
}

static Worker *new_worker()
{
    Worker *w = (Worker *)calloc(1, sizeof *w);
    if (!w)
        abort();
    for (char *&shared : w->shareds)
        if (!(shared = (char *)aligned_alloc(128, SHARED_BYTES / 128 * 128 + 128)))
            abort();
    return w;
}

/* Of this thread of the CPU. */
static Worker *get_worker()
{
    if (!emu_worker) {
        pthread_once(&worker_once, make_worker_key);
        lock_idle();
        emu_worker = idle;
        if (idle)
            idle = idle->next_idle;
        unlock_idle();
        if (!emu_worker)
            emu_worker = new_worker();
        pthread_setspecific(worker_key, emu_worker);
    }
    return emu_worker;
}

struct Order {
    enum { FORWARD, REVERSE, RANDOM } kind;
    unsigned seed;
};

static Order read_order()
{
    const char *text = getenv("ZS_EMU_ORDER");
    if (!text || !strcmp(text, "fwd"))
        return {Order::FORWARD, 0};
    if (!strcmp(text, "rev"))
        return {Order::REVERSE, 0};
    if (!strncmp(text, "rand", 4) && (!text[4] || text[4] == ':'))
        return {Order::RANDOM, text[4] ? (unsigned)strtoul(text + 5, nullptr, 0) : 1};
    fprintf(stderr, "emulated CUDA: ZS_EMU_ORDER is '%s', not fwd, rev or rand[:SEED]\n", text);
    abort();
}

static void choose_order(Worker *w, unsigned salt)
{
    static const Order order = read_order();
    for (int t = 0; t < w->threads; t++)
        w->order[t] = order.kind == Order::REVERSE ? w->threads - 1 - t : t;
    unsigned state = (order.seed + salt) * 2654435761u + 1;
    for (int t = w->threads - 1; t > 0 && order.kind == Order::RANDOM; t--) {
        state = state * 1664525u + 1013904223u;
        const int other = (int)((state >> 8) % (unsigned)(t + 1)), kept = w->order[t];
        w->order[t] = w->order[other];
        w->order[other] = kept;
    }
}

struct Share {
    const emu_grid *grid;
    size_t first, step;
};

static void *run_share(void *ptr)
{
    const Share *share = (const Share *)ptr;
    const emu_grid *grid = share->grid;
    const size_t x = grid->grid.x, y = grid->grid.y, blocks = x * y * grid->grid.z;
    Worker *w = get_worker();
    w->grid = grid;
    w->threads = (int)(grid->block.x * grid->block.y * grid->block.z);
    emu_here.block_dim = grid->block;
    emu_here.grid_dim = grid->grid;
    choose_order(w, (unsigned)share->first);
    w->launches++;
    release(&w->begin);
#ifdef EMU_TSAN
    w->tsan = __tsan_get_current_fiber();
#endif
    for (size_t b = share->first; b < blocks; b += share->step) {
        emu_here.block = {(unsigned)(b % x), (unsigned)(b / x % y), (unsigned)(b / x / y)};
        emu_run_block(w);
    }
    for (auto &lane : w->ends)
        for (auto &point : lane)
            acquire(point);
    /* ThreadSanitizer has some thousands of threads for all streams together. */
    emu_trim_fibers(w, 256 + SPARE_FIBERS);
    return nullptr;
}

void emu_run_grid(const emu_grid &grid)
{
    static const char *text = getenv("ZS_EMU_THREADS");
    static const size_t wanted = text ? strtoul(text, nullptr, 0) : 1;
    const size_t blocks = (size_t)grid.grid.x * grid.grid.y * grid.grid.z;
    size_t count = wanted < blocks ? wanted : blocks;
    count = count < 1 ? 1 : count > MAX_WORKERS ? MAX_WORKERS : count;
    Share shares[MAX_WORKERS];
    pthread_t threads[MAX_WORKERS];
    for (size_t i = 0; i < count; i++)
        shares[i] = {&grid, i, count};
    for (size_t i = 1; i < count; i++)
        if (pthread_create(&threads[i], nullptr, run_share, &shares[i]) != 0)
            abort();
    run_share(&shares[0]);
    for (size_t i = 1; i < count; i++)
        pthread_join(threads[i], nullptr);
}
