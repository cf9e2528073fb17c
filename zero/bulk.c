/* SPDX-License-Identifier: Apache-2.0 */
#include "zero/bulk.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/status.h"
#include "base/util.h"
#include "device/cuda.h"
#include "device/mark.h"

enum { WATCH_MS = 50, MESSAGE = 512 };

struct zs_bulk {
    zs_comm *comm;
    zs_device *device;
    zs_math *math;
    int rank, world;

    /* Several devices. The watch is a thread that ends what is queued when a rank failed or does
     * not come to an end, because whoever waits for a device cannot look. All below is under lock.
     */
    zs_nccl *nccl;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t watch;
    int watching, closing;
    zs_mark last; /* behind what was queued last, at queued_at, for what */
    double queued_at;
    char what[96];
    zs_status failed;
    char message[MESSAGE];
};

/* ---- the watch ---- */

/* Under lock. */
static void end(zs_bulk *bulk, zs_status status, const char *message)
{
    if (bulk->failed != ZS_OK)
        return;
    bulk->failed = status;
    snprintf(bulk->message, sizeof bulk->message, "%s", message);
    bulk->device->cuda->nccl_abort(bulk->nccl);
}

static zs_status late(zs_bulk *bulk)
{
    const double limit = zs_comm_timeout(bulk->comm), waited = zs_now() - bulk->queued_at;
    int done;
    if (!(limit > 0) || !bulk->last.set || waited <= limit)
        return ZS_OK;
    ZS_CHECK(zs_mark_done(bulk->device, &bulk->last, &done));
    if (done)
        return ZS_OK;
    return zs_fail(ZS_ERR_TIMEOUT,
                   "rank %d: %s was queued on its device %.0f s ago and is not done: a device "
                   "hangs, or computes longer than the time-out of %g s",
                   bulk->rank, bulk->what, waited, limit);
}

static void *watch(void *arg)
{
    zs_bulk *bulk = arg;
    pthread_mutex_lock(&bulk->lock);
    while (!bulk->closing && bulk->failed == ZS_OK) {
        struct timespec until;
        zs_status status = bulk->device->cuda->nccl_check(bulk->nccl);
        if (status == ZS_OK)
            status = zs_comm_check(bulk->comm);
        if (status == ZS_OK)
            status = late(bulk);
        if (status != ZS_OK) {
            end(bulk, status, zs_last_error());
            break;
        }
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += WATCH_MS * 1000000L;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&bulk->wake, &bulk->lock, &until);
    }
    pthread_mutex_unlock(&bulk->lock);
    return NULL;
}

static zs_status start_watch(zs_bulk *bulk)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int code = pthread_create(&bulk->watch, NULL, watch, bulk);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code)
        return zs_fail(ZS_ERR_NOMEM, "rank %d: a thread that watches its device cannot be started",
                       bulk->rank);
    bulk->watching = 1;
    return ZS_OK;
}

zs_status zs_bulk_check(zs_bulk *bulk)
{
    zs_status status = ZS_OK;
    if (!bulk->nccl)
        return ZS_OK;
    pthread_mutex_lock(&bulk->lock);
    if (bulk->failed != ZS_OK)
        status = zs_fail(bulk->failed, "%s", bulk->message);
    pthread_mutex_unlock(&bulk->lock);
    return status;
}

void zs_bulk_abort(zs_bulk *bulk, const char *message)
{
    if (!bulk || !bulk->nccl)
        return;
    pthread_mutex_lock(&bulk->lock);
    end(bulk, ZS_ERR_COMM, message);
    pthread_mutex_unlock(&bulk->lock);
}

/* ---- open and close ---- */

/* Rank 0 makes the id, all come together with it. */
static zs_status join(zs_bulk *bulk)
{
    const zs_cuda_plugin *cuda = bulk->device->cuda;
    unsigned char own[ZS_NCCL_ID_BYTES] = {0};
    unsigned char *all = malloc((size_t)bulk->world * sizeof own);
    zs_status status = ZS_OK;
    if (!all)
        status = zs_fail(ZS_ERR_NOMEM, "no memory for the id of %d ranks", bulk->world);
    if (status == ZS_OK && bulk->rank == 0)
        status = cuda->nccl_id(own);
    status = zs_comm_agree(bulk->comm, "the communicator of the devices", status);
    if (status == ZS_OK)
        status = zs_comm_all_gather(bulk->comm, "the id of the devices' communicator", own, all,
                                    sizeof own);
    if (status == ZS_OK) {
        status = cuda->nccl_open(bulk->device, bulk->rank, bulk->world, all, &bulk->nccl);
        status = zs_comm_agree(bulk->comm, "joining the devices", status);
    }
    free(all);
    return status;
}

