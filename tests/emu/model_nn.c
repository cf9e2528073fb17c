/* SPDX-License-Identifier: Apache-2.0 */
/* kernels/nn_device.h on a CUDA device (emulated) against kernels/nn.h on the host. Both compute in
 * fp32, in other orders: what may differ is given in float epsilons of the largest result. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "device/cuda.h"
#include "kernels/kernels.h"
#include "kernels/nn.h"
#include "kernels/nn_device.h"

enum { WIDEST = 1500, ROOM = 24 << 20, GUARD = 64, GUARD_BYTE = 0x5a };

static zs_device *device;
static zs_nn_device *nn, *opened[2]; /* of fp32, of bf16 */
static const zs_nn *host;
static const zs_kernels *kernels;
static unsigned char *on_device, *pinned; /* [ROOM] each */
static size_t used;

static void need(zs_status status)
{
    if (status != ZS_OK)
        fail_msg("%s", zs_last_error());
}

/* ---- arrays on the device, between guards ---- */

static void *up(const void *from, size_t bytes)
{
    const size_t at = zs_round_up(used + GUARD, 64);
    used = at + bytes + GUARD;
    assert_true(used <= ROOM);
    memset(pinned + at - GUARD, GUARD_BYTE, bytes + 2 * (size_t)GUARD);
    memcpy(pinned + at, from, bytes);
    need(device->ops->copy(device, on_device + at - GUARD, pinned + at - GUARD,
                           bytes + 2 * (size_t)GUARD, NULL));
    return on_device + at;
}

static void down(void *to, const void *from, size_t bytes)
{
    const size_t at = (size_t)((const unsigned char *)from - on_device);
    need(device->ops->copy(device, pinned + at - GUARD, on_device + at - GUARD,
                           bytes + 2 * (size_t)GUARD, NULL));
    need(device->ops->stream_sync(device, NULL));
    for (size_t i = 0; i < GUARD; i++)
        if (pinned[at - 1 - i] != GUARD_BYTE || pinned[at + bytes + i] != GUARD_BYTE)
            fail_msg("bytes outside an array were written");
    memcpy(to, pinned + at, bytes);
}

static float *floats(size_t n)
{
    float *x = malloc(n * sizeof *x);
    assert_non_null(x);
    return x;
}

/* In (-2, 2). */
static float *randoms(size_t n)
{
    static uint32_t state = 1;
    float *x = floats(n);
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)state * 0x1p-30f;
    }
    return x;
}

static uint16_t *halves(const float *x, size_t n)
{
    uint16_t *out = malloc(n * sizeof *out);
    assert_non_null(out);
    kernels->cast[ZS_BF16][ZS_FP32](n, out, x);
    return out;
}

/* x as the device has it, rounded to dtype; x becomes what it holds. */
static void *up_as(float *x, size_t n, zs_dtype dtype)
{
    if (dtype == ZS_FP32)
        return up(x, n * sizeof *x);
    uint16_t *narrow = halves(x, n);
    host->widen(n, x, narrow);
    void *at = up(narrow, n * sizeof *narrow);
    free(narrow);
    return at;
}

static void use(zs_dtype dtype)
{
    used = 0;
    nn = opened[dtype == ZS_BF16];
}

static void down_as(float *to, const void *from, size_t n, zs_dtype dtype)
{
    if (dtype == ZS_FP32) {
        down(to, from, n * sizeof *to);
        return;
    }
    uint16_t *narrow = malloc(n * sizeof *narrow);
    assert_non_null(narrow);
    down(narrow, from, n * sizeof *narrow);
    host->widen(n, to, narrow);
    free(narrow);
}

/* Within that many epsilons (of dtype) of the largest value wanted. */
static void near(const char *what, size_t n, const float *got, const float *want, zs_dtype dtype,
                 double epsilons)
{
    const double epsilon = dtype == ZS_FP32 ? FLT_EPSILON : 1.0 / 128;
    double most = 0;
    for (size_t i = 0; i < n; i++)
        most = fmax(most, fabs((double)want[i]));
    for (size_t i = 0; i < n; i++)
        if (!(fabs((double)got[i] - (double)want[i]) <= epsilons * epsilon * most))
            fail_msg("%s: element %zu of %zu is %.9g, not %.9g (largest %.3g)", what, i, n,
                     (double)got[i], (double)want[i], most);
}

/* ---- tests ---- */

static const int lengths[] = {1, 2, 31, 64, 250, 1500};
static const zs_dtype dtypes[] = {ZS_FP32, ZS_BF16};

