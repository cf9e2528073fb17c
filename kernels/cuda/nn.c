/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cuda/nn.h"

#include <cublas_v2.h>
#include <stdlib.h>

#include "kernels/cuda/kernels.h"
#include "kernels/nn_rooms.h"

enum { COLUMN_ROWS = 64 }; /* least rows of a partial sum of a column */

struct zs_cuda_nn {
    zs_nn_device base;
    zs_device *device;
    cudaStream_t stream;
    zs_dtype dtype;
    cublasHandle_t cublas;
    float *partial; /* [ZS_NN_COLUMN_TILES][widest] */
    int widest;
};

zs_status zs_cuda_nn_enter(zs_nn_device *nn, cudaStream_t *stream, zs_dtype *dtype)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    *stream = n->stream;
    *dtype = n->dtype;
    return zs_cuda_enter(n->device);
}

/* ---- matrix products ---- */

static zs_status cublas_status(cublasStatus_t code, const char *what)
{
    if (code == CUBLAS_STATUS_SUCCESS)
        return ZS_OK;
    const zs_status status = code == CUBLAS_STATUS_ALLOC_FAILED ? ZS_ERR_NOMEM : ZS_ERR_DEVICE;
    return zs_fail(status, "%s: %s (%s)", what, cublasGetStatusString(code),
                   cublasGetStatusName(code));
}

static cudaDataType type_of(zs_dtype dtype)
{
    return dtype == ZS_FP32 ? CUDA_R_32F : CUDA_R_16BF;
}

/* By rows here, by columns there: the transposed product, with its factors exchanged. */
zs_status zs_cuda_nn_gemm(zs_nn_device *nn, const zs_gemm *g)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    if (!g->m || !g->n)
        return ZS_OK;
    ZS_CHECK(zs_cuda_enter(n->device));
    return cublas_status(
        cublasGemmStridedBatchedEx(n->cublas, g->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                                   g->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, g->n, g->m, g->k,
                                   &g->alpha, g->b, type_of(g->dtype), g->ldb, g->stride_b, g->a,
                                   type_of(g->dtype), g->lda, g->stride_a, &g->beta, g->c,
                                   type_of(g->c_dtype), g->ldc, g->stride_c, ZS_MAX(g->batch, 1),
                                   CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "queueing a matrix product");
}

/* ---- rows ---- */

static zs_status cuda_embed(zs_nn_device *nn, int tokens, int width, const int32_t *ids,
                            const void *table, float *out)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    ZS_CHECK(zs_cuda_enter(n->device));
    return zs_cuda_nn_embed(n->stream, n->dtype, tokens, width, ids, table, out);
}

static zs_status cuda_embed_grad(zs_nn_device *nn, const zs_nn_embed_grad *grad)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    ZS_CHECK(zs_cuda_enter(n->device));
    return zs_cuda_nn_embed_grad(n->stream, grad);
}

static zs_status cuda_rms(zs_nn_device *nn, const zs_nn_rms *rms)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    if (!rms->count)
        return ZS_OK;
    ZS_CHECK(zs_cuda_enter(n->device));
    return zs_cuda_nn_rms(n->stream, n->dtype, rms);
}

static zs_status cuda_rms_grad(zs_nn_device *nn, const zs_nn_rms_grad *grad)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    ZS_CHECK(zs_cuda_enter(n->device));
    return zs_cuda_nn_rms_grad(n->stream, n->dtype, grad);
}

/* Rows of a part, so that there are at most ZS_NN_COLUMN_TILES parts. */
static int rows_each(int64_t count, int least)
{
    return (int)ZS_MAX((int64_t)zs_div_up((uint64_t)count, ZS_NN_COLUMN_TILES), (int64_t)least);
}

/* Adds up parts [count][width] of sums. */
static zs_status add_partial(const zs_cuda_nn *n, int count, int width, float *out, int add)
{
    const zs_nn_columns last = {.count = count, .width = width, .dy = n->partial, .dtype = ZS_FP32};
    return zs_cuda_nn_columns(n->stream, &last, ZS_MAX(count, 1), out, add);
}

static zs_status check_width(const zs_cuda_nn *n, int width)
{
    if (width > n->widest)
        return zs_fail(ZS_ERR_INTERNAL, "sums of %d columns, in room for %d", width, n->widest);
    return zs_cuda_enter(n->device);
}

static zs_status cuda_columns(zs_nn_device *nn, const zs_nn_columns *columns)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    const int each = rows_each(columns->count, COLUMN_ROWS);
    ZS_CHECK(check_width(n, columns->width));
    if (columns->count)
        ZS_CHECK(zs_cuda_nn_columns(n->stream, columns, each, n->partial, 0));
    else if (!columns->add)
        return zs_cuda_status(cudaMemsetAsync(columns->out, 0,
                                              (size_t)columns->width * sizeof *columns->out,
                                              n->stream),
                              "queueing a fill with zeros");
    if (!columns->count)
        return ZS_OK;
    return add_partial(n, (int)zs_div_up((uint64_t)columns->count, (uint64_t)each), columns->width,
                       columns->out, columns->add);
}

static zs_status cuda_angles(zs_nn_device *nn, int tokens, int half, const int32_t *positions,
                             const float *frequencies, float *cos, float *sin)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    ZS_CHECK(zs_cuda_enter(n->device));
    return zs_cuda_nn_angles(n->stream, tokens, half, positions, frequencies, cos, sin);
}

