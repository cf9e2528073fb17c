/* SPDX-License-Identifier: Apache-2.0 */
/* What is to be broken, and whether it is its turn. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/fault_impl.h"

enum {
    ITEM_BYTES = 200,
    ITEMS = 64,
    CHANGE = ZS_FAULT_WRITE | ZS_FAULT_SYNC | ZS_FAULT_ALLOCATE | ZS_FAULT_RENAME
};

struct zs_fault_rule {
    unsigned ops; /* of zs_fault_op */
    uint64_t first, last, every;
    char file[ITEM_BYTES];
    zs_fault fault;
    int by_default; /* short or flip without a number */
    uint64_t seen;
};

/* ---- reading a specification ---- */

static zs_status fail_item(const char *item, const char *why)
{
    return zs_fail(ZS_ERR_ARG, "fault '%s': %s; see docs/faults.md", item, why);
}

/* 1 and *end behind it; 0: there is no number. */
static int read_number(const char *text, char **end, uint64_t *out)
{
    if (*text < '0' || *text > '9')
        return 0;
    errno = 0;
    *out = strtoull(text, end, 10);
    return !errno;
}

static int read_op(const char *text, unsigned *ops)
{
    static const struct {
        const char *name;
        unsigned ops;
    } names[] = {{"read", ZS_FAULT_READ},        {"write", ZS_FAULT_WRITE},
                 {"sync", ZS_FAULT_SYNC},        {"allocate", ZS_FAULT_ALLOCATE},
                 {"rename", ZS_FAULT_RENAME},    {"change", CHANGE},
                 {"any", ZS_FAULT_READ | CHANGE}};

    for (size_t i = 0; i < ZS_COUNT(names); i++) {
        if (strcmp(text, names[i].name) != 0)
            continue;
        *ops = names[i].ops;
        return 1;
    }
    return 0;
}

static int read_when(const char *text, zs_fault_rule *r)
{
    char *end;

    if (!read_number(text, &end, &r->first) || !r->first)
        return 0;
    r->last = r->first;
    switch (*end) {
    case '\0':
        return 1;
    case '+':
        r->last = UINT64_MAX;
        return !end[1];
    case '-':
        return read_number(end + 1, &end, &r->last) && !*end && r->last >= r->first;
    case '/':
        r->last = UINT64_MAX;
        return read_number(end + 1, &end, &r->every) && !*end && r->every;
    default:
        return 0;
    }
}

static int read_errno(const char *text, int *out)
{
#define NAME(e)                                                                                    \
    {                                                                                              \
#e, e                                                                                      \
    }
    static const struct {
        const char *name;
        int value;
    } names[] = {NAME(EIO),    NAME(ENOSPC),    NAME(EDQUOT), NAME(EAGAIN), NAME(EINTR),
                 NAME(ENOMEM), NAME(EROFS),     NAME(EFBIG),  NAME(EINVAL), NAME(EACCES),
                 NAME(EPERM),  NAME(ENODEV),    NAME(ENXIO),  NAME(EBUSY),  NAME(ENOLINK),
                 NAME(ESTALE), NAME(ETIMEDOUT), NAME(EBADF),  NAME(EFAULT), NAME(ECANCELED)};
#undef NAME

    for (size_t i = 0; i < ZS_COUNT(names); i++)
        if (!strcmp(text, names[i].name))
            *out = names[i].value;
    return *out != 0;
}

static int read_fault(const char *text, zs_fault_rule *r)
{
    zs_fault *fault = &r->fault;
    const char *colon = strchrnul(text, ':');
    size_t length = (size_t)(colon - text);
    uint64_t number = 0;
    char *end;
    int has_number = *colon && read_number(colon + 1, &end, &number) && !*end;
    int plain = !*colon;

    if (!strncmp(text, "cut", length) && length == 3) {
        fault->cut = plain                          ? ZS_CUT_ERROR
                     : !strcmp(colon + 1, "kill")   ? ZS_CUT_KILL
                     : !strcmp(colon + 1, "silent") ? ZS_CUT_SILENT
                                                    : ZS_CUT_NONE;
        return fault->cut != ZS_CUT_NONE;
    }
    r->by_default = plain;
    if (!strncmp(text, "short", length) && length == 5) {
        fault->shorten = 1;
        fault->short_bytes = (uint32_t)ZS_MIN(number, (uint64_t)ZS_IO_REQUEST);
        return plain || has_number;
    }
    if (!strncmp(text, "flip", length) && length == 4) {
        fault->flip = 1;
        fault->flip_bit = number;
        return plain || has_number;
    }
    if (!strncmp(text, "delay", length) && length == 5) {
        fault->delay = (double)number * 1e-3;
        return has_number;
    }
    return plain && read_errno(text, &fault->error);
}

