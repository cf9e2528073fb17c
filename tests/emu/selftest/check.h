/* SPDX-License-Identifier: Apache-2.0 */
/* What the emulation's own tests share. */
#ifndef ZS_EMU_SELFTEST_CHECK_H
#define ZS_EMU_SELFTEST_CHECK_H

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tests/emu/emu.h"

extern "C" const emu_control emu_control_table;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "FAILED: %s:%d: %s\n", __FILE__, __LINE__, #condition);                \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static inline cudaStream_t new_stream()
{
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    return stream;
}

static inline cudaEvent_t new_event()
{
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
    return event;
}

template <class T> static inline T *new_pinned(size_t count)
{
    T *ptr = static_cast<T *>(calloc(count, sizeof(T)));
    CHECK(cudaHostRegister(ptr, count * sizeof(T),
                           cudaHostRegisterPortable | cudaHostRegisterMapped) == cudaSuccess);
    return ptr;
}

template <class T> static inline void free_pinned(T *ptr)
{
    CHECK(cudaHostUnregister(ptr) == cudaSuccess);
    free(ptr);
}

template <class T> static inline T *new_device(size_t count)
{
    void *ptr;
    CHECK(cudaMalloc(&ptr, count * sizeof(T)) == cudaSuccess);
    return static_cast<T *>(ptr);
}

/* Device memory with these contents, and what device memory holds when the stream has come so far:
 * both of the present device. */
template <class T> static inline T *on_device(const std::vector<T> &from)
{
    T *ptr = new_device<T>(from.size());
    memcpy(emu_pointer(ptr), from.data(), from.size() * sizeof(T));
    return ptr;
}

template <class T>
static inline std::vector<T> from_device(cudaStream_t stream, const T *ptr, size_t count)
{
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    const T *twin = static_cast<const T *>(emu_pointer(ptr));
    return std::vector<T>(twin, twin + count);
}

#endif
