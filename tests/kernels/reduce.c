/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

enum { MOST_SOURCES = 9 };

static void compare_add(const zs_kernels *k, const zs_kernels *reference, zs_dtype to,
                        zs_dtype from, size_t n, size_t shift, check_kind kind)
{
    char what[128];
    check_array src = check_array_make(shift, n * zs_dtype_size(from));
    check_array want = check_array_make(shift ? 24 - shift : 0, n * zs_dtype_size(to));
    check_fill(&src, from, kind, n + shift);
    check_fill(&want, to, kind, n + shift + 1);
    check_array got = check_array_copy(&want);
    reference->add[to][from](n, want.data, src.data);
    k->add[to][from](n, got.data, src.data);
    snprintf(what, sizeof what, "add %s: %s to %s n %zu shift %zu %s", k->name, zs_dtype_name(from),
             zs_dtype_name(to), n, shift, check_kind_names[kind]);
    check_same(what, "dst", to, &got, &want);
    free(src.base);
    free(want.base);
    free(got.base);
}

/* own: the source that is dst as well, or -1. */
static void compare_sources(const zs_kernels *k, const zs_kernels *reference, zs_dtype dtype,
                            size_t n, size_t sources, int own, check_kind kind)
{
    char what[128];
    check_array src[MOST_SOURCES];
    const void *at[MOST_SOURCES];
    for (size_t s = 0; s < sources; s++) {
        src[s] = check_array_make(4 * s, n * zs_dtype_size(dtype));
        check_fill(&src[s], dtype, kind, n + s);
        at[s] = src[s].data;
    }
    check_array want = check_array_make(8, n * zs_dtype_size(dtype));
    if (own >= 0) {
        memcpy(want.data, src[own].data, want.bytes);
        at[own] = want.data;
    }
    check_array got = check_array_copy(&want);
    reference->sum_sources[dtype](n, want.data, at, sources);
    if (own >= 0)
        at[own] = got.data;
    k->sum_sources[dtype](n, got.data, at, sources);
    snprintf(what, sizeof what, "sum_sources %s: %s n %zu sources %zu own %d %s", k->name,
             zs_dtype_name(dtype), n, sources, own, check_kind_names[kind]);
    check_same(what, "dst", dtype, &got, &want);
    for (size_t s = 0; s < sources; s++)
        free(src[s].base);
    free(want.base);
    free(got.base);
}

static void compare_squares(const zs_kernels *k, const zs_kernels *reference, zs_dtype dtype,
                            size_t n, size_t shift, check_kind kind)
{
    check_array x = check_array_make(shift, n * zs_dtype_size(dtype));
    check_fill(&x, dtype, kind, n + shift);
    double want = reference->sum_squares[dtype](n, x.data), got = k->sum_squares[dtype](n, x.data);
    if (memcmp(&want, &got, sizeof want) && !(isnan(want) && isnan(got))) {
        printf("FAIL sum_squares %s: %s n %zu shift %zu %s is %a, want %a\n", k->name,
               zs_dtype_name(dtype), n, shift, check_kind_names[kind], got, want);
        check_failures++;
    }
    if (k->nonfinite[dtype](n, x.data) != reference->nonfinite[dtype](n, x.data)) {
        printf("FAIL nonfinite %s: %s n %zu shift %zu %s\n", k->name, zs_dtype_name(dtype), n,
               shift, check_kind_names[kind]);
        check_failures++;
    }
    free(x.base);
}

static void compare_all(const zs_kernels *k, const zs_kernels *reference)
{
    for (int d = 0; d < ZS_DTYPES; d++)
        for (size_t s = 0; s < ZS_COUNT(check_sizes); s++)
            for (int kind = 0; kind < CHECK_KINDS; kind++) {
                size_t n = check_sizes[s];
                for (size_t sources = 0; sources <= MOST_SOURCES; sources++)
                    /* None is dst, or the first, or the middle one. */
                    for (int own = -1; own < (int)sources && n <= 4096; own += 1 + 4 * (own >= 0))
                        compare_sources(k, reference, (zs_dtype)d, n, sources, own,
                                        (check_kind)kind);
                for (size_t shift = 0; shift < ZS_COUNT(check_shifts); shift++) {
                    for (int from = 0; from < ZS_DTYPES; from++)
                        compare_add(k, reference, (zs_dtype)d, (zs_dtype)from, n,
                                    check_shifts[shift], (check_kind)kind);
                    compare_squares(k, reference, (zs_dtype)d, ZS_MIN(n, (size_t)ZS_SUM_BLOCK),
                                    check_shifts[shift], (check_kind)kind);
                }
            }
}

/* ---- each level against the definitions ---- */

static void add_is_rounded_once(const zs_kernels *k)
{
    /* 1 + 2^-8 lies half-way between two bf16 values; a little more goes up. */
    uint16_t dst[2] = {0x3f80, 0x3f80};
    float src[2] = {0x1p-8f, 0x1.01p-8f};
    k->add[ZS_BF16][ZS_FP32](2, dst, src);
    check_that(dst[0] == 0x3f80 && dst[1] == 0x3f81, "add: rounding of bf16 + fp32");
    /* Left to right in fp32, rounded at the end: the halves add up. */
    uint16_t a = 0x3f80, b = 0x3b80, sum;
    const void *sources[] = {&a, &b, &b};
    k->sum_sources[ZS_BF16](1, &sum, sources, 3);
    check_that(sum == 0x3f81, "sum_sources: one rounding at the end");
    float big = 0x1p24f, one = 1, total;
    const void *order[] = {&big, &one, &one};
    k->sum_sources[ZS_FP32](1, &total, order, 3);
    check_that(total == 0x1p24f, "sum_sources: order of additions");
    float zero = -0.0f;
    const void *minus[] = {&zero};
    k->sum_sources[ZS_FP32](1, &total, minus, 1);
    check_that(signbit(total) != 0, "sum_sources: one source is copied, -0 too");
}

