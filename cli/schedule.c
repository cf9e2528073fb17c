/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/schedule.h"

#include <math.h>

double zs_schedule_factor(zs_schedule schedule, uint64_t taken, uint64_t warmup, uint64_t total)
{
    if (taken < warmup)
        return (double)taken / (double)warmup;
    double rest = total > warmup ? (double)(total - warmup) : 1.0;
    switch (schedule) {
    case ZS_SCHEDULE_LINEAR:
        return taken < total ? (double)(total - taken) / rest : 0.0;
    case ZS_SCHEDULE_COSINE:
        return fmax(0.0, 0.5 * (1.0 + cos(M_PI * 0.5 * 2.0 * ((double)(taken - warmup) / rest))));
    case ZS_SCHEDULE_CONSTANT:
        break;
    }
    return 1.0;
}
