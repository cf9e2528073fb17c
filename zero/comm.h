/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives between ranks. Each call names what it is for; all ranks' descriptions {operation,
 * what, bytes} are compared before data moves, so ranks that disagree get ZS_ERR_MISMATCH naming
 * both, not wrong data. Sums go in rank order, in fp32, whatever the transport. */
#ifndef ZS_ZERO_COMM_H
#define ZS_ZERO_COMM_H

#include "kernels/math.h"
#include "zspill.h"

/* recv holds world x bytes; send may be recv + rank * bytes (in place). */
zs_status zs_comm_all_gather(zs_comm *comm, const char *what, const void *send, void *recv,
                             size_t bytes);
/* recv[i] = sum over r of rank r's send[me * count + i]; send holds world x count elements and is
 * only read, unless recv is send + rank * count (in place), which is allowed. */
zs_status zs_comm_reduce_scatter(zs_comm *comm, zs_math *math, const char *what, const void *send,
                                 void *recv, uint64_t count, zs_dtype dtype);
/* Only compares what the ranks are at, for data that moves by other means (zero/bulk.h). bytes and
 * dtype as a reduce-scatter (reduce 1) or an all-gather (0) of that much would name them. */
zs_status zs_comm_meet(zs_comm *comm, const char *what, int reduce, uint64_t bytes, zs_dtype dtype);
/* ZS_OK, or what made comm fail. Any thread. */
zs_status zs_comm_check(zs_comm *comm);
/* How long a rank waits for another, 0: not known here. */
double zs_comm_timeout(const zs_comm *comm);
zs_status zs_comm_barrier(zs_comm *comm, const char *what);
/* Every rank brings its local outcome (with zs_last_error set if bad). All OK: ZS_OK everywhere.
 * Else the failing ranks get their own status back, the others ZS_ERR_COMM with the lowest failing
 * rank's number and message. */
zs_status zs_comm_agree(zs_comm *comm, const char *what, zs_status local);
/* All ranks must bring the same bytes, else ZS_ERR_MISMATCH "what ... rank A and rank B differ". */
zs_status zs_comm_same(zs_comm *comm, const char *what, uint64_t value);

#endif
