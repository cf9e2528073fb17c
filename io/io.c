/* SPDX-License-Identifier: Apache-2.0 */
/* Transfers queue up here, are cut into requests as the engine has room, and what comes back is
 * continued or judged. All of it runs on the thread that calls. */
#include "io/io.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "io/backend.h"

/* About a second without any progress is a failure. */
enum { TRIES_MAX = 1000 };

typedef struct transfer {
    zs_file *file;
    zs_io_req *req;
    unsigned char *buf;
    uint64_t offset;
    size_t bytes;
    int write;
} transfer;

struct zs_io {
    zs_io_backend *backend;
    zs_log log;
    pid_t pid;
    zs_io_op *ops, *idle;
    unsigned depth, in_flight;
    transfer *queue; /* a ring; capacity is a power of two */
    size_t head, count, capacity;
    zs_io_stats stats;
    char description[sizeof((zs_io_backend *)NULL)->description + ZS_IO_NOTE_BYTES];
};

const zs_log *zs_io_log(const zs_io *io)
{
    return &io->log;
}

zs_io_backend *zs_io_get_backend(const zs_io *io)
{
    return io->backend;
}

int zs_io_is_forked(const zs_io *io)
{
    return io->pid != getpid();
}

static void describe(zs_io *io)
{
    snprintf(io->description, sizeof io->description, "%s%s", io->backend->description,
             io->backend->note);
}

zs_status zs_io_open_backend(zs_io_backend *backend, unsigned depth, const zs_log *log, zs_io **out)
{
    zs_io *io = calloc(1, sizeof *io);

    *out = NULL;
    if (!io || !(io->ops = calloc(depth, sizeof *io->ops))) {
        free(io);
        backend->ops->close(backend);
        return zs_fail(ZS_ERR_NOMEM, "block files: no memory for %u requests", depth);
    }
    io->backend = backend;
    io->pid = getpid();
    if (log)
        io->log = *log;
    io->depth = depth;
    for (unsigned i = depth; i-- > 0;) {
        io->ops[i].index = i;
        io->ops[i].next = io->idle;
        io->idle = &io->ops[i];
    }
    describe(io);
    *out = io;
    return ZS_OK;
}

const char *zs_io_describe(const zs_io *io)
{
    return io->description;
}

void zs_io_get_stats(const zs_io *io, zs_io_stats *out)
{
    *out = io->stats;
}

zs_status zs_io_register(zs_io *io, void *base, size_t bytes)
{
    if ((uintptr_t)base % ZS_IO_ALIGN)
        return zs_fail(ZS_ERR_ARG, "block files: buffer %p is not aligned to %d bytes", base,
                       ZS_IO_ALIGN);
    if (bytes && io->backend->ops->buffer_add)
        io->backend->ops->buffer_add(io->backend, &io->log, base, bytes);
    describe(io);
    return ZS_OK;
}

void zs_io_unregister(zs_io *io, void *base)
{
    if (io->backend->ops->buffer_remove)
        io->backend->ops->buffer_remove(io->backend, base);
    describe(io);
}

/* ---- completions ---- */

/* The end of the path, which tells most, so that the message fits. */
static const char *path_tail(const zs_file *file)
{
    enum { KEEP = 80 };
    size_t length = strlen(file->path);
    return length > KEEP ? file->path + length - KEEP : file->path;
}

static void fail_request(zs_io_req *req, zs_status status, int write, const zs_file *file,
                         uint64_t offset, uint64_t bytes, const char *why)
{
    if (req->status != ZS_OK)
        return;
    req->status = status;
    snprintf(req->error, sizeof req->error, "%s %llu bytes at offset %llu of '%s': %s",
             write ? "writing" : "reading", (unsigned long long)bytes, (unsigned long long)offset,
             path_tail(file), why);
}

static void fail_op(const zs_io_op *op, zs_status status, const char *why)
{
    fail_request(op->req, status, op->write, op->file, op->offset, op->bytes, why);
}

static void finish_op(zs_io *io, zs_io_op *op)
{
    op->req->pending--;
    op->file->pending--;
    op->next = io->idle;
    io->idle = op;
    io->in_flight--;
}

static void submit(zs_io *io, zs_io_op *op)
{
    io->stats.requests++;
    io->backend->ops->submit(io->backend, op);
}

/* Books what was moved. With O_DIRECT a rest must start aligned: a part of a block is moved again.
 */
static uint32_t advance(zs_io *io, zs_io_op *op)
{
    uint32_t moved = ZS_MIN((uint32_t)op->result, op->bytes);

    if (moved < op->bytes && op->file->direct)
        moved -= moved % ZS_IO_ALIGN;
    op->buf += moved;
    op->offset += moved;
    op->bytes -= moved;
    *(op->write ? &io->stats.written_bytes : &io->stats.read_bytes) += moved;
    return moved;
}

/* 1: op is over, well or not. 0: there is a rest to do. */
static int judge(zs_io *io, zs_io_op *op)
{
    int result = op->result;

    if (result > 0) {
        uint32_t moved = advance(io, op);
        if (!op->bytes)
            return 1;
        if (moved) {
            op->tries = 0;
            return 0;
        }
    }
    if (result >= 0 && !op->write) {
        fail_op(op, ZS_ERR_CORRUPT, "the file ends there: it was cut short");
        return 1;
    }
    /* ECANCELED: the thread that submitted it has ended. */
    if (result < 0 && result != -EINTR && result != -EAGAIN && result != -ECANCELED) {
        fail_op(op, result == -ENOSPC ? ZS_ERR_NOSPACE : ZS_ERR_IO, strerror(-result));
        return 1;
    }
    if (++op->tries >= TRIES_MAX) {
        fail_op(op, ZS_ERR_IO, result < 0 ? strerror(-result) : "nothing is written");
        return 1;
    }
    if (op->tries > 8)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    return 0;
}

