/* SPDX-License-Identifier: Apache-2.0 */
/* A model's weights into and out of an engine, each rank its own ranges. */
#ifndef ZS_MODEL_WEIGHTS_H
#define ZS_MODEL_WEIGHTS_H

#include "model/config.h"
#include "model/safetensors.h"
#include "zspill.h"

/* 0: not a dtype that weights are read from; else *out is it. */
int zs_weights_dtype(zs_st_dtype stored, zs_dtype *out);
/* Whether the files hold exactly these weights, as zs_weights_load demands. dir: what messages call
 * the files. */
zs_status zs_weights_check(const zs_st *st, const char *dir, const zs_weight *weights,
                           size_t count);

/* weights[i] is parameter params[i] of engine. All three are collective where the comm has several
 * ranks and end with zs_params_publish. */

/* dir: a Hugging Face model directory. Missing tensors, other shapes or dtypes than F32, BF16, F16
 * are errors that name the tensor; tensors the model does not know are errors too, but for a tied
 * lm_head and rotary inv_freq buffers. */
zs_status zs_weights_load(zs_engine *engine, const char *dir, const zs_weight *weights,
                          const zs_param *params, size_t count);
/* As transformers initializes: normal(0, init_range) for matrices, 1 for norms, 0 for biases; the
 * value of an element depends on seed, weight number and element number only (counter-based
 * generator), not on the world. */
zs_status zs_weights_init(zs_engine *engine, const zs_model_config *config, uint64_t seed,
                          const zs_weight *weights, const zs_param *params, size_t count);
/* Writes the weights in dtype (rounded from the working copy) to dir/model.safetensors or, above
 * shard_bytes (0: 5 GB), to model-00001-of-0000N.safetensors and so on with an index; config.json
 * with its dtype key set; and copies tokenizer*, special_tokens_map.json, generation_config.json,
 * chat_template* from source (the directory or the config file that the model came from). Files
 * appear by rename, what a loader looks for last; weights of an earlier save are removed. */
zs_status zs_weights_save(zs_engine *engine, zs_comm *comm, const char *dir, const char *source,
                          zs_dtype dtype, uint64_t shard_bytes, const zs_weight *weights,
                          const zs_param *params, size_t count);

/* Values from elsewhere than an engine. */
typedef struct zs_weights_source {
    void *cookie;
    /* The elements of weight i that this rank writes. */
    zs_status (*range)(void *cookie, size_t i, uint64_t *first, uint64_t *count);
    zs_status (*read)(void *cookie, size_t i, uint64_t first, uint64_t count, zs_dtype dtype,
                      void *dst);
} zs_weights_source;
zs_status zs_weights_save_from(const zs_weights_source *values, zs_comm *comm, const char *dir,
                               const char *source, zs_dtype dtype, uint64_t shard_bytes,
                               const zs_weight *weights, size_t count);

#endif
