/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/avx2/lanes.h"
#include "kernels/level.h"
#include "kernels/plain.h"

#define CAST(level, d, s)                                                                          \
    void zs_##level##_cast_##d##_##s(size_t n, void *dst, const void *src)                         \
    {                                                                                              \
        size_t i = 0;                                                                              \
        for (; n - i >= 8; i += 8)                                                                 \
            zs_store8_##d(dst, i, zs_load8_##s(src, i));                                           \
        for (; i < n; i++)                                                                         \
            zs_store_##d(dst, i, zs_load_##s(src, i));                                             \
    }
ZS_COPY(avx2, fp32, 4)
ZS_COPY(avx2, bf16, 2)
ZS_COPY(avx2, fp16, 2)
CAST(avx2, fp32, bf16)
CAST(avx2, fp32, fp16)
CAST(avx2, bf16, fp32)
CAST(avx2, bf16, fp16)
CAST(avx2, fp16, fp32)
CAST(avx2, fp16, bf16)
