/* SPDX-License-Identifier: Apache-2.0 */
/* The spill file of stage-3 working shards: one extent a shard, overwritten in place (what it holds
 * can always be made again from the masters). The file is unlinked right after it is made, so
 * nothing is left behind. */
#ifndef ZS_OFFLOAD_PARAM_FILE_H
#define ZS_OFFLOAD_PARAM_FILE_H

#include "io/io.h"
#include "zspill.h"

typedef struct zs_param_file zs_param_file;

/* shard_bytes[i]: length of shard i; extents start at multiples of ZS_IO_ALIGN. The bytes on disk
 * are booked in ledger under "parameters". io is borrowed. */
zs_status zs_param_file_open(const char *dir, int rank, zs_io *io, zs_ledger *ledger,
                             const uint64_t *shard_bytes, size_t count, zs_param_file **out);
void zs_param_file_close(zs_param_file **file);
/* Extent length of shard i: shard_bytes rounded up to ZS_IO_ALIGN. Buffers must be this large. */
uint64_t zs_param_file_extent(const zs_param_file *file, size_t shard);
/* Queue the whole extent into buf (ZS_IO_ALIGN-aligned). */
zs_status zs_param_file_read(zs_param_file *file, size_t shard, void *buf, zs_io_req *req);
/* Queue bytes (rounded up to ZS_IO_ALIGN; buf holds that much) at byte offset of shard, a multiple
 * of ZS_IO_ALIGN. */
zs_status zs_param_file_write(zs_param_file *file, size_t shard, uint64_t offset, const void *buf,
                              size_t bytes, zs_io_req *req);

#endif
