/* SPDX-License-Identifier: Apache-2.0 */
/* See schedule.h. Compiled without sanitizers: nothing here may be an inline function of a library
 * that instrumented code uses too. EMU_TSAN, EMU_ASAN: what the rest is compiled with. */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>

#include "tests/emu/worker.h"

#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

__thread emu_place emu_here;

__thread Worker *emu_worker;
static __thread Fiber *current __attribute__((tls_model("initial-exec")));

extern "C" void emu_switch(void **save, void *to);
asm(".text\n"
    ".globl emu_switch\n"
    ".hidden emu_switch\n"
    "emu_switch:\n"
    "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
    "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n"
    "ret\n");

void emu_kernel_die(const char *what, int line, int other_line)
{
    const Worker *w = emu_worker;
    fprintf(stderr, "emulated CUDA: kernel %s: %s", w->grid->kernel, what);
    if (line)
        fprintf(stderr, ", line %d", line);
    if (other_line)
        fprintf(stderr, " (and line %d)", other_line);
    fprintf(stderr, ", block (%u,%u,%u)", emu_here.block.x, emu_here.block.y, emu_here.block.z);
    if (current)
        fprintf(stderr, ", thread (%u,%u,%u)", current->thread.x, current->thread.y,
                current->thread.z);
    fprintf(stderr, "; of %d threads %d have ended, %d are at the block's barrier\n", w->threads,
            w->done, w->arrived);
    abort();
}

/* ---- what the sanitizers are told ---- */

/* A fresh one for each barrier, in turn, so that a block's barriers do not order the next one's. */
static void *order_point(Worker *w)
{
    return &w->order_points[w->order_used++ % ORDER_POINTS * 8];
}

/* What the threads of the present block release when they end, or of the one before it there. */
static void *end_point(Worker *w, bool before)
{
    return w->ends[w->blocks % LANES][w->blocks / LANES % 2 ^ before];
}

static void poison(char *ptr, size_t bytes)
{
#ifdef EMU_ASAN
    __asan_poison_memory_region(ptr, bytes);
#endif
    (void)ptr, (void)bytes;
}

static void unpoison(char *ptr, size_t bytes)
{
#ifdef EMU_ASAN
    __asan_unpoison_memory_region(ptr, bytes);
#endif
    (void)ptr, (void)bytes;
}

/* Not memset, which sanitizers watch. */
static void fill_nan(char *ptr, size_t bytes)
{
    for (; bytes >= 8; ptr += 8, bytes -= 8)
        *(volatile uint64_t *)ptr = ~(uint64_t)0;
    for (; bytes; ptr++, bytes--)
        *(volatile char *)ptr = (char)0xff;
}

/* ---- fibers ---- */

static void to_fiber(Worker *w, Fiber *fiber)
{
    current = fiber;
    emu_here.thread = fiber->thread;
#if defined(EMU_TSAN)
    __tsan_switch_to_fiber(fiber->tsan, __tsan_switch_to_fiber_no_sync);
#elif defined(EMU_ASAN)
    __sanitizer_start_switch_fiber(&w->fake_stack, fiber->stack, STACK_BYTES);
#endif
    emu_switch(&w->stack_pointer, fiber->stack_pointer);
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(w->fake_stack, nullptr, nullptr);
#endif
    current = nullptr;
}

static void to_worker(Worker *w, Fiber *fiber)
{
#if defined(EMU_TSAN)
    __tsan_switch_to_fiber(w->tsan, __tsan_switch_to_fiber_no_sync);
#elif defined(EMU_ASAN)
    __sanitizer_start_switch_fiber(&fiber->fake_stack, w->stack_bottom, w->stack_size);
#endif
    emu_switch(&fiber->stack_pointer, w->stack_pointer);
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(fiber->fake_stack, &w->stack_bottom, &w->stack_size);
#endif
}

/* The fiber becomes the next CUDA thread that has not begun. */
static void assign(Worker *w, Fiber *fiber)
{
    const uint3 dim = w->grid->block;
    const unsigned linear = (unsigned)w->order[w->next++];
    w->running[linear] = fiber;
    fiber->linear = (int)linear;
    fiber->line = 0;
    fiber->fenced = false;
    fiber->thread = {linear % dim.x, linear / dim.x % dim.y, linear / dim.x / dim.y};
}

static void free_fiber(Worker *w, Fiber *fiber)
{
    fiber->next_free = nullptr;
    if (w->free_last)
        w->free_last->next_free = fiber;
    else
        w->free_first = fiber;
    w->free_last = fiber;
    w->free_count++;
}

