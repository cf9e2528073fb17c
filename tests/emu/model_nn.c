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

enum { ROOM = 24 << 20, GUARD = 64, GUARD_BYTE = 0x5a };

static zs_device *device;
static zs_nn_device *nn;
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

/* Room for what column_sums adds up. */
static float *partial_sums(int n)
{
    const size_t at = zs_round_up(used, 64);
    used = at + (size_t)ZS_NN_SUM_TILES * (size_t)n * sizeof(float);
    assert_true(used <= ROOM);
    return (float *)(on_device + at);
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

static float *copy_of(const float *x, size_t n)
{
    float *copy = floats(n);
    memcpy(copy, x, n * sizeof *x);
    return copy;
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

static int setup(void **state)
{
    (void)state;
    used = 0;
    return 0;
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
    assert_non_null(dw);
    used = 0;
    const void *dev_w = up_as(w, (size_t)n, dtype);
    const float *dev_x = up(x, count * 4), *dev_dy = up(dy, count * 4);
    float *dev_rstd = up(rstd, (size_t)rows * 4), *dev_dx = up(base, count * 4);
    void *dev_y = up(got, count * zs_dtype_size(dtype));
    float *dev_dw = up(got, (size_t)n * 4);
    float *dev_partial = partial_sums(n);

    for (int r = 0; r < rows; r++) {
        const size_t at = (size_t)r * (size_t)n;
        rstd[r] = host->rms((size_t)n, y + at, x + at, w, 1e-5f);
        host->rms_grad((size_t)n, dx + at, base + at, dy + at, x + at, w, rstd[r], dw, NULL);
    }
    need(nn->ops->rms(nn, rows, n, dev_x, NULL, dev_w, dtype, 1e-5f, dev_rstd, dev_y, dtype));
    down_as(got, dev_y, count, dtype);
    near("rms", count, got, y, dtype, dtype == ZS_FP32 ? 8 : 1);
    down(got, dev_rstd, (size_t)rows * 4);
    near("rstd", (size_t)rows, got, rstd, ZS_FP32, 8);
    need(nn->ops->column_sums(nn, rows, n, dev_dy, ZS_FP32, dev_x, NULL, dev_rstd, dev_partial,
                              dev_dw, ZS_FP32, 0));
    down(got, dev_dw, (size_t)n * 4);
    near("gradient of a norm weight", (size_t)n, got, dw, ZS_FP32, 4 + rows / 8.0);
    need(nn->ops->column_sums(nn, rows, n, dev_dy, ZS_FP32, dev_x, NULL, dev_rstd, dev_partial,
                              dev_dw, ZS_FP32, 1));
    host->add((size_t)n, dw, dw);
    down(got, dev_dw, (size_t)n * 4);
    near("twice that", (size_t)n, got, dw, ZS_FP32, 4 + rows / 8.0);
    need(nn->ops->rms_grad(nn, rows, n, dev_dy, NULL, dev_x, dev_w, dtype, dev_rstd, dev_dx, dev_dx,
                           dev_y));
    down(got, dev_dx, count * 4);
    near("gradient of rms", count, got, dx, ZS_FP32, 16);
    down_as(got, dev_y, count, dtype);
    near("rms again", count, got, y, dtype, dtype == ZS_FP32 ? 8 : 1);
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
    float *dev_dw = up(dw, sizeof dw), *dev_partial = partial_sums(N);
    need(nn->ops->rms(nn, SOME, N, dev_x, dev_sources, dev_w, ZS_FP32, 1e-6f, dev_rstd, dev_y,
                      ZS_FP32));
    down(got, dev_y, sizeof y);
    near("rms", SOME * N, got, y, ZS_FP32, 8);
    need(nn->ops->column_sums(nn, SOME, N, dev_dy, ZS_FP32, dev_x, dev_sources, dev_rstd,
                              dev_partial, dev_dw, ZS_FP32, 0));
    down(got, dev_dw, sizeof dw);
    near("gradient of the weight", N, got, dw, ZS_FP32, 8);
    need(nn->ops->rms_grad(nn, ROWS, N, dev_dy, dev_slots, dev_x, dev_w, ZS_FP32, dev_rstd, NULL,
                           dev_dx, NULL));
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
        used = 0;
        float *dev_x = up(x, ROWS * N * 4), *dev_partial = partial_sums(N);
        const void *dev_b = up_as(b, N, dtype), *dev_dy = up_as(dy, ROWS * N, dtype);
        void *dev_sum = up(got, N * zs_dtype_size(dtype));
        for (int r = 0; r < ROWS; r++) {
            host->add(N, x + (size_t)r * N, b);
            host->add(N, sum, dy + (size_t)r * N);
        }
        need(nn->ops->add_bias(nn, ROWS, N, dev_x, dev_b, dtype));
        down(got, dev_x, ROWS * N * 4);
        assert_memory_equal(got, x, ROWS * N * 4);
        need(nn->ops->column_sums(nn, ROWS, N, dev_dy, dtype, NULL, NULL, NULL, dev_partial,
                                  dev_sum, dtype, 0));
        down_as(got, dev_sum, N, dtype);
        near("gradient of a bias", N, got, sum, dtype, dtype == ZS_FP32 ? 40 : 1);
        /* Of no rows it is 0, or what it was. */
        need(nn->ops->column_sums(nn, 0, N, dev_dy, dtype, NULL, NULL, NULL, dev_partial, dev_sum,
                                  dtype, 1));
        down_as(got, dev_sum, N, dtype);
        near("of nothing", N, got, sum, dtype, dtype == ZS_FP32 ? 40 : 1);
        need(nn->ops->column_sums(nn, 0, N, dev_dy, dtype, NULL, NULL, NULL, dev_partial, dev_sum,
                                  dtype, 0));
        down_as(got, dev_sum, N, dtype);
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
            used = 0;
            const void *dev_table = up_as(table, VOCAB * n, dtype);
            const int32_t *dev_ids = up(ids, sizeof ids), *dev_first = up(first, sizeof first);
            const int32_t *dev_next = up(next, sizeof next);
            const float *dev_dx = up(dx, TOKENS * n * 4);
            float *dev_out = up(out, TOKENS * n * 4);
            void *dev_grad = up(dx, VOCAB * n * zs_dtype_size(dtype));
            for (size_t t = 0; t < TOKENS; t++) {
                memcpy(out + t * n, table + (size_t)ids[t] * n, n * 4);
                host->add(n, grad + (size_t)ids[t] * n, dx + t * n);
            }
            need(nn->ops->lookup(nn, TOKENS, (int)n, dev_ids, dev_table, dtype, dev_out));
            down(got, dev_out, TOKENS * n * 4);
            assert_memory_equal(got, out, TOKENS * n * 4);
            need(nn->ops->lookup_grad(nn, VOCAB, (int)n, dev_first, dev_next, dev_dx, dev_grad,
                                      dtype, 0));
            down_as(got, dev_grad, VOCAB * n, dtype);
            near("gradient of an embedding", VOCAB * n, got, grad, dtype, 1);
            need(nn->ops->lookup_grad(nn, VOCAB, (int)n, dev_first, dev_next, dev_dx, dev_grad,
                                      dtype, 1));
            host->add(VOCAB * n, grad, grad);
            down_as(got, dev_grad, VOCAB * n, dtype);
            near("twice that", VOCAB * n, got, grad, dtype, 1.5);
            free(table), free(dx), free(out), free(grad), free(got);
        }
}

static void rope(void **state)
{
    enum { TOKENS = 7, HEADS = 3, HALF = 20, N = TOKENS * HEADS * 2 * HALF };
    const int32_t positions[TOKENS] = {0, 1, 2, 0, 1, 1000, 131071};
    float frequencies[HALF], c[TOKENS * HALF], s[TOKENS * HALF], *x = randoms(N);
    float *turned = copy_of(x, N), got[N];
    (void)state;
    for (int i = 0; i < HALF; i++)
        frequencies[i] = 1.0f / powf(10000.0f, (float)i / HALF);
    for (int i = 0; i < TOKENS * HALF; i++) {
        const float angle = (float)positions[i / HALF] * frequencies[i % HALF];
        c[i] = (float)cos((double)angle);
        s[i] = (float)sin((double)angle);
    }
    for (int i = 0; i < TOKENS * HEADS; i++)
        host->rope(HALF, turned + (size_t)i * 2 * HALF, c + (size_t)(i / HEADS) * HALF,
                   s + (size_t)(i / HEADS) * HALF, 0);
    const float *dev_frequencies = up(frequencies, sizeof frequencies);
    const int32_t *dev_positions = up(positions, sizeof positions);
    float *dev_c = up(got, sizeof c), *dev_s = up(got, sizeof s), *dev_x = up(x, sizeof got);
    need(nn->ops->angles(nn, TOKENS, HALF, dev_positions, dev_frequencies, dev_c, dev_s));
    need(nn->ops->rope(nn, TOKENS, HEADS, HALF, dev_x, dev_c, dev_s, 0));
    down(got, dev_c, sizeof c);
    near("cosines", TOKENS * HALF, got, c, ZS_FP32, 1);
    down(got, dev_s, sizeof s);
    near("sines", TOKENS * HALF, got, s, ZS_FP32, 1);
    down(got, dev_x, sizeof got);
    near("rope", N, got, turned, ZS_FP32, 2);
    need(nn->ops->rope(nn, TOKENS, HEADS, HALF, dev_x, dev_c, dev_s, 1));
    down(got, dev_x, sizeof got);
    near("rope back", N, got, x, ZS_FP32, 4);
    free(x), free(turned);
}

static void swiglu(void **state)
{
    enum { N = 777 };
    (void)state;
    for (size_t d = 0; d < ZS_COUNT(dtypes); d++) {
        const zs_dtype dtype = dtypes[d];
        const double epsilons = dtype == ZS_FP32 ? 8 : 1;
        float *gate = randoms(N), *up_ = randoms(N), *dact = randoms(N), y[N], got[N];
        for (int i = 0; i < N; i++)
            gate[i] *= 20;
        gate[0] = -200; /* where exp saturates */
        gate[1] = 200;
        used = 0;
        float *dev_gate = up(gate, sizeof y), *dev_up = up(up_, sizeof y);
        float *dev_dact = up(dact, sizeof y);
        const size_t bytes = N * zs_dtype_size(dtype);
        void *dev_act = dtype == ZS_FP32 ? dev_dact : up(y, bytes);
        void *dev_dgate = dtype == ZS_FP32 ? dev_gate : up(y, bytes);
        void *dev_dup = dtype == ZS_FP32 ? dev_up : up(y, bytes);
        void *dev_y = up(y, bytes);
        host->swiglu(N, y, gate, up_);
        need(nn->ops->swiglu(nn, N, dev_gate, dev_up, dev_y, dtype));
        down_as(got, dev_y, N, dtype);
        near("swiglu", N, got, y, dtype, epsilons);
        need(nn->ops->swiglu_grad(nn, N, dev_gate, dev_up, dev_dact, dev_act, dev_dgate, dev_dup,
                                  dtype));
        host->swiglu_grad(N, y, gate, up_, dact);
        down_as(got, dev_act, N, dtype);
        near("swiglu again", N, got, y, dtype, epsilons);
        down_as(got, dev_dgate, N, dtype);
        near("gradient of gate", N, got, gate, dtype, epsilons);
        down_as(got, dev_dup, N, dtype);
        near("gradient of up", N, got, up_, dtype, epsilons);
        free(gate), free(up_), free(dact);
    }
}

/* A tile of queries in the middle of a row, with a document that begins within it. */
static void softmax_case(int queries, int first, int start)
{
    enum { HEADS = 3 };
    const int begin = start < first ? start : 0, keys = first + queries - begin;
    const size_t line = (size_t)keys, count = (size_t)(HEADS * queries) * line;
    int32_t *starts = malloc((size_t)queries * sizeof *starts);
    float *x = randoms(count), *dp = randoms(count), *delta = randoms((size_t)(HEADS * queries));
    float *p = calloc(count, sizeof *p), *ds = calloc(count, sizeof *ds), *got = floats(count);
    float *lse = floats((size_t)(HEADS * queries));
    assert_true(starts && p && ds);
    used = 0;
    for (int q = 0; q < queries; q++)
        starts[q] = first + q >= start ? start : begin;
    const zs_nn_scores scores = {.heads = HEADS,
                                 .queries = queries,
                                 .keys = keys,
                                 .first = first,
                                 .begin = begin,
                                 .starts = up(starts, (size_t)queries * sizeof *starts),
                                 .lse = up(lse, (size_t)(HEADS * queries) * 4)};
    float *dev_x = up(x, count * 4), *dev_again = up(x, count * 4), *dev_dp = up(dp, count * 4);
    const float *dev_delta = up(delta, (size_t)(HEADS * queries) * 4);
    for (int h = 0; h < HEADS; h++)
        for (int q = 0; q < queries; q++) {
            const size_t row = (size_t)(h * queries + q), stat = (size_t)(q * HEADS + h);
            const size_t from = (size_t)(starts[q] - begin);
            const size_t seen = (size_t)(first + q + 1 - begin) - from, at = row * line + from;
            float most;
            memcpy(p + at, x + at, seen * 4);
            memcpy(ds + at, dp + at, seen * 4);
            const float sum = host->softmax(seen, p + at, &most);
            lse[stat] = most + logf(sum);
            memcpy(p + at, x + at, seen * 4);
            host->softmax_grad(seen, p + at, ds + at, lse[stat], delta[stat]);
        }
    need(nn->ops->softmax(nn, &scores, dev_x));
    down(got, dev_x, count * 4);
    near("softmax", count, got, p, ZS_FP32, 16);
    for (size_t i = 0; i < count; i++)
        assert_true(p[i] != 0 || got[i] == 0);
    down(got, scores.lse, (size_t)(HEADS * queries) * 4);
    near("lse", (size_t)(HEADS * queries), got, lse, ZS_FP32, 4);
    need(nn->ops->softmax_grad(nn, &scores, dev_again, dev_dp, dev_delta));
    down(got, dev_again, count * 4);
    near("softmax again", count, got, p, ZS_FP32, 16);
    down(got, dev_dp, count * 4);
    near("gradient of softmax", count, got, ds, ZS_FP32, 32);
    free(starts), free(x), free(dp), free(delta), free(p), free(ds), free(got), free(lse);
}

static void softmax(void **state)
{
    (void)state;
    softmax_case(1, 0, 0);
    softmax_case(17, 0, 0);
    softmax_case(16, 32, 0);
    softmax_case(16, 32, 20);
    softmax_case(16, 32, 39);
    softmax_case(5, 1200, 3); /* the whole block to a row */
}

static void entropy(void **state)
{
    enum { ROWS = 3 };
    static const int vocabs[] = {2, 100, 2049};
    (void)state;
    for (size_t v = 0; v < ZS_COUNT(vocabs); v++)
        for (size_t d = 0; d < ZS_COUNT(dtypes); d++) {
            const zs_dtype dtype = dtypes[d];
            const size_t vocab = (size_t)vocabs[v];
            const int32_t targets[ROWS] = {0, vocabs[v] - 1, vocabs[v] / 2};
            float *logits = randoms(ROWS * vocab), *got = floats(ROWS * vocab);
            double losses[ROWS], sum = 0, dev_losses[ROWS];
            used = 0;
            logits[0] = 80; /* a prediction that is almost sure */
            float *dev_logits = up(logits, ROWS * vocab * 4);
            const int32_t *dev_targets = up(targets, sizeof targets);
            double *dev = up(losses, sizeof losses), *dev_sum = up(&sum, sizeof sum);
            void *grad = dtype == ZS_FP32 ? dev_logits : up(got, ROWS * vocab * 2);
            for (size_t r = 0; r < ROWS; r++) {
                float *row = logits + r * vocab, most;
                const double logit = row[targets[r]];
                const float total = host->softmax(vocab, row, &most);
                losses[r] = log((double)total) + (double)most - logit;
                sum += losses[r];
                host->scale(vocab, row, 0.25f / total);
                row[targets[r]] -= 0.25f;
            }
            need(nn->ops->entropy(nn, ROWS, vocabs[v], dev_logits, dev_targets, 0.25f, dev, grad,
                                  dtype));
            need(nn->ops->sum_losses(nn, ROWS, dev, 0, dev_sum));
            need(nn->ops->sum_losses(nn, ROWS, dev, 1, dev_sum));
            down(dev_losses, dev, sizeof losses);
            for (int r = 0; r < ROWS; r++)
                assert_true(fabs(dev_losses[r] - losses[r]) <= 1e-6 * fmax(1, fabs(losses[r])));
            down(dev_losses, dev_sum, sizeof sum);
            assert_true(fabs(dev_losses[0] - 2 * sum) <= 1e-6 * fmax(1, fabs(sum)));
            down_as(got, grad, ROWS * vocab, dtype);
            near("gradient of logits", ROWS * vocab, got, logits, dtype, dtype == ZS_FP32 ? 8 : 1);
            free(logits), free(got);
        }
}

static void dots_and_narrow(void **state)
{
    enum { ROWS = 6 };
    (void)state;
    for (size_t i = 0; i < ZS_COUNT(lengths); i++) {
        const size_t n = (size_t)lengths[i];
        float *a = randoms(ROWS * n), *b = randoms(ROWS * n), want[ROWS], got[ROWS];
        used = 0;
        const float *dev_a = up(a, ROWS * n * 4), *dev_b = up(b, ROWS * n * 4);
        float *out = up(want, sizeof want);
        for (size_t r = 0; r < ROWS; r++)
            want[r] = host->dot(n, a + r * n, b + r * n);
        need(nn->ops->dots(nn, ROWS, (int)n, dev_a, dev_b, out));
        down(got, out, sizeof got);
        near("dots", ROWS, got, want, ZS_FP32, 32);
        /* At odd places, too. */
        uint16_t *want_halves = halves(a, ROWS * n), *got_halves = halves(b, ROWS * n);
        for (size_t past = 0; past < 2 && past < n; past++) {
            uint16_t *to = up(got_halves, ROWS * n * 2);
            need(nn->ops->narrow(nn, ROWS * n - past, dev_a + past, to + past));
            down(got_halves, to, ROWS * n * 2);
            assert_memory_equal(got_halves + past, want_halves + past, (ROWS * n - past) * 2);
        }
        free(a), free(b), free(want_halves), free(got_halves);
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
        used = 0;
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
        need(nn->ops->gemm(nn, &(zs_nn_gemm){.m = M,
                                             .n = N,
                                             .k = K,
                                             .a = dev_a,
                                             .b = dev_b,
                                             .c = dev_c,
                                             .in = in,
                                             .out = out,
                                             .transpose_a = ta,
                                             .transpose_b = tb,
                                             .lda = LD,
                                             .ldb = LD,
                                             .ldc = LD,
                                             .batch = BATCH,
                                             .step_a = ROOM_EACH,
                                             .step_b = ROOM_EACH,
                                             .step_c = ROOM_EACH,
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
        cmocka_unit_test_setup(norms, setup),    cmocka_unit_test_setup(norms_of_some, setup),
        cmocka_unit_test_setup(biases, setup),   cmocka_unit_test_setup(embedding, setup),
        cmocka_unit_test_setup(rope, setup),     cmocka_unit_test_setup(swiglu, setup),
        cmocka_unit_test_setup(softmax, setup),  cmocka_unit_test_setup(entropy, setup),
        cmocka_unit_test_setup(products, setup), cmocka_unit_test_setup(dots_and_narrow, setup),
    };
    host = zs_nn_get();
    kernels = zs_kernels_get();
    if (zs_device_open_cuda(0, &device) != ZS_OK ||
        device->cuda->nn_open(device, NULL, &nn) != ZS_OK ||
        device->ops->alloc(device, ROOM, (void **)&on_device) != ZS_OK ||
        device->ops->host_alloc(device, ROOM, (void **)&pinned) != ZS_OK) {
        fprintf(stderr, "emulated: %s\n", zs_last_error());
        return 1;
    }
    print_message("emulated\n");
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    device->ops->free(device, on_device, ROOM);
    device->ops->host_free(device, pinned, ROOM);
    nn->ops->close(nn);
    zs_device_close(&device);
    return failed;
}
