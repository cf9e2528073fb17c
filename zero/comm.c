/* SPDX-License-Identifier: Apache-2.0 */
#include "zero/comm.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "zero/comm_impl.h"

/* Changes with the description's layout: processes that run different versions say so. */
enum { DESC_MAGIC = 0x5a533031, ALL_REDUCE_MAX = 4096 };

static void fill_desc(const zs_comm *comm, zs_comm_desc *desc, zs_comm_op op, const char *what,
                      uint64_t bytes, uint32_t detail)
{
    memset(desc, 0, sizeof *desc);
    desc->magic = DESC_MAGIC;
    desc->rank = comm->rank;
    desc->op = op;
    desc->detail = detail;
    desc->bytes = bytes;
    desc->what_hash = zs_hash_bytes(ZS_HASH_START, what, strlen(what));
    snprintf(desc->what, sizeof desc->what, "%s", what);
}

const char *zs_comm_describe(const zs_comm_desc *desc, char *text, size_t bytes)
{
    static const char *const reduce_names[] = {"sum", "max", "min"};
    unsigned long long n = desc->bytes;
    switch ((zs_comm_op)desc->op) {
    case ZS_COMM_ALL_GATHER:
        snprintf(text, bytes, "all-gather of %s (%llu bytes)", desc->what, n);
        break;
    case ZS_COMM_REDUCE_SCATTER:
        snprintf(text, bytes, "reduce-scatter of %s (%llu bytes %s)", desc->what, n,
                 zs_dtype_name((zs_dtype)desc->detail));
        break;
    case ZS_COMM_BARRIER:
        snprintf(text, bytes, "barrier at %s", desc->what);
        break;
    case ZS_COMM_AGREE:
        snprintf(text, bytes, "agreement on %s", desc->what);
        break;
    case ZS_COMM_SAME:
        snprintf(text, bytes, "comparison of %s", desc->what);
        break;
    case ZS_COMM_ALL_REDUCE:
        snprintf(text, bytes, "all-reduce of %s (%s of %llu values)", desc->what,
                 desc->detail < ZS_COUNT(reduce_names) ? reduce_names[desc->detail] : "?",
                 n / (unsigned long long)sizeof(double));
        break;
    default:
        snprintf(text, bytes, "operation %u", (unsigned)desc->op);
    }
    return text;
}

static int same_desc(const zs_comm_desc *a, const zs_comm_desc *b)
{
    return a->op == b->op && a->detail == b->detail && a->bytes == b->bytes &&
           a->what_hash == b->what_hash && !strcmp(a->what, b->what);
}

/* Meets the other ranks and compares what they are at. */
static zs_status meet(zs_comm *comm, const zs_comm_desc *mine, const void *send)
{
    if (comm->pid != getpid())
        return zs_fail(ZS_ERR_FORKED,
                       "communicator of rank %d belongs to process %ld: a forked child may not "
                       "use it",
                       comm->rank, (long)comm->pid);
    comm->now = mine;
    ZS_CHECK(comm->ops->exchange(comm, send));

    for (int r = 0; r < comm->world; r++) {
        const zs_comm_desc *peer = comm->peer[r];
        if (peer->magic != DESC_MAGIC)
            return zs_fail(ZS_ERR_MISMATCH,
                           "rank %d does not run the same version of zspill as rank %d", r,
                           comm->rank);
        if (peer->rank != r)
            return zs_fail(ZS_ERR_MISMATCH,
                           "all-gather puts what rank %d sent in the place of rank %d: give each "
                           "rank its own number in zs_comm_open_callbacks",
                           (int)peer->rank, r);
        if (!same_desc(comm->peer[0], peer)) {
            char first[256], other[256];
            return zs_fail(
                ZS_ERR_MISMATCH,
                "rank 0 is at %s, rank %d at %s: all ranks must visit units in the same order, "
                "with the same configuration",
                zs_comm_describe(comm->peer[0], first, sizeof first), r,
                zs_comm_describe(peer, other, sizeof other));
        }
    }
    return ZS_OK;
}

