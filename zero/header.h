/* SPDX-License-Identifier: Apache-2.0 */
/* What the engine keeps beside the states in each superblock: counters, and the caller's bytes.
 * Pure: knows neither engine nor file. docs/format.md describes it. */
#ifndef ZS_ZERO_HEADER_H
#define ZS_ZERO_HEADER_H

#include <stddef.h>

#include "zspill.h"

typedef struct zs_header {
    uint64_t commit, step;
    double loss_scale;
    int good_steps;
    uint64_t *steps; /* [param_count]: Adam's count of each, in the order of registration */
    size_t param_count;
    const void *user;
    size_t user_bytes;
} zs_header;

/* *bytes: room in out, then what was taken; ZS_ERR_ARG when it does not fit. */
zs_status zs_header_encode(const zs_header *header, void *out, size_t *bytes);
/* header->steps and param_count are the caller's, steps NULL: not wanted, and any number of
 * parameters will do. user points into data. */
zs_status zs_header_decode(const void *data, size_t bytes, zs_header *header);

#endif
