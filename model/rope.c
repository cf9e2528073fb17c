/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "base/status.h"
#include "base/util.h"
#include "model/internal.h"

/* As transformers computes it, float32 where it has tensors. */
float zs_rope_frequency(const zs_model_config *c, int i)
{
    float exponent = (float)(2 * i) / (float)c->head_dim;
    float f = 1.0f / (float)pow((float)c->rope_theta, exponent);
    if (c->rope_type == ZS_ROPE_LINEAR)
        return f / (float)c->rope_factor;
    if (c->rope_type != ZS_ROPE_LLAMA3)
        return f;
    float old = (float)c->rope_original_positions;
    float wave = (float)(2.0 * M_PI) / f;
    if (wave > old / (float)c->rope_low_freq)
        return f / (float)c->rope_factor;
    if (wave < old / (float)c->rope_high_freq)
        return f;
    float smooth =
        (old / wave - (float)c->rope_low_freq) / (float)(c->rope_high_freq - c->rope_low_freq);
    return (1.0f - smooth) * (f / (float)c->rope_factor) + smooth * f;
}

typedef struct fill {
    zs_model *model;
    int first;
} fill;

static void fill_position(void *arg, size_t index, int worker)
{
    const fill *f = arg;
    const zs_model *model = f->model;
    int half = model->config.head_dim / 2, position = f->first + (int)index;
    float *c = model->cos + (size_t)position * (size_t)half;
    float *s = model->sin + (size_t)position * (size_t)half;
    (void)worker;
    for (int i = 0; i < half; i++) {
        float angle = (float)position * zs_rope_frequency(&model->config, i);
        c[i] = (float)cos((double)angle);
        s[i] = (float)sin((double)angle);
    }
}

zs_status zs_rope_reach(zs_model *model, int last)
{
    if (last < model->table_positions)
        return ZS_OK;
    /* Doubling keeps the number of growths small; the model's positions end it. */
    int positions =
        ZS_MIN(ZS_MAX(last + 1, 2 * model->table_positions), model->config.max_positions);
    size_t row = (size_t)(model->config.head_dim / 2) * sizeof(float);
    for (int i = 0; i < 2; i++) {
        float **table = i ? &model->sin : &model->cos;
        float *grown = realloc(*table, (size_t)positions * row);
        if (!grown)
            return zs_fail(ZS_ERR_NOMEM, "no memory for the rotary angles of %d positions",
                           positions);
        *table = grown;
    }
    fill f = {model, model->table_positions};
    int added = positions - model->table_positions;
    zs_pool_run(model->pool, fill_position, &f, (size_t)added);
    model->table_positions = positions;
    return zs_memory_note(model->engine, ZS_TIER_DEVICE, "activations",
                          (int64_t)((size_t)added * row * 2));
}
