/* SPDX-License-Identifier: Apache-2.0 */
/* What attention does between its matrix products, for a tile of queries and a tile of keys. A warp
 * takes a query of a head: lane l has every 32nd key. Narrow results take the place of the scores
 * they come from, once all lanes have read theirs: in bf16 a row fills the first half of its room.
 */
#include "kernels/cuda/nn_sum.h"

enum { EACH = ZS_NN_TILE_MOST / ZS_CUDA_LANES };

/* A row of scores: a query and a head of the group. */
typedef struct query {
    size_t row;     /* of the tile's arrays, over all pairs at hand */
    size_t stat;    /* of lse and delta */
    int pair, t, g; /* t: in-row token */
    int from, to;   /* keys of the tile that it sees */
} query;

/* False: no such row. */
static __device__ __forceinline__ bool query_of(const zs_cuda_tile &tile, const int32_t *starts,
                                                query *q)
{
    const int index = (int)(blockIdx.x * ZS_CUDA_WARPS + threadIdx.y);
    const int rows = tile.queries * tile.group;
    if (index >= rows)
        return false;
    q->pair = tile.pair + (int)blockIdx.y;
    q->t = tile.query + index / tile.group;
    q->g = index % tile.group;
    q->row = (size_t)blockIdx.y * rows + index;
    q->stat = ((size_t)q->pair * tile.seq + q->t) * tile.group + q->g;
    const int start = starts ? starts[(size_t)(q->pair / tile.kv_heads) * tile.seq + q->t] : 0;
    q->from = max(start - tile.key, 0);
    q->to = min(q->t + 1 - tile.key, tile.keys);
    return true;
}

template <class T>
__global__ void __launch_bounds__(ZS_CUDA_LANES *ZS_CUDA_WARPS)
    softmax(const zs_cuda_tile tile, const int32_t *starts, float *scores, float *sums, float *max,
            float *denominator)
{
    query q;
    if (!query_of(tile, starts, &q))
        return;
    const int lane = (int)threadIdx.x;
    const float *from = scores + q.row * tile.ld;
    float s[EACH], top = -INFINITY, sum = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = lane + j * ZS_CUDA_LANES;
        s[j] = i >= q.from && i < q.to ? from[i] : -INFINITY;
        top = fmaxf(top, s[j]);
    }
    const float before = tile.first ? -INFINITY : max[q.row];
    top = fmaxf(zs_warp_max(top), before);
    /* Where nothing was seen so far, all terms are 0 whatever they are measured against. */
    const float shift = top == -INFINITY ? 0.0f : top;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        s[j] = expf(s[j] - shift);
        sum += s[j];
    }
    sum = zs_warp_sum(sum);
    const float shrink = expf(before - shift);
    __syncwarp();
    typename T::memory *to = reinterpret_cast<typename T::memory *>(scores + q.row * tile.ld);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = lane + j * ZS_CUDA_LANES;
        if (i < tile.keys)
            to[i] = T::narrow(s[j]);
    }
    if (!tile.first)
        for (int c = lane; c < tile.dim; c += ZS_CUDA_LANES)
            sums[q.row * tile.dim + c] *= shrink;
    __syncwarp(); /* all have read max */
    if (lane == 0) {
        denominator[q.row] = tile.first ? sum : denominator[q.row] * shrink + sum;
        max[q.row] = top;
    }
}

template <class T>
__global__ void __launch_bounds__(ZS_CUDA_LANES *ZS_CUDA_WARPS)
    attention_out(const zs_cuda_tile tile, const float *sums, const float *max,
                  const float *denominator, typename T::memory *out, float *lse)
{
    query q;
    if (!query_of(tile, NULL, &q))
        return;
    const int lane = (int)threadIdx.x, kv = q.pair % tile.kv_heads;
    const size_t token = (size_t)(q.pair / tile.kv_heads) * tile.seq + q.t;
    const size_t head = (size_t)kv * tile.group + q.g;
    typename T::memory *to = out + (token * tile.kv_heads * tile.group + head) * tile.dim;
    const float scale = 1.0f / denominator[q.row];
    for (int c = lane; c < tile.dim; c += ZS_CUDA_LANES)
        to[c] = T::narrow(sums[q.row * tile.dim + c] * scale);
    if (lane == 0)
        lse[q.stat] = max[q.row] + logf(denominator[q.row]);
}

/* One tile of all queries; rows are in head-major order. */
template <class T>
__global__ void __launch_bounds__(ZS_CUDA_LANES *ZS_CUDA_WARPS)
    attention_delta(const zs_cuda_tile tile, const typename T::memory *out,
                    const typename T::memory *dout, typename T::memory *dout_heads, float *delta)
{
    query q;
    if (!query_of(tile, NULL, &q))
        return;
    const int lane = (int)threadIdx.x, kv = q.pair % tile.kv_heads;
    const size_t token = (size_t)(q.pair / tile.kv_heads) * tile.seq + q.t;
    const size_t head = (size_t)kv * tile.group + q.g;
    const size_t from = (token * tile.kv_heads * tile.group + head) * tile.dim;
    float sum = 0;
    for (int c = lane; c < tile.dim; c += ZS_CUDA_LANES) {
        sum += T::widen(dout[from + c]) * T::widen(out[from + c]);
        dout_heads[q.stat * tile.dim + c] = dout[from + c];
    }
    sum = zs_warp_sum(sum);
    if (lane == 0)
        delta[q.stat] = sum;
}

