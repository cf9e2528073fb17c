/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of weights: computed in tiles of output rows, each over all tokens at once, and left
 * where the engine keeps them. */
#include <cblas.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "model/internal.h"

enum { MOST_JOBS = 18, ID_TILE = 1024 };

typedef struct sink {
    void *buffer;
    int accumulate;
    int tile, tiles; /* rows of a task; tasks */
} sink;

typedef struct run {
    zs_model *model;
    const zs_grad_job *jobs;
    size_t count;
    sink sinks[MOST_JOBS];
} run;

/* n elements from values to element offset of the buffer, in its dtype. */
static void deliver(const zs_model *model, const sink *s, size_t offset, size_t n,
                    const float *values)
{
    zs_dtype dtype = model->options.grad_dtype;
    char *dst = (char *)s->buffer + offset * zs_dtype_size(dtype);
    if (s->accumulate)
        model->kernels->add[dtype][ZS_FP32](n, dst, values);
    else
        model->kernels->cast[dtype][ZS_FP32](n, dst, values);
}

static void column_sums(const zs_model *model, int worker, const zs_grad_job *job, const sink *s,
                        int first, int rows)
{
    float *sum = zs_model_scratch(model, worker);
    memset(sum, 0, (size_t)rows * sizeof(float));
    for (int t = 0; t < job->count; t++)
        model->nn->add((size_t)rows, sum, job->dy + (size_t)t * (size_t)job->ld + (size_t)first);
    deliver(model, s, (size_t)first, (size_t)rows, sum);
}

static void grad_task(void *arg, size_t index, int worker)
{
    run *r = arg;
    size_t j = 0;
    while (index >= (size_t)r->sinks[j].tiles)
        index -= (size_t)r->sinks[j++].tiles;
    const zs_grad_job *job = &r->jobs[j];
    const sink *s = &r->sinks[j];
    int first = (int)index * s->tile, rows = ZS_MIN(s->tile, job->rows - first);
    if (!job->x) {
        column_sums(r->model, worker, job, s, first, rows);
        return;
    }
    size_t offset = (size_t)first * (size_t)job->columns;
    int direct = r->model->options.grad_dtype == ZS_FP32;
    float *out = direct ? (float *)s->buffer + offset : zs_model_scratch(r->model, worker);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, rows, job->columns, job->count, 1.0f,
                job->dy + first, job->ld, job->x, job->columns,
                direct && s->accumulate ? 1.0f : 0.0f, out, job->columns);
    if (!direct)
        deliver(r->model, s, offset, (size_t)rows * (size_t)job->columns, out);
}

/* Even tiles of at most ZS_OUTPUT_TILE rows, in multiples of 16. */
static int tile_rows(int rows)
{
    int tiles = (rows + ZS_OUTPUT_TILE - 1) / ZS_OUTPUT_TILE;
    return ZS_MIN(((rows + tiles - 1) / tiles + 15) / 16 * 16, (int)ZS_OUTPUT_TILE);
}

zs_status zs_grads_run(zs_model *model, const zs_grad_job *jobs, size_t count)
{
    run r = {.model = model, .jobs = jobs, .count = count};
    size_t tasks = 0;
    for (size_t j = 0; j < count; j++) {
        sink *s = &r.sinks[j];
        ZS_CHECK(zs_grad_buffer(model->engine, jobs[j].param, &s->buffer, &s->accumulate));
        s->tile = tile_rows(jobs[j].rows);
        s->tiles = (jobs[j].rows + s->tile - 1) / s->tile;
        tasks += (size_t)s->tiles;
    }
    zs_pool_run(model->pool, grad_task, &r, tasks);
    for (size_t j = 0; j < count; j++)
        ZS_CHECK(zs_grad_ready(model->engine, jobs[j].param, r.sinks[j].buffer,
                               model->options.grad_dtype));
    return ZS_OK;
}

typedef struct embedding {
    zs_model *model;
    const float *dx;
    sink sink;
} embedding;

static void embedding_task(void *arg, size_t index, int worker)
{
    embedding *e = arg;
    zs_model *model = e->model;
    size_t hidden = (size_t)model->config.hidden;
    size_t row_bytes = hidden * zs_dtype_size(model->options.grad_dtype);
    int first = (int)index * ID_TILE, end = ZS_MIN(first + ID_TILE, model->config.vocab);
    float *sum = zs_model_scratch(model, worker);
    if (!e->sink.accumulate)
        memset((char *)e->sink.buffer + (size_t)first * row_bytes, 0,
               (size_t)(end - first) * row_bytes);
    for (int id = first; id < end; id++) {
        int t = model->batch.first_use[id];
        if (t < 0)
            continue;
        memcpy(sum, e->dx + (size_t)t * hidden, hidden * sizeof(float));
        while ((t = model->batch.next_use[t]) >= 0)
            model->nn->add(hidden, sum, e->dx + (size_t)t * hidden);
        deliver(model, &e->sink, (size_t)id * hidden, hidden, sum);
    }
}

zs_status zs_embedding_grad(zs_model *model, const zs_tokens *tokens, const float *dx)
{
    embedding e = {.model = model, .dx = dx};
    zs_param param = model->params[model->index[0][ZS_W_EMBED]];
    ZS_CHECK(zs_grad_buffer(model->engine, param, &e.sink.buffer, &e.sink.accumulate));
    zs_pool_run(model->pool, embedding_task, &e,
                ((size_t)model->config.vocab + ID_TILE - 1) / ID_TILE);
    return zs_grad_ready(model->engine, param, e.sink.buffer, model->options.grad_dtype);
}
