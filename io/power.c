/* SPDX-License-Identifier: Apache-2.0 */
/* What of a file survives when the power fails: everything is written at once and what was there
 * before is kept until a flush; at the cut all of it is put back, oldest last, and then those
 * writes (or sectors of them) that a disk might have got to are written again, in their order. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fork.h"
#include "base/status.h"
#include "base/util.h"
#include "io/fault_impl.h"

enum { SECTOR = 512 };

/* A write, or (data NULL) an allocation. */
typedef struct event {
    uint64_t offset; /* allocation: the size before it */
    uint64_t after;  /* allocation: the size after it */
    uint32_t bytes;
    unsigned char *data; /* what was there before; during a cut: what was written */
} event;

/* Its own descriptor: a file may be closed before the power fails. */
typedef struct power_file {
    dev_t dev;
    ino_t ino;
    int fd;
    event *events;
    size_t count, capacity;
} power_file;

struct zs_power {
    uint64_t random;
    power_file *files;
    size_t count;
    unsigned char *scratch; /* ZS_IO_REQUEST */
    zs_power_names *names;
};

zs_status zs_power_open(uint64_t seed, zs_power **out)
{
    zs_power *power = calloc(1, sizeof *power);

    *out = NULL;
    if (!power || !(power->scratch = aligned_alloc(ZS_IO_ALIGN, ZS_IO_REQUEST)) ||
        !(power->names = zs_power_names_open())) {
        if (power)
            free(power->scratch);
        free(power);
        return zs_fail(ZS_ERR_NOMEM, "faults: no memory for a power supply");
    }
    power->random = seed;
    *out = power;
    return ZS_OK;
}

static void forget_events(power_file *file)
{
    for (size_t i = 0; i < file->count; i++)
        free(file->events[i].data);
    file->count = 0;
}

void zs_power_close(zs_power *power)
{
    if (!power)
        return;
    for (size_t i = 0; i < power->count; i++) {
        forget_events(&power->files[i]);
        free(power->files[i].events);
        zs_fork_unguard_fd(power->files[i].fd);
        close(power->files[i].fd);
    }
    free(power->files);
    zs_power_names_close(power->names);
    free(power->scratch);
    free(power);
}

static power_file *find_file(zs_power *power, const struct stat *st)
{
    for (size_t i = 0; i < power->count; i++)
        if (power->files[i].dev == st->st_dev && power->files[i].ino == st->st_ino)
            return &power->files[i];
    return NULL;
}

