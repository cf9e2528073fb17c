/* SPDX-License-Identifier: Apache-2.0 */
/* The engine that breaks things: what is not to be broken goes to the engine below. */
#include "io/fault.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "io/fault_impl.h"

/* What is known of an operation until it is done. */
typedef struct ticket {
    zs_fault fault;
    double due;
    uint32_t bytes;   /* what it asked for */
    uint32_t carried; /* what the engine below was asked for */
} ticket;

typedef struct fault_backend {
    zs_io_backend base;
    zs_io_backend *inner;
    zs_faults *faults;
    zs_log log;
    ticket *tickets; /* by index of the op */
    zs_io_op *late, *done;
    unsigned below; /* in the engine below */
} fault_backend;

static void sleep_until(double when)
{
    double left = when - zs_now();

    if (left > 0)
        nanosleep(&(struct timespec){(time_t)left, (long)((left - (double)(time_t)left) * 1e9)},
                  NULL);
}

/* ---- power ---- */

static void cut_power(fault_backend *f, zs_cut how)
{
    int error = zs_power_cut(f->faults->power);

    f->faults->dark = how;
    if (error)
        zs_log_print(&f->log, ZS_LOG_ERROR,
                     "faults: the medium could not be left as a power cut leaves it: %s",
                     strerror(error));
    if (how == ZS_CUT_KILL)
        raise(error ? SIGABRT : SIGKILL);
}

/* ---- requests ---- */

static void answer(fault_backend *f, zs_io_op *op, int32_t result)
{
    op->result = result;
    op->next = f->done;
    f->done = op;
}

static void flip(unsigned char *data, const zs_fault *fault)
{
    data[fault->flip_bit / 8] ^= (unsigned char)(1u << fault->flip_bit % 8);
}

/* Here and now: what the engine below could not do without changing the caller's buffer, or with a
 * way back. */
static int32_t write_here(fault_backend *f, const zs_io_op *op, const ticket *t)
{
    zs_power *power = f->faults->power;
    unsigned char *copy = NULL;
    const unsigned char *data = op->buf;
    int32_t result;

    if (t->fault.flip && t->fault.flip_bit / 8 < t->carried) {
        copy = aligned_alloc(ZS_IO_ALIGN, zs_round_up(t->carried, ZS_IO_ALIGN));
        if (!copy)
            return -ENOMEM;
        memcpy(copy, op->buf, t->carried);
        flip(copy, &t->fault);
        data = copy;
    }
    if (power) {
        result = zs_power_write(power, op->file, data, t->carried, op->offset);
    } else {
        ssize_t n = pwrite(op->file->fd, data, t->carried, (off_t)op->offset);
        result = n < 0 ? -errno : (int32_t)n;
    }
    free(copy);
    return result;
}

/* A short transfer of a direct file is one of whole blocks: the rest it only claims. */
static int32_t claim(const zs_io_op *op, const ticket *t)
{
    return t->fault.shorten && op->result == (int32_t)t->carried ? (int32_t)t->fault.short_bytes
                                                                 : op->result;
}

static void carry_out(fault_backend *f, zs_io_op *op)
{
    ticket *t = &f->tickets[op->index];
    zs_faults *faults = f->faults;

    pthread_mutex_lock(&faults->lock);
    t->bytes = t->carried = op->bytes;
    if (faults->dark != ZS_CUT_NONE && (faults->dark != ZS_CUT_SILENT || op->write)) {
        answer(f, op, faults->dark == ZS_CUT_SILENT ? (int32_t)op->bytes : -EIO);
    } else if (t->fault.cut) {
        if (op->write)
            (void)write_here(f, op, t);
        cut_power(f, t->fault.cut);
        answer(f, op, t->fault.cut == ZS_CUT_SILENT && op->write ? (int32_t)op->bytes : -EIO);
    } else if (t->fault.error) {
        answer(f, op, -t->fault.error);
    } else {
        if (t->fault.shorten)
            t->carried = op->file->direct ? t->fault.short_bytes & ~(uint32_t)(ZS_IO_ALIGN - 1)
                                          : t->fault.short_bytes;
        if (!t->carried) {
            answer(f, op, (int32_t)t->fault.short_bytes);
        } else if (op->write && (t->fault.flip || faults->power)) {
            op->result = write_here(f, op, t);
            answer(f, op, claim(op, t));
        } else {
            op->bytes = t->carried;
            f->below++;
            f->inner->ops->submit(f->inner, op);
        }
    }
    pthread_mutex_unlock(&faults->lock);
}

