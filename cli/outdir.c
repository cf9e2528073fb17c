/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/outdir.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"

static zs_status fail_make(const char *option, const char *path)
{
    return zs_fail(ZS_ERR_IO, "%s %s cannot be written to: %s: choose another directory", option,
                   path, strerror(errno));
}

static zs_status make_one(zs_outdir *dirs, const char *option, const char *whole, const char *path)
{
    if (mkdir(path, 0777)) {
        struct stat info;
        if (errno == EEXIST && !stat(path, &info) && S_ISDIR(info.st_mode))
            return ZS_OK;
        if (errno == EEXIST)
            errno = ENOTDIR;
        return fail_make(option, whole);
    }
    if (dirs->count < ZS_OUTDIR_MADE_MAX)
        dirs->made[dirs->count++] = strdup(path);
    return ZS_OK;
}

static zs_status check_writable(const char *option, const char *path)
{
    char *name;
    if (asprintf(&name, "%s/.zspill-XXXXXX", path) < 0)
        return zs_fail(ZS_ERR_NOMEM, "no memory for %s", option);
    int fd = mkstemp(name);
    zs_status status = fd < 0 ? fail_make(option, path) : ZS_OK;
    if (fd >= 0) {
        unlink(name);
        close(fd);
    }
    free(name);
    return status;
}

zs_status zs_outdir_make(zs_outdir *dirs, const char *option, const char *path)
{
    char *part = strdup(path);
    zs_status status = ZS_OK;
    if (!part)
        return zs_fail(ZS_ERR_NOMEM, "no memory for %s", option);
    for (char *slash = strchr(part + 1, '/'); status == ZS_OK && slash;
         slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        status = make_one(dirs, option, path, part);
        *slash = '/';
    }
    if (status == ZS_OK)
        status = make_one(dirs, option, path, part);
    free(part);
    return status == ZS_OK ? check_writable(option, path) : status;
}

void zs_outdir_remove(zs_outdir *dirs)
{
    for (size_t i = dirs->count; i-- > 0;)
        if (dirs->made[i])
            rmdir(dirs->made[i]);
}

void zs_outdir_free(zs_outdir *dirs)
{
    for (size_t i = 0; i < dirs->count; i++)
        free(dirs->made[i]);
    dirs->count = 0;
}
