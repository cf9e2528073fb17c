/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/progress.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

enum { SHORT_RUN = 50 };

void zs_progress_begin(zs_progress *progress, uint64_t first, uint64_t steps)
{
    *progress = (zs_progress){.first = first, .steps = steps, .begin = zs_now()};
}

zs_status zs_progress_flush(void)
{
    errno = 0;
    if (fflush(stdout) || ferror(stdout))
        return zs_fail(ZS_ERR_IO, "cannot write to standard output: %s",
                       errno ? strerror(errno) : "an earlier write failed");
    return ZS_OK;
}

static void print_tiers(const zs_step_row *row)
{
    uint64_t bytes[ZS_TIERS] = {0};
    char text[16];
    for (size_t i = 0; i < row->ledger_rows; i++)
        bytes[row->ledger[i].tier] += row->ledger[i].bytes;
    for (int t = 0; t < ZS_TIERS; t++)
        if (bytes[t])
            printf("  %s %s", zs_tier_name((zs_tier)t), zs_format_bytes(bytes[t], text));
}

static void print_left(double seconds)
{
    unsigned long left = (unsigned long)(seconds + 0.5);
    printf("  left %lu:%02lu:%02lu\n", left / 3600, left / 60 % 60, left % 60);
}

zs_status zs_progress_step(zs_progress *progress, const zs_step_row *row, double flops)
{
    double now = zs_now();
    int always = progress->steps - progress->first <= SHORT_RUN || row->step == progress->steps;
    if (!always && progress->last && now - progress->last < 1)
        return ZS_OK;
    progress->last = now;
    printf("step %llu/%llu  ", (unsigned long long)row->step, (unsigned long long)progress->steps);
    if (row->skipped)
        printf("skipped: %s",
               row->targets ? "the gradient norm is not finite" : "no counted token");
    else
        printf("loss %.6f  grad_norm %.4f", row->loss, row->grad_norm);
    printf("  lr %.3e  %.0f tokens/s  %.1f GFLOP/s", row->lr, (double)row->tokens / row->seconds,
           flops / row->seconds * 1e-9);
    print_tiers(row);
    print_left((now - progress->begin) / (double)(row->step - progress->first) *
               (double)(progress->steps - row->step));
    return zs_progress_flush();
}

zs_status zs_progress_ledger(const zs_memory_row *rows, size_t count)
{
    char now[16], peak[16];
    printf("\n%-7s %-28s %18s %12s %12s\n", "tier", "purpose", "bytes", "", "peak");
    for (int t = 0; t < ZS_TIERS; t++)
        for (size_t i = 0; i < count; i++)
            if (rows[i].tier == (zs_tier)t)
                printf("%-7s %-28s %18llu %12s %12s\n", zs_tier_name(rows[i].tier), rows[i].purpose,
                       (unsigned long long)rows[i].bytes, zs_format_bytes(rows[i].bytes, now),
                       zs_format_bytes(rows[i].peak, peak));
    return zs_progress_flush();
}
