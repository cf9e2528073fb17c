/* SPDX-License-Identifier: Apache-2.0 */
/* Who may use a store file: the lock, and the text in the file that names its holder. */
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "base/fork.h"
#include "base/status.h"
#include "base/util.h"
#include "offload/store_internal.h"

enum {
    /* In the label: docs/format.md. */
    HOLDER_OFFSET = 512,
    HOLDER_BYTES = 64,
    WRITES_SECONDS = 5
};

ssize_t zs_store_read_at(int fd, void *out, size_t bytes, uint64_t offset)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(fd, (char *)out + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        if (n == 0)
            break;
        done += (size_t)n;
    }
    return (ssize_t)done;
}

static zs_status write_at(const zs_store *store, const void *data, size_t bytes, uint64_t offset)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t n =
            pwrite(store->lock_fd, (const char *)data + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return zs_fail(errno == ENOSPC ? ZS_ERR_NOSPACE : ZS_ERR_IO,
                           "store '%s': writing who holds it: %s", store->path, strerror(errno));
        done += (size_t)n;
    }
    return ZS_OK;
}

zs_status zs_store_set_holder(const zs_store *store, int held)
{
    char text[HOLDER_BYTES] = {0};
    if (held)
        snprintf(text, sizeof text, "held by process %ld\n", (long)getpid());
    return write_at(store, text, sizeof text, HOLDER_OFFSET);
}

static zs_status fail_locked(const zs_store *store, int fd)
{
    char text[HOLDER_BYTES] = {0};
    long pid = 0;
    if (zs_store_read_at(fd, text, sizeof text - 1, HOLDER_OFFSET) <= 0 ||
        sscanf(text, "held by process %ld", &pid) != 1)
        return zs_fail(ZS_ERR_LOCKED,
                       "store '%s' is held by another process: end it, or use another directory",
                       store->path);
    return zs_fail(ZS_ERR_LOCKED,
                   "store '%s' is held by process %ld: end it, or use another directory",
                   store->path, pid);
}

/* A process that was killed may have writes under way after its locks are gone, but not after the
 * file that they go through is closed: that one has a lock of its own. type: F_WRLCK or F_UNLCK. 0,
 * or errno; 0 where such locks say nothing. */
static int lock_writes(int fd, short type)
{
    const struct flock whole = {.l_type = type, .l_whence = SEEK_SET};
    struct statfs fs;
    /* There flock is made of these locks, and would be in the way. */
    if (!fstatfs(fd, &fs) &&
        (fs.f_type == NFS_SUPER_MAGIC || (uint32_t)fs.f_type == SMB2_SUPER_MAGIC ||
         (uint32_t)fs.f_type == CIFS_SUPER_MAGIC))
        return 0;
    if (!fcntl(fd, F_OFD_SETLK, &whole))
        return 0;
    return errno == EAGAIN || errno == EACCES ? EAGAIN : 0;
}

static zs_status wait_for_writes(const zs_store *store)
{
    const struct timespec pause = {0, 10 * 1000 * 1000};
    for (int i = 0; i < WRITES_SECONDS * 100; i++) {
        if (!lock_writes(store->lock_fd, F_WRLCK)) {
            (void)lock_writes(store->lock_fd, F_UNLCK);
            return ZS_OK;
        }
        (void)nanosleep(&pause, NULL);
    }
    return zs_fail(ZS_ERR_LOCKED,
                   "store '%s': writes of a process that has ended are still under way after %d "
                   "seconds: try again when the disk is done with them",
                   store->path, WRITES_SECONDS);
}

/* Opens and locks; a file that its holder removed meanwhile is not the one meant. */
zs_status zs_store_open_locked(zs_store *store)
{
    for (;;) {
        int made = 1;
        int fd = open(store->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd < 0 && errno == EEXIST) {
            made = 0;
            fd = open(store->path, O_RDWR | O_CLOEXEC);
            if (fd < 0 && errno == ENOENT)
                continue;
        }
        if (fd < 0)
            return zs_fail(ZS_ERR_IO,
                           "store '%s' cannot be opened: %s: make the directory writable, or use "
                           "another one",
                           store->path, strerror(errno));
        if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
            zs_status status = errno == EWOULDBLOCK
                                   ? fail_locked(store, fd)
                                   : zs_fail(ZS_ERR_IO,
                                             "store '%s' cannot be locked: %s: use a file system "
                                             "that has locks",
                                             store->path, strerror(errno));
            close(fd);
            return status;
        }
        struct stat by_fd, by_path;
        if (fstat(fd, &by_fd) < 0 || stat(store->path, &by_path) < 0 ||
            by_fd.st_ino != by_path.st_ino || by_fd.st_dev != by_path.st_dev) {
            close(fd);
            continue;
        }
        store->lock_fd = fd;
        store->made_file = made;
        ZS_CHECK(zs_fork_guard_fd(fd));
        return wait_for_writes(store);
    }
}

zs_status zs_store_lock_writes(const zs_store *store)
{
    if (lock_writes(zs_file_fd(store->file), F_WRLCK))
        return zs_fail(ZS_ERR_LOCKED, "store '%s' is written to by another program: end it",
                       store->path);
    return ZS_OK;
}

zs_status zs_store_share(const char *path, int *fd)
{
    const zs_store store = {.path = (char *)path};
    zs_status status = ZS_OK;
    *fd = open(path, O_RDONLY | O_CLOEXEC);
    if (*fd < 0)
        return zs_fail(ZS_ERR_IO, "store '%s' cannot be opened: %s", path, strerror(errno));
    if (flock(*fd, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK) {
        status = fail_locked(&store, *fd);
        close(*fd);
        *fd = -1;
    }
    /* A file system without locks is good enough to read from. */
    return status;
}

zs_status zs_store_check_present(const zs_store *store)
{
    struct stat info;
    if (store->lock_fd < 0 || fstat(store->lock_fd, &info) < 0 || info.st_nlink)
        return ZS_OK;
    return zs_fail(ZS_ERR_IO,
                   "store '%s' was removed while in use: no state can be kept in it; leave the "
                   "directory alone while the run lasts",
                   store->path);
}