static void norm_case(int rows, int n, zs_dtype dtype)
{
    const size_t count = (size_t)rows * (size_t)n;
    float *x = randoms(count), *w = randoms((size_t)n), *dy = randoms(count);
    float *base = randoms(count), *y = floats(count), *dx = floats(count);
    float *rstd = floats((size_t)rows), *dw = calloc((size_t)n, sizeof *dw), *got = floats(count);
    const double narrow = dtype == ZS_FP32 ? 8 : 1;
    assert_non_null(dw);
    use(dtype);
    const void *dev_w = up_as(w, (size_t)n, dtype);
    const float *dev_x = up(x, count * 4), *dev_dy = up(dy, count * 4);
    float *dev_rstd = up(rstd, (size_t)rows * 4), *dev_dx = up(base, count * 4);
    void *dev_y = up(got, count * zs_dtype_size(dtype));
    void *dev_narrow = up(got, count * zs_dtype_size(dtype));
    float *dev_dw = up(got, (size_t)n * 4);

    for (int r = 0; r < rows; r++) {
        const size_t at = (size_t)r * (size_t)n;
        rstd[r] = host->rms((size_t)n, y + at, x + at, w, 1e-5f);
        host->rms_grad((size_t)n, dx + at, base + at, dy + at, x + at, w, rstd[r], dw, NULL);
    }
    const zs_nn_rms forward = {.count = rows,
                               .width = n,
                               .x = dev_x,
                               .w = dev_w,
                               .eps = 1e-5f,
                               .rstd = dev_rstd,
                               .y = dev_y};
    need(nn->ops->rms(nn, &forward));
    down_as(got, dev_y, count, dtype);
    near("rms", count, got, y, dtype, narrow);
    down(got, dev_rstd, (size_t)rows * 4);
    near("rstd", (size_t)rows, got, rstd, ZS_FP32, 8);
    zs_nn_columns columns = {.count = rows,
                             .width = n,
                             .dy = dev_dy,
                             .dtype = ZS_FP32,
                             .x = dev_x,
                             .rstd = dev_rstd,
                             .out = dev_dw};
    for (; columns.add < 2; columns.add++) {
        need(nn->ops->columns(nn, &columns));
        down(got, dev_dw, (size_t)n * 4);
        near("gradient of a norm weight", (size_t)n, got, dw, ZS_FP32, 4 + rows / 8.0);
        host->add((size_t)n, dw, dw);
    }
    const zs_nn_rms_grad grad = {.count = rows,
                                 .width = n,
                                 .base = dev_dx,
                                 .dy = dev_dy,
                                 .x = dev_x,
                                 .w = dev_w,
                                 .rstd = dev_rstd,
                                 .dx = dev_dx,
                                 .dx_narrow = dev_narrow,
                                 .y = dev_y};
    need(nn->ops->rms_grad(nn, &grad));
    down(got, dev_dx, count * 4);
    near("gradient of rms", count, got, dx, ZS_FP32, 16);
    down_as(got, dev_narrow, count, dtype);
    near("that, narrow", count, got, dx, dtype, dtype == ZS_FP32 ? 16 : 1);
    down_as(got, dev_y, count, dtype);
    near("rms again", count, got, y, dtype, narrow);
    free(x), free(w), free(dy), free(base), free(y), free(dx), free(rstd), free(dw), free(got);
}

static void norms(void **state)
{
    (void)state;
    for (size_t d = 0; d < ZS_COUNT(dtypes); d++) {
        for (size_t i = 0; i < ZS_COUNT(lengths); i++)
            norm_case(9, lengths[i], dtypes[d]);
        norm_case(700, 40, dtypes[d]);
    }
}