static void fault_submit(zs_io_backend *backend, zs_io_op *op)
{
    fault_backend *f = (fault_backend *)backend;
    ticket *t = &f->tickets[op->index];

    pthread_mutex_lock(&f->faults->lock);
    zs_faults_next(f->faults, op->write ? ZS_FAULT_WRITE : ZS_FAULT_READ, op->file->path, op->bytes,
                   &t->fault);
    pthread_mutex_unlock(&f->faults->lock);
    if (t->fault.delay > 0) {
        t->due = zs_now() + t->fault.delay;
        op->next = f->late;
        f->late = op;
        return;
    }
    carry_out(f, op);
}

static void fault_flush(zs_io_backend *backend)
{
    fault_backend *f = (fault_backend *)backend;

    f->inner->ops->flush(f->inner);
}

/* Returns when the next one is due. */
static double release_late(fault_backend *f)
{
    zs_io_op *late = f->late;
    double now = zs_now(), next = 0;
    int released = 0;

    f->late = NULL;
    while (late) {
        zs_io_op *op = late;
        double due = f->tickets[op->index].due;
        late = op->next;
        if (due <= now) {
            carry_out(f, op);
            released = 1;
            continue;
        }
        op->next = f->late;
        f->late = op;
        next = next > 0 ? ZS_MIN(next, due) : due;
    }
    if (released)
        fault_flush(&f->base);
    return next;
}

static void collect(fault_backend *f, int wait)
{
    zs_io_op *op = f->inner->ops->reap(f->inner, wait);

    while (op) {
        ticket *t = &f->tickets[op->index];
        zs_io_op *next = op->next;
        op->bytes = t->bytes;
        if (t->fault.flip && !op->write && (int64_t)(t->fault.flip_bit / 8) < op->result)
            flip(op->buf, &t->fault);
        answer(f, op, claim(op, t));
        f->below--;
        op = next;
    }
}

static zs_io_op *fault_reap(zs_io_backend *backend, int wait)
{
    fault_backend *f = (fault_backend *)backend;
    zs_io_op *done;

    for (;;) {
        double next = release_late(f);
        if (f->below)
            collect(f, wait && !f->done && !f->late);
        if (!wait || f->done || (!f->below && !f->late))
            break;
        /* With some late and some below: a look at both, every millisecond. */
        if (f->late)
            sleep_until(f->below ? ZS_MIN(next, zs_now() + 1e-3) : next);
    }
    done = f->done;
    f->done = NULL;
    return done;
}

/* ---- allocation, flushes and names ---- */

/* -1: go on; else what to answer. */
static int before_change(fault_backend *f, zs_fault_op op, const char *path)
{
    zs_fault fault;

    zs_faults_next(f->faults, op, path, 0, &fault);
    if (fault.delay > 0)
        sleep_until(zs_now() + fault.delay);
    if (f->faults->dark == ZS_CUT_NONE && fault.cut)
        cut_power(f, fault.cut);
    if (f->faults->dark != ZS_CUT_NONE)
        return f->faults->dark == ZS_CUT_SILENT ? 0 : EIO;
    return fault.error ? fault.error : -1;
}

static int fault_allocate(zs_io_backend *backend, zs_file *file, uint64_t bytes)
{
    fault_backend *f = (fault_backend *)backend;
    int error;

    pthread_mutex_lock(&f->faults->lock);
    error = before_change(f, ZS_FAULT_ALLOCATE, file->path);
    if (error < 0 && f->faults->power)
        error = zs_power_allocate(f->faults->power, file) ? ENOMEM : -1;
    if (error < 0)
        error = zs_file_allocate_plain(file, bytes);
    pthread_mutex_unlock(&f->faults->lock);
    return error;
}

