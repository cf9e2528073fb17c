/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as threads of one process. Data is read straight out of the peers' buffers.
 *
 * A collective has two meeting points. The first (exchange) has a time-out and is woken by abort
 * and close; it either succeeds for all ranks or for none. The second (finish) comes after data
 * moved, which never blocks, and so waits without limit: until it is passed, peers may be reading
 * this rank's buffers, and to return earlier would let the caller free them. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "zero/comm_impl.h"

typedef struct slot {
    zs_comm_desc desc;
    const void *send;
} slot;

/* What the ranks share; all of it under lock, but for the slots between the meeting points. */
typedef struct hub {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int world, open;
    double timeout_s;
    uint64_t exchanges, finishes; /* meetings completed */
    int arrived, finished;        /* ranks at the present one */
    unsigned char here[ZS_COMM_RANKS];
    unsigned char closed[ZS_COMM_RANKS];
    uint64_t calls[ZS_COMM_RANKS];
    int failed;
    zs_status cause; /* for the ranks that wait when it fails; later calls get ZS_ERR_COMM */
    char message[ZS_COMM_MESSAGE];
    /* A rank that has left exchange n may fill its slot for n + 1 while others still read those of
     * n; it cannot reach n + 2 before they are done. Hence two of each. */
    slot slots[2][ZS_COMM_RANKS];
} hub;

typedef struct thread_comm {
    zs_comm base;
    hub *hub;
} thread_comm;

static hub *hub_of(zs_comm *comm)
{
    return ((thread_comm *)comm)->hub;
}

/* Under lock. The first failure stays. */
static void fail_hub(hub *h, zs_status cause, const char *message)
{
    if (h->failed)
        return;
    h->failed = 1;
    h->cause = cause;
    snprintf(h->message, sizeof h->message, "%s", message);
    pthread_cond_broadcast(&h->wake);
}

static struct timespec deadline_after(double seconds)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    /* Longer than thirty years is for ever, and keeps time_t whole. */
    seconds = ZS_MIN(seconds, 1e9);
    at.tv_sec += (time_t)seconds;
    at.tv_nsec += (long)((seconds - floor(seconds)) * 1e9);
    if (at.tv_nsec >= 1000000000) {
        at.tv_nsec -= 1000000000;
        at.tv_sec++;
    }
    return at;
}

/* Under lock: the ranks that did not come to rank's collective, and where they were last. */
static void fail_missing(hub *h, int rank, const zs_comm_desc *mine)
{
    char text[ZS_COMM_MESSAGE], where[256];
    size_t used = (size_t)snprintf(text, sizeof text, "rank %d waited %g s in %s for", rank,
                                   h->timeout_s, zs_comm_describe(mine, where, sizeof where));
    const char *separator = " ";
    for (int r = 0; r < h->world && used < sizeof text; r++) {
        if (h->here[r])
            continue;
        const char *last = "which never came to any";
        if (h->calls[r]) {
            char at[256];
            zs_comm_describe(&h->slots[(h->calls[r] - 1) % 2][r].desc, at, sizeof at);
            snprintf(where, sizeof where, "last seen in %.240s", at);
            last = where;
        }
        used +=
            (size_t)snprintf(text + used, sizeof text - used, "%srank %d (%s)", separator, r, last);
        separator = ", ";
    }
    fail_hub(h, ZS_ERR_TIMEOUT, text);
}

/* Under lock: a rank whose handle is closed will not come any more. */
static void fail_closed(hub *h, int rank, const zs_comm_desc *mine)
{
    for (int r = 0; r < h->world; r++)
        if (h->closed[r]) {
            char text[ZS_COMM_MESSAGE], where[256];
            snprintf(text, sizeof text, "rank %d closed its communicator while rank %d is in %s", r,
                     rank, zs_comm_describe(mine, where, sizeof where));
            fail_hub(h, ZS_ERR_COMM, text);
            return;
        }
}

static zs_status threads_exchange(zs_comm *comm, const void *send)
{
    const zs_comm_desc *mine = comm->now;
    hub *h = hub_of(comm);
    int rank = comm->rank;
    pthread_mutex_lock(&h->lock);
    fail_closed(h, rank, mine);
    if (h->failed) {
        zs_status status = zs_fail(ZS_ERR_COMM, "%s", h->message);
        pthread_mutex_unlock(&h->lock);
        return status;
    }
    uint64_t round = h->exchanges;
    h->slots[round % 2][rank] = (slot){*mine, send};
    h->calls[rank] = round + 1;
    h->here[rank] = 1;
    if (++h->arrived == h->world) {
        h->arrived = 0;
        memset(h->here, 0, sizeof h->here);
        h->exchanges++;
        pthread_cond_broadcast(&h->wake);
    } else {
        struct timespec deadline = deadline_after(h->timeout_s);
        int late = 0;
        while (h->exchanges == round && !h->failed) {
            if (late)
                fail_missing(h, rank, mine);
            else
                late = pthread_cond_timedwait(&h->wake, &h->lock, &deadline) != 0;
            if (h->exchanges == round)
                fail_closed(h, rank, mine);
        }
    }
    zs_status status = ZS_OK;
    if (h->exchanges == round)
        status = zs_fail(h->cause, "%s", h->message);
    for (int r = 0; r < h->world; r++)
        comm->peer[r] = &h->slots[round % 2][r].desc;
    pthread_mutex_unlock(&h->lock);
    return status;
}

/* local: what became of this rank's part. One that failed fails all, since they take it that every
 * rank has its data. */
