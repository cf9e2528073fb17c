/* SPDX-License-Identifier: Apache-2.0 */
/* Sums over the rows of a matrix: gradients of biases and of norm weights. Two passes: blocks of
 * threads sum tiles of rows, then a thread to a column adds the tiles in order. */
#include "kernels/cuda/nn_team.h"

enum { COLUMNS = 32, LANES = NN_THREADS / COLUMNS };

template <class D>
__global__ void __launch_bounds__(NN_THREADS)
    column_partials(int rows, int n, int tile_rows, const typename D::memory *dy, const float *x,
                    const int32_t *sources, const float *rstd, float *partial)
{
    ZS_SHARED(float, sums, NN_THREADS);
    const int column = blockIdx.x * COLUMNS + threadIdx.x % COLUMNS;
    const int lane = threadIdx.x / COLUMNS, first = blockIdx.y * tile_rows;
    const int end = rows - first < tile_rows ? rows : first + tile_rows;
    float sum = 0;
    if (column < n)
        for (int row = first + lane; row < end; row += LANES) {
            float value = D::widen(dy[(uint64_t)row * n + column]);
            if (x)
                value *= x[(uint64_t)(sources ? sources[row] : row) * n + column] * rstd[row];
            sum += value;
        }
    sums[threadIdx.x] = sum;
    for (int half = LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half)
            sums[threadIdx.x] += sums[threadIdx.x + half * COLUMNS];
    }
    if (lane == 0 && column < n)
        partial[(uint64_t)blockIdx.y * n + column] = sums[threadIdx.x];
}

template <class G>
__global__ void __launch_bounds__(NN_THREADS)
    column_totals(int tiles, int n, const float *partial, typename G::memory *grad, int accumulate)
{
    const int column = blockIdx.x * NN_THREADS + threadIdx.x;
    if (column >= n)
        return;
    float sum = 0;
    for (int tile = 0; tile < tiles; tile++)
        sum += partial[(uint64_t)tile * n + column];
    grad[column] = G::narrow(accumulate ? G::widen(grad[column]) + sum : sum);
}

template <class D>
static void partials_launch(cudaStream_t stream, int tiles, int rows, int n, int tile_rows,
                            const void *dy, const float *x, const int32_t *sources,
                            const float *rstd, float *partial)
{
    ZS_LAUNCH((column_partials<D>), dim3((n + COLUMNS - 1) / COLUMNS, tiles), NN_THREADS, 0, stream,
              rows, n, tile_rows, static_cast<const typename D::memory *>(dy), x, sources, rstd,
              partial);
}

template <class G>
static void totals_launch(cudaStream_t stream, int tiles, int n, const float *partial, void *grad,
                          int accumulate)
{
    ZS_LAUNCH((column_totals<G>), (n + NN_THREADS - 1) / NN_THREADS, NN_THREADS, 0, stream, tiles,
              n, partial, static_cast<typename G::memory *>(grad), accumulate);
}

zs_status zs_cuda_nn_column_sums(cudaStream_t stream, int rows, int n, const void *dy,
                                 zs_dtype dy_dtype, const float *x, const int32_t *sources,
                                 const float *rstd, float *partial, void *grad, zs_dtype grad_dtype,
                                 int accumulate)
{
    /* As many tiles as there is room for, but none that leaves a lane without a few rows. */
    int tile_rows = (rows + ZS_NN_SUM_TILES - 1) / ZS_NN_SUM_TILES;
    tile_rows = tile_rows < 4 * LANES ? 4 * LANES : tile_rows;
    const int tiles = (rows + tile_rows - 1) / tile_rows;
    if (tiles) {
        const auto launch =
            dy_dtype == ZS_FP32 ? partials_launch<zs_fp32> : partials_launch<zs_bf16>;
        launch(stream, tiles, rows, n, tile_rows, dy, x, sources, rstd, partial);
        ZS_CHECK(zs_launched("column_partials"));
    }
    const auto launch = grad_dtype == ZS_FP32 ? totals_launch<zs_fp32> : totals_launch<zs_bf16>;
    launch(stream, tiles, n, partial, grad, accumulate);
    return zs_launched("column_totals");
}

zs_status zs_cuda_load_nn_columns(void)
{
    static const void *const kernels[] = {
        ZS_KERNEL(column_partials<zs_fp32>), ZS_KERNEL(column_partials<zs_bf16>),
        ZS_KERNEL(column_totals<zs_fp32>), ZS_KERNEL(column_totals<zs_bf16>)};
    return zs_cuda_load(kernels, sizeof kernels / sizeof kernels[0]);
}
