/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA C++ for a compiler that knows C++ only: included before each kernels/cuda source. A launch
 * gives the kernel the twins of its pointer parameters and queues it on the stream. Functions that
 * are approximate on a GPU are exact here, so their results differ. */
#ifndef ZS_EMU_KERNEL_H
#define ZS_EMU_KERNEL_H

#include <cmath>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>

#include "kernels/cuda/kernels.h"
#include "tests/emu/emu.h"
#include "tests/emu/schedule.h"

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__

#define threadIdx (emu_here.thread)
#define blockIdx  (emu_here.block)
#define blockDim  (emu_here.block_dim)
#define gridDim   (emu_here.grid_dim)
#define warpSize  EMU_WARP

/* ---- launches ---- */

/* What a kernel gets for a parameter. Overload it for a struct that carries pointers. */
template <class T> static inline T emu_argument(T value)
{
    if constexpr (std::is_pointer_v<T>)
        return (T)emu_pointer((const void *)value);
    else
        return value;
}

template <> inline zs_cuda_sources emu_argument(zs_cuda_sources value)
{
    for (const void *&source : value.at)
        source = emu_pointer(source);
    return value;
}

template <class T> static inline void emu_add_number(std::string &to, const T &value)
{
    if constexpr (std::is_arithmetic_v<T>)
        to += (to.empty() ? "" : ",") + std::to_string(value);
}

template <class... P, class... A>
static inline void emu_launch(const char *name, void (*kernel)(P...), dim3 grid, dim3 block,
                              size_t shared_bytes, cudaStream_t stream, A... arguments)
{
    emu_launched launch = {name, (const void *)kernel, grid, block, shared_bytes, stream, {}};
    if (!emu_launch_allowed(launch))
        return;
    if (emu_recording())
        (emu_add_number(launch.numbers, arguments), ...);
    std::tuple<P...> given(emu_argument<P>(static_cast<P>(arguments))...);
    if (emu_translation)
        emu_launch_queue(launch, [translated = emu_translation((const void *)kernel), given] {
            std::apply(
                [translated](const P &...parameter) {
                    void *addresses[] = {(void *)&parameter...};
                    translated(addresses);
                },
                given);
        });
    else
        emu_launch_queue(launch, [kernel, given] { std::apply(kernel, given); });
}

#define ZS_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                  \
    emu_launch(#kernel, kernel, (grid), (block), (shared_bytes), (stream), ##__VA_ARGS__)

#define ZS_SHARED(type, name, count)                                                               \
    static const char name##_site = 0;                                                             \
    type *name =                                                                                   \
        static_cast<type *>(emu_shared(&name##_site, sizeof(type) * (count), alignof(type)))
#define ZS_SHARED_DYNAMIC(type, name) type *name = static_cast<type *>(emu_shared_dynamic())

/* ---- barriers and warps ---- */

static inline void __syncthreads(int line = __builtin_LINE())
{
    emu_sync_block(line);
}

static inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE())
{
    (void)emu_meet(mask, 0, line);
}

static inline void __threadfence()
{
    emu_fence();
}

static inline void __threadfence_system()
{
    emu_fence();
}

enum emu_shuffle { EMU_XOR, EMU_DOWN, EMU_UP, EMU_INDEX };

template <class T>
static inline T emu_shuffled(emu_shuffle how, unsigned mask, T value, int by, int width, int line)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles 4 or 8 bytes");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    const uint64_t *lanes = emu_meet(mask, bits, line);
    const int lane = (int)emu_lane(), first = lane & ~(width - 1), last = first + width - 1;
    int from = how == EMU_XOR    ? lane ^ by
               : how == EMU_DOWN ? lane + by
               : how == EMU_UP   ? lane - by
                                 : first | (by & (width - 1));
    if (from < first || from > last)
        from = lane;
    if (!(emu_present(mask) >> from & 1))
        emu_kernel_die("a shuffle reads a lane that is not in its mask", line, 0);
    T out;
    std::memcpy(&out, &lanes[from], sizeof out);
    return out;
}

#define EMU_SHUFFLE(name, how, type)                                                               \
    template <class T>                                                                             \
    static inline T name(unsigned mask, T value, type by, int width = EMU_WARP,                    \
                         int line = __builtin_LINE())                                              \
    {                                                                                              \
        return emu_shuffled(how, mask, value, (int)by, width, line);                               \
    }
EMU_SHUFFLE(__shfl_xor_sync, EMU_XOR, int)
EMU_SHUFFLE(__shfl_down_sync, EMU_DOWN, unsigned)
EMU_SHUFFLE(__shfl_up_sync, EMU_UP, unsigned)
EMU_SHUFFLE(__shfl_sync, EMU_INDEX, int)
#undef EMU_SHUFFLE

static inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE())
{
    const uint64_t *lanes = emu_meet(mask, predicate != 0, line);
    unsigned out = 0;
    for (unsigned lane = 0; lane < EMU_WARP; lane++)
        if (emu_present(mask) >> lane & 1)
            out |= (unsigned)lanes[lane] << lane;
    return out;
}

static inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE())
{
    return __ballot_sync(mask, predicate, line) != 0;
}

static inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE())
{
    return __ballot_sync(mask, !predicate, line) == 0;
}

static inline int __syncthreads_or(int predicate, int line = __builtin_LINE())
{
    static const char site = 0;
    int *any = static_cast<int *>(emu_shared(&site, sizeof *any, sizeof *any));
    if (threadIdx.x + threadIdx.y + threadIdx.z == 0)
        *any = 0;
    emu_sync_block(line);
    if (predicate)
        __atomic_store_n(any, 1, __ATOMIC_RELAXED);
    emu_sync_block(line);
    const int out = __atomic_load_n(any, __ATOMIC_RELAXED);
    emu_sync_block(line);
    return out;
}

/* ---- atomics ---- */

template <class T> struct emu_same {
    using type = T;
};

/* update(old): what takes its place. Bits decide, so that a NaN equals itself. */
template <class T, class F> static inline T emu_atomic(T *ptr, F update)
{
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    static_assert(sizeof(T) == sizeof(Bits), "CUDA's atomics are of 4 or 8 bytes");
    const bool fenced = emu_fenced();
    Bits *bits = reinterpret_cast<Bits *>(ptr);
    Bits old_bits = __atomic_load_n(bits, __ATOMIC_RELAXED), new_bits;
    T old;
    bool done;
    do {
        std::memcpy(&old, &old_bits, sizeof old);
        T with = update(old);
        std::memcpy(&new_bits, &with, sizeof with);
        done = fenced ? __atomic_compare_exchange_n(bits, &old_bits, new_bits, false,
                                                    __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)
                      : __atomic_compare_exchange_n(bits, &old_bits, new_bits, false,
                                                    __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    } while (!done);
    return old;
}

#define EMU_ATOMIC(name, expression)                                                               \
    template <class T> static inline T name(T *ptr, typename emu_same<T>::type value)              \
    {                                                                                              \
        return emu_atomic(ptr, [=](T old) { return (T)(expression); });                            \
    }
EMU_ATOMIC(atomicAdd, old + value)
EMU_ATOMIC(atomicSub, old - value)
EMU_ATOMIC(atomicMax, old > value ? old : value)
EMU_ATOMIC(atomicMin, old < value ? old : value)
EMU_ATOMIC(atomicAnd, old &value)
EMU_ATOMIC(atomicOr, old | value)
EMU_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
EMU_ATOMIC(atomicExch, ((void)old, value))
#undef EMU_ATOMIC

template <class T>
static inline T atomicCAS(T *ptr, typename emu_same<T>::type compare,
                          typename emu_same<T>::type value)
{
    return emu_atomic(ptr, [=](T old) { return old == compare ? value : old; });
}

/* ---- memory ---- */

template <class T> static inline void emu_aligned(const T *ptr)
{
    if (reinterpret_cast<uintptr_t>(ptr) % sizeof(T))
        emu_kernel_die("a misaligned access, which a GPU refuses", 0, 0);
}

#define EMU_LOAD(name)                                                                             \
    template <class T> static inline T name(const T *ptr)                                          \
    {                                                                                              \
        emu_aligned(ptr);                                                                          \
        return *ptr;                                                                               \
    }
#define EMU_STORE(name)                                                                            \
    template <class T> static inline void name(T *ptr, typename emu_same<T>::type value)           \
    {                                                                                              \
        emu_aligned(ptr);                                                                          \
        *ptr = value;                                                                              \
    }
EMU_LOAD(__ldg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldlu)
EMU_LOAD(__ldcv)
EMU_STORE(__stwb)
EMU_STORE(__stcg)
EMU_STORE(__stcs)
EMU_STORE(__stwt)
#undef EMU_LOAD
#undef EMU_STORE

/* ---- arithmetic ---- */

#define EMU_MATHS(type, name, fma_name, sqrt_name)                                                 \
    static inline type name##add_rn(type a, type b)                                                \
    {                                                                                              \
        return a + b;                                                                              \
    }                                                                                              \
    static inline type name##sub_rn(type a, type b)                                                \
    {                                                                                              \
        return a - b;                                                                              \
    }                                                                                              \
    static inline type name##mul_rn(type a, type b)                                                \
    {                                                                                              \
        return a * b;                                                                              \
    }                                                                                              \
    static inline type name##div_rn(type a, type b)                                                \
    {                                                                                              \
        return a / b;                                                                              \
    }                                                                                              \
    static inline type name##sqrt_rn(type a)                                                       \
    {                                                                                              \
        return std::sqrt(a);                                                                       \
    }                                                                                              \
    static inline type fma_name(type a, type b, type c)                                            \
    {                                                                                              \
        return std::fma(a, b, c);                                                                  \
    }                                                                                              \
    static inline type sqrt_name(type a)                                                           \
    {                                                                                              \
        return 1 / std::sqrt(a);                                                                   \
    }
EMU_MATHS(float, __f, __fmaf_rn, rsqrtf)
EMU_MATHS(double, __d, __fma_rn, rsqrt)
#undef EMU_MATHS

/* Macros: glibc declares functions of the same names. */
#define __expf(x)      std::exp((float)(x))
#define __logf(x)      std::log((float)(x))
#define __log2f(x)     std::log2((float)(x))
#define __sinf(x)      std::sin((float)(x))
#define __cosf(x)      std::cos((float)(x))
#define __frsqrt_rn(x) rsqrtf(x)

static inline float __fdividef(float a, float b)
{
    return a / b;
}

static inline void sincospif(float x, float *s, float *c)
{
    const double angle = (double)x * 3.14159265358979323846;
    *s = (float)std::sin(angle);
    *c = (float)std::cos(angle);
}

#define EMU_BITS(name, from, to)                                                                   \
    static inline to name(from x)                                                                  \
    {                                                                                              \
        to out;                                                                                    \
        static_assert(sizeof out == sizeof x, "");                                                 \
        std::memcpy(&out, &x, sizeof out);                                                         \
        return out;                                                                                \
    }
EMU_BITS(__float_as_uint, float, unsigned)
EMU_BITS(__uint_as_float, unsigned, float)
EMU_BITS(__float_as_int, float, int)
EMU_BITS(__int_as_float, int, float)
EMU_BITS(__double_as_longlong, double, long long)
EMU_BITS(__longlong_as_double, long long, double)
#undef EMU_BITS

static inline unsigned __umulhi(unsigned a, unsigned b)
{
    return (unsigned)((uint64_t)a * b >> 32);
}

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

static inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}

static inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned)x) : 32;
}

static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}

#define EMU_MIN_MAX(type)                                                                          \
    static inline type min(type a, type b)                                                         \
    {                                                                                              \
        return b < a ? b : a;                                                                      \
    }                                                                                              \
    static inline type max(type a, type b)                                                         \
    {                                                                                              \
        return a < b ? b : a;                                                                      \
    }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX

#endif