static Fiber *pop_free(Worker *w)
{
    Fiber *fiber = w->free_first;
    w->free_first = fiber->next_free;
    if (!w->free_first)
        w->free_last = nullptr;
    w->free_count--;
    return fiber;
}

static void make_ready(Worker *w, Fiber *fiber)
{
    w->ready[(w->ready_first + w->ready_count++) % EMU_MAX_THREADS] = fiber;
}

static void end_thread(Worker *w, Fiber *fiber)
{
    release(end_point(w, false));
    w->done++;
    w->warps[fiber->linear / EMU_WARP].exited |= 1u << fiber->linear % EMU_WARP;
    if (w->arrived)
        emu_kernel_die("a thread ends while others wait in __syncthreads", w->line, 0);
}

static void fiber_main()
{
    Fiber *fiber = current;
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &emu_worker->stack_bottom, &emu_worker->stack_size);
#endif
    for (;;) {
        Worker *w = emu_worker;
        if (fiber->launch != w->launches) /* else it has: it is dear */
            acquire(&w->begin);
        fiber->launch = w->launches;
        acquire(end_point(w, true));
        w->grid->thread(w->grid->argument);
        end_thread(w, fiber);
#ifndef EMU_TSAN /* where the next thread is another one to the sanitizer */
        if (!w->ready_count && w->next < w->threads) {
            assign(w, fiber);
            emu_here.thread = fiber->thread;
            continue;
        }
#endif
        free_fiber(w, fiber);
        to_worker(w, fiber);
    }
}

static Fiber *new_fiber(Worker *w)
{
    Fiber *fiber = (Fiber *)calloc(1, sizeof *fiber);
    void *stack = mmap(nullptr, PAGE + STACK_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!fiber || stack == MAP_FAILED || mprotect(stack, PAGE, PROT_NONE) != 0)
        emu_kernel_die("no memory for a fiber", 0, 0);
    fiber->stack = (char *)stack + PAGE;
    /* What emu_switch pops: six registers and where to return to, with the stack aligned as after a
     * call. */
    void **top = (void **)(fiber->stack + STACK_BYTES);
    *--top = nullptr;
    *--top = (void *)fiber_main;
    fiber->stack_pointer = top - 6;
#ifdef EMU_TSAN
    fiber->tsan = __tsan_create_fiber(0);
#endif
    w->fibers++;
    return fiber;
}

static void delete_fiber(Worker *w, Fiber *fiber)
{
#ifdef EMU_TSAN
    __tsan_destroy_fiber(fiber->tsan);
#endif
    unpoison(fiber->stack, STACK_BYTES);
    munmap(fiber->stack - PAGE, PAGE + STACK_BYTES);
    free(fiber);
    w->fibers--;
}

static Fiber *take_fiber(Worker *w)
{
#ifdef EMU_TSAN
    const int spare = SPARE_FIBERS;
#else
    const int spare = 0;
#endif
    Fiber *fiber = w->free_count > spare ? pop_free(w) : new_fiber(w);
    assign(w, fiber);
    return fiber;
}

/* ---- a block ---- */

static void begin_block(Worker *w)
{
    w->blocks++;
    w->shared = w->shareds[w->blocks % LANES];
    w->next = w->done = w->arrived = 0;
    w->ready_count = 0;
    w->site_count = 0;
    const size_t dynamic = w->grid->dynamic_shared;
    unpoison(w->shared, SHARED_BYTES);
    fill_nan(w->shared, dynamic);
    poison(w->shared + dynamic, SHARED_BYTES - dynamic);
    w->static_bytes = 0;
    w->shared_used = dynamic ? dynamic + RED_ZONE : 0;
    for (int first = 0; first < w->threads; first += EMU_WARP) {
        Warp *warp = &w->warps[first / EMU_WARP];
        const int lanes = w->threads - first;
        warp->lanes = lanes >= EMU_WARP ? ~0u : (1u << lanes) - 1;
        warp->exited = 0;
        for (Meeting &meeting : warp->meetings)
            meeting.arrived = 0;
    }
}

void emu_run_block(Worker *w)
{
    begin_block(w);
    while (w->done < w->threads) {
        if (w->ready_count) {
            Fiber *fiber = w->ready[w->ready_first];
            w->ready_first = (w->ready_first + 1) % EMU_MAX_THREADS;
            w->ready_count--;
            to_fiber(w, fiber);
        } else if (w->next < w->threads) {
            to_fiber(w, take_fiber(w));
        } else {
            for (int t = 0; t < w->threads && !current; t++)
                if (w->running[t]->line)
                    current = w->running[t];
            emu_kernel_die("not every thread arrives: a GPU hangs", current ? current->line : 0, 0);
        }
    }
}

