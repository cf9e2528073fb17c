/* SPDX-License-Identifier: Apache-2.0 */
#include "model/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"

enum { COPY_BYTES = 1 << 18 };

zs_status zs_dir_make(const char *path)
{
    char *copy = strdup(path);
    if (!copy)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the path %s", path);
    int error = 0;
    for (char *at = copy + 1; !error && at[-1]; at++) {
        if (*at && *at != '/')
            continue;
        char kept = *at;
        *at = 0;
        if (mkdir(copy, 0777) != 0 && errno != EEXIST)
            error = errno;
        *at = kept;
    }
    free(copy);
    struct stat info;
    if (!error && stat(path, &info) != 0)
        error = errno;
    if (!error && !S_ISDIR(info.st_mode))
        error = ENOTDIR;
    if (!error && access(path, W_OK | X_OK) != 0)
        error = errno;
    if (error)
        return zs_fail(ZS_ERR_IO, "the directory %s cannot be made or written: %s", path,
                       strerror(error));
    return ZS_OK;
}

/* A rename is durable once the directory that holds the name is flushed. */
static zs_status flush_parent(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *dir = slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
    if (!dir)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the path %s", path);
    zs_status status = ZS_OK;
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* EINVAL: a file system whose directories need no flush. */
    if (fd < 0 || (fsync(fd) != 0 && errno != EINVAL))
        status = zs_fail(ZS_ERR_IO, "cannot flush the directory %s: %s", dir, strerror(errno));
    if (fd >= 0)
        close(fd);
    free(dir);
    return status;
}

zs_status zs_file_rename(const char *from, const char *to)
{
    if (rename(from, to) != 0)
        return zs_fail(ZS_ERR_IO, "cannot rename %s to %s: %s", from, to, strerror(errno));
    return flush_parent(to);
}

zs_status zs_file_remove(const char *path)
{
    if (unlink(path) == 0)
        return flush_parent(path);
    if (errno == ENOENT)
        return ZS_OK;
    return zs_fail(ZS_ERR_IO, "cannot remove %s: %s", path, strerror(errno));
}

static int write_all(int fd, const char *data, size_t bytes)
{
    while (bytes) {
        ssize_t put = write(fd, data, bytes);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return -1;
        data += put;
        bytes -= (size_t)put;
    }
    return 0;
}

/* The content of source (a descriptor), or of data where source is -1. */
static zs_status write_file(const char *path, int source, const void *data, size_t bytes)
{
    zs_status status = ZS_OK;
    char *unfinished = NULL, *buffer = NULL;
    int fd = -1;
    if (asprintf(&unfinished, "%s.tmp", path) < 0)
        return zs_fail(ZS_ERR_NOMEM, "no memory to write %s", path);
    buffer = malloc(COPY_BYTES);
    if (!buffer) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory to write %s", path);
        goto fail;
    }
    fd = open(unfinished, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    int bad = fd < 0;
    if (!bad && source < 0)
        bad = write_all(fd, data, bytes) != 0;
    while (!bad && source >= 0) {
        ssize_t got = read(source, buffer, COPY_BYTES);
        if (got == 0)
            break;
        if (got < 0 && errno == EINTR)
            continue;
        bad = got < 0 || write_all(fd, buffer, (size_t)got) != 0;
    }
    if (bad || fsync(fd) != 0) {
        status = zs_fail(errno == ENOSPC ? ZS_ERR_NOSPACE : ZS_ERR_IO, "cannot write %s: %s",
                         unfinished, strerror(errno));
        goto fail;
    }
    ZS_TRY(zs_file_rename(unfinished, path));
fail:
    if (fd >= 0) {
        close(fd);
        if (status)
            unlink(unfinished);
    }
    free(buffer);
    free(unfinished);
    return status;
}

zs_status zs_file_write(const char *path, const void *data, size_t bytes)
{
    return write_file(path, -1, data, bytes);
}

zs_status zs_file_copy(const char *from, const char *to)
{
    int fd = open(from, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return zs_fail(ZS_ERR_IO, "cannot open %s: %s", from, strerror(errno));
    zs_status status = write_file(to, fd, NULL, 0);
    close(fd);
    return status;
}
