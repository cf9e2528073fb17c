/* SPDX-License-Identifier: Apache-2.0 */
/* libaio: what is left of asynchronous I/O where io_uring is forbidden. The kernel works
 * asynchronously only with O_DIRECT; through the page cache io_submit itself waits, which is slower
 * but not wrong. A context belongs to the process, so any thread may submit and reap. */
#include <errno.h>
#include <libaio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/backend.h"

typedef struct aio_backend {
    zs_io_backend base;
    io_context_t context;
    unsigned depth;
    struct iocb *iocbs;  /* by index of the op */
    struct iocb **queue; /* not yet the kernel's, oldest first */
    unsigned queued, in_flight;
    struct io_event *events;
    zs_io_op *refused; /* done before they began */
} aio_backend;

static void aio_submit(zs_io_backend *backend, zs_io_op *op)
{
    aio_backend *aio = (aio_backend *)backend;
    struct iocb *iocb = &aio->iocbs[op->index];

    if (op->write)
        io_prep_pwrite(iocb, op->file->fd, op->buf, op->bytes, (long long)op->offset);
    else
        io_prep_pread(iocb, op->file->fd, op->buf, op->bytes, (long long)op->offset);
    iocb->data = op;
    aio->queue[aio->queued++] = iocb;
}

static void drop_first(aio_backend *aio, unsigned count)
{
    aio->queued -= count;
    memmove(aio->queue, aio->queue + count, aio->queued * sizeof *aio->queue);
}

/* io_submit says no to the first in line. */
static void refuse_first(aio_backend *aio, int error)
{
    zs_io_op *op = aio->queue[0]->data;

    drop_first(aio, 1);
    aio->iocbs[op->index].data = NULL;
    op->result = error;
    op->next = aio->refused;
    aio->refused = op;
}

static void aio_flush(zs_io_backend *backend)
{
    aio_backend *aio = (aio_backend *)backend;

    while (aio->queued) {
        int rc = io_submit(aio->context, aio->queued, aio->queue);
        if (rc > 0) {
            drop_first(aio, (unsigned)rc);
            aio->in_flight += (unsigned)rc;
        } else if (rc == -EAGAIN && aio->in_flight) {
            return; /* what comes back makes room */
        } else if (rc != -EINTR) {
            refuse_first(aio, rc ? rc : -EAGAIN);
        }
    }
}

static zs_io_op *take_refused(aio_backend *aio)
{
    zs_io_op *done = aio->refused;

    aio->refused = NULL;
    return done;
}

/* The context itself is broken: everything it owes has failed. */
static zs_io_op *fail_all(aio_backend *aio, zs_io_op *done, int error)
{
    for (unsigned i = 0; i < aio->depth; i++) {
        zs_io_op *op = aio->iocbs[i].data;
        if (!op)
            continue;
        aio->iocbs[i].data = NULL;
        op->result = error;
        op->next = done;
        done = op;
    }
    aio->queued = aio->in_flight = 0;
    return done;
}

static zs_io_op *aio_reap(zs_io_backend *backend, int wait)
{
    aio_backend *aio = (aio_backend *)backend;
    zs_io_op *done;

    aio_flush(backend);
    done = take_refused(aio);
    while (aio->in_flight) {
        struct timespec now = {0, 0};
        int block = wait && !done;
        int rc = io_getevents(aio->context, block, aio->depth, aio->events, block ? NULL : &now);
        if (rc == -EINTR)
            continue;
        if (rc < 0)
            return fail_all(aio, done, rc);
        for (int i = 0; i < rc; i++) {
            zs_io_op *op = aio->events[i].data;
            aio->iocbs[op->index].data = NULL;
            op->result = (int32_t)(long)aio->events[i].res;
            op->next = done;
            done = op;
        }
        aio->in_flight -= (unsigned)rc;
        if (!block || done)
            break;
    }
    if (aio->queued)
        aio_flush(backend);
    return done;
}

static void aio_close(zs_io_backend *backend)
{
    aio_backend *aio = (aio_backend *)backend;

    if (aio->context)
        (void)io_destroy(aio->context);
    free(aio->iocbs);
    free(aio->queue);
    free(aio->events);
    free(aio);
}

static const zs_io_backend_ops aio_ops = {
    .submit = aio_submit, .flush = aio_flush, .reap = aio_reap, .close = aio_close};

static long long read_number(const char *path)
{
    FILE *file = fopen(path, "re");
    long long value = -1;

    if (file) {
        if (fscanf(file, "%lld", &value) != 1)
            value = -1;
        fclose(file);
    }
    return value;
}

static zs_status explain(int error, unsigned depth)
{
    switch (-error) {
    case EAGAIN:
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "libaio gets no room for %u requests: %lld of fs.aio-max-nr = %lld are in "
                       "use on this machine; as root: sysctl fs.aio-max-nr=1048576",
                       depth, read_number("/proc/sys/fs/aio-nr"),
                       read_number("/proc/sys/fs/aio-max-nr"));
    case ENOSYS:
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "libaio is not in this kernel or hidden by a seccomp profile (ENOSYS); in "
                       "docker use --security-opt seccomp=unconfined");
    case EPERM:
    case EACCES:
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "libaio is forbidden, most likely by a seccomp profile (%s); allow "
                       "io_setup, io_submit, io_getevents and io_destroy, in docker with "
                       "--security-opt seccomp=unconfined",
                       error == -EPERM ? "EPERM" : "EACCES");
    default:
        return zs_fail(ZS_ERR_UNSUPPORTED, "libaio cannot be set up: %s", strerror(-error));
    }
}

zs_status zs_io_aio_open(unsigned depth, zs_io_backend **out)
{
    aio_backend *aio = calloc(1, sizeof *aio);
    zs_status status;
    int rc;

    *out = NULL;
    if (!aio)
        return zs_fail(ZS_ERR_NOMEM, "I/O engine libaio: out of memory");
    aio->base.ops = &aio_ops;
    aio->depth = depth;
    aio->iocbs = calloc(depth, sizeof *aio->iocbs);
    aio->queue = calloc(depth, sizeof(struct iocb *));
    aio->events = calloc(depth, sizeof *aio->events);
    if (!aio->iocbs || !aio->queue || !aio->events) {
        status = zs_fail(ZS_ERR_NOMEM, "I/O engine libaio: out of memory");
        goto fail;
    }
    rc = io_setup((int)depth, &aio->context);
    if (rc) {
        aio->context = NULL;
        status = explain(rc, depth);
        goto fail;
    }
    snprintf(aio->base.description, sizeof aio->base.description, "libaio");
    *out = &aio->base;
    return ZS_OK;

fail:
    aio_close(&aio->base);
    return status;
}
