/* SPDX-License-Identifier: Apache-2.0 */
/* Whether files hold the weights of a model. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "model/weights.h"

int zs_weights_dtype(zs_st_dtype stored, zs_dtype *out)
{
    switch (stored) {
    case ZS_ST_F32:
        *out = ZS_FP32;
        return 1;
    case ZS_ST_BF16:
        *out = ZS_BF16;
        return 1;
    case ZS_ST_F16:
        *out = ZS_FP16;
        return 1;
    default:
        return 0;
    }
}

static const char *shape_text(const int64_t *shape, int ndim, char buf[128])
{
    size_t at = 0;
    buf[0] = 0;
    for (int i = 0; i < ndim && at < 100; i++)
        at += (size_t)snprintf(buf + at, 128 - at, "%s%lld", i ? ", " : "", (long long)shape[i]);
    return buf;
}

static zs_status check_tensor(const zs_st *st, const char *dir, const zs_weight *w)
{
    zs_dtype dtype;
    const zs_st_tensor *t = zs_st_find(st, w->name);
    if (!t)
        return zs_fail(ZS_ERR_MISMATCH, "%s: tensor \"%s\" is missing%s", dir, w->name,
                       w->kind == ZS_W_HEAD
                           ? " (if the head is the embedding, config.json must say "
                             "\"tie_word_embeddings\": true)"
                           : ", but config.json asks for it");
    if (!zs_weights_dtype(t->dtype, &dtype))
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "%s: tensor \"%s\" has dtype %s; weights are read from F32, BF16 and F16",
                       dir, w->name, zs_st_dtype_name(t->dtype));
    if (t->ndim != w->ndim ||
        memcmp(t->shape, w->shape, (size_t)w->ndim * sizeof w->shape[0]) != 0) {
        char have[128], want[128];
        return zs_fail(
            ZS_ERR_MISMATCH, "%s: tensor \"%s\" has shape [%s], but config.json asks for [%s]", dir,
            w->name, shape_text(t->shape, t->ndim, have), shape_text(w->shape, w->ndim, want));
    }
    return ZS_OK;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Tensors that old checkpoints hold and no loader reads. */
static int ignorable(const char *name, int tied)
{
    static const char buffer[] = "rotary_emb.inv_freq";
    size_t length = strlen(name), tail = sizeof buffer - 1;
    return (tied && !strcmp(name, "lm_head.weight")) ||
           (length >= tail && !strcmp(name + length - tail, buffer));
}

/* Every tensor of the files must be a weight of the model. */
static zs_status check_strangers(const zs_st *st, const char *dir, const zs_weight *weights,
                                 size_t count)
{
    zs_status status = ZS_OK;
    int tied = 1;
    const char **names = malloc((count + 1) * sizeof *names);
    if (!names)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the names of %zu weights", count);
    for (size_t i = 0; i < count; i++) {
        names[i] = weights[i].name;
        tied &= weights[i].kind != ZS_W_HEAD;
    }
    qsort(names, count, sizeof *names, compare_names);
    for (size_t i = 0; !status && i < zs_st_count(st); i++) {
        const char *name = zs_st_at(st, i)->name;
        if (!bsearch(&name, names, count, sizeof *names, compare_names) && !ignorable(name, tied))
            status = zs_fail(ZS_ERR_MISMATCH,
                             "%s: tensor \"%.200s\" is no weight of the model that config.json "
                             "describes",
                             dir, name);
    }
    free(names);
    return status;
}

zs_status zs_weights_check(const zs_st *st, const char *dir, const zs_weight *weights, size_t count)
{
    for (size_t i = 0; i < count; i++)
        ZS_CHECK(check_tensor(st, dir, &weights[i]));
    return check_strangers(st, dir, weights, count);
}