static int fault_sync(zs_io_backend *backend, zs_file *file)
{
    fault_backend *f = (fault_backend *)backend;
    int error;

    pthread_mutex_lock(&f->faults->lock);
    error = before_change(f, ZS_FAULT_SYNC, file->path);
    if (error < 0) {
        error = zs_file_sync_plain(file);
        if (!error && f->faults->power)
            zs_power_flushed(f->faults->power, file);
    }
    pthread_mutex_unlock(&f->faults->lock);
    return error;
}

static int fault_sync_dir(zs_io_backend *backend, const char *path, int fd)
{
    fault_backend *f = (fault_backend *)backend;
    int error;

    pthread_mutex_lock(&f->faults->lock);
    error = before_change(f, ZS_FAULT_SYNC, path);
    if (error < 0) {
        error = zs_dir_sync_plain(fd);
        if (!error && f->faults->power)
            zs_power_flushed_dir(f->faults->power, fd);
    }
    pthread_mutex_unlock(&f->faults->lock);
    return error;
}

static int fault_rename(zs_io_backend *backend, const char *from, const char *to)
{
    fault_backend *f = (fault_backend *)backend;
    int error;

    pthread_mutex_lock(&f->faults->lock);
    error = before_change(f, ZS_FAULT_RENAME, to);
    if (error < 0)
        error = f->faults->power ? zs_power_rename(f->faults->power, from, to)
                                 : zs_rename_plain(from, to);
    pthread_mutex_unlock(&f->faults->lock);
    return error;
}

/* ---- the rest is the engine's below ---- */

static void describe(fault_backend *f)
{
    snprintf(f->base.description, sizeof f->base.description, "faults over %.60s",
             f->inner->description);
}

static void fault_buffer_add(zs_io_backend *backend, const zs_log *log, void *base, size_t bytes)
{
    fault_backend *f = (fault_backend *)backend;

    if (f->inner->ops->buffer_add)
        f->inner->ops->buffer_add(f->inner, log, base, bytes);
    describe(f);
}

static void fault_buffer_remove(zs_io_backend *backend, void *base)
{
    fault_backend *f = (fault_backend *)backend;

    if (f->inner->ops->buffer_remove)
        f->inner->ops->buffer_remove(f->inner, base);
    describe(f);
}

static void fault_file_add(zs_io_backend *backend, zs_file *file)
{
    fault_backend *f = (fault_backend *)backend;

    if (f->inner->ops->file_add)
        f->inner->ops->file_add(f->inner, file);
}

static void fault_file_remove(zs_io_backend *backend, zs_file *file)
{
    fault_backend *f = (fault_backend *)backend;

    if (f->inner->ops->file_remove)
        f->inner->ops->file_remove(f->inner, file);
}

static void fault_close(zs_io_backend *backend)
{
    fault_backend *f = (fault_backend *)backend;

    f->inner->ops->close(f->inner);
    zs_faults_close(&f->faults);
    free(f->tickets);
    free(f);
}

static const zs_io_backend_ops fault_ops = {
    .submit = fault_submit,
    .flush = fault_flush,
    .reap = fault_reap,
    .buffer_add = fault_buffer_add,
    .buffer_remove = fault_buffer_remove,
    .file_add = fault_file_add,
    .file_remove = fault_file_remove,
    .allocate = fault_allocate,
    .sync = fault_sync,
    .sync_dir = fault_sync_dir,
    .rename = fault_rename,
    .close = fault_close,
};

zs_status zs_io_fault_open(zs_io_backend *inner, unsigned depth, zs_faults *faults,
                           const zs_log *log, zs_io_backend **out)
{
    fault_backend *f = calloc(1, sizeof *f);

    *out = NULL;
    if (!f || !(f->tickets = calloc(depth, sizeof *f->tickets))) {
        free(f);
        inner->ops->close(inner);
        return zs_fail(ZS_ERR_NOMEM, "faults: out of memory");
    }
    f->base.ops = &fault_ops;
    f->inner = inner;
    f->faults = faults;
    if (log)
        f->log = *log;
    pthread_mutex_lock(&faults->lock);
    faults->users++;
    pthread_mutex_unlock(&faults->lock);
    memcpy(f->base.note, inner->note, sizeof f->base.note);
    describe(f);
    *out = &f->base;
    return ZS_OK;
}
