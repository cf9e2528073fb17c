/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/states_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

enum { ARRAYS = 3, FIXED_ENTRIES = 3, NAME_BYTES = 128 };

static const char *array_name(zs_array array)
{
    static const char *const names[ARRAYS] = {"master", "exp_avg", "exp_avg_sq"};
    return names[array - ZS_MASTER];
}

/* NAME.ARRAY or NAME.step */
static void name_of(const zs_weight *weight, const char *what, char out[NAME_BYTES])
{
    snprintf(out, NAME_BYTES, "%s.%s", weight->name, what);
}

static zs_status add_entry(zs_states_file *f, const char *key, const char *value)
{
    zs_st_entry *entry = &f->entries[f->entry_count++];
    entry->key = strdup(key);
    entry->value = strdup(value);
    return entry->key && entry->value ? ZS_OK : zs_fail(ZS_ERR_NOMEM, "no memory for metadata");
}

static zs_status add_number(zs_states_file *f, const char *key, const char *format, uint64_t value)
{
    char text[24];
    snprintf(text, sizeof text, format, (unsigned long long)value);
    return add_entry(f, key, text);
}

static zs_status describe(zs_states_file *f)
{
    char name[NAME_BYTES];
    const char *record = f->header.user;
    if (f->header.user_bytes > 1 && strlen(record) + 1 == f->header.user_bytes)
        ZS_CHECK(add_entry(f, "zspill.record", record));
    ZS_CHECK(add_number(f, "zspill.fingerprint", "%016llx", f->fingerprint));
    ZS_CHECK(add_number(f, "zspill.step", "%llu", f->header.step));
    for (size_t i = 0; i < f->count; i++) {
        name_of(&f->weights[i], "step", name);
        ZS_CHECK(add_number(f, name, "%llu", f->header.steps[i]));
        for (zs_array a = ZS_MASTER; a <= ZS_EXP_AVG_SQ; a++) {
            zs_st_tensor *t = &f->tensors[i * ARRAYS + (size_t)(a - ZS_MASTER)];
            name_of(&f->weights[i], array_name(a), name);
            t->name = strdup(name);
            if (!t->name)
                return zs_fail(ZS_ERR_NOMEM, "no memory for a tensor's name");
            t->dtype = ZS_ST_F32;
            t->ndim = f->weights[i].ndim;
            memcpy(t->shape, f->weights[i].shape, sizeof f->weights[i].shape);
        }
    }
    return ZS_OK;
}

zs_status zs_states_file_create(zs_states_file *f, const char *path)
{
    zs_status status;
    f->tensors = calloc(f->count * ARRAYS + 1, sizeof *f->tensors);
    f->entries = calloc(f->count + FIXED_ENTRIES, sizeof *f->entries);
    if (!f->tensors || !f->entries) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory for the states of %zu weights", f->count);
        goto fail;
    }
    ZS_TRY(describe(f));
    ZS_TRY(zs_st_plan_with(path, f->entries, f->entry_count, f->tensors, f->count * ARRAYS, 1,
                           &f->writer));
    return ZS_OK;
fail:
    zs_states_file_discard(f);
    return status;
}

zs_status zs_states_file_write(const zs_states_file *f, size_t weight, zs_array array,
                               uint64_t first, uint64_t count, const float *src)
{
    return zs_st_write(f->writer, &f->tensors[weight * ARRAYS + (size_t)(array - ZS_MASTER)], first,
                       count, src);
}

zs_status zs_states_file_finish(zs_states_file *f)
{
    const zs_status status = zs_st_finish(&f->writer, 1);
    zs_states_file_discard(f);
    return status;
}

void zs_states_file_discard(zs_states_file *f)
{
    if (f->writer)
        zs_st_discard(&f->writer);
    for (size_t i = 0; f->tensors && i < f->count * ARRAYS; i++)
        free(f->tensors[i].name);
    for (size_t i = 0; i < f->entry_count; i++) {
        free(f->entries[i].key);
        free(f->entries[i].value);
    }
    free(f->tensors);
    free(f->entries);
    free(f->record);
    zs_st_close(&f->st);
    f->tensors = NULL;
    f->entries = NULL;
    f->record = NULL;
    f->entry_count = 0;
}

/* ---- reading ---- */

static zs_status number(const zs_states_file *f, const char *path, const char *key, int base,
                        uint64_t *out)
{
    char *end;
    const char *text = zs_st_metadata(f->st, key);
    if (!text)
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s has no metadata \"%s\": it was not written by `zspill export --states`",
                       path, key);
    *out = strtoull(text, &end, base);
    if (end == text || *end)
        return zs_fail(ZS_ERR_CORRUPT, "%s: metadata \"%s\" is \"%.40s\", not a number", path, key,
                       text);
    return ZS_OK;
}

static zs_status check_tensor(const zs_states_file *f, const char *path, const zs_weight *w,
                              const char *name)
{
    const zs_st_tensor *t = zs_st_find(f->st, name);
    if (!t)
        return zs_fail(ZS_ERR_MISMATCH,
                       "%s has no tensor \"%s\": take the model that the states belong to", path,
                       name);
    int same = t->dtype == ZS_ST_F32 && t->ndim == w->ndim;
    for (int d = 0; same && d < w->ndim; d++)
        same = t->shape[d] == w->shape[d];
    if (!same)
        return zs_fail(ZS_ERR_MISMATCH,
                       "%s: tensor \"%s\" has not the shape of the model's weight in F32: take the "
                       "model that the states belong to",
                       path, name);
    return ZS_OK;
}

zs_status zs_states_file_open(zs_states_file *f, const char *path)
{
    char name[NAME_BYTES];
    ZS_CHECK(zs_st_open(path, &f->st));
    ZS_CHECK(number(f, path, "zspill.fingerprint", 16, &f->fingerprint));
    ZS_CHECK(number(f, path, "zspill.step", 10, &f->header.step));
    const char *record = zs_st_metadata(f->st, "zspill.record");
    if (!record || strlen(record) >= ZS_USER_BYTES_MAX)
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s has no record of a run in its metadata: it does not come from a state "
                       "of `zspill train`",
                       path);
    f->record = strdup(record);
    if (!f->record)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the run's record");
    f->header.user = f->record;
    f->header.user_bytes = strlen(record) + 1;
    for (size_t i = 0; i < f->count; i++) {
        name_of(&f->weights[i], "step", name);
        ZS_CHECK(number(f, path, name, 10, &f->header.steps[i]));
        for (zs_array a = ZS_MASTER; a <= ZS_EXP_AVG_SQ; a++) {
            name_of(&f->weights[i], array_name(a), name);
            ZS_CHECK(check_tensor(f, path, &f->weights[i], name));
        }
    }
    if (zs_st_count(f->st) != f->count * ARRAYS)
        return zs_fail(ZS_ERR_MISMATCH,
                       "%s has %zu tensors, %zu belong to this model's %zu weights: take the model "
                       "that the states belong to",
                       path, zs_st_count(f->st), f->count * ARRAYS, f->count);
    return ZS_OK;
}

zs_status zs_states_file_read(const zs_states_file *f, size_t weight, zs_array array,
                              uint64_t first, uint64_t count, float *dst)
{
    char name[NAME_BYTES];
    name_of(&f->weights[weight], array_name(array), name);
    return zs_st_read(f->st, zs_st_find(f->st, name), first, count, dst);
}
