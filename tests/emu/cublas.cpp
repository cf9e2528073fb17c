/* SPDX-License-Identifier: Apache-2.0 */
/* cuBLAS on the CPU: products in fp32, summed upwards, rounded to C's type once. */
#include <cstring>
#include <vector>

#include <cublas_v2.h>

#include "kernels/element.h"
#include "tests/emu/emu.h"
#include "tests/emu/gemm.h"

struct cublasContext {
    int device;
    cudaStream_t stream;
    cublasPointerMode_t pointer_mode;
};

struct Matrix {
    const void *data; /* of the first of a batch, or the array of pointers to all */
    cudaDataType type;
    int ld;
    long long stride; /* elements from one of a batch to the next */
    size_t rows, columns;
};

struct Gemm {
    Matrix a, b, c;
    bool transpose_a, transpose_b, pointers;
    size_t m, n, k;
    int batch;
    const void *alpha, *beta; /* of the device, or nullptr */
    float alpha_value, beta_value;
};

static size_t type_bytes(cudaDataType type)
{
    return type == CUDA_R_32F ? 4 : 2;
}

static float load(const void *array, size_t i, cudaDataType type)
{
    return type == CUDA_R_32F    ? zs_load_fp32(array, i)
           : type == CUDA_R_16BF ? zs_load_bf16(array, i)
                                 : zs_load_fp16(array, i);
}

static void store(void *array, size_t i, cudaDataType type, float value)
{
    if (type == CUDA_R_32F)
        zs_store_fp32(array, i, value);
    else if (type == CUDA_R_16BF)
        zs_store_bf16(array, i, value);
    else
        zs_store_fp16(array, i, value);
}

/* ---- on the stream's thread ---- */

/* out[l * across + i] = the matrix's element (i, l), or (l, i) if it is by rows. */
static void pack(std::vector<float> &out, const void *data, const Matrix &x, size_t across,
                 size_t along, bool by_rows)
{
    out.resize(across * along);
    for (size_t l = 0; l < along; l++)
        for (size_t i = 0; i < across; i++)
            out[l * across + i] =
                load(data, by_rows ? i * (size_t)x.ld + l : l * (size_t)x.ld + i, x.type);
}

static const void *of_batch(const Gemm &g, const Matrix &x, int i)
{
    if (g.pointers)
        return emu_pointer_in_memory(static_cast<const void *const *>(x.data)[i]);
    return static_cast<const char *>(x.data) +
           (long long)i * x.stride * (long long)type_bytes(x.type);
}

static void run(const Gemm &g)
{
    const float alpha = g.alpha ? zs_load_fp32(g.alpha, 0) : g.alpha_value;
    const float beta = g.beta ? zs_load_fp32(g.beta, 0) : g.beta_value;
    std::vector<float> a, b, product(g.m * g.n);
    for (int batch = 0; batch < g.batch; batch++) {
        pack(a, of_batch(g, g.a, batch), g.a, g.m, g.k, g.transpose_a);
        pack(b, of_batch(g, g.b, batch), g.b, g.n, g.k, !g.transpose_b);
        emu_gemm(g.m, g.n, g.k, a.data(), b.data(), product.data());
        void *c = const_cast<void *>(of_batch(g, g.c, batch));
        for (size_t j = 0; j < g.n; j++)
            for (size_t i = 0; i < g.m; i++) {
                const size_t at = j * (size_t)g.c.ld + i;
                float value = alpha * product[j * g.m + i];
                if (beta != 0) /* else C may hold anything */
                    value += beta * load(c, at, g.c.type);
                store(c, at, g.c.type, value);
            }
    }
}

/* ---- on the host's thread ---- */

static size_t matrix_bytes(const Matrix &x)
{
    return x.rows && x.columns ? ((x.columns - 1) * (size_t)x.ld + x.rows) * type_bytes(x.type) : 0;
}

/* The twin of what the stream will use; false: not what cuBLAS takes. */
static bool translate(const Gemm &g, Matrix *x)
{
    if (x->ld < (int)x->rows || x->ld < 1 ||
        (x->type != CUDA_R_32F && x->type != CUDA_R_16BF && x->type != CUDA_R_16F))
        return false;
    size_t bytes = g.pointers ? sizeof(void *) * (size_t)g.batch : matrix_bytes(*x);
    if (!g.pointers && bytes)
        bytes += (size_t)(g.batch - 1) * (size_t)x->stride * type_bytes(x->type);
    if (bytes && !emu_is_device(x->data))
        emu_die("cuBLAS got host memory");
    x->data = bytes ? emu_range(x->data, bytes, "cuBLAS") : nullptr;
    return true;
}

static bool known_compute(cublasComputeType_t compute)
{
    return compute == CUBLAS_COMPUTE_32F || compute == CUBLAS_COMPUTE_32F_PEDANTIC ||
           compute == CUBLAS_COMPUTE_32F_FAST_TF32;
}

