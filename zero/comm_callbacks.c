/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as processes, over collectives that the caller or a plug-in brings. A reduce-scatter is an
 * all-to-all of pieces and a sum in rank order, so that its bits are those of ranks as threads. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "zero/comm_impl.h"

/* Of each of the two buffers that pieces pass through. */
enum { BOUNCE_BYTES = 4 << 20 };

typedef struct process_comm {
    zs_comm base;
    zs_comm_transport transport;
    pthread_mutex_t lock; /* of failed and message: abort may come from any thread */
    int failed;
    char message[ZS_COMM_MESSAGE];
    zs_comm_desc *peers; /* [world] */
    char *send_bounce, *recv_bounce;
    size_t piece; /* bytes that one rank may put in a buffer for each other */
} process_comm;

static process_comm *self_of(zs_comm *comm)
{
    return (process_comm *)comm;
}

static void set_failed(process_comm *self, const char *message)
{
    pthread_mutex_lock(&self->lock);
    if (!self->failed) {
        self->failed = 1;
        snprintf(self->message, sizeof self->message, "%s", message);
    }
    pthread_mutex_unlock(&self->lock);
}

static zs_status check_failed(process_comm *self)
{
    zs_status status = ZS_OK;
    pthread_mutex_lock(&self->lock);
    if (self->failed)
        status = zs_fail(ZS_ERR_COMM, "%s", self->message);
    pthread_mutex_unlock(&self->lock);
    return status;
}

/* What a callback's return value means. After a failure nobody knows what the others received, so
 * it stays. */
static zs_status judge(process_comm *self, int code, const char *name)
{
    if (!code)
        return ZS_OK;
    /* An abort has its own words for it. */
    ZS_CHECK(check_failed(self));
    const zs_comm_callbacks *callbacks = &self->transport.callbacks;
    const char *text = callbacks->error ? callbacks->error(callbacks->cookie) : NULL;
    int late = self->transport.timeout_code && code == self->transport.timeout_code;
    char where[256], returned[32];
    snprintf(returned, sizeof returned, "returned %d", code);
    zs_status status = zs_fail(
        late ? ZS_ERR_TIMEOUT : ZS_ERR_COMM, "rank %d in %s: %s %s", self->base.rank,
        zs_comm_describe(self->base.now, where, sizeof where), name, text ? text : returned);
    set_failed(self, zs_last_error());
    return status;
}

static zs_status call_all_gather(process_comm *self, const void *send, void *recv, size_t bytes)
{
    const zs_comm_callbacks *callbacks = &self->transport.callbacks;
    return judge(self, callbacks->all_gather(callbacks->cookie, send, recv, bytes), "all_gather");
}

static zs_status process_exchange(zs_comm *comm, const void *send)
{
    process_comm *self = self_of(comm);
    ZS_CHECK(check_failed(self));
    if (comm->world > 1)
        return call_all_gather(self, comm->now, self->peers, sizeof *comm->now);
    self->peers[0] = *comm->now;
    return ZS_OK;
}

static zs_status process_all_gather(zs_comm *comm, const void *send, void *recv, size_t bytes)
{
    process_comm *self = self_of(comm);
    const zs_comm_transport *transport = &self->transport;
    int in_place = send == (char *)recv + (size_t)comm->rank * bytes;
    if (bytes <= transport->max_bytes && (!in_place || transport->in_place))
        return call_all_gather(self, send, recv, bytes);
    /* The own part may pass through a buffer as a whole: only that is copied. */
    if (bytes <= transport->max_bytes && bytes <= BOUNCE_BYTES) {
        memcpy(self->send_bounce, send, bytes);
        return call_all_gather(self, self->send_bounce, recv, bytes);
    }
    for (size_t at = 0; at < bytes; at += self->piece) {
        size_t part = ZS_MIN(self->piece, bytes - at);
        ZS_CHECK(call_all_gather(self, (const char *)send + at, self->recv_bounce, part));
        for (int r = 0; r < comm->world; r++)
            if (r != comm->rank || !in_place)
                memcpy((char *)recv + (size_t)r * bytes + at, self->recv_bounce + (size_t)r * part,
                       part);
    }
    return ZS_OK;
}

static zs_status process_reduce_scatter(zs_comm *comm, zs_math *math, const void *send, void *recv,
                                        uint64_t count, zs_dtype dtype)
{
    process_comm *self = self_of(comm);
    const zs_comm_callbacks *callbacks = &self->transport.callbacks;
    size_t size = zs_dtype_size(dtype), bytes = (size_t)count * size;
    for (size_t at = 0; at < bytes; at += self->piece) {
        size_t part = ZS_MIN(self->piece, bytes - at);
        const char *from = send;
        if (part < bytes) {
            for (int r = 0; r < comm->world; r++)
                memcpy(self->send_bounce + (size_t)r * part,
                       (const char *)send + (size_t)r * bytes + at, part);
            from = self->send_bounce;
        }
        ZS_CHECK(judge(self,
                       callbacks->all_to_all(callbacks->cookie, from, self->recv_bounce, part),
                       "all_to_all"));
        const void *source[ZS_COMM_RANKS];
        for (int r = 0; r < comm->world; r++)
            source[r] = self->recv_bounce + (size_t)r * part;
        /* Pieces of recv that lie in send were sent before they are written. */
        zs_status status = math->ops->sum_sources(math, NULL, (char *)recv + at, dtype, source,
                                                  (size_t)comm->world, part / size);
        if (status != ZS_OK) {
            set_failed(self, zs_last_error());
            return status;
        }
    }
    return ZS_OK;
}

