/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's part of `zspill train`. */
#ifndef ZS_CLI_RUN_H
#define ZS_CLI_RUN_H

#include "cli/data.h"
#include "cli/metrics.h"
#include "cli/options.h"
#include "cli/record.h"
#include "model/config.h"
#include "zspill.h"

/* What the ranks of a process share; none of it changes while they run. Metrics are rank 0's. */
typedef struct zs_run {
    const zs_options *options;
    zs_model_config config;
    const char *source;    /* --model's directory or --init's file */
    const char *state_dir; /* NULL: evaluation only */
    zs_data *data;         /* NULL: evaluation only */
    zs_data *eval;         /* NULL: none */
    zs_record record;      /* of this run at step 0 */
    uint64_t steps;
    int threads; /* of each rank */
    int bind;    /* ranks' threads fill the allowed CPUs */
    zs_trace *trace;
    zs_metrics *metrics;
} zs_run;

/* Collective: the whole run. A failure here aborts comm. */
zs_status zs_run_rank(const zs_run *run, zs_comm *comm);

#endif
