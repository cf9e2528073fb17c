/* SPDX-License-Identifier: Apache-2.0 */
/* The launchers of nn_*.cu, for C: as kernels/nn_device.h says of the operations of the same names.
 * Each queues on stream, of the present device; of nothing there is nothing to do. */
#ifndef ZS_KERNELS_CUDA_NN_H
#define ZS_KERNELS_CUDA_NN_H

#include "device/cuda/cuda.h"
#include "kernels/nn_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For zs_cuda_plugin's nn_open, which see. */
zs_status zs_cuda_nn_open(zs_device *device, void *stream, zs_nn_device **out);

/* ---- nn_rows.cu ---- */
zs_status zs_cuda_nn_lookup(cudaStream_t stream, int tokens, int n, const int32_t *ids,
                            const void *table, zs_dtype dtype, float *out);
zs_status zs_cuda_nn_lookup_grad(cudaStream_t stream, int vocab, int n, const int32_t *first_use,
                                 const int32_t *next_use, const float *dx, void *grad,
                                 zs_dtype dtype, int accumulate);
zs_status zs_cuda_nn_rms(cudaStream_t stream, int rows, int n, const float *x,
                         const int32_t *sources, const void *w, zs_dtype w_dtype, float eps,
                         float *rstd, void *y, zs_dtype y_dtype);
zs_status zs_cuda_nn_rms_grad(cudaStream_t stream, int rows, int n, const float *dy,
                              const int32_t *slots, const float *x, const void *w, zs_dtype dtype,
                              const float *rstd, const float *base, float *dx, void *y);
zs_status zs_cuda_nn_dots(cudaStream_t stream, uint64_t rows, int n, const float *a, const float *b,
                          float *out);
zs_status zs_cuda_load_nn_rows(void);

/* ---- nn_columns.cu ---- */
zs_status zs_cuda_nn_column_sums(cudaStream_t stream, int rows, int n, const void *dy,
                                 zs_dtype dy_dtype, const float *x, const int32_t *sources,
                                 const float *rstd, float *partial, void *grad, zs_dtype grad_dtype,
                                 int accumulate);
zs_status zs_cuda_load_nn_columns(void);

/* ---- nn_elements.cu ---- */
zs_status zs_cuda_nn_add_bias(cudaStream_t stream, int rows, int n, float *x, const void *b,
                              zs_dtype dtype);
zs_status zs_cuda_nn_angles(cudaStream_t stream, int tokens, int half, const int32_t *positions,
                            const float *frequencies, float *cos, float *sin);
zs_status zs_cuda_nn_rope(cudaStream_t stream, int tokens, int heads, int half, float *x,
                          const float *cos, const float *sin, int inverse);
zs_status zs_cuda_nn_swiglu(cudaStream_t stream, uint64_t n, const float *gate, const float *up,
                            void *y, zs_dtype dtype);
zs_status zs_cuda_nn_swiglu_grad(cudaStream_t stream, uint64_t n, const float *gate,
                                 const float *up, const float *dact, void *act, void *dgate,
                                 void *dup, zs_dtype dtype);
zs_status zs_cuda_load_nn_elements(void);

/* ---- nn_softmax.cu ---- */
zs_status zs_cuda_nn_softmax(cudaStream_t stream, const zs_nn_scores *scores, float *x);
zs_status zs_cuda_nn_softmax_grad(cudaStream_t stream, const zs_nn_scores *scores, float *x,
                                  float *dp, const float *delta);
zs_status zs_cuda_nn_entropy(cudaStream_t stream, int rows, int vocab, float *logits,
                             const int32_t *targets, float scale, double *losses, void *grad,
                             zs_dtype dtype);
zs_status zs_cuda_load_nn_softmax(void);

#ifdef __cplusplus
}
#endif

#endif