static cublasStatus_t queue(cublasHandle_t handle, Gemm g, const void *alpha, const void *beta,
                            cublasComputeType_t compute)
{
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!handle->stream)
        emu_die("cuBLAS without cublasSetStream uses the default stream");
    if (emu_device() != handle->device || emu_stream_device(handle->stream) != handle->device)
        emu_die("cuBLAS: the handle is of device %d, its stream of %d, and %d is current",
                handle->device, emu_stream_device(handle->stream), emu_device());
    if (!known_compute(compute) || g.a.type != g.b.type ||
        (g.a.type != g.c.type && g.c.type != CUDA_R_32F))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (emu_sticky(handle->device) != cudaSuccess || emu_fails(EMU_CUBLAS, handle->device))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    if (!translate(g, &g.a) || !translate(g, &g.b) || !translate(g, &g.c))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (handle->pointer_mode == CUBLAS_POINTER_MODE_DEVICE) {
        g.alpha = emu_range(alpha, sizeof(float), "cuBLAS's alpha");
        g.beta = emu_range(beta, sizeof(float), "cuBLAS's beta");
    } else {
        g.alpha_value = zs_load_fp32(alpha, 0);
        g.beta_value = zs_load_fp32(beta, 0);
    }
    if (!g.m || !g.n || !g.batch)
        return CUBLAS_STATUS_SUCCESS;
    const size_t bytes =
        (size_t)g.batch * (matrix_bytes(g.a) + matrix_bytes(g.b) + matrix_bytes(g.c));
    emu_enqueue(handle->stream,
                {"gemm", emu_fields("\"m\":%zu,\"n\":%zu,\"k\":%zu,\"batch\":%d,\"bytes\":%zu", g.m,
                                    g.n, g.k, g.batch, bytes)},
                [g] { run(g); });
    return CUBLAS_STATUS_SUCCESS;
}

static bool describe(Gemm *g, cublasOperation_t transa, cublasOperation_t transb, int m, int n,
                     int k, int batch)
{
    if (m < 0 || n < 0 || k < 0 || batch < 0)
        return false;
    g->m = (size_t)m;
    g->n = (size_t)n;
    g->k = (size_t)k;
    g->batch = batch;
    g->transpose_a = transa != CUBLAS_OP_N;
    g->transpose_b = transb != CUBLAS_OP_N;
    g->a.rows = g->transpose_a ? g->k : g->m;
    g->a.columns = g->transpose_a ? g->m : g->k;
    g->b.rows = g->transpose_b ? g->n : g->k;
    g->b.columns = g->transpose_b ? g->k : g->n;
    g->c.rows = g->m;
    g->c.columns = g->n;
    return true;
}

extern "C" cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
    const void *alpha, const void *A, cudaDataType Atype, int lda, long long int strideA,
    const void *B, cudaDataType Btype, int ldb, long long int strideB, const void *beta, void *C,
    cudaDataType Ctype, int ldc, long long int strideC, int batchCount,
    cublasComputeType_t computeType, cublasGemmAlgo_t)
{
    Gemm g = {};
    g.a = {A, Atype, lda, strideA, 0, 0};
    g.b = {B, Btype, ldb, strideB, 0, 0};
    g.c = {C, Ctype, ldc, strideC, 0, 0};
    if (!describe(&g, transa, transb, m, n, k, batchCount))
        return CUBLAS_STATUS_INVALID_VALUE;
    return queue(handle, g, alpha, beta, computeType);
}

extern "C" cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa,
                                       cublasOperation_t transb, int m, int n, int k,
                                       const void *alpha, const void *A, cudaDataType Atype,
                                       int lda, const void *B, cudaDataType Btype, int ldb,
                                       const void *beta, void *C, cudaDataType Ctype, int ldc,
                                       cublasComputeType_t computeType, cublasGemmAlgo_t algo)
{
    return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B,
                                      Btype, ldb, 0, beta, C, Ctype, ldc, 0, 1, computeType, algo);
}

extern "C" cublasStatus_t
cublasGemmBatchedEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                    int m, int n, int k, const void *alpha, const void *const Aarray[],
                    cudaDataType Atype, int lda, const void *const Barray[], cudaDataType Btype,
                    int ldb, const void *beta, void *const Carray[], cudaDataType Ctype, int ldc,
                    int batchCount, cublasComputeType_t computeType, cublasGemmAlgo_t)
{
    Gemm g = {};
    g.pointers = true;
    g.a = {Aarray, Atype, lda, 0, 0, 0};
    g.b = {Barray, Btype, ldb, 0, 0, 0};
    g.c = {Carray, Ctype, ldc, 0, 0, 0};
    if (!describe(&g, transa, transb, m, n, k, batchCount))
        return CUBLAS_STATUS_INVALID_VALUE;
    return queue(handle, g, alpha, beta, computeType);
}

/* ---- handles ---- */

extern "C" cublasStatus_t cublasCreate(cublasHandle_t *handle)
{
    *handle = nullptr;
    if (emu_sticky(emu_device()) != cudaSuccess || emu_fails(EMU_CUBLAS, emu_device()))
        return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = new cublasContext{emu_device(), nullptr, CUBLAS_POINTER_MODE_HOST};
    emu_object_count(EMU_CUBLAS_HANDLES, 1);
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasDestroy(cublasHandle_t handle)
{
    if (!handle)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    delete handle;
    emu_object_count(EMU_CUBLAS_HANDLES, -1);
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream)
{
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasSetWorkspace(cublasHandle_t, void *workspace, size_t bytes)
{
    if (reinterpret_cast<uintptr_t>(workspace) % 256)
        return CUBLAS_STATUS_INVALID_VALUE;
    (void)emu_range(workspace, bytes, "cublasSetWorkspace");
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode)
{
    handle->pointer_mode = mode;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" const char *cublasGetStatusName(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
        return "CUBLAS_STATUS_INTERNAL_ERROR";
    }
}

extern "C" const char *cublasGetStatusString(cublasStatus_t status)
{
    return cublasGetStatusName(status);
}
