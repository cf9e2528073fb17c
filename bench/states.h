/* SPDX-License-Identifier: Apache-2.0 */
/* What the benchmarks of the streaming step share: fp32 states on disk, bf16 gradients and working
 * copies in memory, one step of Adam; medians. Whatever fails ends the program. */
#ifndef ZS_BENCH_STATES_H
#define ZS_BENCH_STATES_H

#include "offload/states.h"

enum { BENCH_SHARDS = 6, BENCH_ROUNDS_MOST = 101 };

/* What stores have in common. */
typedef struct bench_env {
    zs_ledger *ledger;
    zs_device *device;
    zs_pool *pool;
    zs_math *math;
    zs_io *io;
} bench_env;

typedef struct bench_states {
    char *dir;
    zs_states *states;
    zs_states_input inputs[BENCH_SHARDS];
    zs_adam_run runs[BENCH_SHARDS];
    zs_adam_coef coef;
    zs_group_config group;
    uint64_t numel, step;
    /* of the last step */
    zs_tier_traffic traffic[ZS_TIERS];
    double adam_seconds;
} bench_states;

#define BENCH_OK(expr)                                                                             \
    do {                                                                                           \
        if ((expr) != ZS_OK)                                                                       \
            bench_die(#expr);                                                                      \
    } while (0)

_Noreturn void bench_die(const char *what);

void bench_env_open(bench_env *env, zs_io_engine engine);
void bench_env_close(bench_env *env);

/* A new store in dir. buffer_bytes: of the ring; 0: chosen. */
void bench_states_open(const bench_env *env, const char *dir, uint64_t numel, uint64_t buffer_bytes,
                       bench_states *out);
/* Its files go, too, and dir if nothing else is in it. */
void bench_states_close(bench_states *b);
void bench_states_step(bench_states *b);

double bench_median(const double *values, int n);
/* The median and the 10th and 90th percentile. */
void bench_print(const char *name, const double *values, int n, const char *unit);

#endif
