/* SPDX-License-Identifier: Apache-2.0 */
#include "zero/manifest.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/crc32c.h"
#include "base/status.h"
#include "base/util.h"
#include "offload/store.h"

/* Lines, each ended by a newline:
 *   zspill manifest 2
 *   fingerprint HEX
 *   run HEX
 *   generation N
 *   world N
 *   chunk_numel N
 *   slots N
 *   replicated 0|1
 *   flats N
 *   then for each: "flat COUNT DTYPE", and COUNT times "param NUMEL NAME" (the name is the rest of
 * the line) crc32c HEX        of all bytes before this line */
static const char first_line[] = "zspill manifest 2\n";
enum { MANIFEST_MOST = 64 << 20, COUNT_MOST = 1 << 24 };

static char *path_of(const char *dir)
{
    char *path = NULL;
    if (asprintf(&path, "%s/zspill.manifest", dir) < 0)
        return NULL;
    return path;
}

void zs_manifest_free(zs_manifest **manifest)
{
    zs_manifest *m = manifest ? *manifest : NULL;
    if (!m)
        return;
    *manifest = NULL;
    for (size_t f = 0; f < m->flat_count; f++) {
        for (size_t p = 0; m->flats[f].names && p < m->flats[f].count; p++)
            free(m->flats[f].names[p]);
        free(m->flats[f].names);
        free(m->flats[f].numels);
    }
    free(m->flats);
    free(m);
}

int zs_manifest_same_shape(const zs_manifest *a, const zs_manifest *b)
{
    if (a->world != b->world || a->replicated != b->replicated ||
        a->chunk_numel != b->chunk_numel || a->slots != b->slots || a->flat_count != b->flat_count)
        return 0;
    for (size_t f = 0; f < a->flat_count; f++) {
        if (a->flats[f].count != b->flats[f].count || a->flats[f].dtype != b->flats[f].dtype)
            return 0;
        for (size_t p = 0; p < a->flats[f].count; p++)
            if (a->flats[f].numels[p] != b->flats[f].numels[p] ||
                strcmp(a->flats[f].names[p], b->flats[f].names[p]) != 0)
                return 0;
    }
    return 1;
}

/* ---- reading ---- */

typedef struct lines {
    const char *at, *end;
    const char *where;
    size_t number;
} lines;

/* "key VALUE" with VALUE in base; the rest of the line into *rest (may be NULL when nothing may
 * follow). */
static zs_status take(lines *l, const char *key, int base, uint64_t *value, const char **rest,
                      size_t *rest_length)
{
    const size_t length = strlen(key);
    const char *end = strchr(l->at, '\n');
    char *stop = NULL;
    l->number++;
    if (end && !strncmp(l->at, key, length) && l->at[length] == ' ' &&
        strchr("0123456789abcdef", l->at[length + 1]) && l->at[length + 1]) {
        errno = 0;
        *value = strtoull(l->at + length + 1, &stop, base);
        if (!errno && stop <= end && (rest ? *stop == ' ' : stop == end)) {
            if (rest) {
                *rest = stop + 1;
                *rest_length = (size_t)(end - stop - 1);
            }
            l->at = end + 1;
            return ZS_OK;
        }
    }
    return zs_fail(ZS_ERR_CORRUPT,
                   "manifest '%s', line %zu: '%s' and a number are missing: restore "
                   "the file from a copy, or start afresh in an empty directory",
                   l->where, l->number, key);
}

static zs_status take_count(lines *l, const char *key, uint64_t most, uint64_t *value)
{
    ZS_CHECK(take(l, key, 10, value, NULL, NULL));
    if (*value > most)
        return zs_fail(ZS_ERR_CORRUPT,
                       "manifest '%s', line %zu: %s is %" PRIu64 "; at most %" PRIu64
                       " is possible",
                       l->where, l->number, key, *value, most);
    return ZS_OK;
}