void emu_sync_block(int line)
{
    Worker *w = emu_worker;
    Fiber *fiber = current;
    if (w->done)
        emu_kernel_die("__syncthreads after another thread has ended", line, 0);
    if (w->arrived && w->line != line)
        emu_kernel_die("threads of a block wait in different __syncthreads", line, w->line);
    const unsigned turn = w->turn & 1;
    if (!w->arrived)
        w->barrier_order[turn] = order_point(w);
    w->line = fiber->line = line;
    release(w->barrier_order[turn]);
    if (++w->arrived == w->threads) {
        w->arrived = 0;
        w->turn++;
        for (int t = 0; t < w->threads; t++) {
            Fiber *other = w->running[w->order[t]];
            if (other != fiber)
                make_ready(w, other);
        }
    } else {
        to_worker(w, fiber);
    }
    fiber->line = 0;
    acquire(w->barrier_order[turn]);
}

const uint64_t *emu_meet(uint32_t mask, uint64_t value, int line)
{
    Worker *w = emu_worker;
    Fiber *fiber = current;
    const int lane = fiber->linear % EMU_WARP, first = fiber->linear - lane;
    Warp *warp = &w->warps[first / EMU_WARP];
    if (!(mask >> lane & 1))
        emu_kernel_die("a lane is not in the mask of its own warp operation", line, 0);
    if (mask & warp->exited)
        emu_kernel_die("a warp operation names a lane that has ended", line, 0);
    Meeting *meeting = &warp->meetings[__builtin_ctz(mask)];
    if (meeting->arrived && (meeting->mask != mask || meeting->line != line))
        emu_kernel_die("lanes are in different warp operations", line, meeting->line);
    const int turn = meeting->turn & 1;
    if (!meeting->arrived)
        meeting->order[turn] = order_point(w);
    meeting->mask = mask;
    meeting->line = fiber->line = line;
    meeting->values[turn][lane] = value;
    meeting->arrived |= 1u << lane;
    release(meeting->order[turn]);
    if (meeting->arrived == (mask & warp->lanes)) {
        meeting->arrived = 0;
        meeting->turn++;
        for (int l = 0; l < EMU_WARP; l++)
            if (l != lane && (mask & warp->lanes) >> l & 1)
                make_ready(w, w->running[first + l]);
    } else {
        to_worker(w, fiber);
    }
    fiber->line = 0;
    acquire(meeting->order[turn]);
    return meeting->values[turn];
}

uint32_t emu_present(uint32_t mask)
{
    return mask & emu_worker->warps[current->linear / EMU_WARP].lanes;
}

unsigned emu_lane()
{
    return (unsigned)current->linear % EMU_WARP;
}

void emu_fence()
{
    current->fenced = true;
}

bool emu_fenced()
{
    return current->fenced;
}

void *emu_shared_dynamic()
{
    if (!emu_worker->grid->dynamic_shared)
        emu_kernel_die("dynamic shared memory is used and none was given to the launch", 0, 0);
    return emu_worker->shared;
}

void *emu_shared(const void *site, size_t bytes, size_t alignment)
{
    Worker *w = emu_worker;
    for (int i = 0; i < w->site_count; i++)
        if (w->sites[i].site == site)
            return w->shared + w->sites[i].offset;
    if (alignment < 16)
        alignment = 16;
    const size_t offset = (w->shared_used + alignment - 1) / alignment * alignment;
    w->static_bytes += bytes;
    if (w->site_count == MAX_SITES || offset + bytes > SHARED_BYTES ||
        w->static_bytes > EMU_DEFAULT_SHARED ||
        w->static_bytes + w->grid->dynamic_shared > w->grid->shared_limit)
        emu_kernel_die("too much shared memory", 0, 0);
    w->sites[w->site_count].site = site;
    w->sites[w->site_count++].offset = offset;
    w->shared_used = offset + bytes + RED_ZONE;
    unpoison(w->shared + offset, bytes);
    fill_nan(w->shared + offset, bytes);
    return w->shared + offset;
}

void emu_trim_fibers(Worker *w, int most)
{
    while (w->fibers > most && w->free_count)
        delete_fiber(w, pop_free(w));
}
