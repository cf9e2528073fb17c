/* SPDX-License-Identifier: Apache-2.0 */
/* The decoder's row kernels: every level against plain C bit for bit, and against double. */
#include <float.h>
#include <math.h>

#include "check.h"
#include "kernels/nn.h"

enum { ARRAYS = 6 };

/* A case: its arrays (inputs and outputs alike), and the scalar that came back. */
typedef struct work {
    size_t n;
    float *a[ARRAYS];
    float scalar[2];
} work;

static void run_rms(const zs_nn *nn, work *w)
{
    w->scalar[0] = nn->rms(w->n, w->a[0], w->a[1], w->a[2], 1e-5f);
}

static void run_rms_grad(const zs_nn *nn, work *w)
{
    nn->rms_grad(w->n, w->a[0], w->a[1], w->a[2], w->a[3], w->a[4], 0.7f, w->a[5], NULL);
    nn->rms_grad(w->n, w->a[2], NULL, w->a[2], w->a[3], w->a[4], 0.7f, w->a[5], w->a[1]);
}

static void run_rope(const zs_nn *nn, work *w)
{
    nn->rope(w->n / 2, w->a[0], w->a[1], w->a[2], 0);
    nn->rope(w->n / 2, w->a[3], w->a[1], w->a[2], 1);
}

static void run_swiglu(const zs_nn *nn, work *w)
{
    nn->swiglu(w->n, w->a[0], w->a[1], w->a[2]);
    nn->swiglu_grad(w->n, w->a[3], w->a[1], w->a[2], w->a[4]);
    nn->swiglu_grad(w->n, w->a[5], w->a[0], w->a[4], w->a[5]); /* in place */
}

static void run_softmax(const zs_nn *nn, work *w)
{
    nn->softmax_grad(w->n, w->a[1], w->a[2], 0.3f, 0.1f);
    if (w->n)
        w->scalar[0] = nn->softmax(w->n, w->a[0], &w->scalar[1]);
}

static void run_simple(const zs_nn *nn, work *w)
{
    nn->add(w->n, w->a[0], w->a[1]);
    nn->scale(w->n, w->a[1], 0.3f);
    nn->widen(w->n, w->a[2], (const unsigned short *)w->a[3]);
    w->scalar[0] = nn->dot(w->n, w->a[0], w->a[4]);
}

static const struct {
    const char *name;
    void (*run)(const zs_nn *nn, work *w);
} cases[] = {{"rms", run_rms},       {"rms_grad", run_rms_grad}, {"rope", run_rope},
             {"swiglu", run_swiglu}, {"softmax", run_softmax},   {"simple", run_simple}};

static void compare(const zs_nn *nn, const zs_nn *reference, size_t which, size_t n, size_t shift,
                    check_kind kind)
{
    check_array want[ARRAYS + 1], got[ARRAYS + 1];
    work a = {.n = n}, b = {.n = n};
    char what[128], array[16];
    snprintf(what, sizeof what, "%s %s: n %zu shift %zu %s", cases[which].name, nn->name, n, shift,
             check_kind_names[kind]);
    for (size_t i = 0; i < ARRAYS; i++) {
        want[i] = check_array_make(shift, n * sizeof(float));
        check_fill(&want[i], ZS_FP32, kind, n + 7 * i + shift);
        got[i] = check_array_copy(&want[i]);
        a.a[i] = want[i].data;
        b.a[i] = got[i].data;
    }
    cases[which].run(reference, &a);
    cases[which].run(nn, &b);
    want[ARRAYS] = check_array_make(0, sizeof a.scalar);
    got[ARRAYS] = check_array_make(0, sizeof b.scalar);
    memcpy(want[ARRAYS].data, a.scalar, sizeof a.scalar);
    memcpy(got[ARRAYS].data, b.scalar, sizeof b.scalar);
    for (size_t i = 0; i <= ARRAYS; i++) {
        snprintf(array, sizeof array, "array %zu", i);
        check_same(what, array, ZS_FP32, &got[i], &want[i]);
        free(want[i].base);
        free(got[i].base);
    }
}

/* Relative to the largest term that went in. */
static void near(const char *what, size_t i, double got, double want, double size, double tolerance)
{
    if (fabs(got - want) <= tolerance * size)
        return;
    printf("FAIL %s[%zu] is %.9g, want %.9g\n", what, i, got, want);
    check_failures++;
}

enum { N = 1000 };

static void fill(float *x, size_t n, double span, uint64_t seed)
{
    uint64_t state = seed;
    for (size_t i = 0; i < n; i++)
        x[i] = (float)((int32_t)check_random(&state) * 0x1p-31 * span);
}

static void exact_exp(const zs_nn *nn)
{
    static float x[N], y[N];
    float max;
    fill(x, N, 86.0, 1);
    x[3] = 0;
    x[4] = -200.0f;
    x[5] = 86.5f;
    memcpy(y, x, sizeof y);
    double sum = 0, top = 86.5;
    float got = nn->softmax(N, y, &max);
    near("softmax max", 0, max, top, 1, 0);
    for (size_t i = 0; i < N; i++) {
        double want = exp((double)(x[i] - 86.5f));
        sum += want;
        if (want >= FLT_MIN)
            near("softmax", i, y[i], want, want, 4e-7);
        else /* what would be denormal is zero */
            near("softmax", i, y[i], want, FLT_MIN, 1);
    }
    near("softmax sum", 0, got, sum, sum, 1e-6);
    for (size_t i = 0; i < N; i++)
        y[i] = x[i] / 20;
    static float p[N], dp[N];
    memcpy(p, y, sizeof p);
    fill(dp, N, 1, 2);
    nn->softmax_grad(N, p, dp, 1.5f, 0.25f);
    for (size_t i = 0; i < N; i++)
        near("softmax_grad", i, p[i], exp((double)y[i] - 1.5), exp((double)y[i] - 1.5), 1e-6);
}

