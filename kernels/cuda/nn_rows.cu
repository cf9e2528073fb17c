/* SPDX-License-Identifier: Apache-2.0 */
/* What works on rows of a width of its own, or on elements: the embedding, norms, sums of columns,
 * biases, SwiGLU. A block of threads takes a row where nothing else is said. */
#include "kernels/cuda/nn_sum.h"

enum {
    ROW_THREADS = 256,
    COLUMN_LANES = 8, /* rows that a block of threads adds up side by side */
    FLAT_THREADS = 256
};

/* ---- embedding ---- */

template <class T>
__global__ void __launch_bounds__(ROW_THREADS)
    embed(int width, const int32_t *ids, const typename T::memory *table, float *out)
{
    const size_t to = (size_t)blockIdx.x * width, from = (size_t)ids[blockIdx.x] * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        out[to + c] = T::widen(table[from + c]);
}

__global__ void __launch_bounds__(ROW_THREADS)
    embed_grad(int width, const int32_t *first_use, const int32_t *next_use, const float *dx,
               float *out, int add)
{
    const int first = first_use[blockIdx.x];
    float *row = out + (size_t)blockIdx.x * width;
    if (first < 0 && add)
        return;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float sum = 0;
        for (int t = first; t >= 0; t = next_use[t])
            sum += dx[(size_t)t * width + c];
        row[c] = add ? row[c] + sum : sum;
    }
}

/* ---- norm ---- */

template <class T>
__global__ void __launch_bounds__(ROW_THREADS)
    rms(int width, const float *x, const int32_t *rows, const typename T::memory *w, float eps,
        float *rstd, typename T::memory *y)
{
    ZS_SHARED(float, room, ZS_CUDA_WARPS_MOST);
    const float *from = x + (size_t)(rows ? rows[blockIdx.x] : (int)blockIdx.x) * width;
    typename T::memory *to = y + (size_t)blockIdx.x * width;
    float sum = 0;
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        sum += from[c] * from[c];
    const float r = 1.0f / sqrtf(zs_block_sum(sum, room) / (float)width + eps);
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        to[c] = T::narrow(from[c] * r * T::widen(w[c]));
    if (threadIdx.x == 0)
        rstd[blockIdx.x] = r;
}

template <class T>
__global__ void __launch_bounds__(ROW_THREADS)
    rms_grad(int width, const float *base, const float *dy, const float *x, const int32_t *slot,
             const typename T::memory *w, const float *rstd, float *dx,
             typename T::memory *dx_narrow, typename T::memory *y)
{
    ZS_SHARED(float, room, ZS_CUDA_WARPS_MOST);
    const int from = slot ? slot[blockIdx.x] : (int)blockIdx.x;
    const size_t at = (size_t)blockIdx.x * width, dy_at = (size_t)(from < 0 ? 0 : from) * width;
    const float r = from < 0 ? 0.0f : rstd[from];
    float sum = 0;
    if (from >= 0)
        for (int c = threadIdx.x; c < width; c += blockDim.x)
            sum += dy[dy_at + c] * T::widen(w[c]) * x[at + c];
    const float pull = zs_block_sum(sum, room) / (float)width * r * r;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float d = base ? base[at + c] : 0.0f;
        if (from >= 0) {
            const float weight = T::widen(w[c]);
            if (y)
                y[at + c] = T::narrow(x[at + c] * r * weight);
            d += (dy[dy_at + c] * weight - x[at + c] * pull) * r;
        }
        dx[at + c] = d;
        if (dx_narrow)
            dx_narrow[at + c] = T::narrow(d);
    }
}

/* ---- sums of columns ---- */

/* 32 columns and `each` rows to a block of threads. */
template <class S>
__global__ void __launch_bounds__(ZS_CUDA_LANES *COLUMN_LANES)
    columns(int count, int width, int each, const typename S::memory *dy, const float *x,
            const int32_t *rows, const float *rstd, float *out, int add)
{
    ZS_SHARED(float, part, ZS_CUDA_LANES *COLUMN_LANES);
    const int c = (int)(blockIdx.x * ZS_CUDA_LANES + threadIdx.x);
    const int first = (int)blockIdx.y * each;
    const int end = first + each < count ? first + each : count;
    float sum = 0;
    if (c < width)
        for (int r = first + (int)threadIdx.y; r < end; r += COLUMN_LANES) {
            float value = S::widen(dy[(size_t)r * width + c]);
            if (x)
                value *= x[(size_t)(rows ? rows[r] : r) * width + c] * rstd[r];
            sum += value;
        }
    part[threadIdx.y * ZS_CUDA_LANES + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || c >= width)
        return;
    for (int lane = 1; lane < COLUMN_LANES; lane++)
        sum += part[lane * ZS_CUDA_LANES + threadIdx.x];
    float *to = out + (size_t)blockIdx.y * width + c;
    *to = add ? *to + sum : sum;
}

/* ---- elements ---- */

