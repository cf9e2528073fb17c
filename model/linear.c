/* SPDX-License-Identifier: Apache-2.0 */
#include <cblas.h>
#include <pthread.h>
#include <string.h>

#include "base/util.h"
#include "model/internal.h"

static void one_thread(void)
{
    openblas_set_num_threads(1);
}

void zs_blas_setup(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, one_thread);
}

int zs_model_widest(const zs_model_config *config)
{
    return ZS_MAX(ZS_MAX(config->hidden, config->intermediate), config->heads * config->head_dim);
}

/* Rows [first, first + *rows) of w in fp32; fewer than asked for when they must be widened. */
static const float *rows_of(const zs_model *model, int worker, const zs_view *w, int first,
                            int *rows)
{
    size_t offset = (size_t)first * (size_t)w->columns;
    if (w->dtype == ZS_FP32)
        return (const float *)w->data + offset;
    /* Room is at least one row of the widest matrix: zs_model_prepare sees to it. */
    size_t room = ZS_MAX((size_t)ZS_WIDE_NUMEL, (size_t)zs_model_widest(&model->config) * 16);
    float *wide = zs_model_scratch(model, worker) + model->scratch_numel - room;
    *rows = ZS_MIN(*rows, ZS_MAX((int)(room / (size_t)w->columns) / 16 * 16, 16));
    model->nn->widen((size_t)*rows * (size_t)w->columns, wide,
                     (const unsigned short *)w->data + offset);
    return wide;
}

void zs_linear(const zs_model *model, int worker, const zs_view *w, const float *bias, int tokens,
               const float *x, float *y, int ldy, int add)
{
    if (bias) {
        for (int t = 0; t < tokens; t++) {
            float *row = y + (size_t)t * (size_t)ldy;
            if (add)
                model->nn->add((size_t)w->rows, row, bias);
            else
                memcpy(row, bias, (size_t)w->rows * sizeof(float));
        }
        add = 1;
    }
    for (int first = 0, rows; first < w->rows; first += rows) {
        rows = w->rows - first;
        const float *weight = rows_of(model, worker, w, first, &rows);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, tokens, rows, w->columns, 1.0f, x,
                    w->columns, weight, w->columns, add ? 1.0f : 0.0f, y + first, ldy);
    }
}

void zs_linear_input_grad(const zs_model *model, int worker, const zs_view *w, int tokens,
                          const float *dy, float *dx, int add)
{
    for (int first = 0, rows; first < w->rows; first += rows) {
        rows = w->rows - first;
        const float *weight = rows_of(model, worker, w, first, &rows);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, tokens, w->columns, rows, 1.0f,
                    dy + first, w->rows, weight, w->columns, add || first ? 1.0f : 0.0f, dx,
                    w->columns);
    }
}