template <class T>
__global__ void __launch_bounds__(ZS_CUDA_LANES *ZS_CUDA_WARPS)
    softmax_grad(const zs_cuda_tile tile, const int32_t *starts, float *scores, float *dscores,
                 const float *lse, const float *delta)
{
    query q;
    if (!query_of(tile, starts, &q))
        return;
    const int lane = (int)threadIdx.x;
    const float *s = scores + q.row * tile.ld, *d = dscores + q.row * tile.ld;
    const float l = lse[q.stat], pull = delta[q.stat];
    float p[EACH], dp[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = lane + j * ZS_CUDA_LANES;
        const bool seen = i >= q.from && i < q.to;
        p[j] = seen ? expf(s[i] - l) : 0.0f;
        dp[j] = seen ? p[j] * (d[i] - pull) : 0.0f;
    }
    __syncwarp();
    typename T::memory *to_p = reinterpret_cast<typename T::memory *>(scores + q.row * tile.ld);
    typename T::memory *to_d = reinterpret_cast<typename T::memory *>(dscores + q.row * tile.ld);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = lane + j * ZS_CUDA_LANES;
        if (i >= tile.keys)
            continue;
        to_p[i] = T::narrow(p[j]);
        to_d[i] = T::narrow(dp[j]);
    }
}

/* ---- launches ---- */

static dim3 grid_of(const zs_cuda_tile *t)
{
    const unsigned rows = (unsigned)(t->queries * t->group);
    return dim3((rows + ZS_CUDA_WARPS - 1) / ZS_CUDA_WARPS, (unsigned)t->pairs);
}

static dim3 block_of()
{
    return dim3(ZS_CUDA_LANES, ZS_CUDA_WARPS);
}

zs_status zs_cuda_nn_softmax(cudaStream_t stream, zs_dtype dtype, const zs_cuda_tile *t,
                             const int32_t *starts, float *scores, float *sums, float *max,
                             float *denominator)
{
    if (dtype == ZS_FP32)
        ZS_LAUNCH((softmax<zs_fp32>), grid_of(t), block_of(), 0, stream, *t, starts, scores, sums,
                  max, denominator);
    else
        ZS_LAUNCH((softmax<zs_bf16>), grid_of(t), block_of(), 0, stream, *t, starts, scores, sums,
                  max, denominator);
    return zs_launched("softmax");
}

template <class T>
static void out_launch(cudaStream_t stream, const zs_cuda_tile *t, const float *sums,
                       const float *max, const float *denominator, void *out, float *lse)
{
    ZS_LAUNCH((attention_out<T>), grid_of(t), block_of(), 0, stream, *t, sums, max, denominator,
              static_cast<typename T::memory *>(out), lse);
}

zs_status zs_cuda_nn_attention_out(cudaStream_t stream, zs_dtype dtype, const zs_cuda_tile *t,
                                   const float *sums, const float *max, const float *denominator,
                                   void *out, float *lse)
{
    if (dtype == ZS_FP32)
        out_launch<zs_fp32>(stream, t, sums, max, denominator, out, lse);
    else
        out_launch<zs_bf16>(stream, t, sums, max, denominator, out, lse);
    return zs_launched("attention_out");
}

template <class T> static void delta_launch(cudaStream_t stream, const zs_nn_attention *a)
{
    typedef typename T::memory memory;
    zs_cuda_tile t = {};
    t.seq = t.queries = a->seq;
    t.group = a->heads / a->kv_heads;
    t.kv_heads = a->kv_heads;
    t.dim = a->dim;
    t.pairs = a->rows * a->kv_heads;
    ZS_LAUNCH((attention_delta<T>), grid_of(&t), block_of(), 0, stream, t,
              static_cast<const memory *>(a->out), static_cast<const memory *>(a->dout),
              static_cast<memory *>(a->dout_heads), a->delta);
}

zs_status zs_cuda_nn_attention_delta(cudaStream_t stream, zs_dtype dtype, const zs_nn_attention *a)
{
    if (dtype == ZS_FP32)
        delta_launch<zs_fp32>(stream, a);
    else
        delta_launch<zs_bf16>(stream, a);
    return zs_launched("attention_delta");
}

zs_status zs_cuda_nn_softmax_grad(cudaStream_t stream, zs_dtype dtype, const zs_cuda_tile *t,
                                  const int32_t *starts, float *scores, float *dscores,
                                  const float *lse, const float *delta)
{
    if (dtype == ZS_FP32)
        ZS_LAUNCH((softmax_grad<zs_fp32>), grid_of(t), block_of(), 0, stream, *t, starts, scores,
                  dscores, lse, delta);
    else
        ZS_LAUNCH((softmax_grad<zs_bf16>), grid_of(t), block_of(), 0, stream, *t, starts, scores,
                  dscores, lse, delta);
    return zs_launched("softmax_grad");
}

zs_status zs_cuda_load_nn_attention(void)
{
    static const void *const kernels[] = {
        ZS_KERNEL(softmax<zs_fp32>),         ZS_KERNEL(softmax<zs_bf16>),
        ZS_KERNEL(attention_out<zs_fp32>),   ZS_KERNEL(attention_out<zs_bf16>),
        ZS_KERNEL(attention_delta<zs_fp32>), ZS_KERNEL(attention_delta<zs_bf16>),
        ZS_KERNEL(softmax_grad<zs_fp32>),    ZS_KERNEL(softmax_grad<zs_bf16>)};
    return zs_cuda_load(kernels, sizeof kernels / sizeof kernels[0]);
}
