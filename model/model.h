/* SPDX-License-Identifier: Apache-2.0 */
/* The decoder: forward and backward over units that a zs_engine gathers. On the host it computes in
 * fp32 (weights in bf16 are widened block by block); on a CUDA device matrix products take inputs
 * of the weights' dtype (docs/numerics.md). Activations of each block are recomputed in backward,
 * or kept. */
#ifndef ZS_MODEL_MODEL_H
#define ZS_MODEL_MODEL_H

#include "base/pool.h"
#include "model/config.h"
#include "zspill.h"

typedef struct zs_model zs_model;

typedef struct zs_model_options {
    int rows, seq;       /* largest micro-batch: rows x seq tokens */
    zs_dtype dtype;      /* working weights: fp32 or bf16 */
    zs_dtype grad_dtype; /* the engine's: fp32 gradients are written straight into its buffers */
    int checkpointing;   /* 1: keep block inputs only and recompute; 0: keep all activations */
    int frozen;          /* 1: for evaluation only, without gradients and optimizer states */
    zs_group decay,
        no_decay;      /* groups for parameters of two or more dimensions, and for the others */
    zs_device *device; /* the engine's, borrowed; NULL: host */
    void *stream;      /* the engine's: on a device all is queued there */
} zs_model_options;

/* One micro-batch. All arrays rows x seq, borrowed. */
typedef struct zs_batch {
    int rows, seq;
    const int32_t *ids;    /* checked against the vocabulary by the caller */
    const int32_t *labels; /* unshifted, -100: not counted; NULL: ids. labels[t] is predicted from
                              what is before t */
    const int32_t *positions; /* a return to 0 starts a new document: attention does not look across
                                 and the label there is not counted; NULL: 0..seq-1 */
} zs_batch;

/* Registers parameters and units (not groups) with engine, which must not be committed yet. All
 * borrowed. */
zs_status zs_model_open(const zs_model_config *config, const zs_model_options *options,
                        zs_engine *engine, zs_pool *pool, zs_model **out);
/* After zs_engine_commit: allocates activations, booked with zs_memory_note as "activations". */
zs_status zs_model_prepare(zs_model *model);
void zs_model_close(zs_model **model);
/* For zs_weights_*: count weights and their parameters, owned by the model. */
void zs_model_params(const zs_model *model, const zs_weight **weights, const zs_param **params,
                     size_t *count);

/* Number of labels of batch that are counted. */
uint64_t zs_batch_tokens(const zs_batch *batch);
/* Forward only: *loss_sum = sum of token losses (and of those that zs_model_train kept). */
zs_status zs_model_evaluate(zs_model *model, const zs_batch *batch, double *loss_sum);
/* Forward and backward of one micro-batch, between zs_grad_begin and zs_grad_finish (both the
 * caller's). Gradients are those of the losses * scale. loss_sum NULL: the loss is kept and is part
 * of the next one that is asked for, so that a device's is waited for once a step. */
zs_status zs_model_train(zs_model *model, const zs_batch *batch, double scale, double *loss_sum);
/* Logits of the last position of each row, [rows][vocab]. For tests and inspection. */
zs_status zs_model_logits(zs_model *model, const zs_batch *batch, float *out);
/* Floating-point operations of forward and backward for one micro-batch, recomputation not counted
 * (6 per weight and token, and attention), for utilisation figures. */
double zs_model_flops(const zs_model *model, int rows, int seq);

#endif
