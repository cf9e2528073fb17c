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
#include "zero/header.h"
#include "zero/manifest.h"
#include "zero/saved.h"

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

/* The new manifest appears once all stores are there; the old one goes once out's note leads to the
 * new; the old stores go after that. */
static zs_status move(const zs_manifest *m, const char *out, const char *from, const char *to)
{
    int locks[64];
    char *source = NULL, *target = NULL;
    for (int r = 0; r < m->world; r++)
        locks[r] = -1;
    zs_status status = join(&source, from, manifest_name);
    if (status == ZS_OK)
        status = join(&target, to, manifest_name);
    /* What an attempt that was cut short left goes; its manifest first. */
    if (status == ZS_OK && unlink(target) != 0 && errno != ENOENT)
        status = zs_fail(ZS_ERR_IO, "%s cannot be removed: %s", target, strerror(errno));
    if (status == ZS_OK) {
        zs_store_sweep(to, none);
        status = carry_stores(m, from, to, locks);
    }
    if (status == ZS_OK)
        status = zs_file_copy(source, target);
    if (status == ZS_OK)
        status = zs_state_note(out, to);
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

/* Which run's state is in dir and how far it is; *run 0: there is none. */
static zs_status look(const char *dir, uint64_t *run, uint64_t *commit)
{
    const zs_log log = {0};
    zs_manifest *m;
    zs_saved *saved;
    *run = 0;
    ZS_CHECK(zs_manifest_load(dir, &m));
    if (!m)
        return ZS_OK;
    *run = m->run;
    const zs_status status = zs_saved_open(dir, m, 0, &log, 0, &saved);
    if (status == ZS_OK)
        *commit = zs_saved_commit(saved);
    zs_saved_close(&saved);
    zs_manifest_free(&m);
    return status;
}

typedef struct wanted {
    uint64_t commit;
    zs_state_check check;
    void *cookie;
} wanted;

static zs_status check_user(const wanted *w, const zs_manifest *m, const char *dir)
{
    const zs_log log = {0};
    zs_status status;
    zs_saved *saved = NULL;
    const void *data;
    size_t bytes;
    zs_header header = {0};
    ZS_TRY(zs_saved_open(dir, m, 0, &log, w->commit, &saved));
    ZS_TRY(zs_saved_header(saved, &data, &bytes));
    ZS_TRY(zs_header_decode(data, bytes, &header));
    status = w->check(w->cookie, header.user, header.user_bytes);
fail:
    zs_saved_close(&saved);
    return status == ZS_OK ? ZS_OK : zs_fail_prefix(status, "cannot resume from %s: ", dir);
}

/* Two of the same run are what a move that was cut short leaves: the one that went on counts. */
static zs_status move_from(const char *out, const char *from, const char *to, const wanted *w)
{
    uint64_t run = 0, commit = 0, run_there = 0, commit_there = 0;
    zs_manifest *m;
    if (same_file(from, to))
        return ZS_OK;
    /* A damaged one where the run is to go on is for the resume itself to refuse. */
    if (look(to, &run_there, &commit_there) != ZS_OK)
        return ZS_OK;
    ZS_CHECK(look(from, &run, &commit));
    if (run && run_there && run != run_there)
        return zs_fail(ZS_ERR_MISMATCH,
                       "%s holds the state of another run than %s, where that of %s is: give this "
                       "run a directory of its own",
                       to, from, out);
    if (!run || (run_there && commit <= commit_there))
        return ZS_OK;
    ZS_CHECK(zs_manifest_load(from, &m));
    if (!m)
        return ZS_OK;
    zs_status status = check_user(w, m, from);
    if (status == ZS_OK) {
        status = move(m, out, from, to);
        if (status == ZS_OK)
            printf("moved the state from %s to %s\n", from, to);
        else
            zs_fail_prefix(status, "the run's state cannot be moved from %s to %s: ", from, to);
    }
    zs_manifest_free(&m);
    return status;
}

zs_status zs_state_relocate(const char *out, const char *dir, uint64_t commit, zs_state_check check,
                            void *cookie)
{
    const wanted w = {commit, check, cookie};
    zs_status status;
    char *own = NULL, *noted = NULL;
    ZS_TRY(join(&own, out, "state"));
    ZS_TRY(read_note(out, &noted));
    if (noted)
        ZS_TRY(move_from(out, noted, dir, &w));
    ZS_TRY(move_from(out, own, dir, &w));
    if (!same_file(own, dir))
        (void)rmdir(own);
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