static void exact_swiglu(const zs_nn *nn)
{
    static float g[N], u[N], d[N], y[N], act[N], dg[N], du[N];
    fill(g, N, 20, 3);
    fill(u, N, 2, 4);
    fill(d, N, 2, 5);
    nn->swiglu(N, y, g, u);
    memcpy(dg, g, sizeof g);
    memcpy(du, u, sizeof u);
    nn->swiglu_grad(N, act, dg, du, d);
    for (size_t i = 0; i < N; i++) {
        double s = 1 / (1 + exp(-(double)g[i])), silu = g[i] * s;
        near("swiglu", i, y[i], silu * u[i], 1, 5e-6);
        near("swiglu again", i, act[i], silu * u[i], 1, 5e-6);
        near("gate", i, dg[i], (double)d[i] * u[i] * (s * (1 + g[i] * (1 - s))), 1, 5e-6);
        near("up", i, du[i], d[i] * silu, 1, 5e-6);
    }
}

static void exact_rms(const zs_nn *nn)
{
    static float x[N], w[N], dy[N], y[N], dx[N], dw[N], again[N], base[N];
    double square = 0, pull = 0;
    fill(x, N, 3, 6);
    fill(w, N, 1, 7);
    fill(dy, N, 1, 8);
    fill(base, N, 1, 9);
    memset(dw, 0, sizeof dw);
    for (size_t i = 0; i < N; i++) {
        square += (double)x[i] * x[i];
        pull += (double)dy[i] * w[i] * x[i];
    }
    double rstd = 1 / sqrt(square / N + 1e-5);
    float got = nn->rms(N, y, x, w, 1e-5f);
    near("rstd", 0, got, rstd, rstd, 1e-6);
    nn->rms_grad(N, dx, base, dy, x, w, got, dw, again);
    for (size_t i = 0; i < N; i++) {
        near("rms", i, y[i], x[i] * rstd * w[i], 1, 1e-6);
        near("rms again", i, again[i], y[i], 1, 0);
        near("rms dx", i, dx[i],
             base[i] + rstd * (dy[i] * (double)w[i] - x[i] * rstd * rstd * pull / N), 1, 2e-6);
        near("rms dw", i, dw[i], dy[i] * x[i] * rstd, 1, 1e-6);
    }
}

static void exact_rope(const zs_nn *nn)
{
    enum { HALF = 20 };
    float x[2 * HALF], y[2 * HALF], c[HALF], s[HALF];
    fill(x, 2 * HALF, 1, 10);
    for (size_t i = 0; i < HALF; i++) {
        c[i] = (float)cos(0.3 * (double)i);
        s[i] = (float)sin(0.3 * (double)i);
    }
    memcpy(y, x, sizeof y);
    nn->rope(HALF, y, c, s, 0);
    for (size_t i = 0; i < HALF; i++) {
        near("rope low", i, y[i], (double)x[i] * c[i] - (double)x[i + HALF] * s[i], 1, 2e-7);
        near("rope high", i, y[i + HALF], (double)x[i + HALF] * c[i] + (double)x[i] * s[i], 1,
             2e-7);
    }
    nn->rope(HALF, y, c, s, 1);
    for (size_t i = 0; i < 2 * HALF; i++)
        near("rope and back", i, y[i], x[i], 1, 4e-7);
}

static void bench(const zs_nn *nn)
{
    float *x[4];
    double seconds[BENCH_ROUNDS];
    for (size_t i = 0; i < 4; i++) {
        x[i] = aligned_alloc(64, BENCH_NUMEL * sizeof(float));
        if (!x[i])
            abort();
        fill(x[i], BENCH_NUMEL, 1, i);
    }
    for (int r = 0; r < BENCH_ROUNDS; r++) {
        double start = zs_now();
        nn->swiglu_grad(BENCH_NUMEL, x[0], x[1], x[2], x[3]);
        seconds[r] = zs_now() - start;
    }
    bench_print(nn->name, "swiglu_grad", 28, seconds);
    for (int r = 0; r < BENCH_ROUNDS; r++) {
        float max;
        double start = zs_now();
        nn->softmax(BENCH_NUMEL, x[0], &max);
        seconds[r] = zs_now() - start;
    }
    bench_print(nn->name, "softmax", 12, seconds);
    for (size_t i = 0; i < 4; i++)
        free(x[i]);
}

int main(int argc, char **argv)
{
    const zs_nn *reference = zs_nn_find("c");
    int timed = argc > 1 && strcmp(argv[1], "--bench") == 0;
    check_that(zs_nn_find("neon") == NULL, "a level that does not exist was found");
    for (const char *const *name = zs_kernels_names(); *name; name++) {
        const zs_nn *nn = zs_nn_find(*name);
        if (!nn) {
            printf("level %s: not on this CPU\n", *name);
            continue;
        }
        if (timed) {
            bench(nn);
            continue;
        }
        exact_exp(nn);
        exact_swiglu(nn);
        exact_rms(nn);
        exact_rope(nn);
        if (nn == reference)
            continue;
        for (size_t which = 0; which < ZS_COUNT(cases); which++)
            for (size_t n = 0; n < ZS_COUNT(check_sizes); n++)
                for (size_t s = 0; s < 3; s++) /* floats need their own alignment */
                    for (check_kind kind = RANDOM; kind < CHECK_KINDS; kind++)
                        compare(nn, reference, which, check_sizes[n], check_shifts[s], kind);
    }
    return check_finish();
}
