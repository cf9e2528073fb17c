/* SPDX-License-Identifier: Apache-2.0 */
/* Bulk data between ranks: weights and gradients. On the host it goes through zero/comm.h and is
 * there when a call returns. On an accelerator it is queued on a stream; the ranks still meet on
 * the host first, so that a rank that disagrees or stays away is found there, by name and within
 * the time-out, and never leaves others waiting on their devices. */
#ifndef ZS_ZERO_BULK_H
#define ZS_ZERO_BULK_H

#include "device/device.h"
#include "zero/comm.h"

typedef struct zs_bulk zs_bulk;

/* Collective. All borrowed; math is the host's. */
zs_status zs_bulk_open(zs_comm *comm, zs_device *device, zs_math *math, zs_bulk **out);
void zs_bulk_close(zs_bulk **bulk);

/* ZS_OK, or what made collectives on the devices fail: an error of theirs, another rank's failure,
 * or one that was not done within the communicator's time-out. Who waits for a device asks after
 * it: by then what was queued has ended, done or not. */
zs_status zs_bulk_check(zs_bulk *bulk);
/* Ends what is queued on this rank's device, so that nobody waits for it for ever. */
void zs_bulk_abort(zs_bulk *bulk, const char *message);

/* One buffer of a call, as in zs_comm_all_gather and zs_comm_reduce_scatter. */
typedef struct zs_piece {
    const void *send;
    void *recv;
    uint64_t count; /* all-gather: bytes; reduce-scatter: elements; of one rank */
} zs_piece;

/* Collective: all pieces as one operation. */
zs_status zs_bulk_all_gather(zs_bulk *bulk, const char *what, const zs_piece *pieces, size_t count,
                             zs_stream *stream);
zs_status zs_bulk_reduce_scatter(zs_bulk *bulk, const char *what, const zs_piece *pieces,
                                 size_t count, zs_dtype dtype, zs_stream *stream);

#endif
