/* SPDX-License-Identifier: Apache-2.0 */
/* From a projection's result to q, k and v and back: each head's norm, rope, and the order of
 * memory. A warp takes a head of a token; a lane takes pairs of elements (i, i + dim / 2). */
#include "kernels/cuda/nn_sum.h"

enum { PAIRS = ZS_NN_HEAD_DIM_MOST / 2 / ZS_CUDA_LANES, ANGLE_THREADS = 128 };

/* The numbers of zs_nn_heads; pointers reach kernels as parameters of their own. */
typedef struct heads_shape {
    int rows, seq, heads, kv_heads, dim;
    float eps;
} heads_shape;

/* Where the head is in head-major order, in elements. */
static __device__ __forceinline__ size_t head_major(const heads_shape &h, int token, int head)
{
    const int group = h.heads / h.kv_heads, row = token / h.seq, t = token % h.seq;
    const size_t pair = (size_t)row * h.kv_heads + head / group;
    return ((pair * h.seq + t) * group + head % group) * h.dim;
}

/* As the host's tables: the angle in fp32, its cosine and sine in double. */
__global__ void __launch_bounds__(ANGLE_THREADS)
    angles(int64_t count, int half, const int32_t *positions, const float *frequencies,
           float *cosines, float *sines)
{
    const int64_t i = (int64_t)blockIdx.x * ANGLE_THREADS + threadIdx.x;
    if (i >= count)
        return;
    const double angle = (double)((float)positions[i / half] * frequencies[i % half]);
    cosines[i] = (float)cos(angle);
    sines[i] = (float)sin(angle);
}

template <class T>
__global__ void __launch_bounds__(ZS_CUDA_LANES *ZS_CUDA_WARPS)
    heads(const heads_shape shape, const float *cos, const float *sin,
          const typename T::memory *norm, float *rstd, const typename T::memory *raw,
          typename T::memory *out)
{
    const int64_t index = (int64_t)blockIdx.x * ZS_CUDA_WARPS + threadIdx.y;
    if (index >= (int64_t)shape.rows * shape.seq * shape.heads)
        return;
    const int token = (int)(index / shape.heads), head = (int)(index % shape.heads);
    const int half = shape.dim / 2, lane = (int)threadIdx.x;
    const typename T::memory *from = raw + (size_t)index * shape.dim;
    typename T::memory *to = out + head_major(shape, token, head);
    float a[PAIRS], b[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        const int i = lane + j * ZS_CUDA_LANES;
        a[j] = i < half ? T::widen(from[i]) : 0.0f;
        b[j] = i < half ? T::widen(from[i + half]) : 0.0f;
    }
    if (norm) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < PAIRS; j++)
            sum += a[j] * a[j] + b[j] * b[j];
        const float r = 1.0f / sqrtf(zs_warp_sum(sum) / (float)shape.dim + shape.eps);
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const int i = lane + j * ZS_CUDA_LANES;
            if (i < half) {
                a[j] = a[j] * r * T::widen(norm[i]);
                b[j] = b[j] * r * T::widen(norm[i + half]);
            }
        }
        if (lane == 0)
            rstd[index] = r;
    }
    const size_t angle = (size_t)token * half;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        const int i = lane + j * ZS_CUDA_LANES;
        if (i >= half)
            continue;
        const float c = cos ? cos[angle + i] : 1.0f, s = cos ? sin[angle + i] : 0.0f;
        to[i] = T::narrow(a[j] * c - b[j] * s);
        to[i + half] = T::narrow(b[j] * c + a[j] * s);
    }
}