/* Rows that come from elsewhere, and rows that get no gradient: the head's. */
static void norms_of_some(void **state)
{
    enum { ROWS = 11, N = 70, SOME = 4 };
    const int32_t sources[SOME] = {2, 3, 7, 10};
    int32_t slots[ROWS];
    float *x = randoms(ROWS * N), *w = randoms(N), *dy = randoms(SOME * N), *got = floats(ROWS * N);
    float y[SOME * N], rstd[SOME], dx[ROWS * N] = {0}, dw[N] = {0};
    (void)state;
    use(ZS_FP32);
    memset(slots, -1, sizeof slots);
    for (int i = 0; i < SOME; i++) {
        const size_t from = (size_t)sources[i] * N, to = (size_t)i * N;
        slots[sources[i]] = i;
        rstd[i] = host->rms(N, y + to, x + from, w, 1e-6f);
        host->rms_grad(N, dx + from, NULL, dy + to, x + from, w, rstd[i], dw, NULL);
    }
    const float *dev_x = up(x, ROWS * N * 4), *dev_w = up(w, N * 4), *dev_dy = up(dy, SOME * N * 4);
    const int32_t *dev_sources = up(sources, sizeof sources), *dev_slots = up(slots, sizeof slots);
    float *dev_y = up(y, sizeof y), *dev_rstd = up(rstd, sizeof rstd), *dev_dx = up(dx, sizeof dx);
    float *dev_dw = up(dw, sizeof dw);
    const zs_nn_rms forward = {.count = SOME,
                               .width = N,
                               .x = dev_x,
                               .rows = dev_sources,
                               .w = dev_w,
                               .eps = 1e-6f,
                               .rstd = dev_rstd,
                               .y = dev_y};
    const zs_nn_columns columns = {.count = SOME,
                                   .width = N,
                                   .dy = dev_dy,
                                   .x = dev_x,
                                   .rows = dev_sources,
                                   .rstd = dev_rstd,
                                   .out = dev_dw};
    const zs_nn_rms_grad grad = {.count = ROWS,
                                 .width = N,
                                 .dy = dev_dy,
                                 .x = dev_x,
                                 .slot = dev_slots,
                                 .w = dev_w,
                                 .rstd = dev_rstd,
                                 .dx = dev_dx};
    need(nn->ops->rms(nn, &forward));
    down(got, dev_y, sizeof y);
    near("rms", SOME * N, got, y, ZS_FP32, 8);
    need(nn->ops->columns(nn, &columns));
    down(got, dev_dw, sizeof dw);
    near("gradient of the weight", N, got, dw, ZS_FP32, 8);
    need(nn->ops->rms_grad(nn, &grad));
    down(got, dev_dx, sizeof dx);
    near("gradient of rms", ROWS * N, got, dx, ZS_FP32, 16);
    free(x), free(w), free(dy), free(got);
}

static void biases(void **state)
{
    enum { ROWS = 300, N = 45 };
    (void)state;
    for (size_t d = 0; d < ZS_COUNT(dtypes); d++) {
        const zs_dtype dtype = dtypes[d];
        float *x = randoms(ROWS * N), *b = randoms(N), *dy = randoms(ROWS * N), sum[N] = {0};
        float *got = floats(ROWS * N);
        use(dtype);
        float *dev_x = up(x, ROWS * N * 4), *dev_sum = up(got, N * 4);
        const void *dev_b = up_as(b, N, dtype), *dev_dy = up_as(dy, ROWS * N, dtype);
        void *dev_narrow = up_as(x, ROWS * N, dtype);
        /* x is what the narrow one holds; the other has more bits. */
        need(nn->ops->bias(nn, ROWS, N, dtype, dev_narrow, dev_b));
        need(nn->ops->bias(nn, ROWS, N, ZS_FP32, dev_x, dev_b));
        for (int r = 0; r < ROWS; r++) {
            host->add(N, x + (size_t)r * N, b);
            host->add(N, sum, dy + (size_t)r * N);
        }
        down_as(got, dev_narrow, ROWS * N, dtype);
        near("a bias", ROWS * N, got, x, dtype, dtype == ZS_FP32 ? 0 : 0.5);
        down(got, dev_x, ROWS * N * 4);
        near("a bias of fp32", ROWS * N, got, x, dtype, dtype == ZS_FP32 ? 0 : 0.5);
        zs_nn_columns columns = {
            .count = ROWS, .width = N, .dy = dev_dy, .dtype = dtype, .out = dev_sum};
        need(nn->ops->columns(nn, &columns));
        down(got, dev_sum, sizeof sum);
        near("gradient of a bias", N, got, sum, ZS_FP32, 40);
        /* Of no rows it is what it was, or 0. */
        columns.count = 0;
        columns.add = 1;
        need(nn->ops->columns(nn, &columns));
        down(got, dev_sum, sizeof sum);
        near("of nothing", N, got, sum, ZS_FP32, 40);
        columns.add = 0;
        need(nn->ops->columns(nn, &columns));
        down(got, dev_sum, sizeof sum);
        for (int i = 0; i < N; i++)
            assert_true(got[i] == 0);
        free(x), free(b), free(dy), free(got);
    }
}

