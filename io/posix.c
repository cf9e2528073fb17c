/* SPDX-License-Identifier: Apache-2.0 */
/* The engine that works everywhere: a few threads that call pread and pwrite. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "io/backend.h"

/* They wait for the disk and take no CPU: what counts is that its queue is never empty. */
enum { THREADS = 8 };

typedef struct posix_backend {
    zs_io_backend base;
    pthread_mutex_t lock; /* of all below */
    pthread_cond_t work, finished;
    zs_io_op *first, *last; /* to do, oldest first */
    zs_io_op *done;
    int stop;
    int threads;
    pthread_t thread[THREADS];
} posix_backend;

static void *thread_main(void *cookie)
{
    posix_backend *posix = cookie;

    pthread_mutex_lock(&posix->lock);
    for (;;) {
        zs_io_op *op;
        ssize_t n;
        while (!posix->first && !posix->stop)
            pthread_cond_wait(&posix->work, &posix->lock);
        if (posix->stop)
            break;
        op = posix->first;
        posix->first = op->next;
        pthread_mutex_unlock(&posix->lock);
        n = op->write ? pwrite(op->file->fd, op->buf, op->bytes, (off_t)op->offset)
                      : pread(op->file->fd, op->buf, op->bytes, (off_t)op->offset);
        op->result = n < 0 ? -errno : (int32_t)n;
        pthread_mutex_lock(&posix->lock);
        /* The owner sees buffer and result through the lock. */
        op->next = posix->done;
        posix->done = op;
        pthread_cond_signal(&posix->finished);
    }
    pthread_mutex_unlock(&posix->lock);
    return NULL;
}

static void posix_submit(zs_io_backend *backend, zs_io_op *op)
{
    posix_backend *posix = (posix_backend *)backend;

    op->next = NULL;
    pthread_mutex_lock(&posix->lock);
    if (posix->first)
        posix->last->next = op;
    else
        posix->first = op;
    posix->last = op;
    pthread_cond_signal(&posix->work);
    pthread_mutex_unlock(&posix->lock);
}

static void posix_flush(zs_io_backend *backend)
{
}

static zs_io_op *posix_reap(zs_io_backend *backend, int wait)
{
    posix_backend *posix = (posix_backend *)backend;
    zs_io_op *done;

    pthread_mutex_lock(&posix->lock);
    while (wait && !posix->done)
        pthread_cond_wait(&posix->finished, &posix->lock);
    done = posix->done;
    posix->done = NULL;
    pthread_mutex_unlock(&posix->lock);
    return done;
}

static void posix_close(zs_io_backend *backend)
{
    posix_backend *posix = (posix_backend *)backend;

    pthread_mutex_lock(&posix->lock);
    posix->stop = 1;
    pthread_cond_broadcast(&posix->work);
    pthread_mutex_unlock(&posix->lock);
    for (int i = 0; i < posix->threads; i++)
        pthread_join(posix->thread[i], NULL);
    pthread_cond_destroy(&posix->finished);
    pthread_cond_destroy(&posix->work);
    pthread_mutex_destroy(&posix->lock);
    free(posix);
}

static const zs_io_backend_ops posix_ops = {
    .submit = posix_submit,
    .flush = posix_flush,
    .reap = posix_reap,
    .close = posix_close,
};

zs_status zs_io_posix_open(unsigned depth, zs_io_backend **out)
{
    posix_backend *posix = calloc(1, sizeof *posix);
    sigset_t all, before;
    int want = (int)ZS_MIN(depth, (unsigned)THREADS), error = 0;

    *out = NULL;
    if (!posix)
        return zs_fail(ZS_ERR_NOMEM, "I/O engine posix: out of memory");
    posix->base.ops = &posix_ops;
    pthread_mutex_init(&posix->lock, NULL);
    pthread_cond_init(&posix->work, NULL);
    pthread_cond_init(&posix->finished, NULL);
    /* Threads inherit the mask: signals are the caller's business. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (posix->threads < want && !error) {
        error = pthread_create(&posix->thread[posix->threads], NULL, thread_main, posix);
        posix->threads += !error;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        int started = posix->threads;
        posix_close(&posix->base);
        return zs_fail(ZS_ERR_NOMEM,
                       "I/O engine posix: thread %d of %d could not be started: %s; raise the "
                       "limit on processes (ulimit -u, pids.max of the container)",
                       started + 1, want, strerror(error));
    }
    snprintf(posix->base.description, sizeof posix->base.description, "posix (%d threads)", want);
    *out = &posix->base;
    return ZS_OK;
}
