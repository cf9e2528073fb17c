/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the emulation share: CUDA on the CPU. A stream is a thread. What the program
 * gets as a device pointer lies in a window that nobody may touch (the host's access is a SIGSEGV);
 * copies and kernels work on its twin. Order between threads exists only where CUDA promises it
 * (enqueue to operation, record to wait, operation to the next one of the stream), so that
 * ThreadSanitizer reports a missing event wait as a race. */
#ifndef ZS_EMU_EMU_H
#define ZS_EMU_EMU_H

#include <functional>

#include <cuda_runtime_api.h>

/* What a kernel uses for the program's pointer: device memory's twin, or pinned host memory itself.
 * Ends the process with a message for any other host memory, which a GPU cannot reach. */
void *emu_pointer(const void *ptr);
void emu_enqueue(cudaStream_t stream, std::function<void()> operation);
/* A use that is an error on a GPU or silently does nothing there: says so and aborts. */
[[noreturn]] void emu_die(const char *what);
/* Most bytes of device memory that were in use at once. */
size_t emu_peak_bytes();

#endif