static zs_status parse_flat(lines *l, zs_manifest_flat *flat)
{
    uint64_t count;
    const char *dtype;
    size_t length;
    ZS_CHECK(take(l, "flat", 10, &count, &dtype, &length));
    flat->dtype = ZS_FP32;
    while (flat->dtype <= ZS_FP16 && (strlen(zs_dtype_name(flat->dtype)) != length ||
                                      strncmp(zs_dtype_name(flat->dtype), dtype, length) != 0))
        flat->dtype++;
    if (flat->dtype > ZS_FP16)
        return zs_fail(ZS_ERR_CORRUPT, "manifest '%s', line %zu: dtype '%.*s' is not known",
                       l->where, l->number, (int)length, dtype);
    /* A line takes 9 bytes at least: a count that the text cannot hold allocates nothing. */
    if (count > (size_t)(l->end - l->at) / 9)
        return zs_fail(ZS_ERR_CORRUPT,
                       "manifest '%s', line %zu: %" PRIu64 " parameters do not fit "
                       "into what follows",
                       l->where, l->number, count);
    flat->names = calloc(count + 1, sizeof *flat->names);
    flat->numels = calloc(count + 1, sizeof *flat->numels);
    if (!flat->names || !flat->numels)
        return zs_fail(ZS_ERR_NOMEM, "manifest '%s': no memory for %" PRIu64 " parameters",
                       l->where, count);
    flat->count = count;
    for (size_t p = 0; p < count; p++) {
        const char *name;
        ZS_CHECK(take(l, "param", 10, &flat->numels[p], &name, &length));
        flat->names[p] = strndup(name, length);
        if (!flat->names[p])
            return zs_fail(ZS_ERR_NOMEM, "manifest '%s': no memory for a name", l->where);
    }
    return ZS_OK;
}

static zs_status parse(lines *l, zs_manifest *m)
{
    uint64_t world, slots, replicated, flats;
    if (strncmp(l->at, first_line, sizeof first_line - 1) != 0)
        return zs_fail(ZS_ERR_CORRUPT,
                       "manifest '%s' does not begin with '%.*s': another version "
                       "of zspill wrote it, or it is no manifest",
                       l->where, (int)sizeof first_line - 2, first_line);
    l->at += sizeof first_line - 1;
    l->number = 1;
    ZS_CHECK(take(l, "fingerprint", 16, &m->fingerprint, NULL, NULL));
    ZS_CHECK(take(l, "run", 16, &m->run, NULL, NULL));
    ZS_CHECK(take(l, "generation", 10, &m->generation, NULL, NULL));
    ZS_CHECK(take_count(l, "world", 64, &world));
    ZS_CHECK(take(l, "chunk_numel", 10, &m->chunk_numel, NULL, NULL));
    ZS_CHECK(take_count(l, "slots", ZS_STORE_SLOTS_MOST, &slots));
    ZS_CHECK(take_count(l, "replicated", 1, &replicated));
    ZS_CHECK(take_count(l, "flats", COUNT_MOST, &flats));
    if (flats > (size_t)(l->end - l->at) / 7)
        return zs_fail(ZS_ERR_CORRUPT,
                       "manifest '%s', line %zu: %" PRIu64 " flat buffers do not fit "
                       "into what follows",
                       l->where, l->number, flats);
    if (!world || !slots || !m->generation)
        return zs_fail(ZS_ERR_CORRUPT, "manifest '%s': world, slots and generation must not be 0",
                       l->where);
    m->world = (int)world;
    m->slots = (int)slots;
    m->replicated = (int)replicated;
    m->flats = calloc(flats + 1, sizeof *m->flats);
    if (!m->flats)
        return zs_fail(ZS_ERR_NOMEM, "manifest '%s': no memory for its tables", l->where);
    m->flat_count = flats;
    for (size_t f = 0; f < flats; f++)
        ZS_CHECK(parse_flat(l, &m->flats[f]));
    return ZS_OK;
}

zs_status zs_manifest_parse(const char *text, const char *where, zs_manifest **out)
{
    zs_status status;
    zs_manifest *m = calloc(1, sizeof *m);
    lines l = {.at = text, .end = text + strlen(text), .where = where};
    uint64_t crc;
    *out = NULL;
    if (!m)
        return zs_fail(ZS_ERR_NOMEM, "manifest '%s': no memory", where);
    ZS_TRY(parse(&l, m));
    const size_t covered = (size_t)(l.at - text);
    ZS_TRY(take(&l, "crc32c", 16, &crc, NULL, NULL));
    if (crc != zs_crc32c(0, text, covered) || *l.at) {
        status = zs_fail(ZS_ERR_CORRUPT,
                         "manifest '%s': its checksum is wrong: restore the file "
                         "from a copy, or start afresh in an empty directory",
                         where);
        goto fail;
    }
    *out = m;
    return ZS_OK;
fail:
    zs_manifest_free(&m);
    return status;
}

