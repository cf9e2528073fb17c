/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/metrics.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "model/json.h"

struct zs_metrics {
    char *path;
    int fd;
    int stream;     /* a pipe or a device: nothing to keep or cut */
    int made, rows; /* made here; whether a row was written or kept */
};

static zs_status fail_write(const zs_metrics *metrics)
{
    return zs_fail(ZS_ERR_IO, "--metrics %s cannot be written: %s", metrics->path, strerror(errno));
}

zs_status zs_metrics_open(const char *path, zs_metrics **out)
{
    zs_metrics *metrics = calloc(1, sizeof(*metrics));
    *out = NULL;
    if (!metrics || !(metrics->path = strdup(path))) {
        free(metrics);
        return zs_fail(ZS_ERR_NOMEM, "no memory for --metrics");
    }
    metrics->made = access(path, F_OK) != 0;
    metrics->fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (metrics->fd < 0) {
        zs_status status = fail_write(metrics);
        metrics->made = 0;
        zs_metrics_close(&metrics);
        return status;
    }
    struct stat info;
    metrics->stream = fstat(metrics->fd, &info) || !S_ISREG(info.st_mode);
    *out = metrics;
    return ZS_OK;
}

static zs_status append(zs_metrics *metrics, const char *text, size_t bytes)
{
    metrics->rows = 1;
    while (bytes) {
        ssize_t put = write(metrics->fd, text, bytes);
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return fail_write(metrics);
        text += put;
        bytes -= (size_t)put;
    }
    return ZS_OK;
}

/* The step of a whole row; -1: not one. */
static zs_status row_step(const char *line, size_t bytes, json_int_t *out)
{
    json_t *row = NULL;
    *out = -1;
    if (bytes && line[bytes - 1] == '\n' &&
        zs_json_parse(line, bytes, "a row", &row) == ZS_ERR_NOMEM)
        return ZS_ERR_NOMEM;
    json_t *step = json_object_get(row, "step");
    if (json_is_integer(step))
        *out = json_integer_value(step);
    json_decref(row);
    return ZS_OK;
}

/* *whole: what is kept is how the file begins. */
static zs_status keep_rows(zs_metrics *metrics, FILE *from, FILE *to, uint64_t step, int *whole)
{
    char *line = NULL;
    size_t capacity = 0;
    ssize_t bytes;
    int dropped = 0, lacks_memory = 0;
    *whole = 1;
    while (errno = 0, (bytes = getline(&line, &capacity, from)) > 0) {
        json_int_t number;
        lacks_memory = row_step(line, (size_t)bytes, &number) != ZS_OK;
        if (lacks_memory)
            break;
        if (number < 0 || (uint64_t)number > step) {
            dropped = 1;
            continue;
        }
        *whole &= !dropped;
        if (fwrite(line, 1, (size_t)bytes, to) != (size_t)bytes)
            break;
        metrics->rows = 1;
    }
    /* getline stops as at the end of the file. */
    lacks_memory |= bytes < 0 && errno == ENOMEM;
    free(line);
    if (lacks_memory)
        return zs_fail(ZS_ERR_NOMEM, "--metrics %s: no memory to read its rows", metrics->path);
    return ferror(from) || ferror(to) ? fail_write(metrics) : ZS_OK;
}

zs_status zs_metrics_begin(zs_metrics *metrics, uint64_t step)
{
    char *kept = NULL;
    size_t kept_bytes = 0;
    int whole = 0;
    zs_status status = ZS_OK;
    if (metrics->stream)
        return ZS_OK;
    if (step) {
        FILE *from = fopen(metrics->path, "re");
        FILE *to = open_memstream(&kept, &kept_bytes);
        status = from && to ? keep_rows(metrics, from, to, step, &whole) : fail_write(metrics);
        if (from)
            fclose(from);
        /* Closing makes the text as short as it is, and drops it where that fails. */
        if (to && (fclose(to) || !kept) && status == ZS_OK)
            status =
                zs_fail(ZS_ERR_NOMEM, "--metrics %s: no memory to keep its rows", metrics->path);
    }
    /* Cutting the end off leaves nothing for a kill to tear. */
    if (status == ZS_OK && ftruncate(metrics->fd, whole ? (off_t)kept_bytes : 0))
        status = fail_write(metrics);
    if (status == ZS_OK && kept_bytes && !whole)
        status = append(metrics, kept, kept_bytes);
    free(kept);
    return status;
}