static zs_status check_heads(const zs_nn_heads *h)
{
    if (h->dim > ZS_NN_HEAD_DIM_MOST || h->dim % 2)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "head_dim %d is not supported on a CUDA device: even and at most %d", h->dim,
                       (int)ZS_NN_HEAD_DIM_MOST);
    return ZS_OK;
}

static zs_status cuda_heads(zs_nn_device *nn, const zs_nn_heads *heads)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    ZS_CHECK(check_heads(heads));
    ZS_CHECK(zs_cuda_enter(n->device));
    return zs_cuda_nn_heads(n->stream, n->dtype, heads);
}

static zs_status cuda_heads_grad(zs_nn_device *nn, const zs_nn_heads *heads)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    const int64_t count = (int64_t)heads->rows * heads->seq * heads->heads;
    const int each = heads->norm ? rows_each(count, 1) : 1;
    ZS_CHECK(check_heads(heads));
    ZS_CHECK(check_width(n, heads->dim));
    ZS_CHECK(zs_cuda_nn_heads_grad(n->stream, n->dtype, heads, each, n->partial));
    if (!heads->norm)
        return ZS_OK;
    return add_partial(n, (int)zs_div_up((uint64_t)count, (uint64_t)each), heads->dim, heads->dnorm,
                       heads->add);
}

/* ---- elements ---- */

static zs_status cuda_bias(zs_nn_device *nn, int count, int width, zs_dtype dtype, void *y,
                           const void *bias)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    ZS_CHECK(zs_cuda_enter(n->device));
    return zs_cuda_nn_bias(n->stream, n->dtype, count, width, dtype, y, bias);
}

static zs_status cuda_swiglu(zs_nn_device *nn, uint64_t count, void *act, const void *gate,
                             const void *up)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    ZS_CHECK(zs_cuda_enter(n->device));
    return zs_cuda_nn_swiglu(n->stream, n->dtype, count, act, gate, up);
}

static zs_status cuda_swiglu_grad(zs_nn_device *nn, uint64_t count, void *act, void *gate, void *up,
                                  const void *dact)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    ZS_CHECK(zs_cuda_enter(n->device));
    return zs_cuda_nn_swiglu_grad(n->stream, n->dtype, count, act, gate, up, dact);
}

static zs_status cuda_entropy(zs_nn_device *nn, const zs_nn_entropy *entropy)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    ZS_CHECK(zs_cuda_enter(n->device));
    return zs_cuda_nn_entropy(n->stream, n->dtype, entropy);
}

static zs_status cuda_sum_losses(zs_nn_device *nn, uint64_t count, const double *losses, int more,
                                 double *out)
{
    const zs_cuda_nn *n = (const zs_cuda_nn *)nn;
    ZS_CHECK(zs_cuda_enter(n->device));
    return zs_cuda_sum_doubles(n->stream, losses, count, more, out);
}

/* ---- open and close ---- */

static void cuda_nn_close(zs_nn_device *nn)
{
    zs_cuda_nn *n = (zs_cuda_nn *)nn;
    if (n->cublas && zs_cuda_enter(n->device) == ZS_OK)
        (void)cublasDestroy(n->cublas);
    free(n);
}

static const zs_nn_device_ops cuda_ops = {
    .gemm = zs_cuda_nn_gemm,
    .embed = cuda_embed,
    .embed_grad = cuda_embed_grad,
    .rms = cuda_rms,
    .rms_grad = cuda_rms_grad,
    .columns = cuda_columns,
    .angles = cuda_angles,
    .heads = cuda_heads,
    .heads_grad = cuda_heads_grad,
    .bias = cuda_bias,
    .swiglu = cuda_swiglu,
    .swiglu_grad = cuda_swiglu_grad,
    .attention = zs_cuda_nn_attention,
    .attention_grad = zs_cuda_nn_attention_grad,
    .entropy = cuda_entropy,
    .sum_losses = cuda_sum_losses,
    .close = cuda_nn_close,
};

/* Products are the same bits each time: one stream, memory of ours to work in, and no sums in less
 * than fp32. */
static zs_status open_cublas(zs_cuda_nn *n, void *workspace)
{
    static const char what[] = "setting up cuBLAS";
    ZS_CHECK(cublas_status(cublasCreate(&n->cublas), "opening cuBLAS"));
    ZS_CHECK(cublas_status(cublasSetStream(n->cublas, n->stream), what));
    ZS_CHECK(cublas_status(cublasSetWorkspace(n->cublas, workspace, ZS_NN_WORKSPACE), what));
    return cublas_status(
        cublasSetMathMode(n->cublas, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION), what);
}

zs_status zs_cuda_nn_open(zs_device *device, const zs_nn_device_config *config, zs_nn_device **out)
{
    zs_status status = ZS_OK;
    *out = NULL;
    zs_cuda_nn *n = calloc(1, sizeof *n);
    if (!n)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the CUDA device's decoder kernels");
    n->base.ops = &cuda_ops;
    n->device = device;
    n->stream = config->stream;
    n->dtype = config->dtype;
    n->widest = config->widest;
    n->partial = (float *)((char *)config->room + ZS_NN_WORKSPACE);
    ZS_TRY(zs_cuda_enter(device));
    ZS_TRY(open_cublas(n, config->room));
    ZS_TRY(zs_cuda_load_nn_rows());
    ZS_TRY(zs_cuda_load_nn_heads());
    ZS_TRY(zs_cuda_load_nn_attention());
    ZS_TRY(zs_cuda_load_nn_entropy());
    ZS_TRY(zs_cuda_load_norm());
    *out = &n->base;
    return ZS_OK;
fail:
    cuda_nn_close(&n->base);
    return status;
}