static void embedding(void **state)
{
    enum { VOCAB = 13, TOKENS = 30 };
    int32_t ids[TOKENS], first[VOCAB], next[TOKENS];
    (void)state;
    memset(first, -1, sizeof first);
    for (int t = TOKENS - 1; t >= 0; t--) {
        ids[t] = t * t % VOCAB; /* some never */
        next[t] = first[ids[t]];
        first[ids[t]] = t;
    }
    for (size_t i = 0; i < ZS_COUNT(lengths); i++)
        for (size_t d = 0; d < ZS_COUNT(dtypes); d++) {
            const size_t n = (size_t)lengths[i];
            const zs_dtype dtype = dtypes[d];
            float *table = randoms(VOCAB * n), *dx = randoms(TOKENS * n);
            float *out = floats(TOKENS * n), *grad = calloc(VOCAB * n, sizeof *grad);
            float *got = floats(TOKENS * n);
            assert_non_null(grad);
            use(dtype);
            const void *dev_table = up_as(table, VOCAB * n, dtype);
            const int32_t *dev_ids = up(ids, sizeof ids);
            float *dev_out = up(out, TOKENS * n * 4), *dev_grad = up(dx, VOCAB * n * 4);
            zs_nn_embed_grad sums = {.vocab = VOCAB,
                                     .width = (int)n,
                                     .first_use = up(first, sizeof first),
                                     .next_use = up(next, sizeof next),
                                     .dx = up(dx, TOKENS * n * 4),
                                     .out = dev_grad};
            for (size_t t = 0; t < TOKENS; t++) {
                memcpy(out + t * n, table + (size_t)ids[t] * n, n * 4);
                host->add(n, grad + (size_t)ids[t] * n, dx + t * n);
            }
            need(nn->ops->embed(nn, TOKENS, (int)n, dev_ids, dev_table, dev_out));
            down(got, dev_out, TOKENS * n * 4);
            assert_memory_equal(got, out, TOKENS * n * 4);
            for (; sums.add < 2; sums.add++) {
                need(nn->ops->embed_grad(nn, &sums));
                down(got, dev_grad, VOCAB * n * 4);
                near("gradient of an embedding", VOCAB * n, got, grad, ZS_FP32, 2);
                host->add(VOCAB * n, grad, grad);
            }
            free(table), free(dx), free(out), free(grad), free(got);
        }
}

/* Head h of token t of [tokens][heads][dim], and where it is in head-major order. */
static size_t token_major(const zs_nn_heads *s, int t, int h)
{
    return (size_t)(t * s->heads + h) * (size_t)s->dim;
}

static size_t head_major(const zs_nn_heads *s, int t, int h)
{
    const int group = s->heads / s->kv_heads, pair = t / s->seq * s->kv_heads + h / group;
    return (size_t)((pair * s->seq + t % s->seq) * group + h % group) * (size_t)s->dim;
}

static void heads_case(int dim, int with_norm, int with_rope, zs_dtype dtype)
{
    enum { ROWS = 2, SEQ = 5, HEADS = 6, KV = 2, TOKENS = ROWS * SEQ };
    const int32_t positions[TOKENS] = {0, 1, 2, 3, 4, 0, 1, 0, 1000, 131071};
    const size_t half = (size_t)dim / 2, n = (size_t)(TOKENS * HEADS * dim);
    const double narrow = dtype == ZS_FP32 ? 16 : 1;
    float *raw = randoms(n), *norm = randoms((size_t)dim), *d = randoms(n), *got = floats(n);
    float *c = floats(TOKENS * half), *s = floats(TOKENS * half), *frequencies = floats(half);
    float rstd[TOKENS * HEADS];
    float *out = floats(n), *draw = floats(n), *dnorm = calloc((size_t)dim, sizeof *dnorm);
    float *row = floats((size_t)dim);
    assert_non_null(dnorm);
    use(dtype);
    zs_nn_heads h = {.rows = ROWS,
                     .seq = SEQ,
                     .heads = HEADS,
                     .kv_heads = KV,
                     .dim = dim,
                     .eps = 1e-5f,
                     .rstd = up(rstd, sizeof rstd),
                     .raw = up_as(raw, n, dtype),
                     .out = up(got, n * zs_dtype_size(dtype)),
                     .d = up(d, n * 4),
                     .draw = up(got, n * zs_dtype_size(dtype)),
                     .dnorm = up(got, (size_t)dim * 4)};
    if (with_norm)
        h.norm = up_as(norm, (size_t)dim, dtype);
    for (size_t i = 0; i < half; i++)
        frequencies[i] = 1.0f / powf(10000.0f, (float)i / (float)half);
    for (size_t i = 0; i < TOKENS * half; i++) {
        const float angle = (float)positions[i / half] * frequencies[i % half];
        c[i] = (float)cos((double)angle);
        s[i] = (float)sin((double)angle);
    }
    if (with_rope) {
        float *dev_cos = up(got, TOKENS * half * 4), *dev_sin = up(got, TOKENS * half * 4);
        need(nn->ops->angles(nn, TOKENS, (int)half, up(positions, sizeof positions),
                             up(frequencies, half * 4), dev_cos, dev_sin));
        down(got, dev_cos, TOKENS * half * 4);
        near("cosines", TOKENS * half, got, c, ZS_FP32, 1);
        down(got, dev_sin, TOKENS * half * 4);
        near("sines", TOKENS * half, got, s, ZS_FP32, 1);
        h.cos = dev_cos;
        h.sin = dev_sin;
    }
    for (int t = 0; t < TOKENS; t++)
        for (int i = 0; i < HEADS; i++) {
            const float *x = raw + token_major(&h, t, i), *cs = c + (size_t)t * half,
                        *sn = s + (size_t)t * half;
            float *y = out + head_major(&h, t, i), *dx = draw + token_major(&h, t, i), r = 0;
            memcpy(y, x, (size_t)dim * 4);
            if (with_norm)
                r = host->rms((size_t)dim, y, x, norm, h.eps);
            memcpy(row, d + head_major(&h, t, i), (size_t)dim * 4);
            if (with_rope) {
                host->rope(half, y, cs, sn, 0);
                host->rope(half, row, cs, sn, 1);
            }
            memcpy(dx, row, (size_t)dim * 4);
            if (with_norm)
                host->rms_grad((size_t)dim, dx, NULL, row, x, norm, r, dnorm, NULL);
        }
    need(nn->ops->heads(nn, &h));
    down_as(got, h.out, n, dtype);
    near("heads", n, got, out, dtype, narrow);
    for (; h.add < 2; h.add++) {
        need(nn->ops->heads_grad(nn, &h));
        down_as(got, h.draw, n, dtype);
        near("gradient of heads", n, got, draw, dtype, narrow);
        if (with_norm) {
            down(got, h.dnorm, (size_t)dim * 4);
            near("gradient of their norm", (size_t)dim, got, dnorm, ZS_FP32, 32);
        }
        host->add((size_t)dim, dnorm, dnorm);
    }
    free(raw), free(norm), free(d), free(got), free(c), free(s), free(out), free(draw), free(dnorm);
    free(row), free(frequencies);
}

