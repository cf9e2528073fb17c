/* SPDX-License-Identifier: Apache-2.0 */
/* Rope, SwiGLU and biases: a thread to an element. */
#include "kernels/cuda/nn_team.h"

static __device__ __forceinline__ uint64_t element()
{
    return (uint64_t)blockIdx.x * NN_THREADS + threadIdx.x;
}

template <class T>
__global__ void __launch_bounds__(NN_THREADS)
    add_bias(uint64_t count, int n, float *x, const typename T::memory *b)
{
    const uint64_t i = element();
    if (i < count)
        x[i] += T::widen(b[i % (unsigned)n]);
}

/* As the host's tables: the angle in fp32, its cosine and sine in double. */
__global__ void __launch_bounds__(NN_THREADS)
    angles(uint64_t count, int half, const int32_t *positions, const float *frequencies,
           float *cosines, float *sines)
{
    const uint64_t i = element();
    if (i >= count)
        return;
    const double angle =
        (double)((float)positions[i / (unsigned)half] * frequencies[i % (unsigned)half]);
    cosines[i] = (float)cos(angle);
    sines[i] = (float)sin(angle);
}

__global__ void __launch_bounds__(NN_THREADS)
    rope(uint64_t count, int heads, int half, float *x, const float *cosines, const float *sines,
         float sign)
{
    const uint64_t i = element();
    if (i >= count)
        return;
    const uint64_t head = i / (unsigned)half, pair = i % (unsigned)half;
    const uint64_t angle = head / (unsigned)heads * half + pair;
    float *lo = x + head * 2 * half + pair, *hi = lo + half;
    const float a = *lo, b = *hi, c = cosines[angle], s = sines[angle] * sign;
    *lo = a * c - b * s;
    *hi = b * c + a * s;
}

static __device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

template <class T>
__global__ void __launch_bounds__(NN_THREADS)
    swiglu(uint64_t count, const float *gate, const float *up, typename T::memory *y)
{
    const uint64_t i = element();
    if (i < count)
        y[i] = T::narrow(gate[i] * sigmoid(gate[i]) * up[i]);
}

template <class T>
__global__ void __launch_bounds__(NN_THREADS)
    swiglu_grad(uint64_t count, const float *gate, const float *up, const float *dact,
                typename T::memory *act, typename T::memory *dgate, typename T::memory *dup)
{
    const uint64_t i = element();
    if (i >= count)
        return;
    const float g = gate[i], u = up[i], d = dact[i], s = sigmoid(g), silu = g * s;
    act[i] = T::narrow(silu * u);
    dgate[i] = T::narrow(d * u * (s + silu * (1.0f - s)));
    dup[i] = T::narrow(d * silu);
}

/* ---- launches ---- */

static unsigned blocks(uint64_t count)
{
    return (unsigned)((count + NN_THREADS - 1) / NN_THREADS);
}

template <class T>
static void bias_launch(cudaStream_t stream, uint64_t count, int n, float *x, const void *b)
{
    ZS_LAUNCH((add_bias<T>), blocks(count), NN_THREADS, 0, stream, count, n, x,
              static_cast<const typename T::memory *>(b));
}

zs_status zs_cuda_nn_add_bias(cudaStream_t stream, int rows, int n, float *x, const void *b,
                              zs_dtype dtype)
{
    const auto launch = dtype == ZS_FP32 ? bias_launch<zs_fp32> : bias_launch<zs_bf16>;
    launch(stream, (uint64_t)rows * (uint64_t)n, n, x, b);
    return zs_launched("add_bias");
}

zs_status zs_cuda_nn_angles(cudaStream_t stream, int tokens, int half, const int32_t *positions,
                            const float *frequencies, float *cos, float *sin)
{
    const uint64_t count = (uint64_t)tokens * (uint64_t)half;
    ZS_LAUNCH(angles, blocks(count), NN_THREADS, 0, stream, count, half, positions, frequencies,
              cos, sin);
    return zs_launched("angles");
}

zs_status zs_cuda_nn_rope(cudaStream_t stream, int tokens, int heads, int half, float *x,
                          const float *cos, const float *sin, int inverse)
{
    const uint64_t count = (uint64_t)tokens * (uint64_t)heads * (uint64_t)half;
    ZS_LAUNCH(rope, blocks(count), NN_THREADS, 0, stream, count, heads, half, x, cos, sin,
              inverse ? -1.0f : 1.0f);
    return zs_launched("rope");
}

template <class T>
static void swiglu_launch(cudaStream_t stream, uint64_t n, const float *gate, const float *up,
                          void *y)
{
    ZS_LAUNCH((swiglu<T>), blocks(n), NN_THREADS, 0, stream, n, gate, up,
              static_cast<typename T::memory *>(y));
}

zs_status zs_cuda_nn_swiglu(cudaStream_t stream, uint64_t n, const float *gate, const float *up,
                            void *y, zs_dtype dtype)
{
    const auto launch = dtype == ZS_FP32 ? swiglu_launch<zs_fp32> : swiglu_launch<zs_bf16>;
    launch(stream, n, gate, up, y);
    return zs_launched("swiglu");
}

template <class T>
static void swiglu_grad_launch(cudaStream_t stream, uint64_t n, const float *gate, const float *up,
                               const float *dact, void *act, void *dgate, void *dup)
{
    ZS_LAUNCH((swiglu_grad<T>), blocks(n), NN_THREADS, 0, stream, n, gate, up, dact,
              static_cast<typename T::memory *>(act), static_cast<typename T::memory *>(dgate),
              static_cast<typename T::memory *>(dup));
}

zs_status zs_cuda_nn_swiglu_grad(cudaStream_t stream, uint64_t n, const float *gate,
                                 const float *up, const float *dact, void *act, void *dgate,
                                 void *dup, zs_dtype dtype)
{
    const auto launch =
        dtype == ZS_FP32 ? swiglu_grad_launch<zs_fp32> : swiglu_grad_launch<zs_bf16>;
    launch(stream, n, gate, up, dact, act, dgate, dup);
    return zs_launched("swiglu_grad");
}

zs_status zs_cuda_load_nn_elements(void)
{
    static const void *const kernels[] = {ZS_KERNEL(add_bias<zs_fp32>),
                                          ZS_KERNEL(add_bias<zs_bf16>),
                                          ZS_KERNEL(angles),
                                          ZS_KERNEL(rope),
                                          ZS_KERNEL(swiglu<zs_fp32>),
                                          ZS_KERNEL(swiglu<zs_bf16>),
                                          ZS_KERNEL(swiglu_grad<zs_fp32>),
                                          ZS_KERNEL(swiglu_grad<zs_bf16>)};
    return zs_cuda_load(kernels, sizeof kernels / sizeof kernels[0]);
}
