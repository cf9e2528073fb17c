/* SPDX-License-Identifier: Apache-2.0 */
/* How a test steers the emulation inside the plug-in that it has loaded, and reads what happened.
 * The same by environment, for programs:
 *
 *   ZS_EMU_FAIL=WHAT[@DEVICE]:N[,...]   the N-th call fails (below), counted from 1
 *   ZS_EMU_SKIP_WAIT=N                  the N-th cudaStreamWaitEvent does nothing (stream_wait:N)
 *   ZS_EMU_RECORD=FILE                  what is queued, one JSON object a line (record.cpp)
 *   ZS_EMU_DRY=1                        nothing is computed or copied, only ordered
 *   ZS_EMU_LEAKS=1                      exit code 86 if anything of CUDA's is left at the end
 *
 * WHAT, and what its N-th call does:
 *
 * - malloc, host_register, stream, event: cudaErrorMemoryAllocation
 * - launch: cudaErrorLaunchOutOfResources, nothing is queued
 * - copy, memset: cudaErrorInvalidValue, nothing is queued
 * - illegal: that launch, when the stream comes to it, ends the device as an illegal address does:
 *   every later call on it fails and nothing runs any more
 * - stream_wait, event_sync, stream_sync: does nothing and succeeds, as if it was not there
 * - nccl: the call returns ncclSystemError
 * - nccl_async: the operation, when the stream comes to it, never ends, and ncclRemoteError is the
 *   communicator's asynchronous error
 * - nccl_hang: the operation never begins, which is what the peers see of a rank that hangs
 * - cublas: CUBLAS_STATUS_EXECUTION_FAILED, nothing is queued */
#ifndef ZS_EMU_CONTROL_H
#define ZS_EMU_CONTROL_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef enum emu_call {
    EMU_MALLOC,
    EMU_HOST_REGISTER,
    EMU_STREAM,
    EMU_EVENT,
    EMU_LAUNCH,
    EMU_COPY,
    EMU_MEMSET,
    EMU_ILLEGAL,
    EMU_STREAM_WAIT,
    EMU_EVENT_SYNC,
    EMU_STREAM_SYNC,
    EMU_NCCL,
    EMU_NCCL_ASYNC,
    EMU_NCCL_HANG,
    EMU_CUBLAS,
    EMU_CALLS
} emu_call;

typedef enum emu_traffic {
    EMU_TO_DEVICE,
    EMU_TO_HOST,
    EMU_ON_DEVICE,
    EMU_CLEARED,
    EMU_COMMUNICATED, /* sent and received buffers of collectives */
    EMU_TRAFFICS
} emu_traffic;

enum { EMU_ANY_DEVICE = -1, EMU_MAX_DEVICES = 64, EMU_LEAK_EXIT = 86 };

typedef struct emu_control {
    /* The nth call from now on fails, on that device or on any; 0: none will. */
    void (*fail)(emu_call call, int device, uint64_t nth);
    /* Calls so far. */
    uint64_t (*calls)(emu_call call, int device);
    /* Bytes so far, of all devices, as they were queued. */
    uint64_t (*bytes)(emu_traffic traffic);
    /* Bytes of a device's memory in use, and the most so far. */
    size_t (*used)(int device);
    size_t (*peak)(int device);
    /* Bytes of every device from now on; below what is in use, nothing more can be had. */
    void (*set_capacity)(size_t bytes);
    /* Allocations, pinned ranges, streams, events and communicators that are open. */
    size_t (*open_objects)(void);
} emu_control;

#define EMU_CONTROL "emu_control_table"

/* Of the plug-in in $ZSPILL_CUDA_LIB. NULL: that is not the emulation. */
static inline const emu_control *emu_control_find(void)
{
    const char *path = getenv("ZSPILL_CUDA_LIB");
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    return library ? (const emu_control *)dlsym(library, EMU_CONTROL) : NULL;
}

#endif