static void drop_transfer(zs_io *io, const transfer *t)
{
    uint32_t requests = (uint32_t)zs_div_up(t->bytes, ZS_IO_REQUEST);

    t->req->pending -= requests;
    t->file->pending -= requests;
    io->head = (io->head + 1) & (io->capacity - 1);
    io->count--;
}

static void pump(zs_io *io)
{
    while (io->count && io->idle) {
        transfer *t = &io->queue[io->head];
        zs_io_op *op = io->idle;
        if (t->req->status != ZS_OK || !t->bytes) {
            drop_transfer(io, t); /* over, or lost already */
            continue;
        }
        io->idle = op->next;
        io->in_flight++;
        op->next = NULL;
        op->file = t->file;
        op->req = t->req;
        op->buf = t->buf;
        op->offset = t->offset;
        op->bytes = (uint32_t)ZS_MIN(t->bytes, (size_t)ZS_IO_REQUEST);
        op->write = t->write;
        op->tries = 0;
        t->buf += op->bytes;
        t->offset += op->bytes;
        t->bytes -= op->bytes;
        submit(io, op);
    }
    /* Done with a transfer as soon as its last cut is on its way: nothing may point to req after
     * the last completion. */
    while (io->count && !io->queue[io->head].bytes)
        drop_transfer(io, &io->queue[io->head]);
    io->backend->ops->flush(io->backend);
}

static void take(zs_io *io, int wait)
{
    zs_io_op *op = io->backend->ops->reap(io->backend, wait);

    while (op) {
        zs_io_op *next = op->next;
        op->next = NULL;
        if (judge(io, op))
            finish_op(io, op);
        else
            submit(io, op);
        op = next;
    }
    pump(io);
}

/* ---- transfers ---- */

static zs_status grow_queue(zs_io *io)
{
    size_t capacity = io->capacity ? 2 * io->capacity : 64;
    transfer *queue = malloc(capacity * sizeof *queue);

    if (!queue)
        return zs_fail(ZS_ERR_NOMEM, "block files: no memory to queue %zu transfers", capacity);
    for (size_t i = 0; i < io->count; i++)
        queue[i] = io->queue[(io->head + i) & (io->capacity - 1)];
    free(io->queue);
    io->queue = queue;
    io->head = 0;
    io->capacity = capacity;
    return ZS_OK;
}

static zs_status queue_transfer(zs_io *io, const transfer *t)
{
    const zs_file *file = t->file;
    const char *what = t->write ? "writing" : "reading";
    uint32_t requests = (uint32_t)zs_div_up(t->bytes, ZS_IO_REQUEST);

    if (file->direct && ((uintptr_t)t->buf | t->offset | t->bytes) % ZS_IO_ALIGN)
        return zs_fail(ZS_ERR_ARG,
                       "%s %zu bytes at offset %llu of '%s' from address %p: all three must be "
                       "multiples of %d",
                       what, t->bytes, (unsigned long long)t->offset, file->path, (void *)t->buf,
                       ZS_IO_ALIGN);
    if (t->write && file->read_only)
        return zs_fail(ZS_ERR_MISUSE, "writing to '%s', which is open for reading only",
                       file->path);
    if (t->offset > file->bytes || t->bytes > file->bytes - t->offset) {
        char why[64];
        if (t->write)
            return zs_fail(ZS_ERR_ARG,
                           "writing %zu bytes at offset %llu of '%s' goes beyond its %llu bytes",
                           t->bytes, (unsigned long long)t->offset, file->path,
                           (unsigned long long)file->bytes);
        snprintf(why, sizeof why, "the file has only %llu bytes", (unsigned long long)file->bytes);
        fail_request(t->req, ZS_ERR_CORRUPT, 0, file, t->offset, t->bytes, why);
        return ZS_OK;
    }
    if (!t->bytes)
        return ZS_OK;
    if (io->count == io->capacity)
        ZS_CHECK(grow_queue(io));
    io->queue[(io->head + io->count++) & (io->capacity - 1)] = *t;
    t->req->pending += requests;
    t->file->pending += requests;
    pump(io);
    return ZS_OK;
}

zs_status zs_io_read(zs_io *io, zs_file *file, uint64_t offset, void *buf, size_t bytes,
                     zs_io_req *req)
{
    return queue_transfer(io, &(transfer){file, req, buf, offset, bytes, 0});
}

zs_status zs_io_write(zs_io *io, zs_file *file, uint64_t offset, const void *buf, size_t bytes,
                      zs_io_req *req)
{
    return queue_transfer(io, &(transfer){file, req, (unsigned char *)buf, offset, bytes, 1});
}

void zs_io_poll(zs_io *io)
{
    take(io, 0);
}

zs_status zs_io_wait(zs_io *io, zs_io_req *req)
{
    zs_status status;

    if (req->pending) {
        double start = zs_now();
        while (req->pending)
            take(io, 1);
        io->stats.wait_seconds += zs_now() - start;
    }
    status = req->status;
    req->status = ZS_OK;
    return status == ZS_OK ? ZS_OK : zs_fail(status, "%s", req->error);
}

void zs_io_drain_file(zs_io *io, zs_file *file)
{
    while (file->pending)
        take(io, 1);
}

void zs_io_close(zs_io **out)
{
    zs_io *io = *out;

    if (!io)
        return;
    *out = NULL;
    if (zs_io_is_forked(io))
        return;
    while (io->in_flight)
        take(io, 1);
    io->backend->ops->close(io->backend);
    free(io->queue);
    free(io->ops);
    free(io);
}
