/* SPDX-License-Identifier: Apache-2.0 */
/* One pool of pthreads per engine. Pool threads block all signals. The public part (open, close) is
 * in zspill.h. */
#ifndef ZS_BASE_POOL_H
#define ZS_BASE_POOL_H

#include "zspill.h"

/* Runs fn(arg, i, worker) for each i < count, handing out indices one after the other to
 * whichever thread is free; the caller takes part (worker 0) and returns when all are done. worker
 * is in [0, zs_pool_threads). What each index does must not depend on the thread that runs it. One
 * caller at a time (a second one waits). fn must not call zs_pool_run on the same pool. */
void zs_pool_run(zs_pool *pool, void (*fn)(void *arg, size_t index, int worker), void *arg,
                 size_t count);
int zs_pool_threads(const zs_pool *pool);
/* CPUs that this process may run on (sched_getaffinity). */
int zs_cpu_count(void);

#endif
