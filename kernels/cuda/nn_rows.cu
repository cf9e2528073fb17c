/* SPDX-License-Identifier: Apache-2.0 */
/* Embedding, norms and dot products: a team of threads to a row. */
#include "kernels/cuda/nn_team.h"

template <class T, int TEAM>
__global__ void __launch_bounds__(NN_THREADS)
    lookup(int tokens, int n, const int32_t *ids, const typename T::memory *table, float *out)
{
    const uint64_t t = team_row<TEAM>();
    if (t >= (uint64_t)tokens)
        return;
    const typename T::memory *from = table + (uint64_t)ids[t] * n;
    for (int i = team_lane<TEAM>(); i < n; i += TEAM)
        out[t * n + i] = T::widen(from[i]);
}

template <class T, int TEAM>
__global__ void __launch_bounds__(NN_THREADS)
    lookup_grad(int vocab, int n, const int32_t *first_use, const int32_t *next_use,
                const float *dx, typename T::memory *grad, int accumulate)
{
    const uint64_t id = team_row<TEAM>();
    if (id >= (uint64_t)vocab)
        return;
    const int first = first_use[id];
    if (first < 0 && accumulate)
        return;
    for (int i = team_lane<TEAM>(); i < n; i += TEAM) {
        typename T::memory *to = grad + id * n + i;
        float sum = 0;
        for (int t = first; t >= 0; t = next_use[t])
            sum += dx[(uint64_t)t * n + i];
        *to = T::narrow(accumulate ? T::widen(*to) + sum : sum);
    }
}

template <class W, class Y, int TEAM>
__global__ void __launch_bounds__(NN_THREADS)
    rms(int rows, int n, const float *x, const int32_t *sources, const typename W::memory *w,
        float eps, float *rstd, typename Y::memory *y)
{
    const uint64_t row = team_row<TEAM>();
    if (row >= (uint64_t)rows)
        return;
    const float *from = x + (sources ? (uint64_t)sources[row] : row) * n;
    float sum = 0;
    for (int i = team_lane<TEAM>(); i < n; i += TEAM)
        sum += from[i] * from[i];
    const float r = 1.0f / sqrtf(team_reduce<TEAM, nn_sum>(sum) / (float)n + eps);
    for (int i = team_lane<TEAM>(); i < n; i += TEAM)
        y[row * n + i] = Y::narrow(from[i] * r * W::widen(w[i]));
    if (team_lane<TEAM>() == 0)
        rstd[row] = r;
}

template <class W, int TEAM>
__global__ void __launch_bounds__(NN_THREADS)
    rms_grad(int rows, int n, const float *dy, const int32_t *slots, const float *x,
             const typename W::memory *w, const float *rstd, const float *base, float *dx,
             typename W::memory *y)
{
    const uint64_t row = team_row<TEAM>();
    if (row >= (uint64_t)rows)
        return;
    const int64_t slot = slots ? (int64_t)slots[row] : (int64_t)row;
    if (slot < 0) {
        for (int i = team_lane<TEAM>(); i < n; i += TEAM)
            dx[row * n + i] = base ? base[row * n + i] : 0.0f;
        return;
    }
    const float r = rstd[slot];
    float sum = 0;
    for (int i = team_lane<TEAM>(); i < n; i += TEAM)
        sum += dy[slot * n + i] * W::widen(w[i]) * x[row * n + i];
    const float pull = team_reduce<TEAM, nn_sum>(sum) / (float)n * r * r;
    for (int i = team_lane<TEAM>(); i < n; i += TEAM) {
        const uint64_t at = row * n + i;
        const float weight = W::widen(w[i]), value = x[at];
        const float d = (dy[slot * n + i] * weight - value * pull) * r;
        dx[at] = base ? base[at] + d : d;
        if (y)
            y[at] = W::narrow(value * r * weight);
    }
}

template <int TEAM>
__global__ void __launch_bounds__(NN_THREADS)
    dots(uint64_t rows, int n, const float *a, const float *b, float *out)
{
    const uint64_t row = team_row<TEAM>();
    if (row >= rows)
        return;
    float sum = 0;
    for (int i = team_lane<TEAM>(); i < n; i += TEAM)
        sum += a[row * n + i] * b[row * n + i];
    sum = team_reduce<TEAM, nn_sum>(sum);
    if (team_lane<TEAM>() == 0)
        out[row] = sum;
}

/* ---- launches ---- */

template <class T>
static void lookup_launch(cudaStream_t stream, int tokens, int n, const int32_t *ids,
                          const void *table, float *out)
{
    const auto lookup_rows = n <= NN_SHORT ? lookup<T, NN_WARP> : lookup<T, NN_THREADS>;
    ZS_LAUNCH(lookup_rows, team_blocks(tokens, n), NN_THREADS, 0, stream, tokens, n, ids,
              static_cast<const typename T::memory *>(table), out);
}

zs_status zs_cuda_nn_lookup(cudaStream_t stream, int tokens, int n, const int32_t *ids,
                            const void *table, zs_dtype dtype, float *out)
{
    if (!tokens)
        return ZS_OK;
    const auto launch = dtype == ZS_FP32 ? lookup_launch<zs_fp32> : lookup_launch<zs_bf16>;
    launch(stream, tokens, n, ids, table, out);
    return zs_launched("lookup");
}

template <class T>
static void lookup_grad_launch(cudaStream_t stream, int vocab, int n, const int32_t *first_use,
                               const int32_t *next_use, const float *dx, void *grad, int accumulate)
{
    const auto lookup_grad_rows =
        n <= NN_SHORT ? lookup_grad<T, NN_WARP> : lookup_grad<T, NN_THREADS>;
    ZS_LAUNCH(lookup_grad_rows, team_blocks(vocab, n), NN_THREADS, 0, stream, vocab, n, first_use,
              next_use, dx, static_cast<typename T::memory *>(grad), accumulate);
}

