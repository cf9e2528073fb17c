/* SPDX-License-Identifier: Apache-2.0 */
/* The names of one level's functions, zs_<level>_<kernel>_<dtype>[_<dtype>], their prototypes and
 * the table made of them. Orders follow zs_dtype. */
#ifndef ZS_KERNELS_LEVEL_H
#define ZS_KERNELS_LEVEL_H

#include "kernels/kernels.h"

#define ZS_EACH_DTYPE(X, ...)                                                                      \
    X(__VA_ARGS__, fp32)                                                                           \
    X(__VA_ARGS__, bf16)                                                                           \
    X(__VA_ARGS__, fp16)
#define ZS_EACH_PAIR(X, level)                                                                     \
    ZS_EACH_DTYPE(X, level, fp32)                                                                  \
    ZS_EACH_DTYPE(X, level, bf16)                                                                  \
    ZS_EACH_DTYPE(X, level, fp16)

#define ZS_DECLARE_PAIR(level, a, b)                                                               \
    void zs_##level##_adam_##a##_##b(size_t n, float *master, float *exp_avg, float *exp_avg_sq,   \
                                     const void *grad, void *working, const zs_adam_coef *coef);   \
    void zs_##level##_cast_##a##_##b(size_t n, void *dst, const void *src);                        \
    void zs_##level##_add_##a##_##b(size_t n, void *dst, const void *src);
#define ZS_DECLARE_ONE(level, a)                                                                   \
    void zs_##level##_sum_sources_##a(size_t n, void *dst, const void *const *src,                 \
                                      size_t sources);                                             \
    double zs_##level##_sum_squares_##a(size_t n, const void *x);                                  \
    int zs_##level##_nonfinite_##a(size_t n, const void *x);
#define ZS_DECLARE_LEVEL(level)                                                                    \
    ZS_EACH_PAIR(ZS_DECLARE_PAIR, level)                                                           \
    ZS_EACH_DTYPE(ZS_DECLARE_ONE, level)

#define ZS_ROW(function)                                                                           \
    {                                                                                              \
        function##_fp32, function##_bf16, function##_fp16                                          \
    }
#define ZS_TABLE(function)                                                                         \
    {                                                                                              \
        ZS_ROW(function##_fp32), ZS_ROW(function##_bf16), ZS_ROW(function##_fp16)                  \
    }
#define ZS_LEVEL(level)                                                                            \
    {                                                                                              \
        .name = #level, .adam = ZS_TABLE(zs_##level##_adam), .cast = ZS_TABLE(zs_##level##_cast),  \
        .add = ZS_TABLE(zs_##level##_add), .sum_sources = ZS_ROW(zs_##level##_sum_sources),        \
        .sum_squares = ZS_ROW(zs_##level##_sum_squares),                                           \
        .nonfinite = ZS_ROW(zs_##level##_nonfinite),                                               \
    }

ZS_DECLARE_LEVEL(c)
#if defined(__x86_64__)
ZS_DECLARE_LEVEL(avx2)
#endif

#endif
