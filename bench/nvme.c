/* SPDX-License-Identifier: Apache-2.0 */
/* The streaming step against the disk: the same bytes moved by the same I/O engine without Adam,
 * checksums and commits, turn and turn about. The limit of a round is the faster of reading and
 * writing at once and of reading everything before writing it; nvme.sh adds what fio says. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "offload/states.h"

enum { SHARDS = 6, IN_FLIGHT = 2, RAW_BYTES = 12 << 20, WARM_UP = 2, ROUNDS_MOST = 101 };

typedef struct bench {
    zs_ledger *ledger;
    zs_device *device;
    zs_pool *pool;
    zs_math *math;
    zs_io *io;
    zs_states *states;
    zs_states_input inputs[SHARDS];
    zs_adam_run runs[SHARDS];
    zs_adam_coef coef;
    zs_group_config group;
    uint64_t numel, step;
    zs_tier_traffic traffic[ZS_TIERS];
    double adam_seconds;
    zs_file *raw;
    zs_mem buffer;
} bench;

static void die(const char *what)
{
    fprintf(stderr, "bench-nvme: %s: %s\n", what, zs_last_error());
    exit(1);
}

#define OK(expr)                                                                                   \
    do {                                                                                           \
        if ((expr) != ZS_OK)                                                                       \
            die(#expr);                                                                            \
    } while (0)

/* ---- ours ---- */

static void open_ours(bench *b, const char *dir, uint64_t buffer_bytes)
{
    static zs_states_shard shards[SHARDS];
    uint64_t left = b->numel;
    for (size_t s = 0; s < SHARDS; s++) {
        /* Unequal, as embedding and blocks are. */
        uint64_t n = s + 1 < SHARDS ? left / (s + 2) / 64 * 64 : left;
        left -= n;
        shards[s] = (zs_states_shard){.numel = n, .working_dtype = ZS_BF16};
        void *grad = calloc(n, 2), *working = calloc(n, 2);
        if (!grad || !working)
            die("memory");
        for (uint64_t i = 0; i < n; i++)
            ((uint16_t *)grad)[i] = (uint16_t)(0x3c00 | (i & 0x807f));
        b->runs[s] = (zs_adam_run){0, n, &b->coef};
        b->inputs[s] = (zs_states_input){grad, ZS_BF16, working, &b->runs[s], 1};
    }
    zs_states_config config = {.tier = ZS_TIER_NVME,
                               .dir = dir,
                               .world = 1,
                               .buffer_bytes = buffer_bytes,
                               .io = b->io,
                               .device = b->device,
                               .math = b->math,
                               .pool = b->pool,
                               .ledger = b->ledger,
                               .shards = shards,
                               .shard_count = SHARDS};
    OK(zs_states_open(&config, &b->states));
}

/* A step and its commit, as `durability = step` has them. */
static double ours(bench *b)
{
    memset(b->traffic, 0, sizeof b->traffic);
    b->adam_seconds = 0;
    zs_adam_coef_make(&b->coef, &b->group, ++b->step, 1.0);
    double begin = zs_now();
    OK(zs_states_step(b->states, b->inputs, b->traffic, &b->adam_seconds));
    OK(zs_states_commit_prepare(b->states));
    OK(zs_states_commit_publish(b->states, b->step, b->step, NULL, 0));
    return zs_now() - begin;
}

/* ---- the disk ---- */

typedef struct lane {
    zs_io_req req[IN_FLIGHT];
    char *buffer;
    uint64_t offset, at, bytes;
    int write;
} lane;

static void lane_queue(bench *b, lane *l, int i)
{
    uint64_t n = ZS_MIN((uint64_t)RAW_BYTES, l->bytes - l->at);
    if (!n)
        return;
    char *buffer = l->buffer + (uint64_t)i * RAW_BYTES;
    OK(l->write ? zs_io_write(b->io, b->raw, l->offset + l->at, buffer, n, &l->req[i])
                : zs_io_read(b->io, b->raw, l->offset + l->at, buffer, n, &l->req[i]));
    l->at += n;
}

/* All lanes at once, each with IN_FLIGHT extents. */
static void run_lanes(bench *b, lane *lanes, int count)
{
    int busy = 1;
    for (int i = 0; i < IN_FLIGHT; i++)
        for (int l = 0; l < count; l++)
            lane_queue(b, &lanes[l], i);
    for (int i = 0; busy; i = (i + 1) % IN_FLIGHT) {
        busy = 0;
        for (int l = 0; l < count; l++) {
            OK(zs_io_wait(b->io, &lanes[l].req[i]));
            lane_queue(b, &lanes[l], i);
        }
        for (int l = 0; l < count; l++)
            for (int j = 0; j < IN_FLIGHT; j++)
                busy |= lanes[l].req[j].pending != 0;
    }
}

/* The bytes of the last step: read from one half of the raw file, written to the other. */
static double disk(bench *b, int mixed)
{
    uint64_t half = zs_file_bytes(b->raw) / 2 / ZS_IO_ALIGN * ZS_IO_ALIGN;
    uint64_t from = b->step % 2 ? half : 0;
    char *buffer = b->buffer.ptr;
    lane lanes[2] = {{.buffer = buffer,
                      .offset = from,
                      .bytes = ZS_MIN(b->traffic[ZS_TIER_NVME].read_bytes, half)},
                     {.buffer = buffer + (uint64_t)IN_FLIGHT * RAW_BYTES,
                      .offset = half - from,
                      .bytes = ZS_MIN(b->traffic[ZS_TIER_NVME].written_bytes, half),
                      .write = 1}};
    double begin = zs_now();
    if (mixed) {
        run_lanes(b, lanes, 2);
    } else {
        run_lanes(b, &lanes[0], 1);
        run_lanes(b, &lanes[1], 1);
    }
    OK(zs_file_sync(b->io, b->raw));
    return zs_now() - begin;
}

