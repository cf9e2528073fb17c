/* SPDX-License-Identifier: Apache-2.0 */
/* What the programs of this directory share: inputs, comparison, timing. Each compares every level
 * with plain C, prints the parameters of what differs, and with --bench times the levels. */
#ifndef TESTS_KERNELS_CHECK_H
#define TESTS_KERNELS_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "kernels/element.h"
#include "kernels/kernels.h"
#include "kernels/math.h"

static const size_t check_sizes[] = {0, 1, 7, 8, 9, 31, 32, 33, 128, 513, 4096, 65536 + 5};
/* Bytes by which arrays miss a 64-byte boundary. */
static const size_t check_shifts[] = {0, 4, 20, 1};

typedef enum check_kind { RANDOM, DENORMAL, SPECIAL, EXTREME, BITS, CHECK_KINDS } check_kind;
static const char *const check_kind_names[] = {"random", "denormal", "special", "extreme", "bits"};

static int check_failures;

static inline uint32_t check_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    uint64_t x = *state ^ *state >> 29;
    return (uint32_t)(x * 0xbf58476d1ce4e5b9u >> 32);
}

/* An array between guards that no kernel may touch. */
typedef struct check_array {
    unsigned char *base;
    void *data;
    size_t shift, bytes;
} check_array;

enum { CHECK_GUARD = 64, CHECK_GUARD_BYTE = 0xa5 };

static inline check_array check_array_make(size_t shift, size_t bytes)
{
    check_array a = {.shift = shift, .bytes = bytes};
    size_t total = zs_round_up(CHECK_GUARD + shift + bytes + CHECK_GUARD, 64);
    a.base = aligned_alloc(64, total);
    if (!a.base)
        abort();
    memset(a.base, CHECK_GUARD_BYTE, total);
    a.data = a.base + CHECK_GUARD + shift;
    return a;
}

static inline check_array check_array_copy(const check_array *from)
{
    check_array a = check_array_make(from->shift, from->bytes);
    memcpy(a.data, from->data, from->bytes);
    return a;
}

static inline int check_guards_intact(const check_array *a)
{
    const unsigned char *end = (const unsigned char *)a->data + a->bytes;
    for (size_t i = 0; i < CHECK_GUARD + a->shift; i++)
        if (a->base[i] != CHECK_GUARD_BYTE)
            return 0;
    for (size_t i = 0; i < CHECK_GUARD; i++)
        if (end[i] != CHECK_GUARD_BYTE)
            return 0;
    return 1;
}

static inline void check_fill(check_array *a, zs_dtype dtype, check_kind kind, uint64_t seed)
{
    static const uint32_t special[] = {0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000,
                                       0xffc12345, 0x7f800001, 0x3f800000, 0x00800000, 0x00000001};
    static const uint32_t extreme[] = {0x7f7fffff, 0xff7fffff, 0x00800000, 0x80800000, 0x00000001,
                                       0x477fe000, 0x477ff000, 0x38800000, 0x33000000, 0x33000001};
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 12345;
    size_t n = a->bytes / zs_dtype_size(dtype);
    for (size_t i = 0; i < n; i++) {
        uint32_t r = check_random(&state);
        uint32_t bits = r;
        if (kind == RANDOM)
            bits = zs_fp32_bits((float)(int32_t)r * 0x1p-31f);
        else if (kind == DENORMAL)
            bits = dtype == ZS_FP16 ? zs_fp32_bits((float)(int32_t)(r % 2047) * 0x1p-25f)
                                    : r & 0x807fffff;
        else if (kind == SPECIAL && r % 4 == 0)
            bits = special[r / 4 % ZS_COUNT(special)];
        else if (kind == SPECIAL)
            bits = zs_fp32_bits((float)(int32_t)r * 0x1p-31f);
        else if (kind == EXTREME)
            bits = extreme[r % ZS_COUNT(extreme)] + (r >> 30) - 1;
        if (dtype == ZS_FP32)
            zs_store_fp32(a->data, i, zs_fp32_from_bits(bits));
        else if (kind == BITS)
            zs_store_16(a->data, i, (uint16_t)bits);
        else if (dtype == ZS_BF16)
            zs_store_bf16(a->data, i, zs_fp32_from_bits(bits));
        else
            zs_store_fp16(a->data, i, zs_fp32_from_bits(bits));
    }
}

