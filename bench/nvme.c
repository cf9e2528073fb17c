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
#include "bench/states.h"

enum { IN_FLIGHT = 2, RAW_BYTES = 12 << 20, WARM_UP = 2 };

typedef struct bench {
    bench_env env;
    bench_states ours;
    zs_file *raw;
    zs_mem buffer;
} bench;

/* A step and its commit, as `durability = step` has them. */
static double ours(bench *b)
{
    double begin = zs_now();
    bench_states_step(&b->ours);
    BENCH_OK(zs_states_commit_prepare(b->ours.states));
    BENCH_OK(zs_states_commit_publish(b->ours.states, b->ours.step, b->ours.step, NULL, 0));
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
    BENCH_OK(l->write ? zs_io_write(b->env.io, b->raw, l->offset + l->at, buffer, n, &l->req[i])
                      : zs_io_read(b->env.io, b->raw, l->offset + l->at, buffer, n, &l->req[i]));
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
            BENCH_OK(zs_io_wait(b->env.io, &lanes[l].req[i]));
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
    uint64_t from = b->ours.step % 2 ? half : 0;
    char *buffer = b->buffer.ptr;
    lane lanes[2] = {{.buffer = buffer,
                      .offset = from,
                      .bytes = ZS_MIN(b->ours.traffic[ZS_TIER_NVME].read_bytes, half)},
                     {.buffer = buffer + (uint64_t)IN_FLIGHT * RAW_BYTES,
                      .offset = half - from,
                      .bytes = ZS_MIN(b->ours.traffic[ZS_TIER_NVME].written_bytes, half),
                      .write = 1}};
    double begin = zs_now();
    if (mixed) {
        run_lanes(b, lanes, 2);
    } else {
        run_lanes(b, &lanes[0], 1);
        run_lanes(b, &lanes[1], 1);
    }
    BENCH_OK(zs_file_sync(b->env.io, b->raw));
    return zs_now() - begin;
}

static void open_disk(bench *b, const char *dir)
{
    char *path;
    if (asprintf(&path, "%s/raw", dir) < 0)
        bench_die("memory");
    BENCH_OK(zs_file_open(b->env.io, path, ZS_FILE_CREATE, b->ours.numel * 24, &b->raw));
    unlink(path);
    free(path);
    BENCH_OK(zs_mem_alloc(b->env.device, b->env.ledger, ZS_TIER_HOST, "raw",
                          2ull * IN_FLIGHT * RAW_BYTES, &b->buffer));
    memset(b->buffer.ptr, 0x5a, b->buffer.bytes);
    BENCH_OK(zs_io_register(b->env.io, b->buffer.ptr, b->buffer.bytes));
}

int main(int argc, char **argv)
{
    const char *dir = argc > 1 ? argv[1] : "bench-nvme.tmp";
    double millions = argc > 2 ? atof(argv[2]) : 60;
    int rounds = argc > 3 ? atoi(argv[3]) : 15;
    const char *engine = argc > 4 ? argv[4] : "auto";
    double buffer_mib = argc > 5 ? atof(argv[5]) : 0;
    if (millions < 1 || rounds < 1 || rounds > BENCH_ROUNDS_MOST) {
        fprintf(stderr,
                "usage: bench-nvme [DIR [MILLIONS of parameters [ROUNDS 1..%d "
                "[auto|io_uring|posix [BUFFER MiB]]]]]\n",
                BENCH_ROUNDS_MOST);
        return 2;
    }
    static bench b;
    static double time[3][BENCH_ROUNDS_MOST], limit[BENCH_ROUNDS_MOST], ratio[BENCH_ROUNDS_MOST],
        adam[BENCH_ROUNDS_MOST], waited[BENCH_ROUNDS_MOST];
    bench_env_open(&b.env, strcmp(engine, "posix") == 0      ? ZS_IO_POSIX
                           : strcmp(engine, "io_uring") == 0 ? ZS_IO_URING
                                                             : ZS_IO_AUTO);
    bench_states_open(&b.env, dir, (uint64_t)(millions * 1e6) / 4096 * 4096,
                      (uint64_t)(buffer_mib * 1048576), &b.ours);
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
        adam[r] = b.ours.adam_seconds;
        waited[r] = b.ours.traffic[ZS_TIER_NVME].seconds;
    }
    printf("%.1f million parameters, %s, %d threads; a step reads %.0f MB and writes %.0f MB\n",
           b.ours.numel / 1e6, zs_io_describe(b.env.io), zs_pool_threads(b.env.pool),
           b.ours.traffic[ZS_TIER_NVME].read_bytes / 1e6,
           b.ours.traffic[ZS_TIER_NVME].written_bytes / 1e6);
    printf("median (10th to 90th percentile) of %d rounds\n", rounds);
    bench_print("ours, step and commit", time[0], rounds, "s");
    bench_print("  of this in Adam", adam, rounds, "s");
    bench_print("  of this waiting for disk", waited, rounds, "s");
    bench_print("disk, both at once", time[1], rounds, "s");
    bench_print("disk, read then write", time[2], rounds, "s");
    bench_print("limit / ours", ratio, rounds, "(target 0.85)");

    zs_io_unregister(b.env.io, b.buffer.ptr);
    zs_mem_free(&b.buffer);
    zs_file_close(&b.raw);
    bench_states_close(&b.ours);
    bench_env_close(&b.env);
    return 0;
}
