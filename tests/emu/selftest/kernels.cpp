/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that are right give the right numbers, in any order of threads. */
#include "tests/emu/kernel.h"
#include "tests/emu/selftest/check.h"

struct Scale {
    float factor;
};

__global__ void scale(float4 *x, int count, Scale by)
{
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < count;
         i += (int)(gridDim.x * blockDim.x)) {
        float4 v = __ldcs(x + i);
        v.x *= by.factor, v.y *= by.factor, v.z *= by.factor, v.w *= by.factor;
        __stcs(x + i, v);
    }
}

/* The sum of a block's values: shuffles, then shared memory. */
static __device__ float block_sum(float x)
{
    ZS_SHARED(float, of_warp, EMU_WARP);
    for (int by = EMU_WARP / 2; by; by /= 2)
        x += __shfl_xor_sync(0xffffffff, x, by);
    if (threadIdx.x % warpSize == 0)
        of_warp[threadIdx.x / warpSize] = x;
    __syncthreads();
    x = threadIdx.x < blockDim.x / warpSize ? of_warp[threadIdx.x] : 0.0f;
    if (threadIdx.x < warpSize)
        for (int by = EMU_WARP / 2; by; by /= 2)
            x += __shfl_down_sync(0xffffffff, x, by);
    return x;
}

/* The last block to come adds up what all left: fences and an atomic in place of a barrier. */
__global__ void sum(float *out, float *partial, unsigned *arrived, const float *x, int count)
{
    float mine = 0;
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < count;
         i += (int)(gridDim.x * blockDim.x))
        mine += x[i];
    mine = block_sum(mine);
    if (threadIdx.x)
        return;
    partial[blockIdx.x] = mine;
    __threadfence();
    if (atomicAdd(arrived, 1u) + 1 == gridDim.x) {
        float total = 0;
        for (unsigned b = 0; b < gridDim.x; b++)
            total += partial[b];
        *out = total;
    }
}

template <class T, int STEP> __global__ void reverse(T *out, const T *in)
{
    ZS_SHARED_DYNAMIC(T, row);
    for (unsigned i = threadIdx.x; i < blockDim.x * STEP; i += blockDim.x)
        row[i] = in[blockIdx.y * blockDim.x * STEP + i];
    __syncthreads();
    for (unsigned i = threadIdx.x; i < blockDim.x * STEP; i += blockDim.x)
        out[blockIdx.y * blockDim.x * STEP + i] = row[blockDim.x * STEP - 1 - i];
}

__global__ void votes(unsigned *ballot, int *any, float *largest)
{
    const unsigned i = threadIdx.x;
    ballot[i] = __ballot_sync(0xffffffff, i % 3 == 0);
    any[i] = __syncthreads_or(i == 17) + __all_sync(0xffffffff, i < 40) * 2 +
             __any_sync(0xffffffff, i == 39) * 4;
    atomicMax(largest, (float)i);
    if (i == 0)
        CHECK(atomicCAS(&ballot[63], 77u, 1u) != 77u);
}

static cudaStream_t stream;

static void numbers_are_right()
{
    enum { N = 4096 };
    std::vector<float> x(N);
    float expected = 0;
    for (int i = 0; i < N; i++) {
        x[i] = (float)(i % 7);
        expected += x[i] * 2;
    }
    float *dx = on_device(x), *out = on_device(std::vector<float>(1)),
          *partial = on_device(std::vector<float>(8));
    unsigned *arrived = on_device(std::vector<unsigned>(1));
    ZS_LAUNCH(scale, 3, 96, 0, stream, (float4 *)dx, N / 4, Scale{2});
    ZS_LAUNCH(sum, 8, 128, 0, stream, out, partial, arrived, dx, N);
    CHECK(from_device(stream, out, 1)[0] == expected);

    float *reversed = on_device(x);
    ZS_LAUNCH((reverse<float, 2>), dim3(1, N / 64), 32, 64 * sizeof(float), stream, reversed, dx);
    std::vector<float> y = from_device(stream, reversed, N);
    for (int i = 0; i < N; i++)
        CHECK(y[i] == 2 * x[i / 64 * 64 + 63 - i % 64]);

    unsigned *ballot = on_device(std::vector<unsigned>(64));
    int *any = on_device(std::vector<int>(64));
    float *largest = on_device(std::vector<float>(1));
    ZS_LAUNCH(votes, 1, 64, 0, stream, ballot, any, largest);
    CHECK(from_device(stream, ballot, 64)[5] == 0x49249249);
    CHECK(from_device(stream, any, 64)[0] == 1 + 2 && from_device(stream, any, 64)[40] == 1 + 4);
    CHECK(from_device(stream, largest, 1)[0] == 63);
    for (void *ptr :
         std::initializer_list<void *>{dx, out, partial, arrived, reversed, ballot, any, largest})
        CHECK(cudaFree(ptr) == cudaSuccess);
}

__global__ void nothing()
{
}

static cudaError_t launch_error(dim3 grid, dim3 block, size_t shared_bytes)
{
    ZS_LAUNCH(nothing, grid, block, shared_bytes, stream);
    return cudaGetLastError();
}

static void launches_are_refused()
{
    CHECK(launch_error(1, 1024, 48 << 10) == cudaSuccess);
    CHECK(launch_error(1, 1025, 0) == cudaErrorInvalidConfiguration);
    CHECK(launch_error(1, dim3(64, 4, 5), 0) == cudaErrorInvalidConfiguration);
    CHECK(launch_error(1, dim3(1, 1, 65), 0) == cudaErrorInvalidConfiguration);
    CHECK(launch_error(0, 32, 0) == cudaErrorInvalidConfiguration);
    CHECK(launch_error(dim3(1, 65536), 32, 0) == cudaErrorInvalidConfiguration);
    CHECK(launch_error(70000, 1, 0) == cudaSuccess);
    CHECK(launch_error(1, 32, (48 << 10) + 1) == cudaErrorInvalidValue);
    CHECK(cudaFuncSetAttribute((const void *)nothing, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               (227 << 10) + 1) == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    CHECK(cudaFuncSetAttribute((const void *)nothing, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               227 << 10) == cudaSuccess);
    CHECK(launch_error(1, 32, 227 << 10) == cudaSuccess);
}

int main()
{
    stream = new_stream();
    numbers_are_right();
    launches_are_refused();
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    puts("emulated: all right");
    return 0;
}
