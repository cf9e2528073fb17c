/* SPDX-License-Identifier: Apache-2.0 */
#include "base/fork.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"

/* A fork concerns the whole process, so this list does too. */
static struct {
    pthread_mutex_t lock;
    int *fds;
    size_t count, capacity;
    int installed;
} guard = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void before_fork(void)
{
    pthread_mutex_lock(&guard.lock);
}

static void after_fork_parent(void)
{
    pthread_mutex_unlock(&guard.lock);
}

static void after_fork_child(void)
{
    for (size_t i = 0; i < guard.count; i++)
        close(guard.fds[i]);
    guard.count = 0;
    pthread_mutex_unlock(&guard.lock);
}

static zs_status guard_fd(int fd)
{
    if (!guard.installed) {
        int error = pthread_atfork(before_fork, after_fork_parent, after_fork_child);
        if (error)
            return zs_fail(ZS_ERR_NOMEM, "fork handler: %s", strerror(error));
        guard.installed = 1;
    }
    if (guard.count == guard.capacity) {
        size_t capacity = guard.capacity ? 2 * guard.capacity : 16;
        int *fds = realloc(guard.fds, capacity * sizeof *fds);
        if (!fds)
            return zs_fail(ZS_ERR_NOMEM, "fork handler: out of memory");
        guard.fds = fds;
        guard.capacity = capacity;
    }
    guard.fds[guard.count++] = fd;
    return ZS_OK;
}

zs_status zs_fork_guard_fd(int fd)
{
    zs_status status;

    pthread_mutex_lock(&guard.lock);
    status = guard_fd(fd);
    pthread_mutex_unlock(&guard.lock);
    return status;
}

void zs_fork_unguard_fd(int fd)
{
    pthread_mutex_lock(&guard.lock);
    for (size_t i = 0; i < guard.count; i++) {
        if (guard.fds[i] == fd) {
            guard.fds[i] = guard.fds[--guard.count];
            break;
        }
    }
    if (!guard.count) {
        free(guard.fds);
        guard.fds = NULL;
        guard.capacity = 0;
    }
    pthread_mutex_unlock(&guard.lock);
}
