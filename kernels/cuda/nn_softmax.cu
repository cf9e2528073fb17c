/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax of attention's scores within what a query sees, its gradient, and cross-entropy. */
#include "kernels/cuda/nn_team.h"

/* Row row of [heads][queries][keys]: its head and query, and keys [from, to) that it sees. */
struct nn_line {
    uint64_t stat; /* in [queries][heads] */
    int from, to;
};

static __device__ __forceinline__ nn_line line_of(uint64_t row, int heads, int queries, int offset,
                                                  int begin, const int32_t *starts)
{
    const int head = (int)(row / (unsigned)queries), query = (int)(row % (unsigned)queries);
    nn_line line;
    line.stat = (uint64_t)query * heads + head;
    line.from = starts[query] - begin;
    line.to = offset + query + 1;
    return line;
}

/* offset: the first query's token, counted from begin. */
template <int TEAM>
__global__ void __launch_bounds__(NN_THREADS)
    softmax(int heads, int queries, int keys, int offset, int begin, const int32_t *starts,
            float *x, float *lse)
{
    const uint64_t row = team_row<TEAM>();
    if (row >= (uint64_t)heads * queries)
        return;
    const nn_line line = line_of(row, heads, queries, offset, begin, starts);
    float *p = x + row * keys;
    float most = -INFINITY, sum = 0;
    for (int i = line.from + team_lane<TEAM>(); i < line.to; i += TEAM)
        most = nn_max::of(most, p[i]);
    most = team_reduce<TEAM, nn_max>(most);
    for (int i = line.from + team_lane<TEAM>(); i < line.to; i += TEAM) {
        p[i] = expf(p[i] - most);
        sum += p[i];
    }
    sum = team_reduce<TEAM, nn_sum>(sum);
    const float scale = 1.0f / sum;
    /* Each thread comes to the keys that it wrote. */
    for (int i = line.from + team_lane<TEAM>(); i < line.to; i += TEAM)
        p[i] *= scale;
    for (int i = team_lane<TEAM>(); i < line.from; i += TEAM)
        p[i] = 0;
    for (int i = line.to + team_lane<TEAM>(); i < keys; i += TEAM)
        p[i] = 0;
    if (team_lane<TEAM>() == 0)
        lse[line.stat] = most + logf(sum);
}

template <int TEAM>
__global__ void __launch_bounds__(NN_THREADS)
    softmax_grad(int heads, int queries, int keys, int offset, int begin, const int32_t *starts,
                 float *x, float *dx, const float *lse, const float *delta)
{
    const uint64_t row = team_row<TEAM>();
    if (row >= (uint64_t)heads * queries)
        return;
    const nn_line line = line_of(row, heads, queries, offset, begin, starts);
    const float shift = lse[line.stat], pull = delta[line.stat];
    float *p = x + row * keys, *dp = dx + row * keys;
    for (int i = team_lane<TEAM>(); i < keys; i += TEAM) {
        const bool seen = i >= line.from && i < line.to;
        const float value = seen ? expf(p[i] - shift) : 0.0f;
        p[i] = value;
        dp[i] = seen ? value * (dp[i] - pull) : 0.0f;
    }
}

/* logits may be grad. */
template <class T>
__global__ void __launch_bounds__(NN_THREADS)
    entropy(int vocab, float *logits, const int32_t *targets, float scale, double *losses,
            typename T::memory *grad)
{
    const uint64_t row = blockIdx.x;
    const int target = targets[row];
    float *x = logits + row * vocab;
    const float logit = x[target];
    float most = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < vocab; i += NN_THREADS)
        most = nn_max::of(most, x[i]);
    most = team_reduce<NN_THREADS, nn_max>(most);
    for (int i = threadIdx.x; i < vocab; i += NN_THREADS) {
        x[i] = expf(x[i] - most);
        sum += x[i];
    }
    sum = team_reduce<NN_THREADS, nn_sum>(sum);
    if (threadIdx.x == 0)
        losses[row] = log((double)sum) + (double)most - (double)logit;
    if (!grad)
        return;
    typename T::memory *to = grad + row * vocab;
    for (int i = threadIdx.x; i < vocab; i += NN_THREADS)
        to[i] = T::narrow(x[i] * (scale / sum) - (i == target ? scale : 0.0f));
}

/* ---- launches ---- */

zs_status zs_cuda_nn_softmax(cudaStream_t stream, const zs_nn_scores *s, float *x)
{
    const auto softmax_rows = s->keys <= NN_SHORT ? softmax<NN_WARP> : softmax<NN_THREADS>;
    ZS_LAUNCH(softmax_rows, team_blocks((uint64_t)s->heads * (uint64_t)s->queries, s->keys),
              NN_THREADS, 0, stream, s->heads, s->queries, s->keys, s->first - s->begin, s->begin,
              s->starts, x, s->lse);
    return zs_launched("softmax");
}

zs_status zs_cuda_nn_softmax_grad(cudaStream_t stream, const zs_nn_scores *s, float *x, float *dp,
                                  const float *delta)
{
    const auto softmax_grad_rows =
        s->keys <= NN_SHORT ? softmax_grad<NN_WARP> : softmax_grad<NN_THREADS>;
    ZS_LAUNCH(softmax_grad_rows, team_blocks((uint64_t)s->heads * (uint64_t)s->queries, s->keys),
              NN_THREADS, 0, stream, s->heads, s->queries, s->keys, s->first - s->begin, s->begin,
              s->starts, x, dp, s->lse, delta);
    return zs_launched("softmax_grad");
}

template <class T>
static void entropy_launch(cudaStream_t stream, int rows, int vocab, float *logits,
                           const int32_t *targets, float scale, double *losses, void *grad)
{
    ZS_LAUNCH((entropy<T>), rows, NN_THREADS, 0, stream, vocab, logits, targets, scale, losses,
              static_cast<typename T::memory *>(grad));
}

zs_status zs_cuda_nn_entropy(cudaStream_t stream, int rows, int vocab, float *logits,
                             const int32_t *targets, float scale, double *losses, void *grad,
                             zs_dtype dtype)
{
    if (!rows)
        return ZS_OK;
    const auto launch = dtype == ZS_FP32 ? entropy_launch<zs_fp32> : entropy_launch<zs_bf16>;
    launch(stream, rows, vocab, logits, targets, scale, losses, grad);
    return zs_launched("entropy");
}

zs_status zs_cuda_load_nn_softmax(void)
{
    static const void *const kernels[] = {
        ZS_KERNEL(softmax<NN_WARP>),      ZS_KERNEL(softmax<NN_THREADS>),
        ZS_KERNEL(softmax_grad<NN_WARP>), ZS_KERNEL(softmax_grad<NN_THREADS>),
        ZS_KERNEL(entropy<zs_fp32>),      ZS_KERNEL(entropy<zs_bf16>)};
    return zs_cuda_load(kernels, sizeof kernels / sizeof kernels[0]);
}
