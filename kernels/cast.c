/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/element.h"
#include "kernels/level.h"
#include "kernels/plain.h"

#define CAST(level, d, s)                                                                          \
    void zs_##level##_cast_##d##_##s(size_t n, void *restrict dst, const void *restrict src)       \
    {                                                                                              \
        for (size_t i = 0; i < n; i++)                                                             \
            zs_store_##d(dst, i, zs_load_##s(src, i));                                             \
    }
ZS_COPY(c, fp32, 4)
ZS_COPY(c, bf16, 2)
ZS_COPY(c, fp16, 2)
CAST(c, fp32, bf16)
CAST(c, fp32, fp16)
CAST(c, bf16, fp32)
CAST(c, bf16, fp16)
CAST(c, fp16, fp32)
CAST(c, fp16, bf16)