/* A warp goes through `each` heads, so that it can add up its part of the norm's gradient. */
template <class T>
__global__ void __launch_bounds__(ZS_CUDA_LANES *ZS_CUDA_WARPS)
    heads_grad(const heads_shape shape, int each, const float *cos, const float *sin,
               const typename T::memory *norm, const float *rstd, const typename T::memory *raw,
               const float *d, typename T::memory *draw, float *partial)
{
    const int64_t count = (int64_t)shape.rows * shape.seq * shape.heads;
    const int64_t run = (int64_t)blockIdx.x * ZS_CUDA_WARPS + threadIdx.y;
    const int64_t end = (run + 1) * each < count ? (run + 1) * each : count;
    const int half = shape.dim / 2, lane = (int)threadIdx.x;
    float low[PAIRS], high[PAIRS];
    if (run * each >= count)
        return;
#pragma unroll
    for (int j = 0; j < PAIRS; j++)
        low[j] = high[j] = 0.0f;
    for (int64_t index = run * each; index < end; index++) {
        const int token = (int)(index / shape.heads), head = (int)(index % shape.heads);
        const float *from = d + head_major(shape, token, head);
        const typename T::memory *x = norm ? raw + (size_t)index * shape.dim : NULL;
        typename T::memory *to = draw + (size_t)index * shape.dim;
        const size_t angle = (size_t)token * half;
        float a[PAIRS], b[PAIRS], sum = 0;
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const int i = lane + j * ZS_CUDA_LANES;
            a[j] = b[j] = 0.0f;
            if (i >= half)
                continue;
            const float c = cos ? cos[angle + i] : 1.0f, s = cos ? sin[angle + i] : 0.0f;
            const float da = from[i], db = from[i + half];
            a[j] = da * c + db * s;
            b[j] = db * c - da * s;
            if (norm)
                sum += a[j] * T::widen(norm[i]) * T::widen(x[i]) +
                       b[j] * T::widen(norm[i + half]) * T::widen(x[i + half]);
        }
        if (norm) {
            const float r = rstd[index];
            const float pull = zs_warp_sum(sum) / (float)shape.dim * r * r;
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                const int i = lane + j * ZS_CUDA_LANES;
                if (i >= half)
                    continue;
                const float xa = T::widen(x[i]), xb = T::widen(x[i + half]);
                low[j] += a[j] * xa * r;
                high[j] += b[j] * xb * r;
                a[j] = (a[j] * T::widen(norm[i]) - xa * pull) * r;
                b[j] = (b[j] * T::widen(norm[i + half]) - xb * pull) * r;
            }
        }
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const int i = lane + j * ZS_CUDA_LANES;
            if (i >= half)
                continue;
            to[i] = T::narrow(a[j]);
            to[i + half] = T::narrow(b[j]);
        }
    }
    if (!norm)
        return;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        const int i = lane + j * ZS_CUDA_LANES;
        if (i >= half)
            continue;
        partial[run * shape.dim + i] = low[j];
        partial[run * shape.dim + i + half] = high[j];
    }
}

/* ---- launches ---- */

static heads_shape shape_of(const zs_nn_heads *h)
{
    const heads_shape shape = {h->rows, h->seq, h->heads, h->kv_heads, h->dim, h->eps};
    return shape;
}

static unsigned blocks_of(const zs_nn_heads *h, int each)
{
    const int64_t count = (int64_t)h->rows * h->seq * h->heads;
    const int64_t of_block = (int64_t)ZS_CUDA_WARPS * each;
    return (unsigned)((count + of_block - 1) / of_block);
}

zs_status zs_cuda_nn_angles(cudaStream_t stream, int tokens, int half, const int32_t *positions,
                            const float *frequencies, float *cosines, float *sines)
{
    const int64_t count = (int64_t)tokens * half;
    ZS_LAUNCH(angles, (unsigned)((count + ANGLE_THREADS - 1) / ANGLE_THREADS), ANGLE_THREADS, 0,
              stream, count, half, positions, frequencies, cosines, sines);
    return zs_launched("angles");
}

template <class T> static void heads_launch(cudaStream_t stream, const zs_nn_heads *h)
{
    typedef typename T::memory memory;
    ZS_LAUNCH((heads<T>), blocks_of(h, 1), dim3(ZS_CUDA_LANES, ZS_CUDA_WARPS), 0, stream,
              shape_of(h), h->cos, h->sin, static_cast<const memory *>(h->norm), h->rstd,
              static_cast<const memory *>(h->raw), static_cast<memory *>(h->out));
}

zs_status zs_cuda_nn_heads(cudaStream_t stream, zs_dtype dtype, const zs_nn_heads *h)
{
    if (dtype == ZS_FP32)
        heads_launch<zs_fp32>(stream, h);
    else
        heads_launch<zs_bf16>(stream, h);
    return zs_launched("heads");
}

template <class T>
static void heads_grad_launch(cudaStream_t stream, const zs_nn_heads *h, int each, float *partial)
{
    typedef typename T::memory memory;
    ZS_LAUNCH((heads_grad<T>), blocks_of(h, each), dim3(ZS_CUDA_LANES, ZS_CUDA_WARPS), 0, stream,
              shape_of(h), each, h->cos, h->sin, static_cast<const memory *>(h->norm), h->rstd,
              static_cast<const memory *>(h->raw), h->d, static_cast<memory *>(h->draw), partial);
}

zs_status zs_cuda_nn_heads_grad(cudaStream_t stream, zs_dtype dtype, const zs_nn_heads *h, int each,
                                float *partial)
{
    if (dtype == ZS_FP32)
        heads_grad_launch<zs_fp32>(stream, h, each, partial);
    else
        heads_grad_launch<zs_bf16>(stream, h, each, partial);
    return zs_launched("heads_grad");
}

zs_status zs_cuda_load_nn_heads(void)
{
    static const void *const kernels[] = {ZS_KERNEL(angles), ZS_KERNEL(heads<zs_fp32>),
                                          ZS_KERNEL(heads<zs_bf16>), ZS_KERNEL(heads_grad<zs_fp32>),
                                          ZS_KERNEL(heads_grad<zs_bf16>)};
    return zs_cuda_load(kernels, sizeof kernels / sizeof kernels[0]);
}