static zs_status process_barrier(zs_comm *comm)
{
    process_comm *self = self_of(comm);
    const zs_comm_callbacks *callbacks = &self->transport.callbacks;
    return judge(self, callbacks->barrier(callbacks->cookie), "barrier");
}

static zs_status process_check(zs_comm *comm)
{
    return check_failed(self_of(comm));
}

static void process_abort(zs_comm *comm, const char *message)
{
    process_comm *self = self_of(comm);
    char text[ZS_COMM_MESSAGE];
    snprintf(text, sizeof text, "rank %d aborted: %s", comm->rank, message);
    set_failed(self, text);
    if (self->transport.abort)
        self->transport.abort(self->transport.callbacks.cookie);
}

static void free_comm(process_comm *self)
{
    pthread_mutex_destroy(&self->lock);
    free(self->recv_bounce);
    free(self->send_bounce);
    free(self->peers);
    free(self);
}

static void process_close(zs_comm *comm)
{
    process_comm *self = self_of(comm);
    if (self->transport.callbacks.close)
        self->transport.callbacks.close(self->transport.callbacks.cookie);
    free_comm(self);
}

static const zs_comm_ops process_ops = {
    .exchange = process_exchange,
    .all_gather = process_all_gather,
    .reduce_scatter = process_reduce_scatter,
    .check = process_check,
    .barrier = process_barrier,
    .abort = process_abort,
    .close = process_close,
};

zs_status zs_comm_open_transport(const zs_comm_transport *transport, int rank, int world,
                                 zs_comm **out)
{
    *out = NULL;
    process_comm *self = calloc(1, sizeof *self);
    if (!self)
        return zs_fail(ZS_ERR_NOMEM, "communicator of rank %d: no memory", rank);
    pthread_mutex_init(&self->lock, NULL);
    self->base = (zs_comm){.ops = &process_ops,
                           .rank = rank,
                           .world = world,
                           .local_ranks = transport->local_ranks,
                           .timeout_s = transport->timeout_s,
                           .pid = getpid()};
    self->transport = *transport;
    self->piece = (size_t)BOUNCE_BYTES / (size_t)world / 64 * 64;
    self->peers = calloc((size_t)world, sizeof *self->peers);
    for (int r = 0; r < world && self->peers; r++)
        self->base.peer[r] = &self->peers[r];
    /* Pages that are never used cost nothing. */
    self->send_bounce = malloc(BOUNCE_BYTES);
    self->recv_bounce = malloc(BOUNCE_BYTES);
    if (!self->peers || !self->send_bounce || !self->recv_bounce) {
        free_comm(self);
        return zs_fail(ZS_ERR_NOMEM, "communicator of rank %d: no memory for %d bytes of buffers",
                       rank, 2 * BOUNCE_BYTES);
    }
    *out = &self->base;
    return ZS_OK;
}

zs_status zs_comm_open_callbacks(const zs_comm_callbacks *callbacks, int rank, int world,
                                 zs_comm **out)
{
    if (!out)
        return zs_fail(ZS_ERR_ARG, "zs_comm_open_callbacks: out is NULL");
    *out = NULL;
    if (!callbacks)
        return zs_fail(ZS_ERR_ARG, "zs_comm_open_callbacks: callbacks is NULL");
    if (callbacks->size < sizeof *callbacks)
        return zs_fail(ZS_ERR_ARG,
                       "zs_comm_open_callbacks: size %zu is below %zu: set it to "
                       "sizeof(zs_comm_callbacks)",
                       callbacks->size, sizeof *callbacks);
    if (world < 1 || world > ZS_COMM_RANKS)
        return zs_fail(ZS_ERR_ARG, "zs_comm_open_callbacks: world %d is not in 1..%d", world,
                       ZS_COMM_RANKS);
    if (rank < 0 || rank >= world)
        return zs_fail(ZS_ERR_ARG, "zs_comm_open_callbacks: rank %d is not in 0..%d", rank,
                       world - 1);
    const char *missing = !callbacks->all_gather   ? "all_gather"
                          : !callbacks->all_to_all ? "all_to_all"
                          : !callbacks->barrier    ? "barrier"
                                                   : NULL;
    if (missing)
        return zs_fail(ZS_ERR_ARG, "zs_comm_open_callbacks: %s is NULL", missing);
    zs_comm_transport transport = {
        .callbacks = *callbacks, .local_ranks = 1, .max_bytes = SIZE_MAX};
    return zs_comm_open_transport(&transport, rank, world, out);
}
