/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of the emulation share: CUDA on the CPU. A stream is a thread. What the program
 * gets as a device pointer lies in a window that nobody may touch (the host's access is a SIGSEGV);
 * copies and kernels work on its twin. Order between threads exists only where CUDA promises it
 * (enqueue to operation, record to wait, operation to the next one of the stream), so that
 * ThreadSanitizer reports a missing event wait as a race.
 *
 * Environment: ZS_EMU_MEMORY, bytes of a device (1 GiB); ZS_EMU_DEVICES, how many (4);
 * ZS_EMU_JITTER, the most microseconds that each operation is late (0). See also schedule.h and
 * control.h. */
#ifndef ZS_EMU_EMU_H
#define ZS_EMU_EMU_H

#include <functional>
#include <string>

#include <cuda_runtime_api.h>

#include "tests/emu/control.h"
#include "tests/emu/vector_types.h"

/* ---- memory.cpp ---- */

/* What a kernel uses for the program's pointer: device memory's twin, or pinned host memory itself.
 * Ends the process with a message for what the present device cannot reach: other host memory,
 * freed memory, another device's. */
void *emu_pointer(const void *ptr);
/* The same for bytes from ptr on, which have to be one allocation's; any device's. */
void *emu_range(const void *ptr, size_t bytes, const char *what);
/* For a pointer that was kept in device memory, when the stream comes to it. */
void *emu_pointer_in_memory(const void *ptr);
bool emu_is_device(const void *ptr);
/* The calling thread's. */
int emu_device();

/* ---- control.cpp ---- */

/* Counts the call; true: it has to fail. */
bool emu_fails(emu_call call, int device);
void emu_count_bytes(emu_traffic traffic, size_t bytes);
/* A use that is an error on a GPU or silently does nothing there: says so and aborts. */
[[noreturn]] void emu_die(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* A number from the environment. */
size_t emu_setting(const char *name, size_t otherwise);
/* Nothing is computed or copied. */
bool emu_dry();
/* Leaves the error for cudaGetLastError and returns it. */
cudaError_t emu_failed(cudaError_t error);
/* What ended a device; cudaSuccess: it lives. */
cudaError_t emu_sticky(int device);
void emu_end_device(int device, cudaError_t error);

/* ---- stream.cpp ---- */

/* What a queued operation is to ZS_EMU_RECORD; fields: JSON of what else it has, by emu_fields. */
struct emu_record {
    const char *operation;
    std::string fields;
};
/* printf, if recording. */
std::string emu_fields(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* run is not called on a device that ended, nor when dry. */
void emu_enqueue(cudaStream_t stream, const emu_record &record, std::function<void()> run);
int emu_stream_device(cudaStream_t stream);
uint64_t emu_stream_number(cudaStream_t stream);
/* Waits for all that is queued on a device. */
void emu_synchronize(int device);

/* ---- record.cpp ---- */

bool emu_recording();
/* A line of what the host did or queued: stream 0 for the host itself. */
void emu_write_record(int device, uint64_t stream, const emu_record &record);

/* ---- launch.cpp ---- */

struct emu_launched {
    const char *name;
    const void *kernel;
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
    std::string numbers; /* the arguments that are no pointers, if recording: "3,0.5" */
};
/* False, and the error is what cudaGetLastError gives: CUDA refuses such a launch. */
bool emu_launch_allowed(const emu_launched &launch);
/* What nvcc made of the kernel, to be run instead, given its parameters' addresses; nullptr: run
 * the kernel itself. Only a plug-in that was linked with the output of ptx.py has any. */
typedef void (*emu_translated)(void **parameters);
emu_translated emu_translation(const void *kernel) __attribute__((weak));
/* thread: what one CUDA thread does. */
void emu_launch_queue(const emu_launched &launch, std::function<void()> thread);

/* ---- objects that have to be closed ---- */

enum emu_object {
    EMU_ALLOCATIONS,
    EMU_PINNED,
    EMU_STREAMS,
    EMU_EVENTS,
    EMU_COMMS,
    EMU_CUBLAS_HANDLES,
    EMU_OBJECTS
};
/* change: 1 opened, -1 closed. */
void emu_object_count(emu_object object, int change);

#endif
