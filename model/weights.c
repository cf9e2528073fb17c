/* SPDX-License-Identifier: Apache-2.0 */
#include "model/weights.h"

#include <math.h>
#include <stdlib.h>

#include "base/status.h"
#include "base/util.h"

/* What is held of a tensor at a time. */
enum { PIECE_BYTES = 4 << 20 };

static zs_status make_piece(void **out)
{
    *out = malloc(PIECE_BYTES);
    if (!*out)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a buffer of %d bytes", PIECE_BYTES);
    return ZS_OK;
}

/* ---- load ---- */

static zs_status load_one(zs_engine *engine, const zs_st *st, const zs_weight *w, zs_param param,
                          void *piece)
{
    zs_dtype dtype = ZS_FP32;
    uint64_t first, count;
    const zs_st_tensor *t = zs_st_find(st, w->name);
    zs_weights_dtype(t->dtype, &dtype);
    ZS_CHECK(zs_param_local(engine, param, &first, &count));
    while (count) {
        uint64_t now = ZS_MIN(count, PIECE_BYTES / zs_dtype_size(dtype));
        ZS_CHECK(zs_st_read(st, t, first, now, piece));
        ZS_CHECK(zs_param_write(engine, param, first, now, dtype, piece));
        first += now;
        count -= now;
    }
    return ZS_OK;
}

zs_status zs_weights_load(zs_engine *engine, const char *dir, const zs_weight *weights,
                          const zs_param *params, size_t count)
{
    zs_status status = ZS_OK;
    zs_st *st = NULL;
    void *piece = NULL;
    ZS_TRY(zs_st_open(dir, &st));
    /* Every rank checks everything, so that all of them refuse alike. */
    ZS_TRY(zs_weights_check(st, dir, weights, count));
    ZS_TRY(make_piece(&piece));
    for (size_t i = 0; i < count; i++)
        ZS_TRY(load_one(engine, st, &weights[i], params[i], piece));
    ZS_TRY(zs_params_publish(engine));
fail:
    free(piece);
    zs_st_close(&st);
    return status;
}

/* ---- init ---- */

/* The finalizer of splitmix64 (Steele, Lea, Flood 2014): 64 bits in, 64 well-mixed bits out. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

/* Two independent standard normal values (Box and Muller) from number pair of a stream. */
static void normal_pair(uint64_t stream, uint64_t pair, double out[2])
{
    const uint64_t golden = UINT64_C(0x9E3779B97F4A7C15);
    const double scale = 0x1p-53, two_pi = 6.283185307179586;
    double u = ((double)(mix(stream + golden * (2 * pair + 1)) >> 11) + 1) * scale; /* (0, 1] */
    double v = (double)(mix(stream + golden * (2 * pair + 2)) >> 11) * scale;
    double radius = sqrt(-2 * log(u));
    out[0] = radius * cos(two_pi * v);
    out[1] = radius * sin(two_pi * v);
}

static void fill_normal(float *dst, uint64_t first, uint64_t count, uint64_t stream, double std)
{
    for (uint64_t i = first & ~UINT64_C(1); i < first + count; i += 2) {
        double values[2];
        normal_pair(stream, i / 2, values);
        if (i >= first)
            dst[i - first] = (float)(std * values[0]);
        if (i + 1 >= first && i + 1 < first + count)
            dst[i + 1 - first] = (float)(std * values[1]);
    }
}

static double constant_of(zs_weight_kind kind)
{
    switch (kind) {
    case ZS_W_ATTN_NORM:
    case ZS_W_MLP_NORM:
    case ZS_W_Q_NORM:
    case ZS_W_K_NORM:
    case ZS_W_FINAL_NORM:
        return 1;
    default:
        return 0;
    }
}

zs_status zs_weights_init(zs_engine *engine, const zs_model_config *config, uint64_t seed,
                          const zs_weight *weights, const zs_param *params, size_t count)
{
    zs_status status = ZS_OK;
    void *piece = NULL;
    ZS_TRY(make_piece(&piece));
    for (size_t i = 0; i < count; i++) {
        uint64_t first, left, stream = mix(mix(seed) + i + 1);
        float *values = piece;
        ZS_TRY(zs_param_local(engine, params[i], &first, &left));
        while (left) {
            uint64_t now = ZS_MIN(left, PIECE_BYTES / sizeof(float));
            if (weights[i].ndim == 2)
                fill_normal(values, first, now, stream, config->init_range);
            for (uint64_t k = 0; weights[i].ndim != 2 && k < now; k++)
                values[k] = (float)constant_of(weights[i].kind);
            ZS_TRY(zs_param_write(engine, params[i], first, now, ZS_FP32, values));
            first += now;
            left -= now;
        }
    }
    ZS_TRY(zs_params_publish(engine));
fail:
    free(piece);
    return status;
}
