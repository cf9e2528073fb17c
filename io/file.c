/* SPDX-License-Identifier: Apache-2.0 */
/* Opening, allocating and syncing block files. */
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/fork.h"
#include "base/status.h"
#include "base/util.h"
#include "io/backend.h"

static zs_status no_space(const char *path, uint64_t bytes, uint64_t available, int error)
{
    char need[16], have[16];

    return zs_fail(ZS_ERR_NOSPACE,
                   "file '%s' needs %llu bytes (%s), but %llu bytes (%s) are free there: %s; free "
                   "some space, or choose another directory%s",
                   path, (unsigned long long)bytes, zs_format_bytes(bytes, need),
                   (unsigned long long)available, zs_format_bytes(available, have), strerror(error),
                   error == EFBIG ? ", or raise the limit on file sizes (ulimit -f)" : "");
}

static uint64_t free_bytes(int fd)
{
    struct statvfs vfs;
    uint64_t bytes;

    if (fstatvfs(fd, &vfs) || zs_mul_overflow(vfs.f_bavail, vfs.f_frsize, &bytes))
        return UINT64_MAX;
    return bytes;
}

int zs_file_allocate_plain(zs_file *file, uint64_t bytes)
{
    return posix_fallocate(file->fd, 0, (off_t)bytes);
}

/* Only allocated, not written: writing everything costs five times what it saves in the first step
 * (docs/results.md). */
static zs_status allocate(zs_io_backend *backend, zs_file *file, uint64_t bytes)
{
    uint64_t available;
    int error;

    if (!bytes)
        return ZS_OK;
    /* First, so that a hopeless wish does not fill the disk on its way to failing. */
    available = free_bytes(file->fd);
    if (bytes > available || bytes > INT64_MAX)
        return no_space(file->path, bytes, available, ENOSPC);
    do
        error = backend->ops->allocate ? backend->ops->allocate(backend, file, bytes)
                                       : zs_file_allocate_plain(file, bytes);
    while (error == EINTR);
    if (error == ENOSPC || error == EFBIG || error == EDQUOT)
        return no_space(file->path, bytes, free_bytes(file->fd), error);
    if (error)
        return zs_fail(ZS_ERR_IO, "file '%s': allocating %llu bytes: %s", file->path,
                       (unsigned long long)bytes, strerror(error));
    return ZS_OK;
}

/* NULL when aligned direct transfers work, else why not. */
static const char *refuses_direct(int fd, uint64_t bytes)
{
    struct statfs fs;
    void *block;
    ssize_t n = 0;

    /* Newer kernels take the flag on tmpfs and copy all the same. */
    if (!fstatfs(fd, &fs) && fs.f_type == TMPFS_MAGIC)
        return "it lies in memory (tmpfs)";
#ifdef STATX_DIOALIGN
    struct statx stx;
    if (!statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &stx) && (stx.stx_mask & STATX_DIOALIGN)) {
        if (!stx.stx_dio_offset_align)
            return "its file system has no direct I/O for it";
        if (stx.stx_dio_offset_align > ZS_IO_ALIGN || stx.stx_dio_mem_align > ZS_IO_ALIGN)
            return "its file system wants direct I/O aligned to more than 4096 bytes";
    }
#endif
    if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_DIRECT))
        return "its file system refuses O_DIRECT";
    /* Some take the flag and then refuse the transfer. */
    if (bytes >= ZS_IO_ALIGN && (block = aligned_alloc(ZS_IO_ALIGN, ZS_IO_ALIGN))) {
        n = pread(fd, block, ZS_IO_ALIGN, 0);
        free(block);
        if (n < 0 && errno == EINVAL) {
            (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_DIRECT);
            return "its file system refuses direct transfers";
        }
    }
    return NULL;
}

/* created: 1 when the file was not there before. */
static int open_path(const char *path, int flags, int *created)
{
    int mode = (flags & ZS_FILE_READ_ONLY ? O_RDONLY : O_RDWR) | O_CLOEXEC;
    int fd;

    *created = 0;
    if (!(flags & ZS_FILE_CREATE))
        return open(path, mode);
    fd = open(path, mode | O_CREAT | O_EXCL, 0666);
    if (fd >= 0)
        *created = 1;
    else if (errno == EEXIST)
        fd = open(path, mode | O_CREAT | O_TRUNC, 0666);
    return fd;
}

static const char *open_fix(int error)
{
    switch (error) {
    case ENOENT:
    case ENOTDIR:
        return "; check the path, its directory must be there";
    case EACCES:
    case EPERM:
    case EROFS:
        return "; choose a path that may be written, or change its permissions";
    case EMFILE:
    case ENFILE:
        return "; raise the limit on open files (ulimit -n)";
    default:
        return "";
    }
}

