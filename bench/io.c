/* SPDX-License-Identifier: Apache-2.0 */
/* One pass over a file through one I/O engine: io.py lets it take turns with fio.
 *
 *   bench-io FILE ENGINE read|write|mixed|fresh MEBIBYTES DEPTH [small]
 *
 * prints gigabytes per second and CPU seconds per second. A file of another size is made and
 * written first. small: the buffer is of small pages, not of the huge ones that zspill's own are
 * of. mixed: reads and writes turn and turn about, each over the first half, as fio's rw with
 * rwmixread=50 does.
 * fresh: FILE is made anew and written whole three times; gigabytes per second of each. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "base/status.h"
#include "base/util.h"
#include "io/io.h"

static const struct {
    const char *name;
    zs_io_engine engine;
} engines[] = {{"auto", ZS_IO_AUTO},
               {"io_uring", ZS_IO_URING},
               {"io_uring_plain", ZS_IO_URING_PLAIN},
               {"libaio", ZS_IO_LIBAIO},
               {"posix", ZS_IO_POSIX}};

/* The posix engine has this many threads (io/posix.c), so never more blocks under way. */
enum { POSIX_THREADS = 8 };

typedef struct memory {
    unsigned char *at;
    size_t blocks; /* of ZS_IO_REQUEST: as many as can be under way, as fio has them */
} memory;

static double cpu_seconds(void)
{
    struct rusage use;

    getrusage(RUSAGE_SELF, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

/* mode: 'r', 'w' or 'm'. All is queued at once, and what arrives is not looked at: it is the engine
 * that is measured, not what a caller does with blocks and in which order it wants them. */
static zs_status pass(zs_io *io, zs_file *file, char mode, const memory *buffer)
{
    const uint64_t blocks = zs_file_bytes(file) / ZS_IO_REQUEST;
    zs_status status = ZS_OK, waited;
    zs_io_req req = {0};

    for (uint64_t i = 0; i < blocks && status == ZS_OK; i++) {
        unsigned char *at = buffer->at + (i % buffer->blocks) * ZS_IO_REQUEST;
        const uint64_t offset = (mode == 'm' ? i / 2 : i) * ZS_IO_REQUEST;
        if (mode == 'w' || (mode == 'm' && i % 2))
            status = zs_io_write(io, file, offset, at, ZS_IO_REQUEST, &req);
        else
            status = zs_io_read(io, file, offset, at, ZS_IO_REQUEST, &req);
    }
    waited = zs_io_wait(io, &req);
    return status == ZS_OK ? waited : status;
}

/* As fio fills its buffers: storage that compresses, or knows zeros, has nothing to gain. */
static void fill(const memory *buffer)
{
    uint64_t x = 0x9E3779B97F4A7C15u;

    for (size_t i = 0; i < buffer->blocks * ZS_IO_REQUEST; i += sizeof x) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        memcpy(buffer->at + i, &x, sizeof x);
    }
}

static zs_status measure(zs_io *io, const char *path, char mode, uint64_t bytes,
                         const memory *buffer)
{
    zs_file *file = NULL;
    zs_status status;
    struct stat st;
    int there = !stat(path, &st) && (uint64_t)st.st_size == bytes;
    double start, cpu, seconds;

    ZS_TRY(zs_file_open(io, path, there ? 0 : ZS_FILE_CREATE, bytes, &file));
    if (!there)
        ZS_TRY(pass(io, file, 'w', buffer));
    start = zs_now();
    cpu = cpu_seconds();
    ZS_TRY(pass(io, file, mode, buffer));
    seconds = zs_now() - start;
    printf("%.4f %.4f\n", (double)bytes / seconds * 1e-9, (cpu_seconds() - cpu) / seconds);
fail:
    zs_file_close(&file);
    return status;
}

/* A file that is allocated but was never written, written whole and flushed, three times. */
static zs_status measure_fresh(zs_io *io, const char *path, uint64_t bytes, const memory *buffer)
{
    zs_file *file = NULL;
    zs_status status;

    ZS_TRY(zs_file_open(io, path, ZS_FILE_CREATE, bytes, &file));
    for (int i = 0; i < 3; i++) {
        double start = zs_now();
        ZS_TRY(pass(io, file, 'w', buffer));
        ZS_TRY(zs_file_sync(io, file));
        printf("%.4f%c", (double)bytes / (zs_now() - start) * 1e-9, i < 2 ? ' ' : '\n');
    }
fail:
    zs_file_close(&file);
    return status;
}

int main(int argc, char **argv)
{
    zs_io *io = NULL;
    zs_status status;
    zs_io_engine engine = ZS_IO_AUTO;
    int known = 0;
    const unsigned long mib = argc >= 6 ? strtoul(argv[4], NULL, 10) : 0;
    const unsigned long depth = argc >= 6 ? strtoul(argv[5], NULL, 10) : 0;

    for (size_t i = 0; argc >= 6 && i < ZS_COUNT(engines); i++) {
        if (strcmp(argv[2], engines[i].name) != 0)
            continue;
        engine = engines[i].engine;
        known = 1;
    }
    if (!known || !mib || mib > 1 << 20 || !depth || depth > 1024 || !strchr("rwmf", argv[3][0])) {
        fputs("usage: bench-io FILE auto|io_uring|io_uring_plain|libaio|posix "
              "read|write|mixed|fresh MEBIBYTES DEPTH [small]\n",
              stderr);
        return 2;
    }
    memory buffer = {.blocks = engine == ZS_IO_POSIX ? ZS_MIN(depth, POSIX_THREADS) : depth};
    const size_t bytes = buffer.blocks * ZS_IO_REQUEST;
    buffer.at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer.at == MAP_FAILED) {
        perror("bench-io");
        return 1;
    }
    if (argc == 6)
        (void)madvise(buffer.at, bytes, MADV_HUGEPAGE); /* as device/host.c does */
    fill(&buffer);
    ZS_TRY(zs_io_open(engine, (unsigned)depth, NULL, &io));
    ZS_TRY(zs_io_register(io, buffer.at, bytes));
    status = argv[3][0] == 'f' ? measure_fresh(io, argv[1], (uint64_t)mib << 20, &buffer)
                               : measure(io, argv[1], argv[3][0], (uint64_t)mib << 20, &buffer);
fail:
    if (status != ZS_OK)
        fprintf(stderr, "bench-io: %s\n", zs_last_error());
    if (io)
        zs_io_unregister(io, buffer.at);
    zs_io_close(&io);
    munmap(buffer.at, bytes);
    return status != ZS_OK;
}