static zs_status finish(zs_comm *comm, zs_status local)
{
    hub *h = hub_of(comm);
    pthread_mutex_lock(&h->lock);
    if (local != ZS_OK) {
        char text[ZS_COMM_MESSAGE], where[256];
        snprintf(text, sizeof text, "rank %d failed in %s: %.512s", comm->rank,
                 zs_comm_describe(comm->now, where, sizeof where), zs_last_error());
        fail_hub(h, ZS_ERR_COMM, text);
    }
    uint64_t round = h->finishes;
    if (++h->finished == h->world) {
        h->finished = 0;
        h->finishes++;
        pthread_cond_broadcast(&h->wake);
    }
    while (h->finishes == round)
        pthread_cond_wait(&h->wake, &h->lock);
    zs_status status = local;
    if (local == ZS_OK && h->failed)
        status = zs_fail(ZS_ERR_COMM, "%s", h->message);
    pthread_mutex_unlock(&h->lock);
    return status;
}

static const void *sent_by(const zs_comm *comm, int rank)
{
    return ((const slot *)(const void *)comm->peer[rank])->send;
}
_Static_assert(offsetof(slot, desc) == 0, "sent_by goes from the description to its slot");

static zs_status threads_all_gather(zs_comm *comm, const void *send, void *recv, size_t bytes)
{
    /* Each starts at itself, so that they do not all read the same buffer at once. */
    for (int i = 0; i < comm->world; i++) {
        int r = (comm->rank + i) % comm->world;
        char *to = (char *)recv + (size_t)r * bytes;
        if (to != sent_by(comm, r))
            memcpy(to, sent_by(comm, r), bytes);
    }
    return finish(comm, ZS_OK);
}

static zs_status threads_reduce_scatter(zs_comm *comm, zs_math *math, const void *send, void *recv,
                                        uint64_t count, zs_dtype dtype)
{
    const void *source[ZS_COMM_RANKS];
    size_t skip = (size_t)comm->rank * (size_t)count * zs_dtype_size(dtype);
    for (int r = 0; r < comm->world; r++)
        source[r] = (const char *)sent_by(comm, r) + skip;
    return finish(
        comm, math->ops->sum_sources(math, NULL, recv, dtype, source, (size_t)comm->world, count));
}

static zs_status threads_check(zs_comm *comm)
{
    hub *h = hub_of(comm);
    zs_status status = ZS_OK;
    pthread_mutex_lock(&h->lock);
    if (h->failed)
        status = zs_fail(ZS_ERR_COMM, "%s", h->message);
    pthread_mutex_unlock(&h->lock);
    return status;
}

static void threads_abort(zs_comm *comm, const char *message)
{
    hub *h = hub_of(comm);
    char text[ZS_COMM_MESSAGE];
    snprintf(text, sizeof text, "rank %d aborted: %s", comm->rank, message);
    pthread_mutex_lock(&h->lock);
    fail_hub(h, ZS_ERR_COMM, text);
    pthread_mutex_unlock(&h->lock);
}

static void free_hub(hub *h)
{
    pthread_cond_destroy(&h->wake);
    pthread_mutex_destroy(&h->lock);
    free(h);
}

static void threads_close(zs_comm *comm)
{
    hub *h = hub_of(comm);
    pthread_mutex_lock(&h->lock);
    h->closed[comm->rank] = 1;
    int left = --h->open;
    pthread_cond_broadcast(&h->wake);
    pthread_mutex_unlock(&h->lock);
    free(comm);
    if (!left)
        free_hub(h);
}

static const zs_comm_ops threads_ops = {
    .exchange = threads_exchange,
    .all_gather = threads_all_gather,
    .reduce_scatter = threads_reduce_scatter,
    .check = threads_check,
    .abort = threads_abort,
    .close = threads_close,
};

zs_status zs_comm_open_threads(int world, double timeout_s, zs_comm **out)
{
    if (!out)
        return zs_fail(ZS_ERR_ARG, "zs_comm_open_threads: out is NULL");
    if (world < 1 || world > ZS_COMM_RANKS) {
        *out = NULL;
        return zs_fail(ZS_ERR_ARG, "zs_comm_open_threads: world %d is not in 1..%d", world,
                       ZS_COMM_RANKS);
    }
    memset(out, 0, (size_t)world * sizeof *out);
    if (!(timeout_s > 0))
        return zs_fail(ZS_ERR_ARG,
                       "zs_comm_open_threads: timeout_s %g is not above 0: give the seconds a rank "
                       "waits for another",
                       timeout_s);

    hub *h = calloc(1, sizeof *h);
    if (!h)
        return zs_fail(ZS_ERR_NOMEM, "zs_comm_open_threads: no memory for %d ranks", world);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&h->wake, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&h->lock, NULL);
    h->world = h->open = world;
    h->timeout_s = timeout_s;

    for (int r = 0; r < world; r++) {
        thread_comm *comm = calloc(1, sizeof *comm);
        if (!comm) {
            while (r-- > 0) {
                free(out[r]);
                out[r] = NULL;
            }
            free_hub(h);
            return zs_fail(ZS_ERR_NOMEM, "zs_comm_open_threads: no memory for %d ranks", world);
        }
        comm->base = (zs_comm){.ops = &threads_ops,
                               .rank = r,
                               .world = world,
                               .local_ranks = world,
                               .timeout_s = timeout_s,
                               .pid = getpid()};
        comm->hub = h;
        out[r] = &comm->base;
    }
    return ZS_OK;
}

zs_status zs_comm_open_self(zs_comm **out)
{
    /* One rank never waits. */
    return zs_comm_open_threads(1, 1, out);
}
