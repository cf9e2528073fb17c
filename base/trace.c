/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "zspill.h"

enum { EVENTS_DEFAULT = 1000000 };

typedef struct event {
    const char *track, *name;
    uint64_t begin, end;
    int rank;
} event;

struct zs_trace {
    pthread_mutex_t lock;
    char *path;
    int fd;
    event *events;
    size_t count, capacity, max;
    uint64_t dropped;
};

/* A row in the viewer; its place in the list is its thread id. */
typedef struct track {
    int rank;
    const char *name;
} track;

uint64_t zs_trace_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

zs_status zs_trace_open(const char *path, size_t max_events, zs_trace **out)
{
    zs_trace *trace;
    zs_status status;

    if (!path || !out)
        return zs_fail(ZS_ERR_ARG, "zs_trace_open: path or out is NULL");
    *out = NULL;
    trace = calloc(1, sizeof *trace);
    if (!trace || !(trace->path = strdup(path))) {
        free(trace);
        return zs_fail(ZS_ERR_NOMEM, "trace '%s': out of memory", path);
    }
    trace->max = max_events ? max_events : EVENTS_DEFAULT;
    /* O_NONBLOCK: a FIFO that nobody reads must not hang the open. */
    trace->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK, 0666);
    if (trace->fd < 0) {
        status = zs_fail(ZS_ERR_IO, "trace '%s' cannot be created: %s; choose another path", path,
                         strerror(errno));
        free(trace->path);
        free(trace);
        return status;
    }
    fcntl(trace->fd, F_SETFL, 0);
    pthread_mutex_init(&trace->lock, NULL);
    *out = trace;
    return ZS_OK;
}

static int make_room(zs_trace *trace)
{
    size_t capacity;
    event *events;

    if (trace->count < trace->capacity)
        return 1;
    if (trace->count == trace->max)
        return 0;
    capacity = ZS_MIN(trace->max, trace->capacity ? 2 * trace->capacity : 1024);
    events = realloc(trace->events, capacity * sizeof *events);
    if (!events)
        return 0;
    trace->events = events;
    trace->capacity = capacity;
    return 1;
}

void zs_trace_span(zs_trace *trace, int rank, const char *track_name, const char *name,
                   uint64_t begin_ns, uint64_t end_ns)
{
    if (!trace)
        return;
    pthread_mutex_lock(&trace->lock);
    if (make_room(trace))
        trace->events[trace->count++] = (event){track_name, name, begin_ns, end_ns, rank};
    else
        trace->dropped++;
    pthread_mutex_unlock(&trace->lock);
}

static void put_string(FILE *file, const char *text)
{
    putc('"', file);
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            fprintf(file, "\\%c", c);
        else if (c < 0x20)
            fprintf(file, "\\u%04x", c);
        else
            putc(c, file);
    }
    putc('"', file);
}

static void put_time(FILE *file, const char *key, uint64_t ns)
{
    /* Microseconds, with all digits. */
    fprintf(file, ",\"%s\":%llu.%03u", key, (unsigned long long)(ns / 1000), (unsigned)(ns % 1000));
}

static void put_metadata(FILE *file, const char *what, int rank, size_t tid, const char *name)
{
    fprintf(file, "{\"ph\":\"M\",\"name\":\"%s\",\"pid\":%d,\"tid\":%zu,\"args\":{\"name\":", what,
            rank, tid);
    put_string(file, name);
    fputs("}},\n", file);
}

/* Writes the names of rank and track when they are new. SIZE_MAX: out of memory. */
static size_t find_track(FILE *file, track **tracks, size_t *count, const event *e)
{
    int new_rank = 1;
    track *grown;

    for (size_t i = 0; i < *count; i++) {
        if ((*tracks)[i].rank != e->rank)
            continue;
        new_rank = 0;
        if ((*tracks)[i].name == e->track || !strcmp((*tracks)[i].name, e->track))
            return i;
    }
    grown = realloc(*tracks, (*count + 1) * sizeof *grown);
    if (!grown)
        return SIZE_MAX;
    *tracks = grown;
    grown[*count] = (track){e->rank, e->track};
    if (new_rank) {
        char name[32];
        snprintf(name, sizeof name, "rank %d", e->rank);
        put_metadata(file, "process_name", e->rank, *count, name);
    }
    put_metadata(file, "thread_name", e->rank, *count, e->track);
    return (*count)++;
}

static int write_events(FILE *file, const zs_trace *trace)
{
    track *tracks = NULL;
    size_t count = 0;
    int fine = 1;

    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", file);
    for (size_t i = 0; i < trace->count && fine; i++) {
        const event *e = &trace->events[i];
        size_t tid = find_track(file, &tracks, &count, e);
        if (tid == SIZE_MAX) {
            fine = 0;
            break;
        }
        fputs("{\"ph\":\"X\",\"name\":", file);
        put_string(file, e->name);
        fprintf(file, ",\"pid\":%d,\"tid\":%zu", e->rank, tid);
        put_time(file, "ts", e->begin);
        put_time(file, "dur", e->end > e->begin ? e->end - e->begin : 0);
        fputs("},\n", file);
    }
    /* The last event is a constant one, so that every other ends in a comma. */
    fprintf(file,
            "{\"ph\":\"M\",\"name\":\"zspill_trace\",\"pid\":0,\"tid\":0,\"args\":{\"events\":%zu,"
            "\"dropped\":%llu}}\n]}\n",
            trace->count, (unsigned long long)trace->dropped);
    free(tracks);
    if (!fine)
        errno = ENOMEM;
    return fine && !ferror(file);
}

zs_status zs_trace_close(zs_trace **out)
{
    zs_trace *trace = out ? *out : NULL;
    zs_status status = ZS_OK;
    FILE *file;
    int fine;

    if (!trace)
        return ZS_OK;
    *out = NULL;
    file = fdopen(trace->fd, "w");
    fine = file && write_events(file, trace);
    if (file)
        fine = !fclose(file) && fine;
    else
        close(trace->fd);
    if (!fine)
        status = zs_fail(ZS_ERR_IO, "trace '%s': writing %zu events failed: %s", trace->path,
                         trace->count, strerror(errno));
    pthread_mutex_destroy(&trace->lock);
    free(trace->events);
    free(trace->path);
    free(trace);
    return status;
}
