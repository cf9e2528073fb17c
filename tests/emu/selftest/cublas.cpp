/* SPDX-License-Identifier: Apache-2.0 */
/* Products of every shape and type against a plain sum. */
#include <cmath>

#include <cublas_v2.h>

#include "kernels/element.h"
#include "tests/emu/selftest/check.h"

static cudaStream_t stream;
static cublasHandle_t handle;
static unsigned state = 1;

static float draw()
{
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 24) / 64 - 2;
}

static size_t width(cudaDataType type)
{
    return type == CUDA_R_32F ? 4 : 2;
}

static float get(const std::vector<char> &x, size_t i, cudaDataType type)
{
    return type == CUDA_R_32F    ? zs_load_fp32(x.data(), i)
           : type == CUDA_R_16BF ? zs_load_bf16(x.data(), i)
                                 : zs_load_fp16(x.data(), i);
}

static std::vector<char> matrix(size_t elements, cudaDataType type)
{
    std::vector<char> x(elements * width(type));
    for (size_t i = 0; i < elements; i++) {
        const float value = draw();
        if (type == CUDA_R_32F)
            zs_store_fp32(x.data(), i, value);
        else if (type == CUDA_R_16BF)
            zs_store_bf16(x.data(), i, value);
        else
            zs_store_fp16(x.data(), i, value);
    }
    return x;
}

struct Shape {
    int m, n, k, lda, ldb, ldc, batch;
    bool ta, tb;
    float alpha, beta;
    cudaDataType in, out;
    bool pointers;
};

