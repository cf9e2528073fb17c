/* SPDX-License-Identifier: Apache-2.0 */
/* What durability and checksums add to a step whose states are on disk: durability=exit,
 * durability=step, and durability=exit without checksums (which zspill itself does not offer: this
 * program is linked so that it can leave them out) take turns on one store. With a store each,
 * where the disk has put the files would decide. */
#include <stdio.h>
#include <stdlib.h>

#include "base/crc32c.h"
#include "base/util.h"
#include "bench/states.h"
#include "offload/states_internal.h"

enum { AT_EXIT, EACH_STEP, NO_CHECKSUMS, KINDS, WARM_UP = 1 };

/* ---- checksums that can be left out: -Wl,--wrap=zs_crc32c ---- */

static int leave_out;
static int left_out;

uint32_t __real_zs_crc32c(uint32_t crc, const void *data, size_t bytes);
uint32_t __wrap_zs_crc32c(uint32_t crc, const void *data, size_t bytes);

uint32_t __wrap_zs_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    if (!leave_out)
        return __real_zs_crc32c(crc, data, bytes);
    __atomic_store_n(&left_out, 1, __ATOMIC_RELAXED);
    return 0;
}

/* ---- a turn ---- */

/* Seconds of one step, the mean of a turn. */
typedef struct cost {
    double all, writes, data, superblock;
} cost;

static double lap(double *since)
{
    double now = zs_now(), taken = now - *since;
    *since = now;
    return taken;
}

/* What is on disk has other checksums than this turn expects: begin from zeros, as a new store
 * does.
 */
static void start_over(bench_states *b)
{
    for (size_t c = 0; c < b->states->geometry.chunk_count; c++)
        b->states->chunks[c].current = ZS_STORE_NO_SLOT;
    bench_states_step(b);
    BENCH_OK(zs_ring_settle(b->states));
}

/* The writes that are under way when a step is over belong to it: without a commit they go on
 * during the next one, and after the last one they are waited for. */
static cost turn(bench_states *b, int kind, int steps)
{
    cost sum = {0};
    leave_out = kind == NO_CHECKSUMS;
    start_over(b);
    double begin = zs_now();
    for (int i = 0; i < steps; i++) {
        bench_states_step(b);
        if (kind != EACH_STEP)
            continue;
        double at = zs_now();
        BENCH_OK(zs_ring_settle(b->states));
        sum.writes += lap(&at);
        BENCH_OK(zs_states_commit_prepare(b->states));
        sum.data += lap(&at);
        BENCH_OK(zs_states_commit_publish(b->states, b->step, b->step, NULL, 0));
        sum.superblock += lap(&at);
    }
    BENCH_OK(zs_ring_settle(b->states));
    leave_out = 0;
    return (cost){.all = (zs_now() - begin) / steps,
                  .writes = sum.writes / steps,
                  .data = sum.data / steps,
                  .superblock = sum.superblock / steps};
}

int main(int argc, char **argv)
{
    const char *dir = argc > 1 ? argv[1] : "bench-durability.tmp";
    double millions = argc > 2 ? atof(argv[2]) : 60;
    int rounds = argc > 3 ? atoi(argv[3]) : 10;
    int steps = argc > 4 ? atoi(argv[4]) : 5;
    if (millions < 1 || rounds < 1 || rounds > BENCH_ROUNDS_MOST || steps < 1) {
        fprintf(stderr,
                "usage: bench-durability [DIR [MILLIONS of parameters [ROUNDS 1..%d "
                "[STEPS in a turn]]]]\n",
                BENCH_ROUNDS_MOST);
        return 2;
    }
    static bench_env env;
    static bench_states store;
    static double all[KINDS][BENCH_ROUNDS_MOST], added[BENCH_ROUNDS_MOST],
        writes[BENCH_ROUNDS_MOST], data[BENCH_ROUNDS_MOST], superblock[BENCH_ROUNDS_MOST],
        rest[BENCH_ROUNDS_MOST], durable[BENCH_ROUNDS_MOST], checked[BENCH_ROUNDS_MOST];
    bench_env_open(&env, ZS_IO_AUTO);
    bench_states_open(&env, dir, (uint64_t)(millions * 1e6) / 4096 * 4096, 0, &store);
    for (int r = -WARM_UP; r < rounds; r++) {
        cost now[KINDS];
        for (int i = 0; i < KINDS; i++) {
            int k = (r + WARM_UP + i) % KINDS;
            now[k] = turn(&store, k, steps);
        }
        if (r < 0)
            continue;
        for (int k = 0; k < KINDS; k++)
            all[k][r] = now[k].all;
        const cost *step = &now[EACH_STEP];
        added[r] = step->all - now[AT_EXIT].all;
        writes[r] = step->writes;
        data[r] = step->data;
        superblock[r] = step->superblock;
        rest[r] = added[r] - step->writes - step->data - step->superblock;
        durable[r] = step->all / now[AT_EXIT].all;
        checked[r] = now[AT_EXIT].all / now[NO_CHECKSUMS].all;
    }
    if (!left_out) {
        fprintf(stderr, "bench-durability: no checksum was left out: the linker took no --wrap\n");
        return 1;
    }
    printf("%.1f million parameters, %s, %d threads; turns of %d steps\n", store.numel / 1e6,
           zs_io_describe(env.io), zs_pool_threads(env.pool), steps);
    printf("a step's time: median (10th to 90th percentile) of %d rounds\n", rounds);
    bench_print("durability=exit", all[AT_EXIT], rounds, "s");
    bench_print("durability=step", all[EACH_STEP], rounds, "s");
    bench_print("  added", added, rounds, "s");
    bench_print("    waiting for the last writes", writes, rounds, "s");
    bench_print("    flushing the data", data, rounds, "s");
    bench_print("    writing and flushing the superblock", superblock, rounds, "s");
    bench_print("    anything else", rest, rounds, "s");
    bench_print("  step / exit", durable, rounds, "");
    bench_print("durability=exit without checksums", all[NO_CHECKSUMS], rounds, "s");
    bench_print("  with / without", checked, rounds, "(target 1.05)");
    bench_states_close(&store);
    bench_env_close(&env);
    return 0;
}
