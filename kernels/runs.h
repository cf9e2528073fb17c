/* SPDX-License-Identifier: Apache-2.0 */
/* What every backend asks of the runs it is given. */
#ifndef ZS_KERNELS_RUNS_H
#define ZS_KERNELS_RUNS_H

#include "base/status.h"
#include "kernels/math.h"

static inline zs_status zs_adam_runs_check(const zs_adam_run *runs, size_t run_count)
{
    uint64_t end = 0;
    for (size_t r = 0; r < run_count; r++) {
        if (runs[r].first < end)
            return zs_fail(ZS_ERR_INTERNAL,
                           "adam: run %zu starts at element %llu, before the previous one ends at "
                           "%llu: runs must ascend",
                           r, (unsigned long long)runs[r].first, (unsigned long long)end);
        end = runs[r].first + runs[r].count;
    }
    return ZS_OK;
}

#endif
