/* SPDX-License-Identifier: Apache-2.0 */
/* Where the ranks of an emulated communicator meet: shared memory, so that they may be threads or
 * processes. */
#ifndef ZS_EMU_NCCL_WORLD_H
#define ZS_EMU_NCCL_WORLD_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

/* What a rank calls; the same on all, or it is a hang or garbage on a GPU. */
struct emu_nccl_call {
    int kind, type, op, root;
    size_t count;
};

constexpr int EMU_MAX_RANKS = 64;
constexpr size_t EMU_SLOT_BYTES = 256 << 10;
constexpr size_t EMU_PIPE_BYTES = 32 << 10;

/* What one rank shows to all. */
struct emu_nccl_slot {
    std::atomic<int> joined;
    emu_nccl_call call;
    alignas(64) char data[EMU_SLOT_BYTES];
};

/* From one rank to another. */
struct emu_nccl_pipe {
    std::atomic<uint32_t> full;
    size_t bytes;
    alignas(64) char data[EMU_PIPE_BYTES];
};

struct emu_nccl_world {
    std::atomic<int> ranks, joined;
    std::atomic<uint32_t> arrived, phase;

    emu_nccl_slot &slot(int rank);
    emu_nccl_pipe &pipe(int from, int to);
    /* Waits for all ranks to come here. False: *given_up was set meanwhile. */
    bool meet(const std::atomic<bool> *given_up);
};

/* A name that no other world has. */
std::string emu_nccl_new_name();
/* One mapping for all ranks of a process. Ends the process if it cannot be had, or if ranks give
 * different counts or the same rank twice. */
emu_nccl_world *emu_nccl_join(const std::string &name, int ranks, int rank);
void emu_nccl_leave(emu_nccl_world *world);

#endif
