/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the decoder's maths share. On the host every loop over the pool is cut by the
 * batch's shape alone, so that the number of threads does not change a bit. */
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

/* What is read of a micro-batch while it is worked on. All but first_use by token or prediction. */
typedef struct zs_batch_arrays {
    int32_t *ids, *positions, *starts;
    int32_t *sources, *targets;    /* counted predictions: token, label */
    int32_t *slot_of;              /* token: number of its prediction, -1: none */
    int32_t *first_use, *next_use; /* tokens of an id, as chains: first_use by id; -1: the end */
} zs_batch_arrays;

/* Where the maths is done. Blocks and head run while their units are acquired. */
typedef struct zs_backend {
    /* Memory, booked as "activations"; close takes what a failed prepare left. */
    zs_status (*prepare)(zs_model *model);
    void (*close)(zs_model *model);
    /* Before model->batch is written, and once it is complete. last: largest position. */
    zs_status (*batch_begin)(zs_model *model);
    zs_status (*batch_ready)(zs_model *model, const zs_tokens *tokens, int last);
    /* inputs[0] from the embedding. */
    zs_status (*embed)(zs_model *model, const zs_tokens *tokens);
    /* The embedding's gradient: row ids[t] gets dx[t]. */
    zs_status (*embed_grad)(zs_model *model, const zs_tokens *tokens, const float *dx);
    /* out NULL: only what backward needs. */
    zs_status (*forward)(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                         float *out, zs_acts *acts);
    /* dx gets the gradient of x for dout. */
    zs_status (*backward)(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                          zs_acts *acts, const float *dout, float *dx);
    /* The losses of predictions, the number of entries of sources and targets, are added to the one
     * that is kept. dx NULL: that only; else the gradient of x for the losses * scale, and those of
     * the head's weights. */
    zs_status (*head)(zs_model *model, const zs_tokens *tokens, const float *x, int predictions,
                      double scale, float *dx);
    /* Logits of sources, one a row of the batch, for the host. */
    zs_status (*logits)(zs_model *model, const zs_tokens *tokens, const float *x, float *out);
    /* The loss kept so far is asked for, and, after what else there is to queue, got: then the next
     * one starts at 0. */
    zs_status (*ask_loss)(zs_model *model);
    zs_status (*get_loss)(zs_model *model, double *out);
} zs_backend;

extern const zs_backend zs_backend_host, zs_backend_device;

struct zs_model {
    zs_model_config config;
    zs_model_options options;
    const zs_backend *backend;
    struct zs_model_device *device; /* model/device.h; NULL on the host */
    zs_engine *engine;
    zs_pool *pool;
    const zs_nn *nn;
    const zs_kernels *kernels;

    zs_weight *weights;
    zs_param *params;
    size_t count;
    zs_unit *units;                    /* layers + 2 */
    int32_t (*index)[ZS_WEIGHT_KINDS]; /* per unit: number of the weight, -1: none */

    char *memory; /* everything below up to the tables of angles; on a device its memory */
    uint64_t memory_bytes;
    zs_batch_arrays batch; /* host memory */
    float **inputs;        /* of each block, and the last block's output: layers + 1 */
    zs_acts *slots;
    int slot_count;
    /* of the block or head whose backward is running */
    float *act, *dmid, *dattn, *delta, *dk, *dv, *dx[2];
    float *logits, *head_grad;
    int head_chunk;
    double *losses;

    /* The host's alone. */
    float *norm_attn, *norm_mlp;
    float *partial; /* [tile of tokens][partial_stride]: gradients of norm weights */
    int partial_stride;
    float *vectors; /* norms and biases of the present unit, widened */
    float *scratch; /* [worker][scratch_numel], then what weights are widened into */
    size_t scratch_numel;
    double loss; /* kept */

    float *cos, *sin; /* [table_positions][head_dim / 2] */
    int table_positions;
};

/* ---- memory.c ---- */
/* Hands out pieces of one allocation, 64-byte aligned; without one it only adds up. */
typedef struct zs_bump {
    char *base;
    uint64_t used;
} zs_bump;
void *zs_take(zs_bump *bump, uint64_t count, size_t size);
float *zs_take_floats(zs_bump *bump, uint64_t count);
/* What both backends have of the model's arrays. */
void zs_take_shared(zs_model *model, zs_bump *bump);
/* tokens: of the largest batch */
void zs_take_batch(zs_batch_arrays *batch, zs_bump *bump, uint64_t tokens, uint64_t vocab);
uint64_t zs_most_tokens(const zs_model *model);

/* ---- batch.c ---- */
/* Checks batch and fills in model->batch, but for the chains. *last: the largest position. */
zs_status zs_batch_read(zs_model *model, const zs_batch *batch, zs_tokens *out, int *predictions,
                        int *last);
/* The chains of first_use and next_use. */
void zs_batch_chain(zs_model *model, const zs_tokens *tokens);

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
zs_status zs_embedding_grad(zs_model *model, const zs_tokens *tokens, const float *dx);

/* ---- rope.c ---- */
/* Angle of pair i per position. */
float zs_rope_frequency(const zs_model_config *config, int i);
/* Makes sure that the tables reach position last. */
zs_status zs_rope_reach(zs_model *model, int last);

/* ---- attention.c ---- */
size_t zs_attention_scratch(const zs_model_config *config, int seq);
void zs_attention(zs_model *model, const zs_tokens *tokens, const zs_acts *acts);
/* dattn becomes the gradient of q. */
void zs_attention_grad(zs_model *model, const zs_tokens *tokens, const zs_acts *acts);

/* ---- block.c ---- */
zs_status zs_block_forward(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                           float *out, zs_acts *acts);
zs_status zs_block_backward(zs_model *model, const zs_tokens *tokens, int layer, const float *x,
                            zs_acts *acts, const float *dout, float *dx);
/* Widens (or only points at) a unit's vector weights; kinds that are absent become NULL. */
zs_status zs_unit_vectors(zs_model *model, int unit, const float *vectors[ZS_WEIGHT_KINDS]);
zs_status zs_unit_matrix(zs_model *model, int unit, zs_weight_kind kind, zs_view *out);

/* ---- loss.c ---- */
int zs_head_chunk(const zs_model_config *config, int tokens);
zs_param zs_head_param(const zs_model *model);
zs_status zs_head_run(zs_model *model, const zs_tokens *tokens, const float *x, int predictions,
                      double scale, float *dx);
zs_status zs_head_logits(zs_model *model, const zs_tokens *tokens, const float *x, float *out);

#endif
