/* SPDX-License-Identifier: Apache-2.0 */
#include "model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "device/device.h"
#include "model/internal.h"

/* ---- parameters and units ---- */

static zs_status add_params(zs_model *model)
{
    for (size_t i = 0; i < model->count; i++) {
        const zs_weight *w = &model->weights[i];
        zs_param_config config;
        zs_param_config_init(&config);
        config.frozen = model->options.frozen;
        config.name = w->name;
        config.ndim = w->ndim;
        config.shape = w->shape;
        config.dtype = model->options.dtype;
        config.group = w->ndim >= 2 ? model->options.decay : model->options.no_decay;
        if (w->kind == ZS_W_EMBED && model->config.tied)
            config.grad_uses = 2;
        ZS_CHECK(zs_param_add(model->engine, &config, &model->params[i]));
        model->index[w->unit][w->kind] = (int32_t)i;
    }
    return ZS_OK;
}

/* Weights come in the order of their units. */
static zs_status add_units(zs_model *model)
{
    size_t first = 0;
    for (int unit = 0; unit < model->config.layers + 2; unit++) {
        char name[32];
        size_t end = first;
        while (end < model->count && model->weights[end].unit == unit)
            end++;
        if (unit == 0)
            strcpy(name, "embedding");
        else if (unit <= model->config.layers)
            snprintf(name, sizeof name, "layers.%d", unit - 1);
        else
            strcpy(name, "head");
        ZS_CHECK(zs_unit_add(model->engine, name, model->params + first, end - first,
                             &model->units[unit]));
        first = end;
    }
    return ZS_OK;
}

static zs_status check_options(const zs_model_config *c, const zs_model_options *o)
{
    if (o->dtype != ZS_FP32 && o->dtype != ZS_BF16)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "model: weights in %s are not supported; use fp32 or bf16",
                       zs_dtype_name(o->dtype));
    if (o->grad_dtype != ZS_FP32 && o->grad_dtype != ZS_BF16)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "model: gradients in %s are not supported; use fp32 or bf16",
                       zs_dtype_name(o->grad_dtype));
    if (o->rows < 1 || o->seq < 2)
        return zs_fail(ZS_ERR_ARG,
                       "model: a micro-batch of %d rows of %d tokens; it needs a row of 2 or more",
                       o->rows, o->seq);
    if (o->seq > c->max_positions)
        return zs_fail(ZS_ERR_ARG,
                       "model: sequence length %d is above the %d positions of the model "
                       "(max_position_embeddings); use shorter rows",
                       o->seq, c->max_positions);
    if (c->sliding_window && o->seq > c->sliding_window)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "model: sequence length %d is above the model's sliding_window %d, and "
                       "windowed attention is not supported; use rows of at most %d tokens",
                       o->seq, c->sliding_window, c->sliding_window);
    if ((int64_t)o->rows * o->seq > INT32_MAX / 64)
        return zs_fail(ZS_ERR_ARG,
                       "model: a micro-batch of %d x %d tokens is too large; use a smaller one",
                       o->rows, o->seq);
    if (c->head_dim % 2)
        return zs_fail(ZS_ERR_UNSUPPORTED, "model: head_dim %d is odd; rope needs an even one",
                       c->head_dim);
    return ZS_OK;
}

zs_status zs_model_open(const zs_model_config *config, const zs_model_options *options,
                        zs_engine *engine, zs_pool *pool, zs_model **out)
{
    zs_status status = ZS_ERR_NOMEM;
    *out = NULL;
    ZS_CHECK(check_options(config, options));
    zs_blas_setup();
    size_t units = (size_t)config->layers + 2;
    zs_model *model = calloc(1, sizeof *model);
    if (!model)
        return zs_fail(ZS_ERR_NOMEM, "model: no memory for its handle");
    model->config = *config;
    model->options = *options;
    model->backend =
        options->device && !options->device->host_access ? &zs_backend_device : &zs_backend_host;
    model->engine = engine;
    model->pool = pool;
    model->nn = zs_nn_get();
    model->kernels = zs_kernels_get();
    ZS_TRY(zs_model_weights(config, &model->weights, &model->count));
    model->params = calloc(model->count, sizeof *model->params);
    model->units = calloc(units, sizeof *model->units);
    model->index = malloc(units * sizeof *model->index);
    if (!model->params || !model->units || !model->index) {
        status =
            zs_fail(ZS_ERR_NOMEM, "model: no memory for the names of %zu weights", model->count);
        goto fail;
    }
    memset(model->index, -1, units * sizeof *model->index);
    ZS_TRY(add_params(model));
    ZS_TRY(add_units(model));
    *out = model;
    return ZS_OK;
fail:
    zs_model_close(&model);
    return status;
}

