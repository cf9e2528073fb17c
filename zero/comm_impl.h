/* SPDX-License-Identifier: Apache-2.0 */
/* What a transport provides to zero/comm.c, which keeps the checking, the in-place rules and the
 * reductions of doubles for all of them. */
#ifndef ZS_ZERO_COMM_IMPL_H
#define ZS_ZERO_COMM_IMPL_H

#include <pthread.h>
#include <sys/types.h>

#include "zero/comm.h"

enum {
    ZS_COMM_RANKS = 64,
    ZS_COMM_WHAT = 96,
    ZS_COMM_PAYLOAD = 512,
    ZS_COMM_MESSAGE = 1024,
};

typedef enum zs_comm_op {
    ZS_COMM_ALL_GATHER = 1,
    ZS_COMM_REDUCE_SCATTER,
    ZS_COMM_BARRIER,
    ZS_COMM_AGREE,
    ZS_COMM_SAME,
    ZS_COMM_ALL_REDUCE,
} zs_comm_op;

/* What a rank is about to do. Ranks send these to each other before data moves; plain bytes, so
 * that it travels through anything. Of the payload only what an operation needs is meaningful. */
typedef struct zs_comm_desc {
    uint32_t magic;
    int32_t rank;
    uint32_t op;
    uint32_t detail; /* zs_dtype or zs_reduce_op */
    uint64_t bytes;
    uint64_t what_hash; /* of the whole name: what may cut it */
    char what[ZS_COMM_WHAT];
    union {
        uint64_t value;
        double values[ZS_COMM_PAYLOAD / sizeof(double)];
        struct {
            int32_t status;
            char message[ZS_COMM_PAYLOAD - 4];
        } outcome;
    } payload;
} zs_comm_desc;

typedef struct zs_comm_ops {
    /* Sends comm->now to all ranks, waits for theirs and sets comm->peer[r] to rank r's, valid
     * until the next exchange. send is what a following all_gather or reduce_scatter is called
     * with. Failures, here and below, name comm->now. */
    zs_status (*exchange)(zs_comm *comm, const void *send);
    /* Only after an exchange that found all ranks at the same operation; world > 1, bytes and count
     * > 0. The arguments obey zero/comm.h. */
    zs_status (*all_gather)(zs_comm *comm, const void *send, void *recv, size_t bytes);
    zs_status (*reduce_scatter)(zs_comm *comm, zs_math *math, const void *send, void *recv,
                                uint64_t count, zs_dtype dtype);
    /* ZS_OK, or what made the communicator fail; any thread. */
    zs_status (*check)(zs_comm *comm);
    /* NULL: an exchange is one already. */
    zs_status (*barrier)(zs_comm *comm);
    void (*abort)(zs_comm *comm, const char *message);
    /* Frees comm too. */
    void (*close)(zs_comm *comm);
} zs_comm_ops;

struct zs_comm {
    const zs_comm_ops *ops;
    int rank, world;
    int local_ranks;
    double timeout_s; /* 0: it has none of its own */
    pid_t pid; /* that opened it: a forked child shares peers and sockets it must not touch */
    const zs_comm_desc *now; /* the call in progress */
    const zs_comm_desc *peer[ZS_COMM_RANKS];
    /* transports extend this */
};

/* "reduce-scatter of unit 'layers.3' (4096 bytes bf16)" into text; returns text. */
const char *zs_comm_describe(const zs_comm_desc *desc, char *text, size_t bytes);

/* Behind zs_comm_open_callbacks and zs_comm_open_mpi. */
typedef struct zs_comm_transport {
    zs_comm_callbacks callbacks;
    int local_ranks;
    double timeout_s;            /* 0: the callbacks' own */
    int timeout_code;            /* what a callback returns for a time-out; 0: none */
    int in_place;                /* all_gather takes send == recv + rank * bytes */
    size_t max_bytes;            /* of one call of all_gather */
    void (*abort)(void *cookie); /* NULL: none. Wakes a callback that waits; any thread */
} zs_comm_transport;
zs_status zs_comm_open_transport(const zs_comm_transport *transport, int rank, int world,
                                 zs_comm **out);

#endif
