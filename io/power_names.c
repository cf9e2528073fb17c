/* SPDX-License-Identifier: Apache-2.0 */
/* What of renames survives when the power fails: those up to some point, in their order, as a
 * journal keeps them; a flushed directory keeps all that were made in it. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/fault_impl.h"

typedef struct name_event {
    dev_t dev; /* of the directory */
    ino_t ino;
    char *from, *to;
    int replaced; /* there was a file, and it held: */
    unsigned char *data;
    size_t bytes;
} name_event;

struct zs_power_names {
    name_event *events;
    size_t count;
};

zs_power_names *zs_power_names_open(void)
{
    return calloc(1, sizeof(zs_power_names));
}

static void clear_event(name_event *e)
{
    free(e->from);
    free(e->to);
    free(e->data);
}

void zs_power_names_close(zs_power_names *names)
{
    for (size_t i = 0; i < names->count; i++)
        clear_event(&names->events[i]);
    free(names->events);
    free(names);
}

/* 0 or a positive errno. */
static int stat_dir(const char *path, struct stat *st)
{
    const char *slash = strrchr(path, '/');
    char *dir = slash ? strndup(path, (size_t)(slash - path) + 1) : strdup(".");
    int error = !dir ? ENOMEM : stat(dir, st) ? errno : 0;

    free(dir);
    return error;
}

/* Small files only. */
static int keep_content(name_event *e)
{
    int fd = open(e->to, O_RDONLY | O_CLOEXEC), error = 0;
    struct stat st;

    if (fd < 0)
        return errno == ENOENT ? 0 : errno;
    e->replaced = 1;
    if (fstat(fd, &st)) {
        error = errno;
    } else {
        e->bytes = (size_t)st.st_size;
        e->data = malloc(e->bytes + 1);
        if (!e->data)
            error = ENOMEM;
        else if (pread(fd, e->data, e->bytes, 0) != (ssize_t)e->bytes)
            error = EIO;
    }
    close(fd);
    return error;
}

int zs_power_names_rename(zs_power_names *names, const char *from, const char *to)
{
    name_event *events = realloc(names->events, (names->count + 1) * sizeof *events);
    name_event e = {.from = strdup(from), .to = strdup(to)};
    struct stat st;
    int error = events && e.from && e.to ? stat_dir(to, &st) : ENOMEM;

    names->events = events ? events : names->events;
    if (!error) {
        e.dev = st.st_dev;
        e.ino = st.st_ino;
        error = keep_content(&e);
    }
    if (!error)
        error = zs_rename_plain(from, to);
    if (error)
        clear_event(&e);
    else
        events[names->count++] = e;
    return error;
}

void zs_power_names_flushed(zs_power_names *names, int dir_fd)
{
    struct stat st;
    size_t kept = 0;

    if (fstat(dir_fd, &st))
        return;
    for (size_t i = 0; i < names->count; i++) {
        name_event *e = &names->events[i];
        if (e->dev == st.st_dev && e->ino == st.st_ino)
            clear_event(e);
        else
            names->events[kept++] = *e;
    }
    names->count = kept;
}

/* The new file goes back to where it was made, the old one comes back. */
static int undo(const name_event *e)
{
    int error = zs_rename_plain(e->to, e->from), fd;

    if (error || !e->replaced)
        return error;
    fd = open(e->to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return errno;
    if (pwrite(fd, e->data, e->bytes, 0) != (ssize_t)e->bytes)
        error = EIO;
    close(fd);
    return error;
}

int zs_power_names_cut(zs_power_names *names, uint64_t *random)
{
    size_t keep = names->count ? zs_fault_random(random) % (names->count + 1) : 0;
    int first = 0;

    for (; names->count > keep; names->count--) {
        int error = undo(&names->events[names->count - 1]);
        clear_event(&names->events[names->count - 1]);
        first = first ? first : error;
    }
    while (names->count)
        clear_event(&names->events[--names->count]);
    return first;
}
