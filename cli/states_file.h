/* SPDX-License-Identifier: Apache-2.0 */
/* Optimizer states by parameter, as a safetensors file: for each weight NAME.master, NAME.exp_avg
 * and NAME.exp_avg_sq in fp32, and in __metadata__ zspill.fingerprint, zspill.record (of the run),
 * zspill.step and NAME.step (Adam's count). */
#ifndef ZS_CLI_STATES_FILE_H
#define ZS_CLI_STATES_FILE_H

#include "model/config.h"
#include "model/safetensors.h"
#include "zero/header.h"

typedef struct zs_states_file {
    /* set by the caller; weights are borrowed */
    const zs_weight *weights;
    size_t count;
    zs_header header; /* user: the run's record, a text with its NUL; steps of each weight */
    uint64_t fingerprint;
    /* its own */
    zs_st_tensor *tensors; /* three a weight */
    zs_st_entry *entries;
    size_t entry_count;
    zs_st_writer *writer;
    zs_st *st;
    char *record;
} zs_states_file;

zs_status zs_states_file_create(zs_states_file *file, const char *path);
/* fp32 elements of ZS_MASTER, ZS_EXP_AVG or ZS_EXP_AVG_SQ of a weight. */
zs_status zs_states_file_write(const zs_states_file *file, size_t weight, zs_array array,
                               uint64_t first, uint64_t count, const float *src);
/* The file appears. */
zs_status zs_states_file_finish(zs_states_file *file);
void zs_states_file_discard(zs_states_file *file);

/* Checks that path has all of it for weights, and fills in header (whose steps the caller made) and
 * fingerprint. Ended by zs_states_file_discard. */
zs_status zs_states_file_open(zs_states_file *file, const char *path);
zs_status zs_states_file_read(const zs_states_file *file, size_t weight, zs_array array,
                              uint64_t first, uint64_t count, float *dst);

#endif
