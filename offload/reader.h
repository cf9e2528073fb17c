/* SPDX-License-Identifier: Apache-2.0 */
/* Looking into a committed store file from outside: for taking it over in another shape, exporting
 * it and checking it. Reads with plain pread and checks every array it touches against its
 * checksum. */
#ifndef ZS_OFFLOAD_READER_H
#define ZS_OFFLOAD_READER_H

#include "base/log.h"
#include "offload/store.h"
#include "zspill.h"

typedef struct zs_store_reader zs_store_reader;

/* Commit `commit` in the file at path; ZS_ERR_CORRUPT when the file does not hold it whole. */
zs_status zs_store_reader_open(const char *path, uint64_t commit, const zs_log *log,
                               zs_store_reader **out);
void zs_store_reader_close(zs_store_reader **reader);
/* Valid while the reader is open. */
const zs_superblock *zs_store_reader_super(const zs_store_reader *reader);
const char *zs_store_reader_path(const zs_store_reader *reader);
const zs_store_geometry *zs_store_reader_geometry(const zs_store_reader *reader);
/* Elements [first, first + count) of an array (master, exp_avg, exp_avg_sq) of a shard. Whole
 * chunks are read and checked, the last one of each array is kept: cheapest in increasing order. */
zs_status zs_store_reader_read(zs_store_reader *reader, size_t shard, zs_array array,
                               uint64_t first, uint64_t count, float *dst);

/* One array of a chunk against its checksum; the message says where it is damaged. */
zs_status zs_store_reader_check(zs_store_reader *reader, size_t chunk, zs_array array);

#endif
