/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

static void compare(const zs_kernels *k, const zs_kernels *reference, zs_dtype to, zs_dtype from,
                    size_t n, size_t shift, check_kind kind)
{
    char what[128];
    check_array src = check_array_make(shift, n * zs_dtype_size(from));
    check_array want = check_array_make(shift ? 24 - shift : 0, n * zs_dtype_size(to));
    check_array got = check_array_copy(&want);
    check_fill(&src, from, kind, n + shift);
    reference->cast[to][from](n, want.data, src.data);
    k->cast[to][from](n, got.data, src.data);
    snprintf(what, sizeof what, "cast %s: %s from %s n %zu shift %zu %s", k->name,
             zs_dtype_name(to), zs_dtype_name(from), n, shift, check_kind_names[kind]);
    check_same(what, "dst", to, &got, &want);
    free(src.base);
    free(want.base);
    free(got.base);
}

static void compare_all(const zs_kernels *k, const zs_kernels *reference)
{
    for (int to = 0; to < ZS_DTYPES; to++)
        for (int from = 0; from < ZS_DTYPES; from++)
            for (size_t s = 0; s < ZS_COUNT(check_sizes); s++)
                for (size_t shift = 0; shift < ZS_COUNT(check_shifts); shift++)
                    for (int kind = 0; kind < CHECK_KINDS; kind++)
                        compare(k, reference, (zs_dtype)to, (zs_dtype)from, check_sizes[s],
                                check_shifts[shift], (check_kind)kind);
}

/* The value of a finite 16-bit pattern, from its definition. */
static double value_16(zs_dtype dtype, unsigned bits)
{
    int mantissa_bits = dtype == ZS_BF16 ? 7 : 10;
    int bias = dtype == ZS_BF16 ? 127 : 15;
    int exponent = (int)(bits & 0x7fff) >> mantissa_bits;
    int mantissa = (int)(bits & ((1u << mantissa_bits) - 1));
    double value = exponent
                       ? ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits)
                       : ldexp(mantissa, 1 - bias - mantissa_bits);
    return bits & 0x8000 ? -value : value;
}

/* Every 16-bit value widens to its definition and comes back; between neighbours, the nearest wins
 * and the midpoint goes to the even one. */
static void exhaustive(const zs_kernels *k, zs_dtype dtype)
{
    enum { N = 0x10000, MIDDLE = N, UP = 2 * N, DOWN = 3 * N };
    static uint16_t in[N], back[4 * N];
    static float wide[4 * N];
    unsigned infinity = dtype == ZS_BF16 ? 0x7f80 : 0x7c00;
    char what[96];
    for (unsigned bits = 0; bits < N; bits++)
        in[bits] = (uint16_t)bits;
    k->cast[ZS_FP32][dtype](N, wide, in);
    for (unsigned bits = 0; bits < N; bits++)
        if ((bits & 0x7fff) < infinity) {
            int last = (bits & 0x7fff) == infinity - 1;
            double low = value_16(dtype, bits);
            /* Above the largest, as if the exponent went on. */
            double high = last ? 2 * low - value_16(dtype, bits - 1) : value_16(dtype, bits + 1);
            float middle = (float)((low + high) / 2);
            wide[MIDDLE + bits] = middle;
            wide[UP + bits] = nextafterf(middle, (float)(bits & 0x8000 ? -INFINITY : INFINITY));
            wide[DOWN + bits] = nextafterf(middle, 0);
        }
    k->cast[dtype][ZS_FP32](4 * N, back, wide);
    for (unsigned bits = 0; bits < N; bits++) {
        int ok;
        if ((bits & 0x7fff) > infinity)
            ok = isnan(wide[bits]) && check_is_nan(dtype, back[bits]) &&
                 (back[bits] & 0x8000) == (bits & 0x8000);
        else if ((bits & 0x7fff) == infinity)
            ok = isinf(wide[bits]) && back[bits] == bits;
        else
            ok = wide[bits] == value_16(dtype, bits) && back[bits] == bits &&
                 back[MIDDLE + bits] == (bits & 1 ? bits + 1 : bits) &&
                 back[UP + bits] == bits + 1 && back[DOWN + bits] == bits;
        snprintf(what, sizeof what, "cast %s: %s pattern 0x%04x", k->name, zs_dtype_name(dtype),
                 bits);
        check_that(ok, what);
    }
}

static void in_place(const zs_kernels *k)
{
    float x[3] = {1, -2, 3};
    k->cast[ZS_FP32][ZS_FP32](3, x, x);
    check_that(x[0] == 1 && x[1] == -2 && x[2] == 3, "cast: fp32 onto itself");
}

static void bench(const zs_kernels *k, zs_dtype to, zs_dtype from)
{
    double seconds[BENCH_ROUNDS];
    char what[64];
    check_array src = check_array_make(0, BENCH_NUMEL * zs_dtype_size(from));
    check_array dst = check_array_make(0, BENCH_NUMEL * zs_dtype_size(to));
    check_fill(&src, from, RANDOM, 1);
    k->cast[to][from](BENCH_NUMEL, dst.data, src.data);
    for (int r = 0; r < BENCH_ROUNDS; r++) {
        double start = zs_now();
        k->cast[to][from](BENCH_NUMEL, dst.data, src.data);
        seconds[r] = zs_now() - start;
    }
    snprintf(what, sizeof what, "cast %s from %s", zs_dtype_name(to), zs_dtype_name(from));
    bench_print(k->name, what, (double)(zs_dtype_size(from) + zs_dtype_size(to)), seconds);
    free(src.base);
    free(dst.base);
}

int main(int argc, char **argv)
{
    int timed = argc > 1 && strcmp(argv[1], "--bench") == 0;
    const zs_kernels *k;
    for (size_t i = 0; (k = check_level(i)); i++) {
        exhaustive(k, ZS_BF16);
        exhaustive(k, ZS_FP16);
        in_place(k);
        for (int pair = 0; timed && pair < ZS_DTYPES * ZS_DTYPES; pair++)
            bench(k, (zs_dtype)(pair / ZS_DTYPES), (zs_dtype)(pair % ZS_DTYPES));
    }
    check_each_level(compare_all);
    return check_finish();
}