template <class D, class T>
__global__ void __launch_bounds__(FLAT_THREADS)
    bias(int width, typename D::memory *y, const typename T::memory *b)
{
    typename D::memory *row = y + (size_t)blockIdx.x * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x)
        row[c] = D::narrow(D::widen(row[c]) + T::widen(b[c]));
}

static __device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static __device__ __forceinline__ void swiglu_grad_one(float *act, float *gate, float *up, float d)
{
    const float u = *up, s = sigmoid(*gate), silu = *gate * s;
    *act = silu * u;
    *gate = d * u * (s + silu * (1.0f - s));
    *up = d * silu;
}

/* Arrays begin at multiples of 16 bytes; the last group may be a part of one. */
template <class T>
__global__ void __launch_bounds__(FLAT_THREADS)
    swiglu(uint64_t n, typename T::memory *act, const typename T::memory *gate,
           const typename T::memory *up)
{
    const uint64_t i = ((uint64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * ZS_CUDA_GROUP;
    if (i + ZS_CUDA_GROUP <= n) {
        float g[ZS_CUDA_GROUP], u[ZS_CUDA_GROUP];
        zs_get_group<T>(gate + i, g);
        zs_get_group<T>(up + i, u);
#pragma unroll
        for (int j = 0; j < ZS_CUDA_GROUP; j++)
            g[j] = g[j] * sigmoid(g[j]) * u[j];
        zs_put_group<T>(act + i, g);
        return;
    }
    for (uint64_t j = i; j < n; j++) {
        const float g = T::widen(gate[j]);
        act[j] = T::narrow(g * sigmoid(g) * T::widen(up[j]));
    }
}

template <class T>
__global__ void __launch_bounds__(FLAT_THREADS)
    swiglu_grad(uint64_t n, typename T::memory *act, typename T::memory *gate,
                typename T::memory *up, const typename T::memory *dact)
{
    const uint64_t i = ((uint64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * ZS_CUDA_GROUP;
    if (i + ZS_CUDA_GROUP <= n) {
        float a[ZS_CUDA_GROUP], g[ZS_CUDA_GROUP], u[ZS_CUDA_GROUP], d[ZS_CUDA_GROUP];
        zs_get_group<T>(gate + i, g);
        zs_get_group<T>(up + i, u);
        zs_get_group<T>(dact + i, d);
#pragma unroll
        for (int j = 0; j < ZS_CUDA_GROUP; j++)
            swiglu_grad_one(&a[j], &g[j], &u[j], d[j]);
        zs_put_group<T>(act + i, a);
        zs_put_group<T>(gate + i, g);
        zs_put_group<T>(up + i, u);
        return;
    }
    for (uint64_t j = i; j < n; j++) {
        float a, g = T::widen(gate[j]), u = T::widen(up[j]);
        swiglu_grad_one(&a, &g, &u, T::widen(dact[j]));
        act[j] = T::narrow(a);
        gate[j] = T::narrow(g);
        up[j] = T::narrow(u);
    }
}

/* ---- launches ---- */

/* Calls the template for fp32 or bf16. */
#define CALL(function, dtype, ...)                                                                 \
    do {                                                                                           \
        if ((dtype) == ZS_FP32)                                                                    \
            function<zs_fp32>(__VA_ARGS__);                                                        \
        else                                                                                       \
            function<zs_bf16>(__VA_ARGS__);                                                        \
    } while (0)

template <class T> static const typename T::memory *as(const void *x)
{
    return static_cast<const typename T::memory *>(x);
}

template <class T> static typename T::memory *as(void *x)
{
    return static_cast<typename T::memory *>(x);
}

template <class T>
static void embed_launch(cudaStream_t stream, int tokens, int width, const int32_t *ids,
                         const void *table, float *out)
{
    ZS_LAUNCH((embed<T>), (unsigned)tokens, zs_row_threads(width, ROW_THREADS), 0, stream, width,
              ids, as<T>(table), out);
}

zs_status zs_cuda_nn_embed(cudaStream_t stream, zs_dtype dtype, int tokens, int width,
                           const int32_t *ids, const void *table, float *out)
{
    CALL(embed_launch, dtype, stream, tokens, width, ids, table, out);
    return zs_launched("embed");
}

zs_status zs_cuda_nn_embed_grad(cudaStream_t stream, const zs_nn_embed_grad *g)
{
    ZS_LAUNCH(embed_grad, (unsigned)g->vocab, zs_row_threads(g->width, ROW_THREADS), 0, stream,
              g->width, g->first_use, g->next_use, g->dx, g->out, g->add);
    return zs_launched("embed_grad");
}

template <class T> static void rms_launch(cudaStream_t stream, const zs_nn_rms *r)
{
    ZS_LAUNCH((rms<T>), (unsigned)r->count, zs_row_threads(r->width, ROW_THREADS), 0, stream,
              r->width, r->x, r->rows, as<T>(r->w), r->eps, r->rstd, as<T>(r->y));
}

zs_status zs_cuda_nn_rms(cudaStream_t stream, zs_dtype dtype, const zs_nn_rms *r)
{
    CALL(rms_launch, dtype, stream, r);
    return zs_launched("rms");
}

template <class T> static void rms_grad_launch(cudaStream_t stream, const zs_nn_rms_grad *g)
{
    ZS_LAUNCH((rms_grad<T>), (unsigned)g->count, zs_row_threads(g->width, ROW_THREADS), 0, stream,
              g->width, g->base, g->dy, g->x, g->slot, as<T>(g->w), g->rstd, g->dx,
              as<T>(g->dx_narrow), as<T>(g->y));
}

zs_status zs_cuda_nn_rms_grad(cudaStream_t stream, zs_dtype dtype, const zs_nn_rms_grad *g)
{
    CALL(rms_grad_launch, dtype, stream, g);
    return zs_launched("rms_grad");
}

template <class S>
static void columns_launch(cudaStream_t stream, const zs_nn_columns *c, int each, float *out,
                           int add)
{
    const dim3 grid((unsigned)((c->width + ZS_CUDA_LANES - 1) / ZS_CUDA_LANES),
                    (unsigned)((c->count + each - 1) / each));
    ZS_LAUNCH((columns<S>), grid, dim3(ZS_CUDA_LANES, COLUMN_LANES), 0, stream, c->count, c->width,
              each, as<S>(c->dy), c->x, c->rows, c->rstd, out, add);
}

zs_status zs_cuda_nn_columns(cudaStream_t stream, const zs_nn_columns *c, int each, float *out,
                             int add)
{
    CALL(columns_launch, c->dtype, stream, c, each, out, add);
    return zs_launched("columns");
}

template <class D, class T>
static void bias_launch(cudaStream_t stream, int count, int width, void *y, const void *b)
{
    ZS_LAUNCH((bias<D, T>), (unsigned)count, zs_row_threads(width, FLAT_THREADS), 0, stream, width,
              as<D>(y), as<T>(b));
}

zs_status zs_cuda_nn_bias(cudaStream_t stream, zs_dtype dtype, int count, int width,
                          zs_dtype y_dtype, void *y, const void *b)
{
    if (dtype == ZS_FP32)
        bias_launch<zs_fp32, zs_fp32>(stream, count, width, y, b);
    else if (y_dtype == ZS_FP32)
        bias_launch<zs_fp32, zs_bf16>(stream, count, width, y, b);
    else
        bias_launch<zs_bf16, zs_bf16>(stream, count, width, y, b);
    return zs_launched("bias");
}

static unsigned flat_blocks(uint64_t n)
{
    const uint64_t tile = FLAT_THREADS * ZS_CUDA_GROUP;
    return (unsigned)((n + tile - 1) / tile);
}

template <class T>
static void swiglu_launch(cudaStream_t stream, uint64_t n, void *act, const void *gate,
                          const void *up)
{
    ZS_LAUNCH((swiglu<T>), flat_blocks(n), FLAT_THREADS, 0, stream, n, as<T>(act), as<T>(gate),
              as<T>(up));
}

zs_status zs_cuda_nn_swiglu(cudaStream_t stream, zs_dtype dtype, uint64_t n, void *act,
                            const void *gate, const void *up)
{
    CALL(swiglu_launch, dtype, stream, n, act, gate, up);
    return zs_launched("swiglu");
}

template <class T>
static void swiglu_grad_launch(cudaStream_t stream, uint64_t n, void *act, void *gate, void *up,
                               const void *dact)
{
    ZS_LAUNCH((swiglu_grad<T>), flat_blocks(n), FLAT_THREADS, 0, stream, n, as<T>(act), as<T>(gate),
              as<T>(up), as<T>(dact));
}

zs_status zs_cuda_nn_swiglu_grad(cudaStream_t stream, zs_dtype dtype, uint64_t n, void *act,
                                 void *gate, void *up, const void *dact)
{
    CALL(swiglu_grad_launch, dtype, stream, n, act, gate, up, dact);
    return zs_launched("swiglu_grad");
}

zs_status zs_cuda_load_nn_rows(void)
{
    static const void *const kernels[] = {ZS_KERNEL(embed<zs_fp32>),
                                          ZS_KERNEL(embed<zs_bf16>),
                                          ZS_KERNEL(embed_grad),
                                          ZS_KERNEL(rms<zs_fp32>),
                                          ZS_KERNEL(rms<zs_bf16>),
                                          ZS_KERNEL(rms_grad<zs_fp32>),
                                          ZS_KERNEL(rms_grad<zs_bf16>),
                                          ZS_KERNEL(columns<zs_fp32>),
                                          ZS_KERNEL(columns<zs_bf16>),
                                          ZS_KERNEL(bias<zs_fp32, zs_fp32>),
                                          ZS_KERNEL(bias<zs_fp32, zs_bf16>),
                                          ZS_KERNEL(bias<zs_bf16, zs_bf16>),
                                          ZS_KERNEL(swiglu<zs_fp32>),
                                          ZS_KERNEL(swiglu<zs_bf16>),
                                          ZS_KERNEL(swiglu_grad<zs_fp32>),
                                          ZS_KERNEL(swiglu_grad<zs_bf16>)};
    return zs_cuda_load(kernels, sizeof kernels / sizeof kernels[0]);
}