zs_status zs_bulk_open(zs_comm *comm, zs_device *device, zs_math *math, zs_bulk **out)
{
    zs_status status;
    *out = NULL;
    zs_bulk *bulk = calloc(1, sizeof *bulk);
    if (!bulk)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the communicator of weights and gradients");
    bulk->comm = comm;
    bulk->device = device;
    bulk->math = math;
    bulk->rank = zs_comm_rank(comm);
    bulk->world = zs_comm_world(comm);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&bulk->wake, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&bulk->lock, NULL);
    if (!device->host_access && bulk->world > 1) {
        ZS_TRY(join(bulk));
        ZS_TRY(start_watch(bulk));
    }
    *out = bulk;
    return ZS_OK;
fail:
    zs_bulk_close(&bulk);
    return status;
}

void zs_bulk_close(zs_bulk **out)
{
    zs_bulk *bulk = *out;
    *out = NULL;
    if (!bulk)
        return;
    if (bulk->watching) {
        pthread_mutex_lock(&bulk->lock);
        bulk->closing = 1;
        pthread_cond_signal(&bulk->wake);
        pthread_mutex_unlock(&bulk->lock);
        pthread_join(bulk->watch, NULL);
    }
    zs_mark_close(bulk->device, &bulk->last);
    if (bulk->nccl)
        bulk->device->cuda->nccl_close(bulk->nccl);
    pthread_cond_destroy(&bulk->wake);
    pthread_mutex_destroy(&bulk->lock);
    free(bulk);
}

/* ---- collectives ---- */

static uint64_t total(const zs_piece *pieces, size_t count)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += pieces[i].count;
    return sum;
}

/* Of one rank: what is there is what is wanted. */
static zs_status copy_alone(zs_bulk *bulk, const zs_piece *pieces, size_t count, size_t size,
                            zs_stream *stream)
{
    for (size_t i = 0; i < count; i++)
        ZS_CHECK(bulk->device->ops->copy(bulk->device, pieces[i].recv, pieces[i].send,
                                         pieces[i].count * size, stream));
    return ZS_OK;
}

/* dtype NULL: an all-gather of bytes. */
static zs_status queue(zs_bulk *bulk, const char *what, const zs_piece *pieces, size_t count,
                       const zs_dtype *dtype, zs_stream *stream)
{
    const zs_cuda_plugin *cuda = bulk->device->cuda;
    const size_t size = dtype ? zs_dtype_size(*dtype) : 1;
    ZS_CHECK(zs_comm_meet(bulk->comm, what, dtype != NULL, total(pieces, count) * size,
                          dtype ? *dtype : ZS_FP32));
    if (bulk->world == 1)
        return copy_alone(bulk, pieces, count, size, stream);
    pthread_mutex_lock(&bulk->lock);
    zs_status status = bulk->failed != ZS_OK ? zs_fail(bulk->failed, "%s", bulk->message)
                       : dtype
                           ? cuda->nccl_reduce_scatter(bulk->nccl, pieces, count, *dtype, stream)
                           : cuda->nccl_all_gather(bulk->nccl, pieces, count, stream);
    if (status == ZS_OK)
        status = zs_mark_set(bulk->device, &bulk->last, stream);
    bulk->queued_at = zs_now();
    snprintf(bulk->what, sizeof bulk->what, "the %s of %s", dtype ? "reduce-scatter" : "all-gather",
             what);
    pthread_mutex_unlock(&bulk->lock);
    return status;
}

zs_status zs_bulk_all_gather(zs_bulk *bulk, const char *what, const zs_piece *pieces, size_t count,
                             zs_stream *stream)
{
    if (!bulk->device->host_access)
        return queue(bulk, what, pieces, count, NULL, stream);
    for (size_t i = 0; i < count; i++)
        ZS_CHECK(
            zs_comm_all_gather(bulk->comm, what, pieces[i].send, pieces[i].recv, pieces[i].count));
    return ZS_OK;
}

zs_status zs_bulk_reduce_scatter(zs_bulk *bulk, const char *what, const zs_piece *pieces,
                                 size_t count, zs_dtype dtype, zs_stream *stream)
{
    if (!bulk->device->host_access)
        return queue(bulk, what, pieces, count, &dtype, stream);
    for (size_t i = 0; i < count; i++)
        ZS_CHECK(zs_comm_reduce_scatter(bulk->comm, bulk->math, what, pieces[i].send,
                                        pieces[i].recv, pieces[i].count, dtype));
    return ZS_OK;
}