void zs_model_params(const zs_model *model, const zs_weight **weights, const zs_param **params,
                     size_t *count)
{
    *weights = model->weights;
    *params = model->params;
    *count = model->count;
}

zs_status zs_model_prepare(zs_model *model)
{
    if (model->memory)
        return zs_fail(ZS_ERR_MISUSE, "model: prepared twice");
    model->slot_count = model->options.checkpointing ? 1 : model->config.layers;
    model->inputs = calloc((size_t)model->config.layers + 1, sizeof *model->inputs);
    model->slots = calloc((size_t)model->slot_count, sizeof *model->slots);
    if (!model->inputs || !model->slots)
        return zs_fail(ZS_ERR_NOMEM, "model: no memory for the activations of %d layers",
                       model->config.layers);
    return model->backend->prepare(model);
}

void zs_model_close(zs_model **model)
{
    zs_model *m = *model;
    if (!m)
        return;
    *model = NULL;
    m->backend->close(m);
    free(m->inputs);
    free(m->slots);
    free(m->index);
    free(m->units);
    free(m->params);
    free(m->weights);
    free(m);
}

/* ---- passes ---- */

static zs_status embed(zs_model *m, const zs_tokens *tokens)
{
    ZS_CHECK(zs_unit_acquire(m->engine, m->units[0]));
    zs_status status = m->backend->embed(m, tokens);
    zs_status released = zs_unit_release(m->engine, m->units[0]);
    return status != ZS_OK ? status : released;
}

static zs_acts *slot(zs_model *m, int layer)
{
    return &m->slots[m->options.checkpointing ? 0 : layer];
}

static zs_status forward(zs_model *m, const zs_tokens *tokens)
{
    ZS_CHECK(embed(m, tokens));
    for (int layer = 0; layer < m->config.layers; layer++) {
        ZS_CHECK(zs_unit_acquire(m->engine, m->units[1 + layer]));
        zs_status status = m->backend->forward(m, tokens, layer, m->inputs[layer],
                                               m->inputs[layer + 1], slot(m, layer));
        zs_status released = zs_unit_release(m->engine, m->units[1 + layer]);
        ZS_CHECK(status);
        ZS_CHECK(released);
    }
    return ZS_OK;
}

static zs_status backward(zs_model *m, const zs_tokens *tokens)
{
    int at = 0; /* which of dx holds what comes in */
    for (int layer = m->config.layers - 1; layer >= 0; layer--, at = !at) {
        ZS_CHECK(zs_unit_acquire(m->engine, m->units[1 + layer]));
        zs_status status = ZS_OK;
        /* The last block's activations are still there. */
        if (m->options.checkpointing && layer != m->config.layers - 1)
            status = m->backend->forward(m, tokens, layer, m->inputs[layer], NULL, slot(m, layer));
        if (status == ZS_OK)
            status = m->backend->backward(m, tokens, layer, m->inputs[layer], slot(m, layer),
                                          m->dx[at], m->dx[!at]);
        zs_status released = zs_unit_release(m->engine, m->units[1 + layer]);
        ZS_CHECK(status);
        ZS_CHECK(released);
    }
    return m->backend->embed_grad(m, tokens, m->dx[at]);
}