static void squares_are_a_tree(const zs_kernels *k)
{
    /* 2^54 swallows a single 1; how many ones meet before they reach it tells the order. */
    static const float lanes[8] = {0x1p27f, 1, 1, 1, 1, 1, 1, 1};
    double l[8];
    for (int j = 0; j < 8; j++)
        l[j] = (double)lanes[j] * lanes[j];
    for (int width = 4; width; width /= 2)
        for (int j = 0; j < width; j++)
            l[j] += l[j + width];
    check_that(k->sum_squares[ZS_FP32](8, lanes) == l[0], "sum_squares: tree of lanes");
    check_that(k->sum_squares[ZS_FP32](0, lanes) == 0, "sum_squares: nothing");
    float large[9];
    for (int i = 0; i < 9; i++)
        large[i] = FLT_MAX;
    check_that(k->sum_squares[ZS_FP32](9, large) == 9 * ((double)FLT_MAX * FLT_MAX),
               "sum_squares: no overflow in double");
}

static void nonfinite_sees_each_place(const zs_kernels *k)
{
    enum { N = 8200 };
    static const uint32_t bad[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001};
    static const uint16_t bad_16[ZS_DTYPES][2] = {
        [ZS_BF16] = {0x7f80, 0xff81}, [ZS_FP16] = {0x7c00, 0xfc01}};
    static const uint16_t good_16[ZS_DTYPES] = {[ZS_BF16] = 0xff7f, [ZS_FP16] = 0xfbff};
    static float x[N];
    static uint16_t h[N];
    for (size_t i = 0; i < N; i++)
        x[i] = -FLT_MAX;
    check_that(!k->nonfinite[ZS_FP32](N, x), "nonfinite: largest fp32 is finite");
    for (size_t i = 0; i < N; i += i < 70 || i > 8100 ? CHECK_EACH : 61 * CHECK_EACH) {
        x[i] = zs_fp32_from_bits(bad[i % ZS_COUNT(bad)]);
        check_that(k->nonfinite[ZS_FP32](N, x), "nonfinite: fp32 found");
        check_that(!k->nonfinite[ZS_FP32](i, x), "nonfinite: fp32 behind the end");
        x[i] = -FLT_MAX;
    }
    for (int d = ZS_BF16; d <= ZS_FP16; d++) {
        for (size_t i = 0; i < N; i++)
            h[i] = good_16[d];
        check_that(!k->nonfinite[d](N, h), "nonfinite: largest 16-bit value is finite");
        for (size_t i = 0; i < N; i += i < 70 || i > 8100 ? CHECK_EACH : 61 * CHECK_EACH) {
            h[i] = bad_16[d][i % 2];
            check_that(k->nonfinite[d](N, h), "nonfinite: 16-bit found");
            check_that(!k->nonfinite[d](i, h), "nonfinite: 16-bit behind the end");
            h[i] = good_16[d];
        }
    }
}

/* ---- timing ---- */

static void bench(const zs_kernels *k, zs_dtype dtype)
{
    enum { SOURCES = 4 };
    double add[BENCH_ROUNDS], sum[BENCH_ROUNDS], squares[BENCH_ROUNDS], look[BENCH_ROUNDS];
    check_array x[SOURCES];
    const void *at[SOURCES];
    volatile double sink;
    char what[64];
    double size = (double)zs_dtype_size(dtype);
    for (int s = 0; s < SOURCES; s++) {
        x[s] = check_array_make(0, BENCH_NUMEL * zs_dtype_size(dtype));
        check_fill(&x[s], dtype, RANDOM, (uint64_t)s);
        at[s] = x[s].data;
    }
    for (int r = 0; r < BENCH_ROUNDS; r++) {
        double t0 = zs_now();
        k->add[dtype][dtype](BENCH_NUMEL, x[0].data, x[1].data);
        double t1 = zs_now();
        k->sum_sources[dtype](BENCH_NUMEL, x[0].data, at, SOURCES);
        double t2 = zs_now();
        sink = k->sum_squares[dtype](BENCH_NUMEL, x[1].data);
        double t3 = zs_now();
        sink = k->nonfinite[dtype](BENCH_NUMEL, x[2].data);
        double t4 = zs_now();
        add[r] = t1 - t0, sum[r] = t2 - t1, squares[r] = t3 - t2, look[r] = t4 - t3;
    }
    (void)sink;
    snprintf(what, sizeof what, "add %s", zs_dtype_name(dtype));
    bench_print(k->name, what, 3 * size, add);
    snprintf(what, sizeof what, "sum of %d sources %s", SOURCES, zs_dtype_name(dtype));
    bench_print(k->name, what, (SOURCES + 1) * size, sum);
    snprintf(what, sizeof what, "sum_squares %s", zs_dtype_name(dtype));
    bench_print(k->name, what, size, squares);
    snprintf(what, sizeof what, "nonfinite %s", zs_dtype_name(dtype));
    bench_print(k->name, what, size, look);
    for (int s = 0; s < SOURCES; s++)
        free(x[s].base);
}

int main(int argc, char **argv)
{
    int timed = argc > 1 && strcmp(argv[1], "--bench") == 0;
    const zs_kernels *k;
    for (size_t i = 0; (k = check_level(i)); i++) {
        add_is_rounded_once(k);
        squares_are_a_tree(k);
        nonfinite_sees_each_place(k);
        for (int d = 0; timed && d < ZS_DTYPES; d++)
            bench(k, (zs_dtype)d);
    }
    check_each_level(compare_all);
    return check_finish();
}
