/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/nn_device.h on a CUDA device: the launchers of nn_*.cu, for C, as those of kernels.h. */
#ifndef ZS_KERNELS_CUDA_NN_H
#define ZS_KERNELS_CUDA_NN_H

#include "device/cuda/cuda.h"
#include "kernels/nn_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of a block of threads where each warp takes one. */
enum { ZS_CUDA_WARPS = 4 };

/* A tile of queries and a tile of keys, for pairs [pair, pair + pairs). */
typedef struct zs_cuda_tile {
    int seq, group, kv_heads, dim;
    int pair, pairs;
    int query, queries; /* in-row tokens [query, query + queries) */
    int key, keys;
    int ld;    /* elements of a row of scores, fp32 */
    int first; /* 1: no tile of keys went before */
} zs_cuda_tile;

zs_status zs_cuda_nn_embed(cudaStream_t stream, zs_dtype dtype, int tokens, int width,
                           const int32_t *ids, const void *table, float *out);
zs_status zs_cuda_nn_embed_grad(cudaStream_t stream, const zs_nn_embed_grad *grad);
zs_status zs_cuda_nn_rms(cudaStream_t stream, zs_dtype dtype, const zs_nn_rms *rms);
zs_status zs_cuda_nn_rms_grad(cudaStream_t stream, zs_dtype dtype, const zs_nn_rms_grad *grad);
/* Rows [tile * each, ...) of each tile into out[tile][width]. */
zs_status zs_cuda_nn_columns(cudaStream_t stream, const zs_nn_columns *columns, int each,
                             float *out, int add);
zs_status zs_cuda_nn_angles(cudaStream_t stream, int tokens, int half, const int32_t *positions,
                            const float *frequencies, float *cos, float *sin);
zs_status zs_cuda_nn_heads(cudaStream_t stream, zs_dtype dtype, const zs_nn_heads *heads);
/* Runs of each heads, one after the other; partial[run][dim]: their parts of dnorm. */
zs_status zs_cuda_nn_heads_grad(cudaStream_t stream, zs_dtype dtype, const zs_nn_heads *heads,
                                int each, float *partial);
zs_status zs_cuda_nn_bias(cudaStream_t stream, zs_dtype dtype, int count, int width,
                          zs_dtype y_dtype, void *y, const void *bias);
zs_status zs_cuda_nn_swiglu(cudaStream_t stream, zs_dtype dtype, uint64_t n, void *act,
                            const void *gate, const void *up);
zs_status zs_cuda_nn_swiglu_grad(cudaStream_t stream, zs_dtype dtype, uint64_t n, void *act,
                                 void *gate, void *up, const void *dact);
zs_status zs_cuda_nn_entropy(cudaStream_t stream, zs_dtype dtype, const zs_nn_entropy *entropy);

/* scores become exp(score - maximum so far), narrow, in place; sums, max and denominator follow. */
zs_status zs_cuda_nn_softmax(cudaStream_t stream, zs_dtype dtype, const zs_cuda_tile *tile,
                             const int32_t *starts, float *scores, float *sums, float *max,
                             float *denominator);
/* The end of a tile of queries. */
zs_status zs_cuda_nn_attention_out(cudaStream_t stream, zs_dtype dtype, const zs_cuda_tile *tile,
                                   const float *sums, const float *max, const float *denominator,
                                   void *out, float *lse);
/* dout in head-major order, and delta = dout . out of each query and head. */
zs_status zs_cuda_nn_attention_delta(cudaStream_t stream, zs_dtype dtype,
                                     const zs_nn_attention *attention);
/* scores become the probabilities, dscores their gradient; both narrow, in place. */
zs_status zs_cuda_nn_softmax_grad(cudaStream_t stream, zs_dtype dtype, const zs_cuda_tile *tile,
                                  const int32_t *starts, float *scores, float *dscores,
                                  const float *lse, const float *delta);

/* As zs_cuda_load_adam. */
zs_status zs_cuda_load_nn_rows(void);
zs_status zs_cuda_load_nn_heads(void);
zs_status zs_cuda_load_nn_attention(void);
zs_status zs_cuda_load_nn_entropy(void);

/* ---- C only ---- */

typedef struct zs_cuda_nn zs_cuda_nn;
zs_status zs_cuda_nn_gemm(zs_nn_device *nn, const zs_gemm *gemm);
zs_status zs_cuda_nn_attention(zs_nn_device *nn, const zs_nn_attention *attention);
zs_status zs_cuda_nn_attention_grad(zs_nn_device *nn, const zs_nn_attention *attention);
/* What its work is queued on, the present device being its own afterwards. */
zs_status zs_cuda_nn_enter(zs_nn_device *nn, cudaStream_t *stream, zs_dtype *dtype);

/* For zs_cuda_plugin's nn_open, which see. */
zs_status zs_cuda_nn_open(zs_device *device, const zs_nn_device_config *config, zs_nn_device **out);

#ifdef __cplusplus
}
#endif

#endif
