/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/avx2/lanes.h"
#include "kernels/level.h"
#include "kernels/plain.h"

#define ADD(level, d, s)                                                                           \
    void zs_##level##_add_##d##_##s(size_t n, void *dst, const void *src)                          \
    {                                                                                              \
        size_t i = 0;                                                                              \
        for (; n - i >= 8; i += 8)                                                                 \
            zs_store8_##d(dst, i, _mm256_add_ps(zs_load8_##d(dst, i), zs_load8_##s(src, i)));      \
        for (; i < n; i++)                                                                         \
            zs_store_##d(dst, i, zs_load_##d(dst, i) + zs_load_##s(src, i));                       \
    }
ZS_EACH_PAIR(ADD, avx2)

/* 32 elements at a time, a cache line or two of each source: enough additions in flight to hide
 * their latency, and few enough to stay in registers. */
#define SUM_SOURCES(level, d)                                                                      \
    void zs_##level##_sum_sources_##d(size_t n, void *dst, const void *const *src, size_t sources) \
    {                                                                                              \
        size_t i = 0;                                                                              \
        for (; sources && n - i >= 32; i += 32) {                                                  \
            __m256 a = zs_load8_##d(src[0], i), b = zs_load8_##d(src[0], i + 8);                   \
            __m256 c = zs_load8_##d(src[0], i + 16), e = zs_load8_##d(src[0], i + 24);             \
            for (size_t s = 1; s < sources; s++) {                                                 \
                a = _mm256_add_ps(a, zs_load8_##d(src[s], i));                                     \
                b = _mm256_add_ps(b, zs_load8_##d(src[s], i + 8));                                 \
                c = _mm256_add_ps(c, zs_load8_##d(src[s], i + 16));                                \
                e = _mm256_add_ps(e, zs_load8_##d(src[s], i + 24));                                \
            }                                                                                      \
            zs_store8_##d(dst, i, a);                                                              \
            zs_store8_##d(dst, i + 8, b);                                                          \
            zs_store8_##d(dst, i + 16, c);                                                         \
            zs_store8_##d(dst, i + 24, e);                                                         \
        }                                                                                          \
        for (; i < n; i++) {                                                                       \
            float sum = sources ? zs_load_##d(src[0], i) : 0.0f;                                   \
            for (size_t s = 1; s < sources; s++)                                                   \
                sum += zs_load_##d(src[s], i);                                                     \
            zs_store_##d(dst, i, sum);                                                             \
        }                                                                                          \
    }
ZS_EACH_DTYPE(SUM_SOURCES, avx2)

/* The product of two floats is exact in double, so fma rounds as multiply and add do. */
static inline void square_add8(__m256d *low, __m256d *high, __m256 x)
{
    __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    __m256d b = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    *low = _mm256_fmadd_pd(a, a, *low);
    *high = _mm256_fmadd_pd(b, b, *high);
}

static inline double lanes_sum(__m256d low, __m256d high)
{
    __m256d four = _mm256_add_pd(low, high);
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}

#define SUM_SQUARES(level, d)                                                                      \
    double zs_##level##_sum_squares_##d(size_t n, const void *x)                                   \
    {                                                                                              \
        __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();                             \
        size_t i = 0;                                                                              \
        for (; n - i >= 8; i += 8)                                                                 \
            square_add8(&low, &high, zs_load8_##d(x, i));                                          \
        /* A lane is never -0, so adding the square of a zero leaves it as it is. */               \
        float tail[8] = {0};                                                                       \
        for (size_t j = 0; j < n - i; j++)                                                         \
            tail[j] = zs_load_##d(x, i + j);                                                       \
        square_add8(&low, &high, zs_load8_fp32(tail, 0));                                          \
        return lanes_sum(low, high);                                                               \
    }
ZS_EACH_DTYPE(SUM_SQUARES, avx2)

ZS_NONFINITES(avx2)
