/* SPDX-License-Identifier: Apache-2.0 */
/* What a run keeps beside its state: what it is a run of, and how far it has come. Stored as JSON
 * in the user bytes of zs_state_commit. */
#ifndef ZS_CLI_RECORD_H
#define ZS_CLI_RECORD_H

#include "cli/data.h"
#include "cli/options.h"
#include "model/config.h"

typedef struct zs_record {
    uint64_t config, weights; /* hashes of the model's shape, and of what it started from */
    uint64_t data;            /* zs_data_identity */
    uint64_t seed, global_batch, seq;
    int shuffle;
    uint64_t step;    /* global batches taken */
    uint64_t updates; /* of those, not skipped: where the schedule stands */
} zs_record;

/* At step 0. */
zs_status zs_record_init(zs_record *record, const zs_options *options,
                         const zs_model_config *config, const zs_data *data, int world);
/* A JSON text with its NUL into text, which holds ZS_USER_BYTES_MAX. */
zs_status zs_record_pack(const zs_record *record, char *text, size_t *bytes);
/* The stored record, if it is one of the same run as `mine` that has taken at most `steps`; else
 * ZS_ERR_MISMATCH says in which option they differ. */
zs_status zs_record_unpack(const char *text, size_t bytes, const zs_record *mine, uint64_t steps,
                           zs_record *out);

#endif