static zs_status check_size(const zs_comm *comm, const char *what, uint64_t count, uint64_t size,
                            uint64_t *bytes)
{
    uint64_t total;
    if (zs_mul_overflow(count, size, bytes) ||
        zs_mul_overflow(*bytes, (uint64_t)comm->world, &total) || total > SIZE_MAX / 2)
        return zs_fail(ZS_ERR_ARG, "collective for %s: %" PRIu64 " elements a rank overflow", what,
                       count);
    return ZS_OK;
}

zs_status zs_comm_all_gather(zs_comm *comm, const char *what, const void *send, void *recv,
                             size_t bytes)
{
    zs_comm_desc desc;
    uint64_t checked;
    ZS_CHECK(check_size(comm, what, bytes, 1, &checked));
    fill_desc(comm, &desc, ZS_COMM_ALL_GATHER, what, bytes, 0);
    ZS_CHECK(meet(comm, &desc, send));
    if (!bytes)
        return ZS_OK;
    if (comm->world == 1) {
        if (send != recv)
            memcpy(recv, send, bytes);
        return ZS_OK;
    }
    return comm->ops->all_gather(comm, send, recv, bytes);
}

zs_status zs_comm_meet(zs_comm *comm, const char *what, int reduce, uint64_t bytes, zs_dtype dtype)
{
    zs_comm_desc desc;
    fill_desc(comm, &desc, reduce ? ZS_COMM_REDUCE_SCATTER : ZS_COMM_ALL_GATHER, what, bytes,
              reduce ? (uint32_t)dtype : 0);
    return meet(comm, &desc, NULL);
}

zs_status zs_comm_reduce_scatter(zs_comm *comm, zs_math *math, const char *what, const void *send,
                                 void *recv, uint64_t count, zs_dtype dtype)
{
    zs_comm_desc desc;
    uint64_t bytes;
    ZS_CHECK(check_size(comm, what, count, zs_dtype_size(dtype), &bytes));
    fill_desc(comm, &desc, ZS_COMM_REDUCE_SCATTER, what, bytes, (uint32_t)dtype);
    ZS_CHECK(meet(comm, &desc, send));
    if (!count)
        return ZS_OK;
    if (comm->world == 1) {
        if (send != recv)
            memcpy(recv, send, (size_t)bytes);
        return ZS_OK;
    }
    return comm->ops->reduce_scatter(comm, math, send, recv, count, dtype);
}

zs_status zs_comm_barrier(zs_comm *comm, const char *what)
{
    zs_comm_desc desc;
    fill_desc(comm, &desc, ZS_COMM_BARRIER, what, 0, 0);
    ZS_CHECK(meet(comm, &desc, NULL));
    return comm->ops->barrier && comm->world > 1 ? comm->ops->barrier(comm) : ZS_OK;
}

zs_status zs_comm_agree(zs_comm *comm, const char *what, zs_status local)
{
    zs_comm_desc desc;
    fill_desc(comm, &desc, ZS_COMM_AGREE, what, 0, 0);
    desc.payload.outcome.status = local;
    char mine[ZS_COMM_MESSAGE];
    if (local != ZS_OK) {
        snprintf(mine, sizeof mine, "%s", zs_last_error());
        snprintf(desc.payload.outcome.message, sizeof desc.payload.outcome.message, "%.*s",
                 (int)sizeof desc.payload.outcome.message - 1, mine);
    }
    zs_status met = meet(comm, &desc, NULL);
    /* The own failure is the cause, whatever became of the meeting. */
    if (local != ZS_OK)
        return zs_fail(local, "%s", mine);
    ZS_CHECK(met);
    for (int r = 0; r < comm->world; r++)
        if (comm->peer[r]->payload.outcome.status != ZS_OK)
            return zs_fail(ZS_ERR_COMM, "%s: rank %d failed: %s", what, r,
                           comm->peer[r]->payload.outcome.message);
    return ZS_OK;
}