static void open_disk(bench *b, const char *dir)
{
    char *path;
    if (asprintf(&path, "%s/raw", dir) < 0)
        die("memory");
    OK(zs_file_open(b->io, path, ZS_FILE_CREATE, b->numel * 24, &b->raw));
    unlink(path);
    free(path);
    OK(zs_mem_alloc(b->device, b->ledger, ZS_TIER_HOST, "raw", 2ull * IN_FLIGHT * RAW_BYTES,
                    &b->buffer));
    memset(b->buffer.ptr, 0x5a, b->buffer.bytes);
    OK(zs_io_register(b->io, b->buffer.ptr, b->buffer.bytes));
}

/* ---- figures ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print(const char *name, const double *values, int n, const char *unit)
{
    double sorted[ROUNDS_MOST];
    memcpy(sorted, values, (size_t)n * sizeof *values);
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
    printf("%-28s %8.3f  (%.3f to %.3f) %s\n", name, sorted[n / 2], sorted[n / 10],
           sorted[n - 1 - n / 10], unit);
}

int main(int argc, char **argv)
{
    const char *dir = argc > 1 ? argv[1] : "bench-nvme.tmp";
    double millions = argc > 2 ? atof(argv[2]) : 60;
    int rounds = argc > 3 ? atoi(argv[3]) : 15;
    const char *engine = argc > 4 ? argv[4] : "auto";
    double buffer_mib = argc > 5 ? atof(argv[5]) : 0;
    if (millions < 1 || rounds < 1 || rounds > ROUNDS_MOST) {
        fprintf(stderr,
                "usage: bench-nvme [DIR [MILLIONS of parameters [ROUNDS 1..%d "
                "[auto|io_uring|posix [BUFFER MiB]]]]]\n",
                ROUNDS_MOST);
        return 2;
    }
    static bench b;
    static double time[3][ROUNDS_MOST], limit[ROUNDS_MOST], ratio[ROUNDS_MOST], adam[ROUNDS_MOST],
        waited[ROUNDS_MOST];
    b.numel = (uint64_t)(millions * 1e6) / 4096 * 4096;
    zs_group_config_init(&b.group);
    OK(zs_ledger_open(&b.ledger));
    OK(zs_device_open_host(&b.device));
    OK(zs_pool_open(0, -1, &b.pool));
    OK(zs_math_open_host(b.pool, &b.math));
    OK(zs_io_open(strcmp(engine, "posix") == 0      ? ZS_IO_POSIX
                  : strcmp(engine, "io_uring") == 0 ? ZS_IO_URING
                                                    : ZS_IO_AUTO,
                  0, NULL, &b.io));
    open_ours(&b, dir, (uint64_t)(buffer_mib * 1048576));
    open_disk(&b, dir);

    for (int r = -WARM_UP; r < rounds; r++) {
        double t[3];
        if (r < 0) {
            t[0] = ours(&b); /* first: the disk then has its bytes to move */
            t[1] = disk(&b, 1);
            t[2] = disk(&b, 0);
            continue;
        }
        for (int i = 0; i < 3; i++) {
            int what = (r + i) % 3;
            t[what] = what == 0 ? ours(&b) : disk(&b, what == 1);
        }
        for (int i = 0; i < 3; i++)
            time[i][r] = t[i];
        limit[r] = ZS_MIN(t[1], t[2]);
        ratio[r] = limit[r] / t[0];
        adam[r] = b.adam_seconds;
        waited[r] = b.traffic[ZS_TIER_NVME].seconds;
    }
    printf("%.1f million parameters, %s, %d threads; a step reads %.0f MB and writes %.0f MB\n",
           b.numel / 1e6, zs_io_describe(b.io), zs_pool_threads(b.pool),
           b.traffic[ZS_TIER_NVME].read_bytes / 1e6, b.traffic[ZS_TIER_NVME].written_bytes / 1e6);
    printf("median (10th to 90th percentile) of %d rounds\n", rounds);
    print("ours, step and commit", time[0], rounds, "s");
    print("  of this in Adam", adam, rounds, "s");
    print("  of this waiting for disk", waited, rounds, "s");
    print("disk, both at once", time[1], rounds, "s");
    print("disk, read then write", time[2], rounds, "s");
    print("limit / ours", ratio, rounds, "(target 0.85)");

    zs_io_unregister(b.io, b.buffer.ptr);
    zs_mem_free(&b.buffer);
    zs_file_close(&b.raw);
    zs_states_close(&b.states);
    for (size_t s = 0; s < SHARDS; s++) {
        free((void *)b.inputs[s].grad);
        free(b.inputs[s].working);
    }
    /* The store was committed, so it stays; this one is nobody's. */
    char *path;
    if (asprintf(&path, "%s/zspill-rank00000.state", dir) >= 0)
        unlink(path);
    free(path);
    rmdir(dir);
    zs_io_close(&b.io);
    zs_math_close(&b.math);
    zs_pool_close(&b.pool);
    zs_device_close(&b.device);
    zs_ledger_close(&b.ledger);
    return 0;
}
