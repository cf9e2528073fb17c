/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/element.h"
#include "kernels/level.h"
#include "kernels/plain.h"

/* Elements whose sums are kept aside before any is stored: dst may be one of the sources. */
enum { PART = 512 };

#define ADD(level, d, s)                                                                           \
    void zs_##level##_add_##d##_##s(size_t n, void *restrict dst, const void *restrict src)        \
    {                                                                                              \
        for (size_t i = 0; i < n; i++)                                                             \
            zs_store_##d(dst, i, zs_load_##d(dst, i) + zs_load_##s(src, i));                       \
    }
ZS_EACH_PAIR(ADD, c)

#define SUM_SOURCES(level, d)                                                                      \
    void zs_##level##_sum_sources_##d(size_t n, void *dst, const void *const *src, size_t sources) \
    {                                                                                              \
        float sum[PART];                                                                           \
        for (size_t first = 0; first < n; first += PART) {                                         \
            size_t count = ZS_MIN(n - first, (size_t)PART);                                        \
            for (size_t i = 0; i < count; i++)                                                     \
                sum[i] = sources ? zs_load_##d(src[0], first + i) : 0.0f;                          \
            for (size_t s = 1; s < sources; s++)                                                   \
                for (size_t i = 0; i < count; i++)                                                 \
                    sum[i] += zs_load_##d(src[s], first + i);                                      \
            for (size_t i = 0; i < count; i++)                                                     \
                zs_store_##d(dst, first + i, sum[i]);                                              \
        }                                                                                          \
    }
ZS_EACH_DTYPE(SUM_SOURCES, c)

#define SUM_SQUARES(level, d)                                                                      \
    double zs_##level##_sum_squares_##d(size_t n, const void *x)                                   \
    {                                                                                              \
        double lane[8] = {0};                                                                      \
        for (size_t first = 0; first < n; first += 8) {                                            \
            size_t count = ZS_MIN(n - first, (size_t)8);                                           \
            for (size_t j = 0; j < count; j++) {                                                   \
                double value = zs_load_##d(x, first + j);                                          \
                lane[j] += value * value;                                                          \
            }                                                                                      \
        }                                                                                          \
        for (size_t width = 4; width > 0; width /= 2)                                              \
            for (size_t j = 0; j < width; j++)                                                     \
                lane[j] += lane[j + width];                                                        \
        return lane[0];                                                                            \
    }
ZS_EACH_DTYPE(SUM_SQUARES, c)

ZS_NONFINITES(c)