static void heads(void **state)
{
    static const int dims[] = {2, 16, 64, 80, 256};
    (void)state;
    for (size_t i = 0; i < ZS_COUNT(dims); i++)
        for (size_t d = 0; d < ZS_COUNT(dtypes); d++) {
            heads_case(dims[i], 1, 1, dtypes[d]);
            heads_case(dims[i], 0, 1, dtypes[d]);
            heads_case(dims[i], 0, 0, dtypes[d]);
        }
    use(ZS_FP32);
    assert_int_equal(
        nn->ops->heads(nn, &(zs_nn_heads){.rows = 1, .seq = 1, .heads = 1, .dim = 258}),
        ZS_ERR_UNSUPPORTED);
    assert_non_null(strstr(zs_last_error(), "head_dim 258"));
}

static void swiglu(void **state)
{
    static const size_t sizes[] = {1, 4, 777, 1024};
    (void)state;
    for (size_t i = 0; i < ZS_COUNT(sizes); i++)
        for (size_t d = 0; d < ZS_COUNT(dtypes); d++) {
            const zs_dtype dtype = dtypes[d];
            const double epsilons = dtype == ZS_FP32 ? 8 : 1;
            const size_t n = sizes[i];
            float *gate = randoms(n), *up_ = randoms(n), *dact = randoms(n), *y = floats(n);
            float *got = floats(n);
            for (size_t j = 0; j < n; j++)
                gate[j] *= 20;
            gate[0] = -200; /* where exp saturates */
            gate[n - 1] = 200;
            use(dtype);
            void *dev_gate = up_as(gate, n, dtype), *dev_up = up_as(up_, n, dtype);
            void *dev_dact = up_as(dact, n, dtype), *dev_y = up(y, n * zs_dtype_size(dtype));
            host->swiglu(n, y, gate, up_);
            need(nn->ops->swiglu(nn, n, dev_y, dev_gate, dev_up));
            down_as(got, dev_y, n, dtype);
            near("swiglu", n, got, y, dtype, epsilons);
            need(nn->ops->swiglu_grad(nn, n, dev_dact, dev_gate, dev_up, dev_dact));
            host->swiglu_grad(n, y, gate, up_, dact);
            down_as(got, dev_dact, n, dtype);
            near("swiglu again", n, got, y, dtype, epsilons);
            down_as(got, dev_gate, n, dtype);
            near("gradient of gate", n, got, gate, dtype, epsilons);
            down_as(got, dev_up, n, dtype);
            near("gradient of up", n, got, up_, dtype, epsilons);
            free(gate), free(up_), free(dact), free(y), free(got);
        }
}

