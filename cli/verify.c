/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/verify.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/util.h"
#include "cli/cli.h"
#include "offload/reader.h"
#include "zero/manifest.h"
#include "zero/saved.h"

typedef struct verify {
    zs_log log;
    uint64_t arrays, damaged, bytes;
    double shown; /* zs_now at the last sign of life; 0: none yet */
} verify;

static void log_warning(void *cookie, zs_log_level level, const char *text)
{
    (void)cookie;
    (void)level;
    zs_cli_error("%s", text);
}

static int failed(void)
{
    zs_cli_error("%s", zs_last_error());
    return ZS_EXIT_FAILED;
}

/* One line of a terminal that is written over and over, and wiped at the end. */
static void show(verify *v, const char *name, size_t done, size_t all)
{
    const double now = zs_now();
    if (!isatty(STDERR_FILENO) || (done < all && now - v->shown < 0.2))
        return;
    v->shown = now;
    if (done < all)
        fprintf(stderr, "\r%s: %zu of %zu chunks ", name, done, all);
    else
        fprintf(stderr, "\r%*s\r", (int)strlen(name) + 48, "");
}

static void verify_reader(verify *v, const char *name, zs_store_reader *reader)
{
    const zs_store_geometry *geometry = zs_store_reader_geometry(reader);
    const uint64_t arrays = v->arrays, damaged = v->damaged;
    for (size_t c = 0; c < geometry->chunk_count; c++) {
        show(v, name, c, geometry->chunk_count);
        for (zs_array a = ZS_MASTER; a <= ZS_EXP_AVG_SQ; a++) {
            v->arrays++;
            v->bytes += geometry->chunks[c].numel * sizeof(float);
            if (zs_store_reader_check(reader, c, a) == ZS_OK)
                continue;
            v->damaged++;
            show(v, name, geometry->chunk_count, geometry->chunk_count);
            printf("  damaged: %s\n", zs_last_error());
        }
    }
    show(v, name, geometry->chunk_count, geometry->chunk_count);
    printf("  %s  %zu chunks, %llu arrays, ", name, geometry->chunk_count,
           (unsigned long long)(v->arrays - arrays));
    if (v->damaged == damaged)
        printf("all as they were written\n");
    else
        printf("%llu damaged\n", (unsigned long long)(v->damaged - damaged));
}

static int finish(const verify *v, const char *path)
{
    char text[16];
    if (v->damaged) {
        zs_cli_error("%s: %llu of %llu arrays are damaged: restore the files of all ranks from one "
                     "copy",
                     path, (unsigned long long)v->damaged, (unsigned long long)v->arrays);
        return ZS_EXIT_FAILED;
    }
    printf("verified     %llu checksums over %s\n", (unsigned long long)v->arrays,
           zs_format_bytes(v->bytes, text));
    return ZS_EXIT_OK;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static int verify_saved(verify *v, const char *dir, const zs_manifest *manifest, uint64_t commit)
{
    zs_saved *saved;
    int code = ZS_EXIT_OK;
    if (zs_saved_open(dir, manifest, 1, &v->log, commit, &saved))
        return failed();
    for (int r = 0; r < manifest->world; r++) {
        zs_store_reader *reader;
        if (zs_saved_rank(saved, r, &reader)) {
            code = failed();
            continue;
        }
        if (r == 0)
            printf("commit       %llu, step %llu, of %d rank(s)\n",
                   (unsigned long long)zs_saved_commit(saved),
                   (unsigned long long)zs_store_reader_super(reader)->step, manifest->world);
        verify_reader(v, base_name(zs_store_reader_path(reader)), reader);
    }
    zs_saved_close(&saved);
    return finish(v, dir) == ZS_EXIT_OK ? code : ZS_EXIT_FAILED;
}

int zs_verify_state(const char *dir, uint64_t commit)
{
    verify v = {.log = {.fn = log_warning, .level = ZS_LOG_WARN}};
    zs_manifest *manifest;
    if (zs_manifest_load(dir, &manifest))
        return failed();
    if (!manifest) {
        zs_cli_error("%s holds no state: there is no zspill.manifest in it, so nothing was ever "
                     "committed there",
                     dir);
        return ZS_EXIT_FAILED;
    }
    printf("checkpoint   %s\n", dir);
    const int code = verify_saved(&v, dir, manifest, commit);
    zs_manifest_free(&manifest);
    return code;
}

int zs_verify_file(const char *path, uint64_t commit)
{
    verify v = {.log = {.fn = log_warning, .level = ZS_LOG_WARN}};
    zs_store store;
    zs_store_reader *reader = NULL;
    int fd, code = ZS_EXIT_FAILED;
    if (zs_store_share(path, &fd))
        return failed();
    if (zs_store_peek(path, &v.log, &store)) {
        failed();
    } else if (store.committed < 0) {
        zs_cli_error("store '%s' holds no commit", path);
        zs_store_close(&store);
    } else {
        if (!commit)
            commit = store.super[store.committed].commit;
        if (zs_store_reader_open(path, commit, &v.log, &reader)) {
            failed();
        } else {
            const zs_superblock *super = zs_store_reader_super(reader);
            printf("commit       %llu, step %llu, rank %d of %d\n",
                   (unsigned long long)super->commit, (unsigned long long)super->step, super->rank,
                   super->world);
            verify_reader(&v, base_name(path), reader);
            code = finish(&v, path);
        }
        zs_store_reader_close(&reader);
        zs_store_close(&store);
    }
    close(fd);
    return code;
}
