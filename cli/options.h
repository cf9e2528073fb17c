/* SPDX-License-Identifier: Apache-2.0 */
/* Options of `zspill train`: one table of name, type, range, default and help serves the command
 * line, the JSON of --config and --help. */
#ifndef ZS_CLI_OPTIONS_H
#define ZS_CLI_OPTIONS_H

#include <stdio.h>

#include "cli/schedule.h"
#include "zspill.h"

typedef enum zs_transport { ZS_TRANSPORT_THREADS = 0, ZS_TRANSPORT_MPI = 1 } zs_transport;

typedef enum zs_device_kind { ZS_DEVICE_CPU = 0, ZS_DEVICE_CUDA = 1 } zs_device_kind;

/* none | host | nvme:DIR */
typedef struct zs_place {
    zs_tier tier;
    char *dir; /* NULL but for nvme */
} zs_place;

typedef struct zs_options {
    char *model, *init, *data, *out;
    int ranks;  /* 0: one, or what MPI says */
    int comm;   /* zs_transport */
    int device; /* zs_device_kind */
    int threads;
    int zero_stage;
    zs_place optimizer, params;
    int adam;      /* zs_adam_side */
    int io_engine; /* zs_io_engine */
    int64_t buffer_bytes, max_live_params, max_shard_size;
    double timeout;

    int dtype, grad_dtype, reduce; /* zs_dtype, zs_dtype, zs_reduce */
    int seq_len;                   /* 0: the token file's, for text 512 or the model's positions */
    int micro_batch, grad_accum;
    int64_t steps;  /* -1: by epochs */
    int64_t epochs; /* -1: by steps; both -1 never leaves zs_options_parse */
    double lr, beta1, beta2, eps, weight_decay, clip;
    int schedule; /* zs_schedule */
    int64_t warmup, seed;
    int shuffle, checkpointing;

    char *eval_data;
    int64_t eval_every;
    int slots;
    int keep;              /* -1: as many as the state has */
    int64_t resume_commit; /* 0: the newest */
    int64_t commit_every;  /* steps between commits; 0: at the end and when stopped only */
    int64_t save_every;    /* another word for it */
    char *config, *metrics, *trace;
    int resume;
    int log_level; /* zs_log_level */
    int help;      /* --help was asked for: nothing else is checked */
} zs_options;

/* argv[0] is skipped. Everything is checked that needs no file but --config. On failure
 * (ZS_ERR_ARG) nothing is left to free. */
zs_status zs_options_parse(int argc, char **argv, zs_options *out);
void zs_options_free(zs_options *options);
void zs_options_help(FILE *stream);

#endif