static zs_status read_item(zs_faults *faults, const char *item)
{
    char text[ITEM_BYTES], *equals, *at, *file, *end;
    zs_fault_rule r = {.first = 1, .last = UINT64_MAX, .every = 1};

    snprintf(text, sizeof text, "%s", item);
    equals = strchr(text, '=');
    if (!equals)
        return fail_item(item, "there is no '='");
    *equals = '\0';
    if (!strcmp(text, "seed"))
        return read_number(equals + 1, &end, &faults->seed) && !*end
                   ? ZS_OK
                   : fail_item(item, "the seed is no number");
    at = strchr(text, '@');
    if (at)
        *at++ = '\0';
    if (!read_op(text, &r.ops))
        return fail_item(item, "use read, write, sync, allocate, rename, change, any or seed");
    if (at && !read_when(at, &r))
        return fail_item(item, "after @ use N, N-M, N+ or N/K, counted from 1");
    file = strstr(equals + 1, ",file=");
    if (file) {
        *file = '\0';
        snprintf(r.file, sizeof r.file, "%s", file + strlen(",file="));
    }
    if (!read_fault(equals + 1, &r))
        return fail_item(item, "after = use an errno such as EIO, short[:BYTES], flip[:BIT], "
                               "delay:MS or cut[:kill|:silent]");
    if ((r.fault.shorten || r.fault.flip) && (r.ops & CHANGE & ~(unsigned)ZS_FAULT_WRITE))
        return fail_item(item, "only reads and writes have bytes to shorten or to flip");
    if (faults->count == ITEMS)
        return fail_item(item, "there are more than 64 of them");
    faults->rules[faults->count++] = r;
    return ZS_OK;
}

zs_status zs_faults_open(const char *spec, zs_faults **out)
{
    zs_faults *faults = calloc(1, sizeof *faults);
    zs_status status = ZS_OK;
    int cuts = 0;

    *out = NULL;
    if (!faults || !(faults->spec = strdup(spec)) ||
        !(faults->rules = calloc(ITEMS, sizeof *faults->rules))) {
        if (faults)
            free(faults->spec);
        free(faults);
        return zs_fail(ZS_ERR_NOMEM, "no memory for faults");
    }
    pthread_mutex_init(&faults->lock, NULL);
    faults->users = 1;
    while (*spec) {
        char item[ITEM_BYTES];
        size_t length = strcspn(spec, ";");
        snprintf(item, sizeof item, "%.*s", (int)ZS_MIN(length, (size_t)ITEM_BYTES), spec);
        spec += length + (spec[length] == ';');
        if (length >= ITEM_BYTES)
            status = fail_item(item, "it is longer than 199 characters");
        else if (length)
            status = read_item(faults, item);
        if (status != ZS_OK)
            goto fail;
    }
    faults->random = faults->seed;
    for (size_t i = 0; i < faults->count; i++)
        cuts |= faults->rules[i].fault.cut;
    if (cuts)
        ZS_TRY(zs_power_open(faults->seed, &faults->power));
    *out = faults;
    return ZS_OK;

fail:
    zs_faults_close(&faults);
    return status;
}

void zs_faults_close(zs_faults **out)
{
    zs_faults *faults = *out;
    unsigned left;

    if (!faults)
        return;
    *out = NULL;
    pthread_mutex_lock(&faults->lock);
    left = --faults->users;
    pthread_mutex_unlock(&faults->lock);
    if (left)
        return;
    zs_power_close(faults->power);
    pthread_mutex_destroy(&faults->lock);
    free(faults->rules);
    free(faults->spec);
    free(faults);
}

/* Ranks as threads open their engines one by one, and one that failed may have closed its own
 * before the next opens: what power and counts belong to is the process. */
zs_status zs_faults_of_environment(zs_faults **out)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static zs_faults *present;
    const char *spec = secure_getenv("ZSPILL_FAULTS");
    zs_status status = ZS_OK;

    *out = NULL;
    if (!spec || !*spec)
        return ZS_OK;
    pthread_mutex_lock(&lock);
    if (present && strcmp(present->spec, spec) != 0)
        zs_faults_close(&present);
    if (!present)
        status = zs_faults_open(spec, &present);
    *out = present;
    pthread_mutex_unlock(&lock);
    return status == ZS_OK ? ZS_OK : zs_fail_prefix(status, "ZSPILL_FAULTS: ");
}

/* ---- whose turn it is ---- */

static int is_due(const zs_fault_rule *r)
{
    return r->seen >= r->first && r->seen <= r->last && (r->seen - r->first) % r->every == 0;
}

static void add_fault(zs_faults *faults, const zs_fault_rule *r, uint32_t bytes, zs_fault *out)
{
    const zs_fault *fault = &r->fault;

    out->delay += fault->delay;
    if (fault->cut && !out->cut)
        out->cut = fault->cut;
    if (fault->error && !out->error)
        out->error = fault->error;
    if (fault->shorten && !out->shorten) {
        /* Half a page of a direct file would be its end. */
        uint32_t half = bytes / 2 & ~(uint32_t)(ZS_IO_ALIGN - 1);
        out->shorten = !r->by_default || half;
        out->short_bytes = r->by_default ? half : ZS_MIN(fault->short_bytes, bytes);
    }
    if (fault->flip && bytes) {
        uint64_t bit = r->by_default ? zs_fault_random(&faults->random) : fault->flip_bit;
        out->flip = 1;
        out->flip_bit = bit % ((uint64_t)bytes * 8);
    }
}

void zs_faults_next(zs_faults *faults, zs_fault_op op, const char *path, uint32_t bytes,
                    zs_fault *out)
{
    *out = (zs_fault){0};
    for (size_t i = 0; i < faults->count; i++) {
        zs_fault_rule *r = &faults->rules[i];
        if (!(r->ops & op) || !strstr(path, r->file))
            continue;
        r->seen++;
        if (!is_due(r))
            continue;
        faults->fired++;
        add_fault(faults, r, bytes, out);
    }
}

uint64_t zs_faults_fired(zs_faults *faults)
{
    uint64_t fired;

    pthread_mutex_lock(&faults->lock);
    fired = faults->fired;
    pthread_mutex_unlock(&faults->lock);
    return fired;
}
