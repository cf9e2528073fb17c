/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL inside libzspill-cuda.so: the calls behind zs_cuda_plugin's nccl_ entries, which say what
 * they do. libnccl.so.2 is opened when the first communicator is. */
#ifndef ZS_ZERO_NCCL_NCCL_H
#define ZS_ZERO_NCCL_NCCL_H

#include "device/cuda.h"

zs_status zs_nccl_id(unsigned char id[ZS_NCCL_ID_BYTES]);
zs_status zs_nccl_open(zs_device *device, int rank, int world,
                       const unsigned char id[ZS_NCCL_ID_BYTES], zs_nccl **out);
zs_status zs_nccl_all_gather(zs_nccl *nccl, const struct zs_piece *pieces, size_t count,
                             zs_stream *stream);
zs_status zs_nccl_reduce_scatter(zs_nccl *nccl, const struct zs_piece *pieces, size_t count,
                                 zs_dtype dtype, zs_stream *stream);
zs_status zs_nccl_check(zs_nccl *nccl);
void zs_nccl_abort(zs_nccl *nccl);
void zs_nccl_close(zs_nccl *nccl);

#endif
