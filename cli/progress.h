/* SPDX-License-Identifier: Apache-2.0 */
/* What a run says on standard output. */
#ifndef ZS_CLI_PROGRESS_H
#define ZS_CLI_PROGRESS_H

#include "cli/metrics.h"

typedef struct zs_progress {
    uint64_t first, steps; /* of this process, and of the run */
    double begin, last;    /* zs_now at the first step and at the last line; 0: none yet */
} zs_progress;

void zs_progress_begin(zs_progress *progress, uint64_t first, uint64_t steps);
/* A line: for every step of a short run, else the first, the last and one a second. flops: of the
 * global batch. */
zs_status zs_progress_step(zs_progress *progress, const zs_step_row *row, double flops);
/* Flushes what was printed; a closed pipe or a full disk is ZS_ERR_IO. */
zs_status zs_progress_flush(void);
/* Bytes of each tier and purpose. */
zs_status zs_progress_ledger(const zs_memory_row *rows, size_t count);

#endif
