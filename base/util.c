/* SPDX-License-Identifier: Apache-2.0 */
#include "base/util.h"

#include <stdio.h>
#include <time.h>

const char *zs_dtype_name(zs_dtype dtype)
{
    static const char *const names[] = {"fp32", "bf16", "fp16"};
    return (unsigned)dtype < ZS_COUNT(names) ? names[dtype] : "?";
}

const char *zs_tier_name(zs_tier tier)
{
    static const char *const names[] = {"device", "host", "nvme"};
    return (unsigned)tier < ZS_COUNT(names) ? names[tier] : "?";
}

double zs_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

const char *zs_format_bytes(uint64_t bytes, char buf[16])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double value = (double)bytes;
    size_t unit = 0;
    while (value >= 1024 && unit + 1 < ZS_COUNT(units)) {
        value /= 1024;
        unit++;
    }
    snprintf(buf, 16, unit ? "%.2f %s" : "%.0f %s", value, units[unit]);
    return buf;
}