static void check(const Shape &s)
{
    const int extra = 2; /* elements between those of a batch */
    const size_t a_step = (size_t)(s.lda * (s.ta ? s.m : s.k) + extra),
                 b_step = (size_t)(s.ldb * (s.tb ? s.k : s.n) + extra),
                 c_step = (size_t)(s.ldc * s.n + extra);
    const auto a = matrix(a_step * (size_t)s.batch, s.in),
               b = matrix(b_step * (size_t)s.batch, s.in),
               c = matrix(c_step * (size_t)s.batch, s.out);
    char *da = on_device(a), *db = on_device(b), *dc = on_device(c);
    const cublasOperation_t ta = s.ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                            tb = s.tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    std::vector<void *> pointers;
    for (char *first : {da, db, dc})
        for (int i = 0; i < s.batch; i++)
            pointers.push_back(first + (size_t)i * (first == da   ? a_step * width(s.in)
                                                    : first == db ? b_step * width(s.in)
                                                                  : c_step * width(s.out)));
    void **dp = on_device(pointers);
    if (s.pointers)
        CHECK(cublasGemmBatchedEx(handle, ta, tb, s.m, s.n, s.k, &s.alpha, dp, s.in, s.lda,
                                  dp + s.batch, s.in, s.ldb, &s.beta, dp + 2 * s.batch, s.out,
                                  s.ldc, s.batch, CUBLAS_COMPUTE_32F,
                                  CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
    else
        CHECK(cublasGemmStridedBatchedEx(
                  handle, ta, tb, s.m, s.n, s.k, &s.alpha, da, s.in, s.lda, (long long)a_step, db,
                  s.in, s.ldb, (long long)b_step, &s.beta, dc, s.out, s.ldc, (long long)c_step,
                  s.batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
    const std::vector<char> got = from_device(stream, dc, c.size());
    for (int z = 0; z < s.batch; z++)
        for (int j = 0; j < s.n; j++)
            for (int i = 0; i < s.m; i++) {
                double sum = 0, size = 0;
                for (int l = 0; l < s.k; l++) {
                    const float x =
                        get(a, (size_t)z * a_step + (size_t)(s.ta ? i * s.lda + l : l * s.lda + i),
                            s.in);
                    const float y =
                        get(b, (size_t)z * b_step + (size_t)(s.tb ? l * s.ldb + j : j * s.ldb + l),
                            s.in);
                    sum += (double)x * y;
                    size += fabs((double)x * y);
                }
                const size_t at = (size_t)z * c_step + (size_t)(j * s.ldc + i);
                const double before = get(c, at, s.out);
                const double expected = s.alpha * sum + s.beta * before;
                const double step = s.out == CUDA_R_32F    ? 0x1p-22
                                    : s.out == CUDA_R_16BF ? 0x1p-8
                                                           : 0x1p-11;
                CHECK(fabs(get(got, at, s.out) - expected) <=
                      0x1p-20 * (fabs(s.alpha) * size + fabs(before)) + step * fabs(expected));
            }
    /* Nothing between columns and matrices was written. */
    for (size_t i = c_step - (size_t)extra; i < c_step; i++)
        CHECK(get(got, i, s.out) == get(c, i, s.out));
    CHECK(cudaFree(da) == cudaSuccess && cudaFree(db) == cudaSuccess &&
          cudaFree(dc) == cudaSuccess && cudaFree(dp) == cudaSuccess);
}

static void usage_is_checked()
{
    const float one = 1, zero = 0;
    float *x = new_device<float>(16);
    const auto gemm = [&](int m, int lda, cudaDataType type, cublasComputeType_t compute) {
        return cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, 2, 2, &one, x, type, lda, x, type,
                            2, &zero, x + 8, CUDA_R_32F, 2, compute, CUBLAS_GEMM_DEFAULT);
    };
    CHECK(gemm(2, 2, CUDA_R_32F, CUBLAS_COMPUTE_32F) == CUBLAS_STATUS_SUCCESS);
    CHECK(gemm(2, 1, CUDA_R_32F, CUBLAS_COMPUTE_32F) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(gemm(-1, 2, CUDA_R_32F, CUBLAS_COMPUTE_32F) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(gemm(2, 2, CUDA_R_32F, (cublasComputeType_t)64) == CUBLAS_STATUS_NOT_SUPPORTED);
    emu_control_table.fail(EMU_CUBLAS, 0, 1);
    CHECK(gemm(2, 2, CUDA_R_32F, CUBLAS_COMPUTE_32F) == CUBLAS_STATUS_EXECUTION_FAILED);
    CHECK(gemm(2, 2, CUDA_R_32F, CUBLAS_COMPUTE_32F) == CUBLAS_STATUS_SUCCESS);
    CHECK(cudaFree(x) == cudaSuccess);
}

int main()
{
    stream = new_stream();
    CHECK(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasSetStream(handle, stream) == CUBLAS_STATUS_SUCCESS);
    CHECK(cublasSetMathMode(handle, CUBLAS_PEDANTIC_MATH) == CUBLAS_STATUS_SUCCESS);
    for (int trial = 0; trial < 200; trial++) {
        const auto upto = [](int most) {
            state = state * 1664525u + 1013904223u;
            return (int)(state >> 16) % most;
        };
        Shape s = {};
        s.m = 1 + upto(40), s.n = 1 + upto(20), s.k = upto(30), s.batch = 1 + upto(3);
        s.ta = upto(2), s.tb = upto(2), s.pointers = upto(2);
        s.lda = (s.ta ? s.k : s.m) + upto(3), s.ldb = (s.tb ? s.n : s.k) + upto(3);
        s.lda += s.lda == 0, s.ldb += s.ldb == 0;
        s.ldc = s.m + upto(3);
        s.alpha = upto(2) ? 1 : 0.5f, s.beta = (float)upto(3) - 1;
        s.in = upto(3) == 0 ? CUDA_R_32F : upto(2) ? CUDA_R_16BF : CUDA_R_16F;
        s.out = upto(2) ? s.in : CUDA_R_32F;
        check(s);
    }
    usage_is_checked();
    CHECK(cublasDestroy(handle) == CUBLAS_STATUS_SUCCESS);
    CHECK(cudaStreamDestroy(stream) == cudaSuccess);
    CHECK(emu_control_table.open_objects() == 0);
    puts("emulated: all right");
    return 0;
}
