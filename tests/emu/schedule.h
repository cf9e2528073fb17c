/* SPDX-License-Identifier: Apache-2.0 */
/* A block's threads on one thread of the CPU: each a fiber, begun only when another waits or ends,
 * so that a kernel that never waits never switches. schedule.cpp is compiled without sanitizers
 * (its own accesses are no part of the program) and tells them about fibers: under ThreadSanitizer
 * every CUDA thread is a thread, ordered with the others of its block by barriers only; under
 * AddressSanitizer shared memory has red zones. Shared memory begins as NaN.
 *
 * Environment: ZS_EMU_ORDER=fwd|rev|rand[:SEED], in which order a block's threads begin (fwd);
 * ZS_EMU_THREADS, how many CPU threads a launch's blocks are dealt to (1). */
#ifndef ZS_EMU_SCHEDULE_H
#define ZS_EMU_SCHEDULE_H

#include <cstddef>
#include <cstdint>

#include "tests/emu/vector_types.h"

constexpr int EMU_MAX_THREADS = 1024;           /* of a block */
constexpr int EMU_WARP = 32;                    /* lanes */
constexpr size_t EMU_DEFAULT_SHARED = 48 << 10; /* bytes of a block */
constexpr size_t EMU_MAX_SHARED = 227 << 10;    /* of one whose kernel asked for them */

/* What the present CUDA thread reads as threadIdx and so on. */
struct emu_place {
    uint3 thread, block, block_dim, grid_dim;
};
extern __thread emu_place emu_here __attribute__((tls_model("initial-exec")));

struct emu_grid {
    const char *kernel;
    uint3 grid, block;
    size_t dynamic_shared, shared_limit;
    void (*thread)(void *argument); /* what one CUDA thread does */
    void *argument;
};

/* Returns when all threads have. Aborts with a message where a GPU would hang, give other results
 * from time to time, or read another lane's garbage. */
void emu_run_grid(const emu_grid &grid);

/* ---- inside a CUDA thread; line: where in the kernel's source ---- */

void emu_sync_block(int line);
/* The lanes in mask meet; returns their values by lane, valid until the same lanes meet again. */
const uint64_t *emu_meet(uint32_t mask, uint64_t value, int line);
/* Those lanes of mask that the warp has: a block's last warp may be short. */
uint32_t emu_present(uint32_t mask);
void *emu_shared(const void *site, size_t bytes, size_t alignment);
void *emu_shared_dynamic();
/* Atomics order the thread's other accesses only if it uses fences. */
void emu_fence();
bool emu_fenced();
unsigned emu_lane();
[[noreturn]] void emu_kernel_die(const char *what, int line, int other_line);

#endif
