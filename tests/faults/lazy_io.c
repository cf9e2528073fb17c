/* SPDX-License-Identifier: Apache-2.0 */
#include "lazy_io.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "io/backend.h"

enum { DEPTH = 64 };

lazy_io_control lazy_io;

typedef struct lazy {
    zs_io_backend base;
    zs_io_op *waiting; /* newest first */
    unsigned char *early[DEPTH];
} lazy;

static void lazy_submit(zs_io_backend *backend, zs_io_op *op)
{
    lazy *l = (lazy *)backend;
    op->next = l->waiting;
    l->waiting = op;
    if (lazy_io.early_data && op->write) {
        if (posix_memalign((void **)&l->early[op->index], ZS_IO_ALIGN, op->bytes) != 0)
            abort();
        memcpy(l->early[op->index], op->buf, op->bytes);
    }
}

static void lazy_flush(zs_io_backend *backend)
{
}

static void carry_out(zs_io_op *op, const unsigned char *data)
{
    if (!lazy_io.only || lazy_io.only == 1 + op->write) {
        long number = lazy_io.requests++;
        if (lazy_io.fail_at >= 0 &&
            (number == lazy_io.fail_at || (lazy_io.persistent && number > lazy_io.fail_at))) {
            op->result = -lazy_io.error;
            return;
        }
    }
    ssize_t n = op->write ? pwrite(op->file->fd, data, op->bytes, (off_t)op->offset)
                          : pread(op->file->fd, op->buf, op->bytes, (off_t)op->offset);
    op->result = n < 0 ? -errno : (int32_t)n;
}

static zs_io_op *lazy_reap(zs_io_backend *backend, int wait)
{
    lazy *l = (lazy *)backend;
    zs_io_op **link = &l->waiting;
    if (!wait || !*link)
        return NULL;
    while (lazy_io.oldest_first && (*link)->next)
        link = &(*link)->next;
    zs_io_op *op = *link;
    *link = op->next;
    op->next = NULL;
    unsigned char *early = l->early[op->index];
    carry_out(op, early ? early : op->buf);
    free(early);
    l->early[op->index] = NULL;
    return op;
}

static void lazy_close(zs_io_backend *backend)
{
    free(backend);
}

zs_status lazy_io_open(zs_io **out)
{
    static const zs_io_backend_ops ops = {
        .submit = lazy_submit, .flush = lazy_flush, .reap = lazy_reap, .close = lazy_close};
    lazy *l = calloc(1, sizeof *l);
    if (!l)
        return zs_fail(ZS_ERR_NOMEM, "lazy I/O");
    l->base.ops = &ops;
    strcpy(l->base.description, "lazy");
    return zs_io_open_backend(&l->base, DEPTH, NULL, out);
}
