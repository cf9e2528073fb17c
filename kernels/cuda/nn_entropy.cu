/* SPDX-License-Identifier: Apache-2.0 */
/* Cross-entropy: a block of threads takes a row of logits, reads it once for the loss, and once
 * more to leave the gradient in its place. */
#include "kernels/cuda/nn_sum.h"

enum { ENTROPY_THREADS = 512 };

template <class T>
__global__ void __launch_bounds__(ENTROPY_THREADS)
    entropy(int vocab, int ld, float *logits, const int32_t *targets, double *losses, int grad,
            float scale)
{
    ZS_SHARED(float, room, ZS_CUDA_WARPS_MOST);
    const float *row = logits + (size_t)blockIdx.x * ld;
    typename T::memory *to =
        reinterpret_cast<typename T::memory *>(logits + (size_t)blockIdx.x * ld);
    const int target = targets[blockIdx.x];
    const float logit = row[target];
    float top = -INFINITY, sum = 0;
    for (int c = threadIdx.x; c < vocab; c += blockDim.x) {
        const float x = row[c], more = fmaxf(top, x);
        /* x - more is NaN where both are infinite: the loss then is no number either. */
        sum = (top == -INFINITY ? 0.0f : sum * expf(top - more)) + expf(x - more);
        top = more;
    }
    const float all = zs_block_max(top, room);
    sum = zs_block_sum(top == -INFINITY ? sum : sum * expf(top - all), room);
    if (threadIdx.x == 0)
        losses[blockIdx.x] = log((double)sum) + (double)all - (double)logit;
    if (!grad)
        return;
    const float factor = scale / sum;
    /* Step by step: in bf16 a step's results lie over logits that it and earlier ones have read. */
    for (int first = 0; first < vocab; first += blockDim.x) {
        const int c = first + (int)threadIdx.x;
        const float x = c < vocab ? row[c] : 0.0f;
        if (sizeof(typename T::memory) < sizeof(float))
            __syncthreads();
        if (c < vocab)
            to[c] = T::narrow(expf(x - all) * factor - (c == target ? scale : 0.0f));
    }
}

template <class T> static void entropy_launch(cudaStream_t stream, const zs_nn_entropy *e)
{
    ZS_LAUNCH((entropy<T>), (unsigned)e->count, zs_row_threads(e->vocab, ENTROPY_THREADS), 0,
              stream, e->vocab, e->ld, e->logits, e->targets, e->losses, e->grad, e->scale);
}

zs_status zs_cuda_nn_entropy(cudaStream_t stream, zs_dtype dtype, const zs_nn_entropy *e)
{
    if (dtype == ZS_FP32)
        entropy_launch<zs_fp32>(stream, e);
    else
        entropy_launch<zs_bf16>(stream, e);
    return zs_launched("entropy");
}

zs_status zs_cuda_load_nn_entropy(void)
{
    static const void *const kernels[] = {ZS_KERNEL(entropy<zs_fp32>), ZS_KERNEL(entropy<zs_bf16>)};
    return zs_cuda_load(kernels, sizeof kernels / sizeof kernels[0]);
}
