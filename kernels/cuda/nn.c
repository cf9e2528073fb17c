/* SPDX-License-Identifier: Apache-2.0 */
/* The table of nn_device.h: the launchers of nn_*.cu, and cuBLAS. */
#include "kernels/cuda/nn.h"

#include <stdlib.h>

#include <cublas_v2.h>

#include "base/util.h"
#include "kernels/cuda/kernels.h"

enum {
    WORKSPACE = 32 << 20,     /* what cuBLAS recommends on its largest devices */
    NARROW_BLOCKS = 132 * 32, /* of threads, enough for any device; each works on in turn */
};

typedef struct cuda_nn {
    zs_nn_device base;
    zs_device *device;
    cudaStream_t stream;
    cublasHandle_t blas;
    void *workspace;
} cuda_nn;

static zs_status blas_status(cublasStatus_t code, const char *what)
{
    if (code == CUBLAS_STATUS_SUCCESS)
        return ZS_OK;
    return zs_fail(code == CUBLAS_STATUS_ALLOC_FAILED ? ZS_ERR_NOMEM : ZS_ERR_DEVICE,
                   "cuBLAS, %s: %s (%s)", what, cublasGetStatusString(code),
                   cublasGetStatusName(code));
}

static zs_status enter(zs_nn_device *nn, cudaStream_t *stream)
{
    const cuda_nn *c = (const cuda_nn *)nn;
    *stream = c->stream;
    return zs_cuda_enter(c->device);
}

static cudaDataType type_of(zs_dtype dtype)
{
    return dtype == ZS_FP32 ? CUDA_R_32F : CUDA_R_16BF;
}

/* cuBLAS has matrices by columns: what is there by rows is the transpose, and c^T = op(b)^T
 * op(a)^T. */
static zs_status nn_gemm(zs_nn_device *nn, const zs_nn_gemm *g)
{
    const cuda_nn *c = (const cuda_nn *)nn;
    ZS_CHECK(zs_cuda_enter(c->device));
    return blas_status(cublasGemmStridedBatchedEx(
                           c->blas, g->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                           g->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, g->n, g->m, g->k, &g->alpha,
                           g->b, type_of(g->in), g->ldb, g->step_b, g->a, type_of(g->in), g->lda,
                           g->step_a, &g->beta, g->c, type_of(g->out), g->ldc, g->step_c, g->batch,
                           g->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                           CUBLAS_GEMM_DEFAULT),
                       "a matrix product");
}

/* An operation that only adds the stream to its arguments. */
#define OPERATION(name, parameters, ...)                                                           \
    static zs_status nn_##name parameters                                                          \
    {                                                                                              \
        cudaStream_t stream;                                                                       \
        ZS_CHECK(enter(nn, &stream));                                                              \
        return zs_cuda_nn_##name(stream, __VA_ARGS__);                                             \
    }

OPERATION(lookup,
          (zs_nn_device * nn, int tokens, int n, const int32_t *ids, const void *table,
           zs_dtype dtype, float *out),
          tokens, n, ids, table, dtype, out)
OPERATION(lookup_grad,
          (zs_nn_device * nn, int vocab, int n, const int32_t *first_use, const int32_t *next_use,
           const float *dx, void *grad, zs_dtype dtype, int accumulate),
          vocab, n, first_use, next_use, dx, grad, dtype, accumulate)
OPERATION(rms,
          (zs_nn_device * nn, int rows, int n, const float *x, const int32_t *sources,
           const void *w, zs_dtype w_dtype, float eps, float *rstd, void *y, zs_dtype y_dtype),
          rows, n, x, sources, w, w_dtype, eps, rstd, y, y_dtype)
OPERATION(rms_grad,
          (zs_nn_device * nn, int rows, int n, const float *dy, const int32_t *slots,
           const float *x, const void *w, zs_dtype dtype, const float *rstd, const float *base,
           float *dx, void *y),
          rows, n, dy, slots, x, w, dtype, rstd, base, dx, y)
OPERATION(column_sums,
          (zs_nn_device * nn, int rows, int n, const void *dy, zs_dtype dy_dtype, const float *x,
           const int32_t *sources, const float *rstd, float *partial, void *grad,
           zs_dtype grad_dtype, int accumulate),
          rows, n, dy, dy_dtype, x, sources, rstd, partial, grad, grad_dtype, accumulate)
OPERATION(add_bias, (zs_nn_device * nn, int rows, int n, float *x, const void *b, zs_dtype dtype),
          rows, n, x, b, dtype)
OPERATION(angles,
          (zs_nn_device * nn, int tokens, int half, const int32_t *positions,
           const float *frequencies, float *cos, float *sin),
          tokens, half, positions, frequencies, cos, sin)
OPERATION(rope,
          (zs_nn_device * nn, int tokens, int heads, int half, float *x, const float *cos,
           const float *sin, int inverse),
          tokens, heads, half, x, cos, sin, inverse)
