/* SPDX-License-Identifier: Apache-2.0 */
/* The file of --metrics: JSON lines, floats with 17 digits, values that are not finite as null.
 * Only rows of steps hold "loss" and "grad_norm"; rows of evaluations hold "eval_loss". */
#ifndef ZS_CLI_METRICS_H
#define ZS_CLI_METRICS_H

#include "zspill.h"

typedef struct zs_metrics zs_metrics;

/* Traffic, times and ledger are one rank's. */
typedef struct zs_step_row {
    uint64_t step;    /* 1 for the first */
    int skipped;      /* loss and grad_norm may then be NaN */
    double loss;      /* mean over the counted tokens of the global batch */
    double grad_norm; /* before clipping */
    double lr;
    uint64_t tokens;  /* of the global batch */
    uint64_t targets; /* of those, counted ones */
    double seconds;   /* of the whole step */
    zs_tier_traffic tier[ZS_TIERS];
    const zs_memory_row *ledger;
    size_t ledger_rows;
} zs_step_row;

/* Creates path if need be, to fail early; what it holds stays until zs_metrics_begin. */
zs_status zs_metrics_open(const char *path, zs_metrics **out);
/* Keeps the rows up to step (of a run that goes on from there), drops the others: a run killed
 * after its last commit left them. */
zs_status zs_metrics_begin(zs_metrics *metrics, uint64_t step);
zs_status zs_metrics_step(zs_metrics *metrics, const zs_step_row *row);
zs_status zs_metrics_eval(zs_metrics *metrics, uint64_t step, double loss, uint64_t targets,
                          double seconds);
/* A file that was made here and got no row is removed. */
void zs_metrics_close(zs_metrics **metrics);

#endif
