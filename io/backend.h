/* SPDX-License-Identifier: Apache-2.0 */
/* What io.c asks of an engine: carry out single requests. Cutting, continuing and judging results
 * is done once, in io.c. */
#ifndef ZS_IO_BACKEND_H
#define ZS_IO_BACKEND_H

#include "io/io.h"

enum { ZS_IO_NOTE_BYTES = 640 };

typedef struct zs_io_op zs_io_op;
typedef struct zs_io_backend zs_io_backend;

/* One request, at most ZS_IO_REQUEST bytes. Between submit and reap it is the backend's. */
struct zs_io_op {
    zs_io_op *next;
    zs_file *file;
    zs_io_req *req;
    unsigned char *buf;
    uint64_t offset;
    uint32_t bytes; /* still to be moved */
    uint32_t index; /* below depth, fixed */
    int write;
    int tries;      /* in a row without progress */
    int32_t result; /* bytes moved, or -errno */
};

struct zs_file {
    zs_io *io;
    char *path;
    uint64_t bytes;
    int fd;
    int direct, read_only;
    int slot;         /* for the backend: its index of the file, or -1 */
    uint32_t pending; /* requests queued or in flight */
};

typedef struct zs_io_backend_ops {
    /* At most depth at a time. Never fails: a failure is a result. */
    void (*submit)(zs_io_backend *backend, zs_io_op *op);
    /* Everything submitted is on its way when this returns (or at the next reap). */
    void (*flush)(zs_io_backend *backend);
    /* The requests that are done, linked by next. wait: at least one. */
    zs_io_op *(*reap)(zs_io_backend *backend, int wait);
    /* All optional. Failing to register is not an error: log it. */
    void (*buffer_add)(zs_io_backend *backend, const zs_log *log, void *base, size_t bytes);
    void (*buffer_remove)(zs_io_backend *backend, void *base);
    void (*file_add)(zs_io_backend *backend, zs_file *file);
    void (*file_remove)(zs_io_backend *backend, zs_file *file);
    /* 0 or a positive errno. Left out: posix_fallocate, fdatasync, fsync of a directory, rename. */
    int (*allocate)(zs_io_backend *backend, zs_file *file, uint64_t bytes);
    int (*sync)(zs_io_backend *backend, zs_file *file);
    int (*sync_dir)(zs_io_backend *backend, const char *path, int fd);
    int (*rename)(zs_io_backend *backend, const char *from, const char *to);
    void (*close)(zs_io_backend *backend);
} zs_io_backend_ops;

struct zs_io_backend {
    const zs_io_backend_ops *ops;
    char description[80];
    char note[ZS_IO_NOTE_BYTES]; /* "; not io_uring: why", from the ladder */
    /* engines extend this */
};

/* The rungs. ZS_ERR_UNSUPPORTED with the reason and the fix where one is not to be had. */
zs_status zs_io_uring_open(unsigned depth, zs_io_backend **out);
zs_status zs_io_uring_plain_open(unsigned depth, zs_io_backend **out);
zs_status zs_io_aio_open(unsigned depth, zs_io_backend **out);
zs_status zs_io_posix_open(unsigned depth, zs_io_backend **out);
/* Takes backend over in either case. Tests bring backends of their own. */
zs_status zs_io_open_backend(zs_io_backend *backend, unsigned depth, const zs_log *log,
                             zs_io **out);

/* What is done where a backend does not. 0 or a positive errno. */
int zs_file_allocate_plain(zs_file *file, uint64_t bytes);
int zs_file_sync_plain(zs_file *file);
int zs_dir_sync_plain(int fd);
int zs_rename_plain(const char *from, const char *to);

/* For file.c. */
const zs_log *zs_io_log(const zs_io *io);
zs_io_backend *zs_io_get_backend(const zs_io *io);
/* In the child of a fork: threads, rings and descriptors are gone, and their numbers may belong to
 * others. Closing only forgets. */
int zs_io_is_forked(const zs_io *io);
/* Until nothing of the file is queued or in flight. */
void zs_io_drain_file(zs_io *io, zs_file *file);

#endif