/* ---- attention, against sums in double over all keys at once ---- */

typedef struct attention_case {
    zs_nn_heads s; /* of queries */
    const int32_t *starts;
    const float *q, *k, *v, *dout;    /* head-major, dout token-major */
    double *out, *lse, *dq, *dk, *dv; /* out token-major */
    double *p, *dp;                   /* [seq] */
} attention_case;

static void attend(const attention_case *a, int row, int t, int h)
{
    const zs_nn_heads *s = &a->s;
    const int dim = s->dim, group = s->heads / s->kv_heads, token = row * s->seq + t;
    const size_t at_q = head_major(s, token, h), at_out = token_major(s, token, h);
    const size_t pair = (size_t)(row * s->kv_heads + h / group) * (size_t)(s->seq * dim);
    const double scale = 1 / sqrt((double)dim);
    double most = -INFINITY, sum = 0, delta = 0;
    for (int j = a->starts[token]; j <= t; j++) {
        const size_t at = pair + (size_t)(j * dim);
        a->p[j] = a->dp[j] = 0;
        for (int c = 0; c < dim; c++) {
            a->p[j] += scale * (double)a->q[at_q + (size_t)c] * (double)a->k[at + (size_t)c];
            a->dp[j] += (double)a->dout[at_out + (size_t)c] * (double)a->v[at + (size_t)c];
        }
        most = fmax(most, a->p[j]);
    }
    for (int j = a->starts[token]; j <= t; j++)
        sum += exp(a->p[j] - most);
    a->lse[at_q / (size_t)dim] = most + log(sum);
    for (int j = a->starts[token]; j <= t; j++) {
        a->p[j] = exp(a->p[j] - most) / sum;
        delta += a->p[j] * a->dp[j];
    }
    for (int j = a->starts[token]; j <= t; j++)
        for (int c = 0; c < dim; c++) {
            const size_t at = pair + (size_t)(j * dim + c);
            const double ds = scale * a->p[j] * (a->dp[j] - delta);
            a->out[at_out + (size_t)c] += a->p[j] * (double)a->v[at];
            a->dv[at] += a->p[j] * (double)a->dout[at_out + (size_t)c];
            a->dq[at_q + (size_t)c] += ds * (double)a->k[at];
            a->dk[at] += ds * (double)a->q[at_q + (size_t)c];
        }
}

static double *zeros(size_t n)
{
    double *x = calloc(n, sizeof *x);
    assert_non_null(x);
    return x;
}

static void near_doubles(const char *what, size_t n, const float *got, const double *want,
                         zs_dtype dtype, double epsilons)
{
    float *rounded = floats(n);
    for (size_t i = 0; i < n; i++)
        rounded[i] = (float)want[i];
    near(what, n, got, rounded, dtype, epsilons);
    free(rounded);
}

static void attention_with(int rows, int seq, int heads, int kv_heads, int dim, int tile,
                           const int32_t *starts, zs_dtype dtype)
{
    const size_t tokens = (size_t)(rows * seq), nq = tokens * (size_t)(heads * dim);
    const size_t nk = tokens * (size_t)(kv_heads * dim), stats = tokens * (size_t)heads;
    const size_t size = zs_dtype_size(dtype);
    const size_t room = zs_nn_attention_room(rows, seq, heads, kv_heads, dim, tile);
    const double epsilons = dtype == ZS_FP32 ? 32 : 2;
    float *q = randoms(nq), *k = randoms(nk), *v = randoms(nk), *dout = randoms(nq);
    float *got = calloc(ZS_MAX(nq, room), sizeof *got);
    assert_non_null(got);
    use(dtype);
    zs_nn_attention a = {.rows = rows,
                         .seq = seq,
                         .heads = heads,
                         .kv_heads = kv_heads,
                         .dim = dim,
                         .tile = tile,
                         .starts = up(starts, tokens * sizeof *starts),
                         .host_starts = starts,
                         .q = up_as(q, nq, dtype),
                         .k = up_as(k, nk, dtype),
                         .v = up_as(v, nk, dtype),
                         .dout = up_as(dout, nq, dtype),
                         .out = up(got, nq * size),
                         .dout_heads = up(got, nq * size),
                         .lse = up(got, stats * 4),
                         .delta = up(got, stats * 4),
                         .dq = up(got, nq * 4),
                         .dk = up(got, nk * 4),
                         .dv = up(got, nk * 4),
                         .room = up(got, room * 4)};
    attention_case want = {
        .s = {.rows = rows, .seq = seq, .heads = heads, .kv_heads = kv_heads, .dim = dim},
        .starts = starts,
        .q = q,
        .k = k,
        .v = v,
        .dout = dout,
        .out = zeros(nq),
        .lse = zeros(stats),
        .dq = zeros(nq),
        .dk = zeros(nk),
        .dv = zeros(nk),
        .p = zeros((size_t)seq),
        .dp = zeros((size_t)seq)};
    for (int i = 0; i < rows * seq * heads; i++)
        attend(&want, i / heads / seq, i / heads % seq, i % heads);
    need(nn->ops->attention(nn, &a));
    down_as(got, a.out, nq, dtype);
    near_doubles("attention", nq, got, want.out, dtype, epsilons);
    down(got, a.lse, stats * 4);
    near_doubles("lse", stats, got, want.lse, ZS_FP32, 32);
    need(nn->ops->attention_grad(nn, &a));
    down(got, a.dq, nq * 4);
    near_doubles("gradient of q", nq, got, want.dq, dtype, epsilons);
    down(got, a.dk, nk * 4);
    near_doubles("gradient of k", nk, got, want.dk, dtype, epsilons);
    down(got, a.dv, nk * 4);
    near_doubles("gradient of v", nk, got, want.dv, dtype, epsilons);
    down(got, a.room, room * 4); /* guards */
    free(q), free(k), free(v), free(dout), free(got), free(want.out), free(want.lse);
    free(want.dq), free(want.dk), free(want.dv), free(want.p), free(want.dp);
}