/* NULL with errno. */
static power_file *note_file(zs_power *power, const zs_file *file, struct stat *st)
{
    power_file *found, *files;
    int fd;

    if (fstat(file->fd, st))
        return NULL;
    found = find_file(power, st);
    if (found)
        return found;
    files = realloc(power->files, (power->count + 1) * sizeof *files);
    if (!files)
        return NULL;
    power->files = files;
    fd = fcntl(file->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return NULL;
    if (zs_fork_guard_fd(fd) != ZS_OK) {
        close(fd);
        errno = ENOMEM;
        return NULL;
    }
    files[power->count] = (power_file){.dev = st->st_dev, .ino = st->st_ino, .fd = fd};
    return &files[power->count++];
}

static event *add_event(power_file *file)
{
    if (file->count == file->capacity) {
        size_t capacity = file->capacity ? 2 * file->capacity : 64;
        event *events = realloc(file->events, capacity * sizeof *events);
        if (!events)
            return NULL;
        file->events = events;
        file->capacity = capacity;
    }
    file->events[file->count] = (event){0};
    return &file->events[file->count++];
}

/* All of it, zeros beyond the end of the file. 0 or a positive errno. */
static int read_all(int fd, unsigned char *data, uint32_t bytes, uint64_t offset)
{
    ssize_t n = pread(fd, data, bytes, (off_t)offset);

    if (n < 0)
        return errno;
    memset(data + n, 0, bytes - (size_t)n);
    return 0;
}

static int write_all(int fd, const unsigned char *data, uint32_t bytes, uint64_t offset)
{
    ssize_t n = pwrite(fd, data, bytes, (off_t)offset);

    return n == (ssize_t)bytes ? 0 : n < 0 ? errno : EIO;
}

int zs_power_write(zs_power *power, const zs_file *file, const void *data, uint32_t bytes,
                   uint64_t offset)
{
    struct stat st;
    power_file *noted = note_file(power, file, &st);
    unsigned char *before = aligned_alloc(ZS_IO_ALIGN, zs_round_up(ZS_MAX(bytes, 1u), ZS_IO_ALIGN));
    event *e = noted && before ? add_event(noted) : NULL;
    ssize_t n;
    int error;

    if (!e) {
        free(before);
        return -ENOMEM;
    }
    *e = (event){.offset = offset, .bytes = bytes, .data = before};
    error = read_all(file->fd, before, bytes, offset);
    n = error ? -1 : pwrite(file->fd, data, bytes, (off_t)offset);
    if (n >= 0)
        return (int)n;
    error = error ? error : errno;
    free(before);
    noted->count--;
    return -error;
}

int zs_power_allocate(zs_power *power, const zs_file *file)
{
    struct stat st;
    power_file *noted = note_file(power, file, &st);
    event *e = noted ? add_event(noted) : NULL;

    if (!e)
        return ENOMEM;
    e->offset = (uint64_t)st.st_size;
    return 0;
}

void zs_power_flushed(zs_power *power, const zs_file *file)
{
    struct stat st;
    power_file *noted = fstat(file->fd, &st) ? NULL : find_file(power, &st);

    if (noted)
        forget_events(noted);
}

int zs_power_rename(zs_power *power, const char *from, const char *to)
{
    return zs_power_names_rename(power->names, from, to);
}

void zs_power_flushed_dir(zs_power *power, int fd)
{
    zs_power_names_flushed(power->names, fd);
}

/* ---- the cut ---- */

static int undo(zs_power *power, const power_file *file, event *e)
{
    struct stat st;
    int error;

    if (!e->data) {
        if (fstat(file->fd, &st))
            return errno;
        e->after = (uint64_t)st.st_size;
        return ftruncate(file->fd, (off_t)e->offset) ? errno : 0;
    }
    error = read_all(file->fd, power->scratch, e->bytes, e->offset);
    if (!error)
        error = write_all(file->fd, e->data, e->bytes, e->offset);
    memcpy(e->data, power->scratch, e->bytes);
    return error;
}

/* Every other sector, on average. */
static int tear(zs_power *power, const power_file *file, const event *e)
{
    int error = read_all(file->fd, power->scratch, e->bytes, e->offset);

    if (error)
        return error;
    for (uint32_t at = 0; at < e->bytes; at += SECTOR)
        if (zs_fault_random(&power->random) >> 63)
            memcpy(power->scratch + at, e->data + at, ZS_MIN(SECTOR, e->bytes - at));
    return write_all(file->fd, power->scratch, e->bytes, e->offset);
}

/* *gone: the allocation was lost, and with it what came later. */
static int redo(zs_power *power, const power_file *file, const event *e, int *gone)
{
    uint64_t choice = (zs_fault_random(&power->random) >> 32) % 3;

    if (*gone)
        return 0;
    if (!e->data) {
        *gone = choice == 0;
        return *gone ? 0 : posix_fallocate(file->fd, 0, (off_t)e->after);
    }
    if (choice == 0)
        return 0;
    return choice == 1 ? write_all(file->fd, e->data, e->bytes, e->offset) : tear(power, file, e);
}

int zs_power_cut(zs_power *power)
{
    int first = zs_power_names_cut(power->names, &power->random);

    for (size_t i = 0; i < power->count; i++) {
        power_file *file = &power->files[i];
        int gone = 0, error = 0;
        for (size_t k = file->count; k-- > 0 && !error;)
            error = undo(power, file, &file->events[k]);
        for (size_t k = 0; k < file->count && !error; k++)
            error = redo(power, file, &file->events[k], &gone);
        forget_events(file);
        first = first ? first : error;
    }
    return first;
}