/* The head's units, the embedding among them when tied. */
static zs_status acquire_head(zs_model *m)
{
    int head = m->config.layers + 1;
    ZS_CHECK(zs_unit_acquire(m->engine, m->units[head]));
    return m->config.tied ? zs_unit_acquire(m->engine, m->units[0]) : ZS_OK;
}

static zs_status release_head(zs_model *m)
{
    int head = m->config.layers + 1;
    if (m->config.tied)
        ZS_CHECK(zs_unit_release(m->engine, m->units[0]));
    return zs_unit_release(m->engine, m->units[head]);
}

static zs_status head(zs_model *m, const zs_tokens *tokens, int predictions, double scale,
                      float *dx)
{
    ZS_CHECK(acquire_head(m));
    zs_status status =
        m->backend->head(m, tokens, m->inputs[m->config.layers], predictions, scale, dx);
    zs_status released = release_head(m);
    return status != ZS_OK ? status : released;
}

static zs_status read_batch(zs_model *m, const zs_batch *batch, zs_tokens *tokens, int *predictions,
                            int *last)
{
    if (!m->memory)
        return zs_fail(ZS_ERR_MISUSE, "model: a batch before zs_model_prepare");
    ZS_CHECK(m->backend->batch_begin(m));
    return zs_batch_read(m, batch, tokens, predictions, last);
}

zs_status zs_model_evaluate(zs_model *model, const zs_batch *batch, double *loss_sum)
{
    zs_tokens tokens;
    int predictions, last;
    ZS_CHECK(read_batch(model, batch, &tokens, &predictions, &last));
    ZS_CHECK(model->backend->batch_ready(model, &tokens, last));
    ZS_CHECK(forward(model, &tokens));
    ZS_CHECK(head(model, &tokens, predictions, 1.0, NULL));
    ZS_CHECK(model->backend->ask_loss(model));
    return model->backend->get_loss(model, loss_sum);
}

zs_status zs_model_train(zs_model *model, const zs_batch *batch, double scale, double *loss_sum)
{
    zs_tokens tokens;
    int predictions, last;
    ZS_CHECK(read_batch(model, batch, &tokens, &predictions, &last));
    zs_batch_chain(model, &tokens);
    ZS_CHECK(model->backend->batch_ready(model, &tokens, last));
    ZS_CHECK(forward(model, &tokens));
    ZS_CHECK(head(model, &tokens, predictions, scale, model->dx[0]));
    /* Asked for here and got below: on a device backward is queued while the loss is on its way. */
    if (loss_sum)
        ZS_CHECK(model->backend->ask_loss(model));
    ZS_CHECK(backward(model, &tokens));
    return loss_sum ? model->backend->get_loss(model, loss_sum) : ZS_OK;
}

zs_status zs_model_logits(zs_model *model, const zs_batch *batch, float *out)
{
    zs_tokens tokens;
    int predictions, last;
    ZS_CHECK(read_batch(model, batch, &tokens, &predictions, &last));
    for (int row = 0; row < tokens.rows; row++)
        model->batch.sources[row] = (row + 1) * tokens.seq - 1;
    ZS_CHECK(model->backend->batch_ready(model, &tokens, last));
    ZS_CHECK(forward(model, &tokens));
    ZS_CHECK(acquire_head(model));
    zs_status status =
        model->backend->logits(model, &tokens, model->inputs[model->config.layers], out);
    zs_status released = release_head(model);
    return status != ZS_OK ? status : released;
}

double zs_model_flops(const zs_model *model, int rows, int seq)
{
    const zs_model_config *c = &model->config;
    double tokens = (double)rows * seq, weights = (double)c->vocab * c->hidden;
    for (size_t i = 0; i < model->count; i++)
        if (model->weights[i].layer >= 0 && model->weights[i].ndim == 2)
            weights += (double)model->weights[i].shape[0] * (double)model->weights[i].shape[1];
    /* Causal: a token attends to half of the row on average. */
    double attention = 6.0 * c->layers * c->heads * c->head_dim * (double)seq;
    return tokens * (6.0 * weights + attention);
}
