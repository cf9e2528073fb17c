/* SPDX-License-Identifier: Apache-2.0 */
#include "base/crc32c.h"

#include <string.h>

/* A table is linear in its index: the entries of single bits give all others, at compile time. */
#define BIT(n, i, e) (((n) >> (i)&1) ? (e) : 0u)
#define ENTRY(n, a, b, c, d, e, f, g, h)                                                           \
    (BIT(n, 0, a) ^ BIT(n, 1, b) ^ BIT(n, 2, c) ^ BIT(n, 3, d) ^ BIT(n, 4, e) ^ BIT(n, 5, f) ^     \
     BIT(n, 6, g) ^ BIT(n, 7, h))
#define ENTRIES_4(n, ...)                                                                          \
    ENTRY(n, __VA_ARGS__), ENTRY((n) + 1, __VA_ARGS__), ENTRY((n) + 2, __VA_ARGS__),               \
        ENTRY((n) + 3, __VA_ARGS__)
#define ENTRIES_16(n, ...)                                                                         \
    ENTRIES_4(n, __VA_ARGS__), ENTRIES_4((n) + 4, __VA_ARGS__), ENTRIES_4((n) + 8, __VA_ARGS__),   \
        ENTRIES_4((n) + 12, __VA_ARGS__)
#define ENTRIES_64(n, ...)                                                                         \
    ENTRIES_16(n, __VA_ARGS__), ENTRIES_16((n) + 16, __VA_ARGS__),                                 \
        ENTRIES_16((n) + 32, __VA_ARGS__), ENTRIES_16((n) + 48, __VA_ARGS__)
#define SLICE(...)                                                                                 \
    {                                                                                              \
        ENTRIES_64(0, __VA_ARGS__), ENTRIES_64(64, __VA_ARGS__), ENTRIES_64(128, __VA_ARGS__),     \
            ENTRIES_64(192, __VA_ARGS__)                                                           \
    }

/* table[s][n]: the byte n followed by s zero bytes. */
static const uint32_t table[8][256] = {
    SLICE(0xf26b8303, 0xe13b70f7, 0xc79a971f, 0x8ad958cf, 0x105ec76f, 0x20bd8ede, 0x417b1dbc,
          0x82f63b78),
    SLICE(0x13a29877, 0x274530ee, 0x4e8a61dc, 0x9d14c3b8, 0x3fc5f181, 0x7f8be302, 0xff17c604,
          0xfbc3faf9),
    SLICE(0xa541927e, 0x4f6f520d, 0x9edea41a, 0x38513ec5, 0x70a27d8a, 0xe144fb14, 0xc76580d9,
          0x8b277743),
    SLICE(0xdd45aab8, 0xbf672381, 0x7b2231f3, 0xf64463e6, 0xe964b13d, 0xd725148b, 0xaba65fe7,
          0x52a0c93f),
    SLICE(0x38116fac, 0x7022df58, 0xe045beb0, 0xc5670b91, 0x8f2261d3, 0x1ba8b557, 0x37516aae,
          0x6ea2d55c),
    SLICE(0xef306b19, 0xdb8ca0c3, 0xb2f53777, 0x6006181f, 0xc00c303e, 0x85f4168d, 0x0e045beb,
          0x1c08b7d6),
    SLICE(0x68032cc8, 0xd0065990, 0xa5e0c5d1, 0x4e2dfd53, 0x9c5bfaa6, 0x3d5b83bd, 0x7ab7077a,
          0xf56e0ef4),
    SLICE(0x493c7d27, 0x9278fa4e, 0x211d826d, 0x423b04da, 0x847609b4, 0x0d006599, 0x1a00cb32,
          0x34019664),
};

static uint64_t load64(const unsigned char *p)
{
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

uint32_t zs_crc32c_table(uint32_t crc, const void *data, size_t bytes)
{
    const unsigned char *p = data;

    crc = ~crc;
    for (; bytes >= 8; p += 8, bytes -= 8) {
        uint32_t low = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 |
                              (uint32_t)p[3] << 24);
        crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^
              table[4][low >> 24] ^ table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^
              table[0][p[7]];
    }
    for (; bytes; bytes--)
        crc = crc >> 8 ^ table[0][(crc ^ *p++) & 255];
    return ~crc;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* The crc32 instruction takes three cycles but a new one may start each cycle: three streams keep
 * it busy. */
enum { STREAM = 1024 };
/* Appending n zero bytes multiplies by x^(8n); clmul and crc32 together give x^33 of that. */
#define SHIFT_1_STREAM  0x170076fa /* x^(8 * 1024 - 33), reflected */
#define SHIFT_2_STREAMS 0xa51b6135 /* x^(8 * 2048 - 33) */

__attribute__((target("sse4.2,pclmul"))) static uint32_t
crc32c_sse42(uint32_t start, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    uint64_t crc = (uint32_t)~start;

    for (; bytes >= 3 * STREAM; p += 3 * STREAM, bytes -= 3 * STREAM) {
        uint64_t crc1 = 0, crc2 = 0;
        __m128i a, b;
        for (size_t i = 0; i < STREAM; i += 8) {
            crc = _mm_crc32_u64(crc, load64(p + i));
            crc1 = _mm_crc32_u64(crc1, load64(p + STREAM + i));
            crc2 = _mm_crc32_u64(crc2, load64(p + 2 * STREAM + i));
        }
        a = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc),
                                 _mm_cvtsi64_si128(SHIFT_2_STREAMS), 0);
        b = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc1),
                                 _mm_cvtsi64_si128(SHIFT_1_STREAM), 0);
        crc = crc2 ^ _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(_mm_xor_si128(a, b)));
    }
    for (; bytes >= 8; p += 8, bytes -= 8)
        crc = _mm_crc32_u64(crc, load64(p));
    for (; bytes; bytes--)
        crc = _mm_crc32_u8((uint32_t)crc, *p++);
    return ~(uint32_t)crc;
}
#endif

uint32_t zs_crc32c(uint32_t crc, const void *data, size_t bytes)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"))
        return crc32c_sse42(crc, data, bytes);
#endif
    return zs_crc32c_table(crc, data, bytes);
}