/* Tiles smaller and larger than rows, documents that begin in a tile and at its edges. */
static void attention(void **state)
{
    enum { ROWS = 2, SEQ = 37 };
    int32_t whole[ROWS * SEQ] = {0}, documents[ROWS * SEQ];
    (void)state;
    for (int t = 0; t < SEQ; t++) {
        documents[t] = t < 8 ? 0 : t < 24 ? 8 : t < 25 ? 24 : 25;
        documents[SEQ + t] = t < 35 ? 0 : 35;
    }
    for (size_t d = 0; d < ZS_COUNT(dtypes); d++) {
        attention_with(ROWS, SEQ, 4, 2, 16, 8, documents, dtypes[d]);
        attention_with(ROWS, SEQ, 4, 4, 10, 13, documents, dtypes[d]);
        attention_with(ROWS, SEQ, 3, 1, 16, 512, documents, dtypes[d]);
        attention_with(ROWS, SEQ, 4, 2, 16, 8, whole, dtypes[d]);
        attention_with(1, 1, 2, 1, 4, 4, whole, dtypes[d]);
    }
}

static void entropy(void **state)
{
    enum { ROWS = 3 };
    static const int vocabs[] = {2, 100, 2049, 5000};
    (void)state;
    for (size_t v = 0; v < ZS_COUNT(vocabs); v++)
        for (size_t d = 0; d < ZS_COUNT(dtypes); d++) {
            const zs_dtype dtype = dtypes[d];
            const size_t vocab = (size_t)vocabs[v], ld = zs_round_up(vocab, 8);
            const size_t narrow_ld = ld * 4 / zs_dtype_size(dtype);
            const int32_t targets[ROWS] = {0, vocabs[v] - 1, vocabs[v] / 2};
            float *logits = randoms(ROWS * ld), *got = floats(ROWS * narrow_ld);
            double losses[ROWS], sum = 0, dev_losses[ROWS];
            use(dtype);
            logits[0] = 80; /* a prediction that is almost sure */
            zs_nn_entropy e = {.count = ROWS,
                               .vocab = vocabs[v],
                               .logits = up(logits, ROWS * ld * 4),
                               .ld = (int)ld,
                               .targets = up(targets, sizeof targets),
                               .losses = up(losses, sizeof losses),
                               .scale = 0.25f};
            double *dev_sum = up(&sum, sizeof sum);
            for (size_t r = 0; r < ROWS; r++) {
                float *row = logits + r * ld, most;
                const double logit = row[targets[r]];
                const float total = host->softmax(vocab, row, &most);
                losses[r] = log((double)total) + (double)most - logit;
                sum += losses[r];
                host->scale(vocab, row, 0.25f / total);
                row[targets[r]] -= 0.25f;
            }
            for (; e.grad < 2; e.grad++) { /* losses alone leave logits as they are */
                need(nn->ops->entropy(nn, &e));
                down(dev_losses, e.losses, sizeof losses);
                for (int r = 0; r < ROWS; r++)
                    assert_true(fabs(dev_losses[r] - losses[r]) <= 1e-6 * fmax(1, fabs(losses[r])));
            }
            need(nn->ops->sum_losses(nn, ROWS, e.losses, 0, dev_sum));
            need(nn->ops->sum_losses(nn, ROWS, e.losses, 1, dev_sum));
            down(dev_losses, dev_sum, sizeof sum);
            assert_true(fabs(dev_losses[0] - 2 * sum) <= 1e-6 * fmax(1, fabs(sum)));
            down_as(got, e.logits, ROWS * narrow_ld, dtype);
            for (size_t r = 0; r < ROWS; r++)
                near("gradient of logits", vocab, got + r * narrow_ld, logits + r * ld, dtype,
                     dtype == ZS_FP32 ? 8 : 1);
            free(logits), free(got);
        }
}