static void set_real(json_t *object, const char *key, double value)
{
    json_object_set_new(object, key, isfinite(value) ? json_real(value) : json_null());
}

static void set_count(json_t *object, const char *key, uint64_t value)
{
    json_object_set_new(object, key, json_integer((json_int_t)value));
}

static zs_status append_row(zs_metrics *metrics, json_t *row)
{
    char *text = json_dumps(row, JSON_COMPACT | JSON_REAL_PRECISION(17));
    const int lacks_memory = zs_json_lacks_memory();
    json_decref(row);
    if (!text || lacks_memory) {
        free(text);
        return zs_fail(ZS_ERR_NOMEM, "--metrics %s: no memory for a row", metrics->path);
    }
    /* One write a row, so that whoever follows the file sees whole ones. */
    size_t bytes = strlen(text);
    char *line = realloc(text, bytes + 2);
    if (!line) {
        free(text);
        return zs_fail(ZS_ERR_NOMEM, "--metrics %s: no memory for a row", metrics->path);
    }
    line[bytes] = '\n';
    zs_status status = append(metrics, line, bytes + 1);
    free(line);
    return status;
}

static json_t *tiers_json(const zs_tier_traffic tier[ZS_TIERS])
{
    json_t *tiers = json_object();
    for (int t = 0; t < ZS_TIERS; t++) {
        json_t *one = json_object();
        set_count(one, "read_bytes", tier[t].read_bytes);
        set_count(one, "written_bytes", tier[t].written_bytes);
        set_real(one, "seconds", tier[t].seconds);
        json_object_set_new(tiers, zs_tier_name((zs_tier)t), one);
    }
    return tiers;
}

static json_t *ledger_json(const zs_memory_row *rows, size_t count)
{
    json_t *ledger = json_array();
    for (size_t i = 0; i < count; i++) {
        json_t *one = json_object();
        json_object_set_new(one, "tier", json_string(zs_tier_name(rows[i].tier)));
        json_object_set_new(one, "purpose", json_string(rows[i].purpose));
        set_count(one, "bytes", rows[i].bytes);
        set_count(one, "peak", rows[i].peak);
        json_array_append_new(ledger, one);
    }
    return ledger;
}

zs_status zs_metrics_step(zs_metrics *metrics, const zs_step_row *row)
{
    zs_json_watch();
    json_t *object = json_object();
    set_count(object, "step", row->step);
    set_real(object, "loss", row->loss);
    set_real(object, "grad_norm", row->grad_norm);
    set_real(object, "lr", row->lr);
    set_count(object, "tokens", row->tokens);
    set_count(object, "targets", row->targets);
    set_real(object, "tokens_per_s", (double)row->tokens / row->seconds);
    set_real(object, "seconds", row->seconds);
    if (row->skipped)
        json_object_set_new(object, "skipped", json_true());
    json_object_set_new(object, "tiers", tiers_json(row->tier));
    json_object_set_new(object, "ledger", ledger_json(row->ledger, row->ledger_rows));
    return append_row(metrics, object);
}

zs_status zs_metrics_eval(zs_metrics *metrics, uint64_t step, double loss, uint64_t targets,
                          double seconds)
{
    zs_json_watch();
    json_t *object = json_object();
    set_count(object, "step", step);
    set_real(object, "eval_loss", loss);
    set_count(object, "targets", targets);
    set_real(object, "seconds", seconds);
    return append_row(metrics, object);
}

void zs_metrics_close(zs_metrics **metrics)
{
    zs_metrics *m = *metrics;
    *metrics = NULL;
    if (!m)
        return;
    if (m->fd >= 0)
        close(m->fd);
    if (m->made && !m->rows)
        unlink(m->path);
    free(m->path);
    free(m);
}
