/* SPDX-License-Identifier: Apache-2.0 */
/* Eight lanes of kernels/element.h: the same operations in the same order. */
#ifndef ZS_KERNELS_AVX2_LANES_H
#define ZS_KERNELS_AVX2_LANES_H

#include <immintrin.h>

#include "kernels/element.h"

static inline __m256 zs_load8_fp32(const void *array, size_t i)
{
    return _mm256_loadu_ps((const void *)((const char *)array + i * 4));
}

static inline void zs_store8_fp32(void *array, size_t i, __m256 x)
{
    _mm256_storeu_ps((void *)((char *)array + i * 4), x);
}

/* Past the caches; array + i must be 32-byte aligned (fp32) or 16 (the others). */
static inline void zs_stream8_fp32(void *array, size_t i, __m256 x)
{
    _mm256_stream_ps((void *)((char *)array + i * 4), x);
}

static inline __m128i zs_load8_16(const void *array, size_t i)
{
    return _mm_loadu_si128((const void *)((const char *)array + i * 2));
}

static inline void zs_store8_16(void *array, size_t i, __m128i h)
{
    _mm_storeu_si128((void *)((char *)array + i * 2), h);
}

static inline void zs_stream8_16(void *array, size_t i, __m128i h)
{
    _mm_stream_si128((void *)((char *)array + i * 2), h);
}

static inline __m256 zs_load8_bf16(const void *array, size_t i)
{
    __m256i wide = _mm256_cvtepu16_epi32(zs_load8_16(array, i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline __m128i zs_bf16_from8(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i even = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i half = _mm256_srli_epi32(_mm256_blendv_epi8(even, nan, is_nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

static inline void zs_store8_bf16(void *array, size_t i, __m256 x)
{
    zs_store8_16(array, i, zs_bf16_from8(x));
}

static inline void zs_stream8_bf16(void *array, size_t i, __m256 x)
{
    zs_stream8_16(array, i, zs_bf16_from8(x));
}

static inline __m256 zs_load8_fp16(const void *array, size_t i)
{
    return _mm256_cvtph_ps(zs_load8_16(array, i));
}

static inline __m128i zs_fp16_from8(__m256 x)
{
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline void zs_store8_fp16(void *array, size_t i, __m256 x)
{
    zs_store8_16(array, i, zs_fp16_from8(x));
}

static inline void zs_stream8_fp16(void *array, size_t i, __m256 x)
{
    zs_stream8_16(array, i, zs_fp16_from8(x));
}

#endif
