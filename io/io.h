/* SPDX-License-Identifier: Apache-2.0 */
/* Block files: asynchronous reads and writes of whole extents. One zs_io belongs to one thread at a
 * time; it knows bytes, not tensors.
 *
 * Extents of any size are cut into requests of at most 512 KiB, as many in flight as the depth
 * allows. Short transfers, EINTR and EAGAIN are continued. With O_DIRECT (used where the file
 * system takes it) addresses, offsets and lengths must be multiples of ZS_IO_ALIGN; always keep to
 * that. */
#ifndef ZS_IO_IO_H
#define ZS_IO_IO_H

#include "base/ledger.h"
#include "base/log.h"
#include "zspill.h"

enum { ZS_IO_ALIGN = 4096, ZS_IO_REQUEST = 512 * 1024 };

typedef struct zs_io zs_io;
typedef struct zs_file zs_file;

/* One logical transfer; lives in the caller's memory and must stay there until it is done. Zero it
 * before first use. */
typedef struct zs_io_req {
    uint32_t pending; /* requests still in flight */
    zs_status status; /* the first failure */
    char error[192];  /* its message: file, operation, offset, length, errno text */
} zs_io_req;

typedef struct zs_io_stats {
    uint64_t read_bytes, written_bytes, requests;
    double wait_seconds; /* spent inside zs_io_wait */
} zs_io_stats;

/* depth: requests in flight, 1..1024; 0: 64. engine AUTO: the best of io_uring with registered
 * buffers and files, plain io_uring, libaio, posix threads, and says in the log and in
 * zs_io_describe why not a better one. By name: that engine or ZS_ERR_UNSUPPORTED with the reason.
 * A machine that registers, but not as much as it is given, still is one that has io_uring. */
zs_status zs_io_open(zs_io_engine engine, unsigned depth, const zs_log *log, zs_io **out);
/* Waits for what is in flight. Files must have been closed. */
void zs_io_close(zs_io **io);
/* "io_uring (registered buffers, registered files)", "posix (8 threads); not io_uring: ..." */
const char *zs_io_describe(const zs_io *io);
/* Whether engine (not AUTO) can be used here; reason: why not, as one line with the fix, or "". */
zs_status zs_io_probe(zs_io_engine engine, char *reason, size_t bytes);

/* Tells the engine that transfers will come from [base, base + bytes), page-aligned; may pin it.
 * Failing to pin (RLIMIT_MEMLOCK) is logged with the fix, not an error. */
zs_status zs_io_register(zs_io *io, void *base, size_t bytes);
void zs_io_unregister(zs_io *io, void *base);

enum {
    ZS_FILE_CREATE = 1, /* make it, or truncate what is there */
    ZS_FILE_READ_ONLY = 2,
    ZS_FILE_BUFFERED = 4 /* through the page cache: any offset, length and address will do */
};
/* bytes: size the file is allocated to at CREATE (posix_fallocate; ZS_ERR_NOSPACE names bytes
 * needed and free; a file that was just made is removed again). */
zs_status zs_file_open(zs_io *io, const char *path, int flags, uint64_t bytes, zs_file **out);
void zs_file_close(zs_file **file);
uint64_t zs_file_bytes(const zs_file *file);
const char *zs_file_path(const zs_file *file);
int zs_file_is_direct(const zs_file *file);
int zs_file_fd(const zs_file *file);

/* Queue one transfer; they never block for the transfer itself. Past end of file: ZS_ERR_CORRUPT in
 * the request. A request may carry several transfers: it is done when all are. */
zs_status zs_io_read(zs_io *io, zs_file *file, uint64_t offset, void *buf, size_t bytes,
                     zs_io_req *req);
zs_status zs_io_write(zs_io *io, zs_file *file, uint64_t offset, const void *buf, size_t bytes,
                      zs_io_req *req);
/* Submits what is queued and takes completions without waiting. */
void zs_io_poll(zs_io *io);
/* Until req is done; returns its status with its message set. req may then be used again. */
zs_status zs_io_wait(zs_io *io, zs_io_req *req);
/* fdatasync, after all writes to file are done. */
zs_status zs_file_sync(zs_io *io, zs_file *file);
/* fsync of a directory: what was made, renamed or removed in it outlives a power cut. */
zs_status zs_io_sync_dir(zs_io *io, const char *path);
/* A small file as a whole: written as path.tmp, flushed, renamed to path, the directory flushed.
 * Whatever happens, path is the old one or the new one; after success, the new one. */
zs_status zs_io_replace_file(zs_io *io, const char *path, const void *data, size_t bytes);
void zs_io_get_stats(const zs_io *io, zs_io_stats *out);

#endif
