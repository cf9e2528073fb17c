/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the emulation share: CUDA on the CPU. A stream is a thread. What the program
 * gets as a device pointer lies in a window that nobody may touch (the host's access is a SIGSEGV);
 * copies and kernels work on its twin. Order between threads exists only where CUDA promises it
 * (enqueue to operation, record to wait, operation to the next one of the stream), so that
 * ThreadSanitizer reports a missing event wait as a race.
 *
 * Environment: ZS_EMU_MEMORY, bytes of a device (1 GiB); ZS_EMU_DEVICES, how many (4);
 * ZS_EMU_JITTER, the most microseconds that each operation is late (0). See also schedule.h. */
#ifndef ZS_EMU_EMU_H
#define ZS_EMU_EMU_H

#include <functional>

#include <cuda_runtime_api.h>

#include "tests/emu/vector_types.h"

/* What a kernel uses for the program's pointer: device memory's twin, or pinned host memory itself.
 * Ends the process with a message for any other host memory, which a GPU cannot reach. */
void *emu_pointer(const void *ptr);
bool emu_is_device(const void *ptr);
void emu_enqueue(cudaStream_t stream, std::function<void()> operation);

struct emu_launched {
    const char *name;
    const void *kernel;
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
};
/* False, and the error is what cudaGetLastError gives: CUDA refuses such a launch. */
bool emu_launch_allowed(const emu_launched &launch);
/* thread: what one CUDA thread does. */
void emu_launch_queue(const emu_launched &launch, std::function<void()> thread);

/* Waits for all that is queued. */
void emu_synchronize();
/* A number from the environment. */
size_t emu_setting(const char *name, size_t otherwise);
/* A use that is an error on a GPU or silently does nothing there: says so and aborts. */
[[noreturn]] void emu_die(const char *what);
/* Leaves the error for cudaGetLastError and returns it. */
cudaError_t emu_failed(cudaError_t error);
/* Most bytes of device memory that were in use at once. */
size_t emu_peak_bytes();

#endif