zs_status zs_file_open(zs_io *io, const char *path, int flags, uint64_t bytes, zs_file **out)
{
    zs_io_backend *backend = zs_io_get_backend(io);
    zs_file *file = NULL;
    zs_status status;
    struct stat st;
    const char *why;
    int created = 0, guarded = 0;

    *out = NULL;
    if ((flags & ZS_FILE_CREATE) && (flags & ZS_FILE_READ_ONLY))
        return zs_fail(ZS_ERR_ARG, "file '%s' cannot be made and be read only", path);
    file = calloc(1, sizeof *file);
    if (!file || !(file->path = strdup(path))) {
        free(file);
        return zs_fail(ZS_ERR_NOMEM, "file '%s': out of memory", path);
    }
    file->io = io;
    file->slot = -1;
    file->read_only = (flags & ZS_FILE_READ_ONLY) != 0;
    file->fd = open_path(path, flags, &created);
    if (file->fd < 0) {
        int error = errno;
        status =
            zs_fail(ZS_ERR_IO, "file '%s' cannot be %s: %s%s", path,
                    flags & ZS_FILE_CREATE ? "made" : "opened", strerror(error), open_fix(error));
        goto fail;
    }
    if (fstat(file->fd, &st)) {
        status = zs_fail(ZS_ERR_IO, "file '%s': fstat: %s", path, strerror(errno));
        goto fail;
    }
    if (!S_ISREG(st.st_mode)) {
        status = zs_fail(ZS_ERR_ARG, "'%s' is not a regular file; name a file", path);
        goto fail;
    }
    ZS_TRY(zs_fork_guard_fd(file->fd));
    guarded = 1;
    file->bytes = (uint64_t)st.st_size;
    if (flags & ZS_FILE_CREATE) {
        ZS_TRY(allocate(backend, file, bytes));
        file->bytes = bytes;
    }
    /* After the allocation, which some file systems do with odd little writes. */
    why = flags & ZS_FILE_BUFFERED ? "so it was asked for" : refuses_direct(file->fd, file->bytes);
    file->direct = !why;
    if (why && !(flags & ZS_FILE_BUFFERED))
        zs_log_print(zs_io_log(io), ZS_LOG_INFO, "file '%s' goes through the page cache: %s", path,
                     why);
    if (backend->ops->file_add)
        backend->ops->file_add(backend, file);
    *out = file;
    return ZS_OK;

fail:
    if (created)
        unlink(path);
    if (guarded)
        zs_fork_unguard_fd(file->fd);
    if (file->fd >= 0)
        close(file->fd);
    free(file->path);
    free(file);
    return status;
}

void zs_file_close(zs_file **out)
{
    zs_file *file = *out;
    zs_io_backend *backend;

    if (!file)
        return;
    *out = NULL;
    if (zs_io_is_forked(file->io))
        return;
    backend = zs_io_get_backend(file->io);
    zs_io_drain_file(file->io, file);
    if (backend->ops->file_remove)
        backend->ops->file_remove(backend, file);
    zs_fork_unguard_fd(file->fd);
    close(file->fd);
    free(file->path);
    free(file);
}

int zs_file_sync_plain(zs_file *file)
{
    return fdatasync(file->fd) ? errno : 0;
}

zs_status zs_file_sync(zs_io *io, zs_file *file)
{
    zs_io_backend *backend = zs_io_get_backend(io);
    int error;

    zs_io_drain_file(io, file);
    do
        error = backend->ops->sync ? backend->ops->sync(backend, file) : zs_file_sync_plain(file);
    while (error == EINTR);
    if (error)
        return zs_fail(error == ENOSPC || error == EDQUOT ? ZS_ERR_NOSPACE : ZS_ERR_IO,
                       "flushing '%s': %s; what was written since the last flush may be lost",
                       file->path, strerror(error));
    return ZS_OK;
}

int zs_dir_sync_plain(int fd)
{
    return fsync(fd) ? errno : 0;
}

zs_status zs_io_sync_dir(zs_io *io, const char *path)
{
    zs_io_backend *backend = zs_io_get_backend(io);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int error = EINTR;

    if (fd < 0)
        error = errno;
    while (fd >= 0 && error == EINTR)
        error = backend->ops->sync_dir ? backend->ops->sync_dir(backend, path, fd)
                                       : zs_dir_sync_plain(fd);
    if (fd >= 0)
        close(fd);
    if (error)
        return zs_fail(ZS_ERR_IO, "directory '%s' cannot be flushed: %s", path, strerror(error));
    return ZS_OK;
}

uint64_t zs_file_bytes(const zs_file *file)
{
    return file->bytes;
}

const char *zs_file_path(const zs_file *file)
{
    return file->path;
}

int zs_file_is_direct(const zs_file *file)
{
    return file->direct;
}

int zs_file_fd(const zs_file *file)
{
    return file->fd;
}
