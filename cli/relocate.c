/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/relocate.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "model/files.h"
#include "offload/store.h"
#include "zero/manifest.h"

static const char manifest_name[] = "zspill.manifest";
static const uint64_t none[2] = {0, 0};

static zs_status join(char **out, const char *dir, const char *name)
{
    if (asprintf(out, "%s/%s", dir, name) >= 0)
        return ZS_OK;
    *out = NULL;
    return zs_fail(ZS_ERR_NOMEM, "no memory for the path %s/%s", dir, name);
}

static int same_file(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static int has_manifest(const char *dir)
{
    char *path;
    if (join(&path, dir, manifest_name) != ZS_OK)
        return 0;
    const int there = access(path, F_OK) == 0;
    free(path);
    return there;
}

/* The directory that OUT/state.path names; *out NULL: there is no note. */
static zs_status read_note(const char *dir, char **out)
{
    char *path, text[PATH_MAX + 2] = "";
    *out = NULL;
    ZS_CHECK(join(&path, dir, "state.path"));
    FILE *file = fopen(path, "re");
    free(path);
    if (!file)
        return ZS_OK;
    if (fgets(text, sizeof text, file)) {
        text[strcspn(text, "\n")] = '\0';
        if (*text)
            *out = strdup(text);
    }
    fclose(file);
    return ZS_OK;
}

/* Another name for the same bytes where the file system allows that, else a copy. */
static zs_status carry(const char *from, const char *to)
{
    if (link(from, to) == 0)
        return ZS_OK;
    return zs_file_copy(from, to);
}

static zs_status carry_stores(const zs_manifest *m, const char *from, const char *to, int *locks)
{
    zs_status status = ZS_OK;
    for (int r = 0; status == ZS_OK && r < m->world; r++) {
        char *source = zs_store_path(from, m->generation, r);
        char *target = zs_store_path(to, m->generation, r);
        if (!source || !target)
            status = zs_fail(ZS_ERR_NOMEM, "no memory for a store's path");
        else
            status = zs_store_share(source, &locks[r]);
        if (status == ZS_OK)
            status = carry(source, target);
        free(source);
        free(target);
    }
    return status;
}

/* The new manifest appears once all stores are there, and the stores go once the old one is gone.
 */
static zs_status move(const zs_manifest *m, const char *from, const char *to)
{
    int locks[64];
    char *source = NULL, *target = NULL;
    for (int r = 0; r < m->world; r++)
        locks[r] = -1;
    /* What an attempt that was cut short left. Without a manifest it is no state. */
    zs_store_sweep(to, none);
    zs_status status = carry_stores(m, from, to, locks);
    if (status == ZS_OK)
        status = join(&source, from, manifest_name);
    if (status == ZS_OK)
        status = join(&target, to, manifest_name);
    if (status == ZS_OK)
        status = zs_file_copy(source, target);
    if (status == ZS_OK && unlink(source) != 0)
        status = zs_fail(ZS_ERR_IO, "%s cannot be removed: %s", source, strerror(errno));
    for (int r = 0; r < m->world; r++)
        if (locks[r] >= 0)
            close(locks[r]);
    free(source);
    free(target);
    if (status == ZS_OK)
        zs_store_sweep(from, none);
    return status;
}

static zs_status move_from(const char *from, const char *to)
{
    zs_manifest *m;
    ZS_CHECK(zs_manifest_load(from, &m));
    if (!m)
        return ZS_OK;
    const zs_status status = move(m, from, to);
    zs_manifest_free(&m);
    if (status != ZS_OK)
        return zs_fail_prefix(status, "the run's state cannot be moved from %s to %s: ", from, to);
    printf("moved the state from %s to %s\n", from, to);
    return ZS_OK;
}

zs_status zs_state_relocate(const char *out, const char *dir)
{
    zs_status status;
    char *own = NULL, *noted = NULL;
    if (has_manifest(dir))
        return ZS_OK;
    ZS_TRY(join(&own, out, "state"));
    ZS_TRY(read_note(out, &noted));
    if (noted && !same_file(noted, dir) && has_manifest(noted))
        ZS_TRY(move_from(noted, dir));
    else if (!same_file(own, dir) && has_manifest(own)) {
        ZS_TRY(move_from(own, dir));
        (void)rmdir(own);
    }
    status = ZS_OK;
fail:
    free(own);
    free(noted);
    return status;
}

zs_status zs_state_note(const char *out, const char *dir)
{
    zs_status status;
    char *own = NULL, *path = NULL, *whole = NULL, *noted = NULL;
    ZS_TRY(join(&own, out, "state"));
    ZS_TRY(join(&path, out, "state.path"));
    ZS_TRY(read_note(out, &noted));
    whole = realpath(dir, NULL);
    if (same_file(own, dir)) {
        if (noted && unlink(path) != 0 && errno != ENOENT)
            status = zs_fail(ZS_ERR_IO, "%s cannot be removed: %s", path, strerror(errno));
    } else if (whole && !strchr(whole, '\n') && (!noted || strcmp(noted, whole) != 0)) {
        char text[PATH_MAX + 2];
        const int length = snprintf(text, sizeof text, "%s\n", whole);
        status = zs_file_write(path, text, (size_t)length);
    }
fail:
    free(own);
    free(path);
    free(whole);
    free(noted);
    return status;
}
