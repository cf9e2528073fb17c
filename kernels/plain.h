/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that plain C says best: each level compiles them with its own flags. */
#ifndef ZS_KERNELS_PLAIN_H
#define ZS_KERNELS_PLAIN_H

#include "base/util.h"
#include "kernels/element.h"

#define ZS_COPY(level, d, width)                                                                   \
    void zs_##level##_cast_##d##_##d(size_t n, void *dst, const void *src)                         \
    {                                                                                              \
        if (dst != src && n)                                                                       \
            memcpy(dst, src, n *(width));                                                          \
    }

static inline uint32_t zs_magnitude_fp32(const void *x, size_t i)
{
    return zs_fp32_bits(zs_load_fp32(x, i)) & 0x7fffffff;
}

static inline uint16_t zs_magnitude_16(const void *x, size_t i)
{
    return zs_load_16(x, i) & 0x7fff;
}

/* Looks at what was found once in a while only, so that the loop inside has no branch. */
#define ZS_NONFINITE(level, d, magnitude, uint, infinity)                                          \
    int zs_##level##_nonfinite_##d(size_t n, const void *x)                                        \
    {                                                                                              \
        const size_t part = 4096;                                                                  \
        for (size_t first = 0; first < n; first += part) {                                         \
            size_t count = ZS_MIN(n - first, part);                                                \
            uint largest = 0;                                                                      \
            for (size_t i = first; i < first + count; i++)                                         \
                largest = ZS_MAX(largest, magnitude(x, i));                                        \
            if (largest >= (infinity))                                                             \
                return 1;                                                                          \
        }                                                                                          \
        return 0;                                                                                  \
    }
#define ZS_NONFINITES(level)                                                                       \
    ZS_NONFINITE(level, fp32, zs_magnitude_fp32, uint32_t, 0x7f800000)                             \
    ZS_NONFINITE(level, bf16, zs_magnitude_16, uint16_t, 0x7f80)                                   \
    ZS_NONFINITE(level, fp16, zs_magnitude_16, uint16_t, 0x7c00)

#endif