zs_status zs_comm_same(zs_comm *comm, const char *what, uint64_t value)
{
    zs_comm_desc desc;
    fill_desc(comm, &desc, ZS_COMM_SAME, what, 0, 0);
    desc.payload.value = value;
    ZS_CHECK(meet(comm, &desc, NULL));
    uint64_t first = comm->peer[0]->payload.value;
    for (int r = 1; r < comm->world; r++)
        if (comm->peer[r]->payload.value != first)
            return zs_fail(ZS_ERR_MISMATCH,
                           "%s of rank 0 and rank %d differ (%" PRIx64 " and %" PRIx64
                           "): all ranks must use the same",
                           what, r, first, comm->peer[r]->payload.value);
    return ZS_OK;
}

static double reduce_two(zs_reduce_op op, double a, double b)
{
    if (op == ZS_OP_SUM)
        return a + b;
    /* A NaN of any rank must reach all. */
    if (isnan(a) || isnan(b))
        return NAN;
    return op == ZS_OP_MAX ? ZS_MAX(a, b) : ZS_MIN(a, b);
}

zs_status zs_comm_all_reduce(zs_comm *comm, const char *what, zs_reduce_op op, double *values,
                             size_t n)
{
    if (!comm || !what || (n && !values))
        return zs_fail(ZS_ERR_ARG, "zs_comm_all_reduce: comm, what or values is NULL");
    if (op != ZS_OP_SUM && op != ZS_OP_MAX && op != ZS_OP_MIN)
        return zs_fail(ZS_ERR_ARG, "zs_comm_all_reduce of %s: unknown operation %d", what, (int)op);
    if (n > ALL_REDUCE_MAX)
        return zs_fail(ZS_ERR_ARG, "zs_comm_all_reduce of %s: %zu values are more than %d: cut it",
                       what, n, ALL_REDUCE_MAX);

    zs_comm_desc desc;
    fill_desc(comm, &desc, ZS_COMM_ALL_REDUCE, what, n * sizeof *values, (uint32_t)op);
    /* Few values travel with the description and save a round. */
    int few = n <= ZS_COUNT(desc.payload.values);
    if (few && n)
        memcpy(desc.payload.values, values, n * sizeof *values);
    double *all = NULL;
    if (!few && comm->world > 1) {
        all = malloc((size_t)comm->world * n * sizeof *all);
        if (!all)
            return zs_fail(ZS_ERR_NOMEM, "zs_comm_all_reduce of %s: no memory", what);
    }
    zs_status status;
    ZS_TRY(meet(comm, &desc, values));
    if (all)
        ZS_TRY(comm->ops->all_gather(comm, values, all, n * sizeof *values));
    for (int r = 0; r < comm->world && (few || all); r++) {
        const double *theirs = few ? comm->peer[r]->payload.values : all + (size_t)r * n;
        for (size_t i = 0; i < n; i++)
            values[i] = r ? reduce_two(op, values[i], theirs[i]) : theirs[i];
    }
fail:
    free(all);
    return status;
}

zs_status zs_comm_check(zs_comm *comm)
{
    return comm->ops->check(comm);
}

double zs_comm_timeout(const zs_comm *comm)
{
    return comm->timeout_s;
}

int zs_comm_rank(const zs_comm *comm)
{
    return comm ? comm->rank : -1;
}

int zs_comm_world(const zs_comm *comm)
{
    return comm ? comm->world : -1;
}

int zs_comm_local_ranks(const zs_comm *comm)
{
    return comm ? comm->local_ranks : -1;
}

void zs_comm_abort(zs_comm *comm, const char *message)
{
    if (comm && comm->pid == getpid())
        comm->ops->abort(comm, message ? message : "no reason given");
}

void zs_comm_close(zs_comm **comm)
{
    if (!comm || !*comm)
        return;
    /* In a forked child the parent's locks may be held for ever: leave everything alone. */
    if ((*comm)->pid == getpid())
        (*comm)->ops->close(*comm);
    *comm = NULL;
}
