/* SPDX-License-Identifier: Apache-2.0 */
/* zspill doctor: what this machine offers for training, and how to get what is missing. */
#include <cblas.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/pool.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/cli.h"
#include "device/cuda.h"
#include "io/io.h"
#include "kernels/kernels.h"
#include "zspill.h"

enum { EXTENT = 4 << 20, IN_FLIGHT = 8, REASON_BYTES = 512, MIB_MAX = 1 << 20, MPI_SECONDS = 10 };

static const char usage[] =
    "usage: zspill doctor [--size MIB] [PATH]\n\n"
    "Says what this machine offers: instruction sets, cores, memory, I/O engines, MPI, GPUs, and\n"
    "direct I/O and speed of the disk that holds the directory PATH (default: .), measured by\n"
    "writing and reading a file of MIB mebibytes (default: 256; 0: do not).\n";

static void say(const char *key, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void say(const char *key, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    printf("%-14s ", key);
    vprintf(format, args);
    putchar('\n');
    va_end(args);
}

static void say_cpu(void)
{
    const char *const *names = zs_kernels_names();
    char levels[128] = "";
    for (size_t used = 0; *names && used < sizeof(levels); names++)
        used +=
            (size_t)snprintf(levels + used, sizeof(levels) - used, "%s%s (%s)", used ? ", " : "",
                             *names, zs_kernels_find(*names) ? "usable" : "not on this CPU");
    say("kernels", "%s in use, of %s", zs_kernels_get()->name, levels);
    say("cores", "%d allowed, %ld online", zs_cpu_count(), sysconf(_SC_NPROCESSORS_ONLN));
    say("BLAS", "%s", openblas_get_config());
}

/* A value of /proc/meminfo in bytes; 0: not there. */
static uint64_t meminfo(const char *key)
{
    char line[128];
    uint64_t kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    if (!file)
        return 0;
    while (fgets(line, sizeof(line), file))
        if (!strncmp(line, key, strlen(key)) && line[strlen(key)] == ':')
            kib = strtoull(line + strlen(key) + 1, NULL, 10);
    fclose(file);
    return kib << 10;
}

static void say_memory(void)
{
    char total[16], available[16], limit[16];
    struct rlimit memlock;
    say("memory", "%s, %s available", zs_format_bytes(meminfo("MemTotal"), total),
        zs_format_bytes(meminfo("MemAvailable"), available));
    if (getrlimit(RLIMIT_MEMLOCK, &memlock))
        return;
    if (memlock.rlim_cur == RLIM_INFINITY)
        say("memlock", "unlimited");
    else
        say("memlock",
            "%s: larger rings cannot be pinned; fix: `ulimit -l unlimited`, or memlock in "
            "/etc/security/limits.conf, or LimitMEMLOCK=infinity of the service",
            zs_format_bytes(memlock.rlim_cur, limit));
}

static void say_engines(void)
{
    static const struct {
        zs_io_engine engine;
        const char *name;
    } rungs[] = {{ZS_IO_URING, "io_uring"},
                 {ZS_IO_URING_PLAIN, "io_uring_plain"},
                 {ZS_IO_LIBAIO, "libaio"},
                 {ZS_IO_POSIX, "posix"}};
    char reason[REASON_BYTES];
    for (size_t i = 0; i < ZS_COUNT(rungs); i++) {
        if (zs_io_probe(rungs[i].engine, reason, sizeof(reason)) == ZS_OK)
            say(rungs[i].name, "usable");
        else
            say(rungs[i].name, "not usable: %s", reason);
    }
}

static void say_gpus(void)
{
    const zs_cuda_plugin *cuda;
    int count;
    if (zs_cuda_open(&cuda) != ZS_OK) {
        say("CUDA", "not usable: %s", zs_last_error());
        return;
    }
    say("CUDA", "plug-in found: %s", cuda->build);
    if (cuda->device_count(&count) != ZS_OK)
        say("GPUs", "none: %s (nvidia-smi lists those that the driver sees)", zs_last_error());
    else if (!count)
        say("GPUs", "none is seen; CUDA_VISIBLE_DEVICES, or the container, may hide them");
    for (int i = 0; i < count; i++) {
        zs_cuda_info info;
        char memory[16];
        if (cuda->device_info(i, &info) == ZS_OK)
            say(i ? "" : "GPUs", "cuda:%d is %s: compute capability %d.%d, %s", i, info.name,
                info.major, info.minor, zs_format_bytes(info.total_bytes, memory));
        else
            say(i ? "" : "GPUs", "cuda:%d cannot be asked: %s", i, zs_last_error());
    }
}

/* In a child: MPI libraries write to standard error, end the process when they fail, and cannot be
 * unloaded. */
static void say_mpi(void)
{
    int ends[2];
    char text[REASON_BYTES] = "";
    fflush(stdout);
    if (pipe(ends))
        return;
    pid_t child = fork();
    if (child == 0) {
        zs_comm *comm = NULL;
        alarm(MPI_SECONDS);
        close(ends[0]);
        int bad = zs_comm_open_mpi(MPI_SECONDS, &comm) != ZS_OK;
        if (bad && write(ends[1], zs_last_error(), strlen(zs_last_error())) < 0)
            _exit(2);
        zs_comm_close(&comm);
        _exit(bad);
    }
    close(ends[1]);
    size_t used = 0;
    ssize_t got;
    while (used < sizeof(text) - 1 &&
           (got = read(ends[0], text + used, sizeof(text) - 1 - used)) > 0)
        used += (size_t)got;
    close(ends[0]);
    int state = -1;
    if (child > 0)
        waitpid(child, &state, 0);
    if (WIFEXITED(state) && WEXITSTATUS(state) == 0)
        say("MPI", "plug-in found, and MPI starts");
    else
        say("MPI", "not usable: %s", used ? text : "MPI did not start");
}

typedef struct disk_test {
    zs_io *io;
    zs_file *file;
    unsigned char *buffer;
    uint64_t bytes;
    zs_io_req reqs[IN_FLIGHT];
} disk_test;

static zs_status transfer_all(disk_test *t, int writing, double *seconds)
{
    zs_status status = ZS_OK;
    double begin = zs_now();
    memset(t->reqs, 0, sizeof(t->reqs));
    uint64_t extents = t->bytes / EXTENT;
    for (uint64_t i = 0; i < extents + IN_FLIGHT; i++) {
        size_t slot = i % IN_FLIGHT;
        unsigned char *buffer = t->buffer + slot * EXTENT;
        if (i >= IN_FLIGHT && i - IN_FLIGHT < extents) {
            /* All must be waited for, also after a failure: buffer is to be freed. */
            zs_status one = zs_io_wait(t->io, &t->reqs[slot]);
            status = status == ZS_OK ? one : status;
        }
        if (i >= extents || status != ZS_OK)
            continue;
        status = writing ? zs_io_write(t->io, t->file, i * EXTENT, buffer, EXTENT, &t->reqs[slot])
                         : zs_io_read(t->io, t->file, i * EXTENT, buffer, EXTENT, &t->reqs[slot]);
    }
    if (status == ZS_OK && writing)
        status = zs_file_sync(t->io, t->file);
    *seconds = zs_now() - begin;
    return status;
}

static zs_status measure(disk_test *t, const char *name)
{
    double wrote, read;
    char size[16];
    ZS_CHECK(zs_file_open(t->io, name, ZS_FILE_CREATE, t->bytes, &t->file));
    unlink(name);
    say("I/O engine", "%s", zs_io_describe(t->io));
    say("O_DIRECT", "%s",
        zs_file_is_direct(t->file)
            ? "works here"
            : "refused by this file system: transfers go through the page cache; "
              "fix: a directory on ext4 or xfs");
    if (!t->bytes)
        return ZS_OK;
    ZS_CHECK(transfer_all(t, 1, &wrote));
    ZS_CHECK(transfer_all(t, 0, &read));
    say("disk speed", "write %.2f GB/s, read %.2f GB/s over %s%s", (double)t->bytes / wrote * 1e-9,
        (double)t->bytes / read * 1e-9, zs_format_bytes(t->bytes, size),
        zs_file_is_direct(t->file) ? "" : " (page cache, not the disk)");
    return ZS_OK;
}

static zs_status say_disk(const char *path, uint64_t bytes)
{
    disk_test t = {.bytes = bytes};
    struct statvfs space;
    char *name = NULL, room[16];
    zs_status status = ZS_OK;
    size_t buffer_bytes = (size_t)IN_FLIGHT * EXTENT;
    if (!statvfs(path, &space))
        say("disk space", "%s free at %s",
            zs_format_bytes((uint64_t)space.f_bavail * space.f_frsize, room), path);
    if (asprintf(&name, "%s/.zspill-doctor-%ld", path, (long)getpid()) < 0)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a path");
    void *buffer =
        mmap(NULL, buffer_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED) {
        free(name);
        return zs_fail(ZS_ERR_NOMEM, "no memory for %zu bytes", buffer_bytes);
    }
    t.buffer = buffer;
    memset(t.buffer, 0x5A, buffer_bytes);
    ZS_TRY(zs_io_open(ZS_IO_AUTO, 0, NULL, &t.io));
    ZS_TRY(zs_io_register(t.io, t.buffer, buffer_bytes));
    status = measure(&t, name);
fail:
    zs_file_close(&t.file);
    if (t.io)
        zs_io_unregister(t.io, t.buffer);
    zs_io_close(&t.io);
    munmap(buffer, buffer_bytes);
    free(name);
    return status;
}

static int fail_usage(const char *word, const char *why)
{
    zs_cli_error("doctor: '%s' %s", word, why);
    return ZS_EXIT_USAGE;
}

int zs_cli_doctor(int argc, char **argv)
{
    const char *path = NULL;
    long mib = 256;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
            fputs(usage, stdout);
            return ZS_EXIT_OK;
        }
        if (!strcmp(argv[i], "--size")) {
            char *end = NULL;
            if (++i == argc)
                return fail_usage("--size", "needs a value: mebibytes");
            mib = strtol(argv[i], &end, 10);
            if (*end || end == argv[i] || mib < 0 || mib > MIB_MAX)
                return fail_usage(argv[i], "is no size in mebibytes from 0 to 1048576");
        } else if (argv[i][0] == '-') {
            return fail_usage(argv[i], "is not an option: `zspill doctor --help` lists them");
        } else if (path) {
            return fail_usage(argv[i], "is one path too many");
        } else {
            path = argv[i];
        }
    }
    say("zspill", "%s", zs_version());
    say_cpu();
    say_memory();
    say_mpi();
    say_gpus();
    say_engines();
    uint64_t bytes = (uint64_t)mib << 20;
    if (say_disk(path ? path : ".", zs_round_up(bytes, EXTENT)) != ZS_OK) {
        zs_cli_error("%s", zs_last_error());
        return ZS_EXIT_FAILED;
    }
    return ZS_EXIT_OK;
}