zs_status zs_manifest_load(const char *dir, zs_manifest **out)
{
    zs_status status = ZS_OK;
    char *path = path_of(dir), *text = NULL;
    FILE *file = NULL;
    struct stat st;
    *out = NULL;
    if (!path)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the manifest's path in '%s'", dir);
    file = fopen(path, "re");
    if (!file) {
        if (errno != ENOENT && errno != ENOTDIR)
            status = zs_fail(errno == ENOMEM ? ZS_ERR_NOMEM : ZS_ERR_IO,
                             "manifest '%s' cannot be read: %s", path, strerror(errno));
        goto fail;
    }
    if (fstat(fileno(file), &st) || st.st_size > MANIFEST_MOST) {
        status =
            zs_fail(ZS_ERR_CORRUPT, "manifest '%s' is larger than %d bytes", path, MANIFEST_MOST);
        goto fail;
    }
    text = calloc(1, (size_t)st.st_size + 1);
    if (!text) {
        status = zs_fail(ZS_ERR_NOMEM, "manifest '%s': no memory for its %lld bytes", path,
                         (long long)st.st_size);
        goto fail;
    }
    if (fread(text, 1, (size_t)st.st_size, file) != (size_t)st.st_size) {
        status = zs_fail(ZS_ERR_IO, "manifest '%s' cannot be read: %s", path, strerror(errno));
        goto fail;
    }
    status = zs_manifest_parse(text, path, out);
fail:
    if (file)
        fclose(file);
    free(text);
    free(path);
    return status;
}

zs_status zs_manifest_find(const zs_manifest *m, const char *dir, const char *name, uint64_t numel,
                           size_t *flat, size_t *at)
{
    for (*flat = 0; *flat < m->flat_count; ++*flat) {
        const zs_manifest_flat *f = &m->flats[*flat];
        for (*at = 0; *at < f->count; ++*at) {
            if (strcmp(f->names[*at], name) != 0)
                continue;
            if (f->numels[*at] == numel)
                return ZS_OK;
            return zs_fail(ZS_ERR_MISMATCH,
                           "parameter '%s' has %llu elements, and %llu in the state in '%s'", name,
                           (unsigned long long)numel, (unsigned long long)f->numels[*at], dir);
        }
    }
    return zs_fail(ZS_ERR_MISMATCH,
                   "parameter '%s' is not in the state in '%s': take the model it was made with",
                   name, dir);
}

/* ---- writing ---- */

static void print(FILE *out, const zs_manifest *m)
{
    fprintf(out, "%sfingerprint %" PRIx64 "\nrun %" PRIx64 "\n", first_line, m->fingerprint,
            m->run);
    fprintf(out, "generation %" PRIu64 "\nworld %d\n", m->generation, m->world);
    fprintf(out, "chunk_numel %" PRIu64 "\nslots %d\nreplicated %d\n", m->chunk_numel, m->slots,
            m->replicated);
    fprintf(out, "flats %zu\n", m->flat_count);
    for (size_t f = 0; f < m->flat_count; f++) {
        fprintf(out, "flat %zu %s\n", m->flats[f].count, zs_dtype_name(m->flats[f].dtype));
        for (size_t p = 0; p < m->flats[f].count; p++)
            fprintf(out, "param %" PRIu64 " %s\n", m->flats[f].numels[p], m->flats[f].names[p]);
    }
}

zs_status zs_manifest_save(const char *dir, zs_io *io, const zs_manifest *m)
{
    zs_status status;
    char *text = NULL, *path = path_of(dir);
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (!path || !out) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory for the manifest of '%s'", dir);
        goto fail;
    }
    print(out, m);
    /* What found no room may have been dropped long before the flush. */
    if (fflush(out) || ferror(out)) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory for the manifest of '%s'", dir);
        goto fail;
    }
    fprintf(out, "crc32c %" PRIx32 "\n", zs_crc32c(0, text, bytes));
    const int failed = fclose(out);
    out = NULL;
    /* Closing makes the text as short as it is, and drops it where that fails. */
    if (failed || !text) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory for the manifest of '%s'", dir);
        goto fail;
    }
    status = zs_io_replace_file(io, path, text, bytes);
    if (status != ZS_OK)
        status = zs_fail_prefix(status, "the manifest cannot be written: ");
fail:
    if (out)
        fclose(out);
    free(text);
    free(path);
    return status;
}
