/* SPDX-License-Identifier: Apache-2.0 */
/* Small files that are replaced as a whole. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "io/backend.h"

int zs_rename_plain(const char *from, const char *to)
{
    return rename(from, to) ? errno : 0;
}

static zs_status write_beside(zs_io *io, const char *path, const void *data, size_t bytes)
{
    zs_file *file = NULL;
    zs_io_req req = {0};
    zs_status status;

    ZS_CHECK(zs_file_open(io, path, ZS_FILE_CREATE | ZS_FILE_BUFFERED, bytes, &file));
    status = zs_io_write(io, file, 0, data, bytes, &req);
    if (status == ZS_OK)
        status = zs_io_wait(io, &req);
    if (status == ZS_OK)
        status = zs_file_sync(io, file);
    zs_file_close(&file);
    return status;
}

static zs_status put_in_place(zs_io *io, const char *from, const char *to)
{
    zs_io_backend *backend = zs_io_get_backend(io);
    int error =
        backend->ops->rename ? backend->ops->rename(backend, from, to) : zs_rename_plain(from, to);

    if (!error)
        return ZS_OK;
    return zs_fail(ZS_ERR_IO, "file '%s' cannot be put in place: %s", to, strerror(error));
}

zs_status zs_io_replace_file(zs_io *io, const char *path, const void *data, size_t bytes)
{
    const char *slash = strrchr(path, '/');
    char *beside = NULL, *dir = NULL;
    zs_status status;

    if (asprintf(&beside, "%s.tmp", path) < 0)
        beside = NULL;
    dir = slash == path ? strdup("/") : slash ? strndup(path, (size_t)(slash - path)) : strdup(".");
    if (!beside || !dir) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory for the path '%s'", path);
        goto done;
    }
    status = write_beside(io, beside, data, bytes);
    if (status == ZS_OK)
        status = put_in_place(io, beside, path);
    if (status == ZS_OK)
        status = zs_io_sync_dir(io, dir);
    else
        (void)unlink(beside);
done:
    free(beside);
    free(dir);
    return status;
}