/* All transpositions, a leading dimension that is larger, batches, and beta. */
static void products(void **state)
{
    enum { M = 5, N = 7, K = 9, LD = 11, BATCH = 2, ROOM_EACH = LD * LD };
    float *a = randoms(BATCH * ROOM_EACH), *b = randoms(BATCH * ROOM_EACH);
    (void)state;
    for (int variant = 0; variant < 16; variant++) {
        const int ta = variant & 1, tb = variant >> 1 & 1;
        const zs_dtype in = variant & 4 ? ZS_BF16 : ZS_FP32, out = variant & 8 ? in : ZS_FP32;
        float *c = randoms(BATCH * ROOM_EACH), *got = floats(BATCH * ROOM_EACH);
        use(in);
        const void *dev_a = up_as(a, BATCH * ROOM_EACH, in),
                   *dev_b = up_as(b, BATCH * ROOM_EACH, in);
        void *dev_c = up_as(c, BATCH * ROOM_EACH, out);
        for (int p = 0; p < BATCH; p++)
            for (int i = 0; i < M; i++)
                for (int j = 0; j < N; j++) {
                    const float *x = a + p * ROOM_EACH, *y = b + p * ROOM_EACH;
                    double sum = 0;
                    for (int l = 0; l < K; l++)
                        sum += (double)(ta ? x[l * LD + i] : x[i * LD + l]) *
                               (double)(tb ? y[j * LD + l] : y[l * LD + j]);
                    float *to = c + p * ROOM_EACH + i * LD + j;
                    *to = (float)(0.5 * sum + (double)*to);
                }
        need(nn->ops->gemm(nn, &(zs_gemm){.m = M,
                                          .n = N,
                                          .k = K,
                                          .a = dev_a,
                                          .b = dev_b,
                                          .c = dev_c,
                                          .dtype = in,
                                          .c_dtype = out,
                                          .transpose_a = ta,
                                          .transpose_b = tb,
                                          .lda = LD,
                                          .ldb = LD,
                                          .ldc = LD,
                                          .batch = BATCH,
                                          .stride_a = ROOM_EACH,
                                          .stride_b = ROOM_EACH,
                                          .stride_c = ROOM_EACH,
                                          .alpha = 0.5f,
                                          .beta = 1}));
        down_as(got, dev_c, BATCH * ROOM_EACH, out);
        near("a product", BATCH * ROOM_EACH, got, c, out, out == ZS_FP32 ? 8 : 1);
        free(c), free(got);
    }
    free(a), free(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norms),     cmocka_unit_test(norms_of_some), cmocka_unit_test(biases),
        cmocka_unit_test(heads),     cmocka_unit_test(embedding),     cmocka_unit_test(swiglu),
        cmocka_unit_test(attention), cmocka_unit_test(entropy),       cmocka_unit_test(products),
    };
    const size_t room = zs_nn_device_room(WIDEST);
    void *rooms[2] = {NULL};
    host = zs_nn_get();
    kernels = zs_kernels_get();
    zs_status status = zs_device_open_cuda(0, &device);
    for (int i = 0; i < 2 && status == ZS_OK; i++) {
        zs_nn_device_config config = {.dtype = dtypes[i], .widest = WIDEST};
        config.stream = device->ops->stream_native(device, NULL);
        status = device->ops->alloc(device, room, &rooms[i]);
        config.room = rooms[i];
        if (status == ZS_OK)
            status = device->cuda->nn_open(device, &config, &opened[i]);
    }
    if (status != ZS_OK || device->ops->alloc(device, ROOM, (void **)&on_device) != ZS_OK ||
        device->ops->host_alloc(device, ROOM, (void **)&pinned) != ZS_OK) {
        fprintf(stderr, "%s\n", zs_last_error());
        return 1;
    }
    print_message("%s\n", device->cuda->build);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    device->ops->free(device, on_device, ROOM);
    device->ops->host_free(device, pinned, ROOM);
    for (int i = 0; i < 2; i++) {
        opened[i]->ops->close(opened[i]);
        device->ops->free(device, rooms[i], room);
    }
    zs_device_close(&device);
    return failed;
}