zs_status zs_cuda_nn_lookup_grad(cudaStream_t stream, int vocab, int n, const int32_t *first_use,
                                 const int32_t *next_use, const float *dx, void *grad,
                                 zs_dtype dtype, int accumulate)
{
    const auto launch =
        dtype == ZS_FP32 ? lookup_grad_launch<zs_fp32> : lookup_grad_launch<zs_bf16>;
    launch(stream, vocab, n, first_use, next_use, dx, grad, accumulate);
    return zs_launched("lookup_grad");
}

template <class W, class Y>
static void rms_launch(cudaStream_t stream, int rows, int n, const float *x, const int32_t *sources,
                       const void *w, float eps, float *rstd, void *y)
{
    const auto rms_rows = n <= NN_SHORT ? rms<W, Y, NN_WARP> : rms<W, Y, NN_THREADS>;
    ZS_LAUNCH(rms_rows, team_blocks(rows, n), NN_THREADS, 0, stream, rows, n, x, sources,
              static_cast<const typename W::memory *>(w), eps, rstd,
              static_cast<typename Y::memory *>(y));
}

zs_status zs_cuda_nn_rms(cudaStream_t stream, int rows, int n, const float *x,
                         const int32_t *sources, const void *w, zs_dtype w_dtype, float eps,
                         float *rstd, void *y, zs_dtype y_dtype)
{
    if (!rows)
        return ZS_OK;
    const auto launch = w_dtype == ZS_FP32   ? rms_launch<zs_fp32, zs_fp32>
                        : y_dtype == ZS_FP32 ? rms_launch<zs_bf16, zs_fp32>
                                             : rms_launch<zs_bf16, zs_bf16>;
    launch(stream, rows, n, x, sources, w, eps, rstd, y);
    return zs_launched("rms");
}

template <class W>
static void rms_grad_launch(cudaStream_t stream, int rows, int n, const float *dy,
                            const int32_t *slots, const float *x, const void *w, const float *rstd,
                            const float *base, float *dx, void *y)
{
    const auto rms_grad_rows = n <= NN_SHORT ? rms_grad<W, NN_WARP> : rms_grad<W, NN_THREADS>;
    ZS_LAUNCH(rms_grad_rows, team_blocks(rows, n), NN_THREADS, 0, stream, rows, n, dy, slots, x,
              static_cast<const typename W::memory *>(w), rstd, base, dx,
              static_cast<typename W::memory *>(y));
}

zs_status zs_cuda_nn_rms_grad(cudaStream_t stream, int rows, int n, const float *dy,
                              const int32_t *slots, const float *x, const void *w, zs_dtype dtype,
                              const float *rstd, const float *base, float *dx, void *y)
{
    if (!rows)
        return ZS_OK;
    const auto launch = dtype == ZS_FP32 ? rms_grad_launch<zs_fp32> : rms_grad_launch<zs_bf16>;
    launch(stream, rows, n, dy, slots, x, w, rstd, base, dx, y);
    return zs_launched("rms_grad");
}

zs_status zs_cuda_nn_dots(cudaStream_t stream, uint64_t rows, int n, const float *a, const float *b,
                          float *out)
{
    if (!rows)
        return ZS_OK;
    const auto dots_rows = n <= NN_SHORT ? dots<NN_WARP> : dots<NN_THREADS>;
    ZS_LAUNCH(dots_rows, team_blocks(rows, n), NN_THREADS, 0, stream, rows, n, a, b, out);
    return zs_launched("dots");
}

zs_status zs_cuda_load_nn_rows(void)
{
    static const void *const kernels[] = {ZS_KERNEL(lookup<zs_fp32, NN_WARP>),
                                          ZS_KERNEL(lookup<zs_fp32, NN_THREADS>),
                                          ZS_KERNEL(lookup<zs_bf16, NN_WARP>),
                                          ZS_KERNEL(lookup<zs_bf16, NN_THREADS>),
                                          ZS_KERNEL(lookup_grad<zs_fp32, NN_WARP>),
                                          ZS_KERNEL(lookup_grad<zs_fp32, NN_THREADS>),
                                          ZS_KERNEL(lookup_grad<zs_bf16, NN_WARP>),
                                          ZS_KERNEL(lookup_grad<zs_bf16, NN_THREADS>),
                                          ZS_KERNEL(rms<zs_fp32, zs_fp32, NN_WARP>),
                                          ZS_KERNEL(rms<zs_fp32, zs_fp32, NN_THREADS>),
                                          ZS_KERNEL(rms<zs_bf16, zs_fp32, NN_WARP>),
                                          ZS_KERNEL(rms<zs_bf16, zs_fp32, NN_THREADS>),
                                          ZS_KERNEL(rms<zs_bf16, zs_bf16, NN_WARP>),
                                          ZS_KERNEL(rms<zs_bf16, zs_bf16, NN_THREADS>),
                                          ZS_KERNEL(rms_grad<zs_fp32, NN_WARP>),
                                          ZS_KERNEL(rms_grad<zs_fp32, NN_THREADS>),
                                          ZS_KERNEL(rms_grad<zs_bf16, NN_WARP>),
                                          ZS_KERNEL(rms_grad<zs_bf16, NN_THREADS>),
                                          ZS_KERNEL(dots<NN_WARP>),
                                          ZS_KERNEL(dots<NN_THREADS>)};
    return zs_cuda_load(kernels, sizeof kernels / sizeof kernels[0]);
}
