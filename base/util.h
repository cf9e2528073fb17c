/* SPDX-License-Identifier: Apache-2.0 */
/* Small arithmetic that every room needs; nothing here allocates or fails. */
#ifndef ZS_BASE_UTIL_H
#define ZS_BASE_UTIL_H

#include <stddef.h>
#include <stdint.h>

#include "zspill.h"

#define ZS_MIN(a, b)    ((a) < (b) ? (a) : (b))
#define ZS_MAX(a, b)    ((a) > (b) ? (a) : (b))
#define ZS_COUNT(array) (sizeof(array) / sizeof((array)[0]))

enum { ZS_PAGE = 4096 };

/* to: a power of two. Wraps on overflow: check sizes from input with zs_mul_overflow first. */
static inline uint64_t zs_round_up(uint64_t value, uint64_t to)
{
    return (value + to - 1) & ~(to - 1);
}

static inline uint64_t zs_div_up(uint64_t value, uint64_t by)
{
    return value / by + (value % by != 0);
}

/* 1 when a * b does not fit; else *out = a * b. */
static inline int zs_mul_overflow(uint64_t a, uint64_t b, uint64_t *out)
{
    return __builtin_mul_overflow(a, b, out);
}

static inline size_t zs_dtype_size(zs_dtype dtype)
{
    return dtype == ZS_FP32 ? 4 : 2;
}

#define ZS_HASH_START UINT64_C(0xcbf29ce484222325)

/* FNV-1a, for comparing what ranks hold. */
static inline uint64_t zs_hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *p = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* "fp32", "bf16", "fp16" */
const char *zs_dtype_name(zs_dtype dtype);
/* "device", "host", "nvme" */
const char *zs_tier_name(zs_tier tier);
/* Monotonic seconds. */
double zs_now(void);
/* Human bytes, "1.5 GiB", into buf (at least 16 bytes); returns buf. */
const char *zs_format_bytes(uint64_t bytes, char buf[16]);

#endif