static inline uint32_t check_bits(const void *data, zs_dtype dtype, size_t i)
{
    return dtype == ZS_FP32 ? zs_fp32_bits(zs_load_fp32(data, i)) : zs_load_16(data, i);
}

static inline int check_is_nan(zs_dtype dtype, uint32_t bits)
{
    static const uint32_t infinity[] = {0x7f800000, 0x7f80, 0x7c00};
    return (bits & (dtype == ZS_FP32 ? 0x7fffffffu : 0x7fffu)) > infinity[dtype];
}

/* Same bits, or NaN on both sides. Prints and counts the first difference; what names the case. */
static inline int check_same(const char *what, const char *array, zs_dtype dtype,
                             const check_array *got, const check_array *want)
{
    size_t n = want->bytes / zs_dtype_size(dtype);
    for (size_t i = 0; i < n; i++) {
        uint32_t a = check_bits(got->data, dtype, i), b = check_bits(want->data, dtype, i);
        if (a == b || (check_is_nan(dtype, a) && check_is_nan(dtype, b)))
            continue;
        printf("FAIL %s: %s[%zu] (%s) is 0x%x, want 0x%x\n", what, array, i, zs_dtype_name(dtype),
               a, b);
        check_failures++;
        return 0;
    }
    if (!check_guards_intact(got)) {
        printf("FAIL %s: bytes outside %s were written\n", what, array);
        check_failures++;
        return 0;
    }
    return 1;
}

static inline void check_that(int holds, const char *what)
{
    if (holds)
        return;
    printf("FAIL %s\n", what);
    check_failures++;
}

/* The i-th level under test, plain C the last; NULL: no more. tests/emu builds these programs for
 * one level that it defines, CHECK_LEVEL. */
#ifdef CHECK_LEVEL
extern const zs_kernels CHECK_LEVEL;
/* Calls take long there: of places in an array, one in so many is looked at. */
enum { CHECK_EACH = 9 };

static inline const zs_kernels *check_level(size_t i)
{
    return i == 0 ? &CHECK_LEVEL : NULL;
}
#else
enum { CHECK_EACH = 1 };

static inline const zs_kernels *check_level(size_t i)
{
    for (const char *const *name = zs_kernels_names(); *name; name++) {
        const zs_kernels *k = zs_kernels_find(*name);
        if (k && i-- == 0)
            return k;
    }
    return NULL;
}
#endif

/* Calls use with each level under test but plain C. */
static inline void check_each_level(void (*use)(const zs_kernels *k, const zs_kernels *c))
{
    const zs_kernels *c = zs_kernels_find("c"), *k;
    for (size_t i = 0; (k = check_level(i)); i++)
        if (k != c)
            use(k, c);
}

/* Runs of all sizes over n elements, some left alone, with gaps: what a chunk of many parameters
 * looks like. At most most of them; returns how many. */
static inline size_t check_runs(zs_adam_run *runs, size_t most, uint64_t n,
                                const zs_adam_coef *coefs, size_t coef_count)
{
    size_t count = 0;
    uint64_t first = 5;
    uint64_t random = 99;
    while (first < n && count < most) {
        uint64_t size = check_random(&random) % (count % 40 == 7 ? 60000 : 70);
        runs[count] = (zs_adam_run){first, ZS_MIN(size, n - first),
                                    count % 5 == 3 ? NULL : &coefs[count % coef_count]};
        first += size + (count % 11 == 0 ? 20000 : 0);
        count++;
    }
    return count;
}

static inline int check_finish(void)
{
    printf(check_failures ? "%d failures\n" : "ok\n", check_failures);
    return check_failures ? 1 : 0;
}

/* --bench: one thread, arrays beyond its caches; the median of rounds. */
enum { BENCH_ROUNDS = 7, BENCH_NUMEL = 4 << 20 };

static inline int bench_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline void bench_print(const char *level, const char *what, double bytes_per_element,
                               double seconds[BENCH_ROUNDS])
{
    qsort(seconds, BENCH_ROUNDS, sizeof seconds[0], bench_by_value);
    double median = seconds[BENCH_ROUNDS / 2];
    printf("%-5s %-28s %7.3f ns/element %7.2f GB/s (fastest %.2f)\n", level, what,
           1e9 * median / BENCH_NUMEL, 1e-9 * bytes_per_element * BENCH_NUMEL / median,
           1e-9 * bytes_per_element * BENCH_NUMEL / seconds[0]);
}

#endif
