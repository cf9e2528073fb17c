/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the decoder's maths share. Every loop over the pool is cut by the batch's shape
 * alone, so that the number of threads does not change a bit. */
#ifndef ZS_MODEL_INTERNAL_H
#define ZS_MODEL_INTERNAL_H

#include "base/pool.h"
#include "kernels/kernels.h"
#include "kernels/nn.h"
#include "model/model.h"

enum {
    ZS_TOKEN_TILE = 256,    /* most tokens of one matrix product */
    ZS_QUERY_TILE = 128,    /* queries whose scores are held at once */
    ZS_OUTPUT_TILE = 256,   /* rows of a weight's gradient in one task */
    ZS_VOCAB_TILE = 512,    /* rows of the head in one task */
    ZS_WIDE_NUMEL = 1 << 18 /* fp32 elements that bf16 weights are widened into at once */
};

/* A weight matrix as the engine has it: [rows][columns] of dtype. */
typedef struct zs_view {
    const void *data;
    zs_dtype dtype;
    int rows, columns;
} zs_view;

/* What backward needs of one block beside its input. All [tokens][...]. */
typedef struct zs_acts {
    float *q, *k, *v;             /* after norm and rope */
    float *raw_q, *raw_k;         /* before them; only with qk_norm */
    float *attn;                  /* before the output projection */
    float *mid;                   /* input + attention */
    float *gate, *up;             /* backward turns them into their gradients */
    float *rstd_attn, *rstd_mlp;  /* one a token */
    float *rstd_q, *rstd_k, *lse; /* one a token and head */
} zs_acts;

/* The micro-batch at hand, with defaults filled in. */
typedef struct zs_tokens {
    int rows, seq, count; /* count = rows * seq */
    int tile;             /* tokens of one task */
    const int32_t *ids;
    const int32_t *positions;
    const int32_t *starts; /* in-row index at which the token's document starts */
} zs_tokens;

struct zs_model {
    zs_model_config config;
    zs_model_options options;
    zs_engine *engine;
    zs_pool *pool;
    const zs_nn *nn;
    const zs_kernels *kernels;

    zs_weight *weights;
    zs_param *params;
    size_t count;
    zs_unit *units;                    /* layers + 2 */
    int32_t (*index)[ZS_WEIGHT_KINDS]; /* per unit: number of the weight, -1: none */

    char *memory; /* everything below up to the tables of angles */
    uint64_t memory_bytes;
    float **inputs; /* of each block, and the last block's output: layers + 1 */
    zs_acts *slots;
    int slot_count;
    /* of the block or head whose backward is running */
    float *act, *norm_attn, *norm_mlp, *dmid, *dattn, *delta, *dk, *dv, *dx[2];
    float *partial; /* [tile of tokens][partial_stride]: gradients of norm weights */
    int partial_stride;
    float *vectors; /* norms and biases of the present unit, widened */
    float *logits, *head_grad;
    int head_chunk;
    double *losses;
    int32_t *sources, *targets; /* counted predictions: token, label */
    int32_t *slot_of;           /* token: number of its prediction, -1: none */
    int32_t *positions, *starts;
    int32_t *first_use, *next_use; /* tokens of an id, as chains */
    float *scratch;                /* [worker][scratch_numel], then what weights are widened into */
    size_t scratch_numel;

    float *cos, *sin; /* [table_positions][head_dim / 2] */
    int table_positions;
};

/* ---- linear.c ---- */
/* Matrix products run on the thread that asks for them, in the whole process. */
void zs_blas_setup(void);
static inline float *zs_model_scratch(const zs_model *model, int worker)
{
    return model->scratch + (size_t)worker * model->scratch_numel;
}
/* bias NULL: y = x W^T (+ y when add); else y = x W^T + bias (+ y when add). */
void zs_linear(const zs_model *model, int worker, const zs_view *w, const float *bias, int tokens,
               const float *x, float *y, int ldy, int add);
/* dx = dy W (+ dx when add) */
void zs_linear_input_grad(const zs_model *model, int worker, const zs_view *w, int tokens,
                          const float *dy, float *dx, int add);
/* Most columns of any matrix whose products run here. */
int zs_model_widest(const zs_model_config *config);

/* ---- grads.c ---- */
/* One parameter's gradient: dy^T x, or without x the sum of dy's rows. dy: [count][rows] with
 * leading dimension ld. */
typedef struct zs_grad_job {
    zs_param param;
    const float *dy, *x;
    int count, ld;
    int rows, columns;
} zs_grad_job;
/* Computes them all, in tiles over the pool, and hands each to the engine. */
zs_status zs_grads_run(zs_model *model, const zs_grad_job *jobs, size_t count);
/* The embedding's: row ids[t] gets dx[t]. */
zs_status zs_embedding_grad(zs_model *model, const zs_tokens *tokens, const float *dx);

/* ---- rope.c ---- */
/* Makes sure that the tables reach position last. */
zs_status zs_rope_reach(zs_model *model, int last);

/* ---- attention.c ---- */
size_t zs_attention_scratch(const zs_model_config *config, int seq);
void zs_attention(zs_model *model, const zs_tokens *tokens, const zs_acts *acts);
/* dattn becomes the gradient of q. */
void zs_attention_grad(zs_model *model, const zs_tokens *tokens, const zs_acts *acts);

/* ---- block.c ---- */
/* out NULL: only what backward needs. */
zs_status zs_block_forward(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                           float *out, zs_acts *acts);
/* dx gets the gradient of x for dout. */
zs_status zs_block_backward(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                            zs_acts *acts, const float *dout, float *dx);
/* Widens (or only points at) a unit's vector weights; kinds that are absent become NULL. */
zs_status zs_unit_vectors(zs_model *model, int unit, const float *vectors[ZS_WEIGHT_KINDS]);
zs_status zs_unit_matrix(zs_model *model, int unit, zs_weight_kind kind, zs_view *out);

/* ---- loss.c ---- */
int zs_head_chunk(const zs_model_config *config, int tokens);
/* predictions: number of entries of sources and targets. dx NULL: loss only; else the gradient of x
 * for loss_sum * scale, and those of the head's weights. */
zs_status zs_head_run(zs_model *model, const zs_tokens *tokens, const float *x, int predictions,
                      double scale, double *loss_sum, float *dx);
zs_status zs_head_logits(zs_model *model, const zs_tokens *tokens, const float *x, float *out);

#endif