OPERATION(swiglu,
          (zs_nn_device * nn, uint64_t n, const float *gate, const float *up, void *y,
           zs_dtype dtype),
          n, gate, up, y, dtype)
OPERATION(swiglu_grad,
          (zs_nn_device * nn, uint64_t n, const float *gate, const float *up, const float *dact,
           void *act, void *dgate, void *dup, zs_dtype dtype),
          n, gate, up, dact, act, dgate, dup, dtype)
OPERATION(dots,
          (zs_nn_device * nn, uint64_t rows, int n, const float *a, const float *b, float *out),
          rows, n, a, b, out)
OPERATION(softmax, (zs_nn_device * nn, const zs_nn_scores *scores, float *x), scores, x)
OPERATION(softmax_grad,
          (zs_nn_device * nn, const zs_nn_scores *scores, float *x, float *dp, const float *delta),
          scores, x, dp, delta)
OPERATION(entropy,
          (zs_nn_device * nn, int rows, int vocab, float *logits, const int32_t *targets,
           float scale, double *losses, void *grad, zs_dtype dtype),
          rows, vocab, logits, targets, scale, losses, grad, dtype)

static zs_status nn_sum_losses(zs_nn_device *nn, uint64_t count, const double *losses, int more,
                               double *out)
{
    cudaStream_t stream;
    ZS_CHECK(enter(nn, &stream));
    return zs_cuda_sum_doubles(stream, losses, count, more, out);
}

static zs_status nn_narrow(zs_nn_device *nn, uint64_t n, const float *src, void *dst)
{
    cudaStream_t stream;
    /* Whole groups, unless an array begins within one. */
    const int aligned = (uintptr_t)src % (ZS_CUDA_GROUP * sizeof(float)) == 0 &&
                        (uintptr_t)dst % (ZS_CUDA_GROUP * sizeof(uint16_t)) == 0;
    const zs_cuda_align align = {.shift = 0, .vector = aligned};
    ZS_CHECK(enter(nn, &stream));
    return zs_cuda_cast(stream, NARROW_BLOCKS, dst, ZS_BF16, src, ZS_FP32, n, align);
}

static void nn_close(zs_nn_device *nn)
{
    cuda_nn *c = (cuda_nn *)nn;
    if (c->blas && zs_cuda_enter(c->device) == ZS_OK)
        (void)cublasDestroy(c->blas);
    c->device->ops->free(c->device, c->workspace, WORKSPACE);
    free(c);
}

static const zs_nn_device_ops ops = {
    .gemm = nn_gemm,
    .lookup = nn_lookup,
    .lookup_grad = nn_lookup_grad,
    .rms = nn_rms,
    .rms_grad = nn_rms_grad,
    .column_sums = nn_column_sums,
    .add_bias = nn_add_bias,
    .angles = nn_angles,
    .rope = nn_rope,
    .swiglu = nn_swiglu,
    .swiglu_grad = nn_swiglu_grad,
    .dots = nn_dots,
    .softmax = nn_softmax,
    .softmax_grad = nn_softmax_grad,
    .entropy = nn_entropy,
    .sum_losses = nn_sum_losses,
    .narrow = nn_narrow,
    .close = nn_close,
};

static zs_status load(void)
{
    ZS_CHECK(zs_cuda_load_nn_rows());
    ZS_CHECK(zs_cuda_load_nn_columns());
    ZS_CHECK(zs_cuda_load_nn_elements());
    ZS_CHECK(zs_cuda_load_nn_softmax());
    ZS_CHECK(zs_cuda_load_elementwise());
    return zs_cuda_load_norm();
}

zs_status zs_cuda_nn_open(zs_device *device, void *stream, zs_nn_device **out)
{
    zs_status status;
    *out = NULL;
    cuda_nn *c = calloc(1, sizeof *c);
    if (!c)
        return zs_fail(ZS_ERR_NOMEM, "nn on CUDA: out of memory");
    c->base = (zs_nn_device){.ops = &ops, .bytes = WORKSPACE};
    c->device = device;
    c->stream = stream ? stream : device->ops->stream_native(device, NULL);
    ZS_TRY(zs_cuda_enter(device));
    ZS_TRY(load());
    ZS_TRY(device->ops->alloc(device, WORKSPACE, &c->workspace));
    ZS_TRY(blas_status(cublasCreate(&c->blas), "opening it"));
    ZS_TRY(blas_status(cublasSetStream(c->blas, c->stream), "choosing its stream"));
    /* Its own would be allocated and freed as it sees fit, and be another each time: with one that
     * stays, a product has the same bits in each run on the same device. */
    ZS_TRY(
        blas_status(cublasSetWorkspace(c->blas, c->workspace, WORKSPACE), "giving it a workspace"));
    *out = &c->base;
    return ZS_OK;
fail:
    nn_close(&c->base);
    return status;
}
