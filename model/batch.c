/* SPDX-License-Identifier: Apache-2.0 */
/* What the caller's micro-batch means: checked, with defaults filled in. */
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "model/internal.h"

static int counted(const zs_batch *batch, size_t i)
{
    const int32_t *labels = batch->labels ? batch->labels : batch->ids;
    if (i % (size_t)batch->seq == 0 || (batch->positions && batch->positions[i] == 0))
        return 0;
    return labels[i] != -100;
}

uint64_t zs_batch_tokens(const zs_batch *batch)
{
    uint64_t count = 0;
    for (size_t i = 0; i < (size_t)batch->rows * (size_t)batch->seq; i++)
        count += (uint64_t)counted(batch, i);
    return count;
}

/* Tokens of one task: large enough for efficient products (each packs the weights anew), small
 * enough to occupy the cores. */
static int tile_of(int tokens)
{
    return tokens >= 1024  ? ZS_TOKEN_TILE
           : tokens >= 512 ? ZS_TOKEN_TILE / 2
           : tokens >= 128 ? ZS_TOKEN_TILE / 4
                           : ZS_TOKEN_TILE / 8;
}

zs_status zs_batch_read(zs_model *m, const zs_batch *batch, zs_tokens *out, int *predictions,
                        int *last)
{
    const zs_model_options *o = &m->options;
    zs_batch_arrays *to = &m->batch;
    *last = *predictions = 0;
    if (batch->rows < 1 || batch->seq < 1 || batch->seq > o->seq || batch->rows > o->rows)
        return zs_fail(ZS_ERR_ARG, "model: a batch of %d x %d tokens; it was opened for %d x %d",
                       batch->rows, batch->seq, o->rows, o->seq);
    size_t count = (size_t)batch->rows * (size_t)batch->seq;
    for (size_t i = 0; i < count; i++) {
        int in_row = (int)(i % (size_t)batch->seq);
        int32_t position = batch->positions ? batch->positions[i] : in_row;
        if (batch->ids[i] < 0 || batch->ids[i] >= m->config.vocab)
            return zs_fail(ZS_ERR_ARG, "model: token id %d at row %zu; the vocabulary has %d",
                           batch->ids[i], i / (size_t)batch->seq, m->config.vocab);
        if (position < 0 || position >= m->config.max_positions)
            return zs_fail(ZS_ERR_ARG, "model: position %d at row %zu; the model has %d", position,
                           i / (size_t)batch->seq, m->config.max_positions);
        to->ids[i] = batch->ids[i];
        to->positions[i] = position;
        to->starts[i] = in_row == 0 || position == 0 ? in_row : to->starts[i - 1];
        *last = ZS_MAX(*last, position);
        to->slot_of[i] = -1;
        if (!counted(batch, i))
            continue;
        int32_t label = batch->labels ? batch->labels[i] : batch->ids[i];
        if (label < 0 || label >= m->config.vocab)
            return zs_fail(ZS_ERR_ARG,
                           "model: label %d at row %zu; labels are below the vocabulary of %d, or "
                           "-100 where not counted",
                           label, i / (size_t)batch->seq, m->config.vocab);
        to->slot_of[i - 1] = *predictions;
        to->sources[*predictions] = (int32_t)i - 1;
        to->targets[(*predictions)++] = label;
    }
    *out = (zs_tokens){batch->rows, batch->seq,    (int)count, tile_of((int)count),
                       to->ids,     to->positions, to->starts};
    return ZS_OK;
}

void zs_batch_chain(zs_model *model, const zs_tokens *tokens)
{
    zs_batch_arrays *b = &model->batch;
    memset(b->first_use, -1, (size_t)model->config.vocab * sizeof(*b->first_use));
    for (int t = tokens->count - 1; t >= 0; t--) {
        b->next_use[t] = b->first_use[tokens->ids[t]];
        b->first_use[tokens->ids[t]] = t;
    }
}
