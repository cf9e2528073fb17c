/* SPDX-License-Identifier: Apache-2.0 */
#include "base/pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"

enum {
    THREADS_MAX = 64,
    CPUS_MAX = 1 << 16,
    /* About ten microseconds: bridges back-to-back runs, little enough to lose when cores are
     * shared. */
    SPINS = 200
};

struct zs_pool {
    int threads; /* the caller included */
    pid_t pid;
    pthread_mutex_t caller; /* held by whoever is inside zs_pool_run */
    pthread_mutex_t lock;   /* of everything below but next */
    pthread_cond_t work, done;
    void (*fn)(void *arg, size_t index, int worker);
    void *arg;
    size_t count;
    int stop;
    atomic_int seats;  /* how many more threads may join the present run */
    atomic_int active; /* threads inside the present run, the caller not counted */
    _Alignas(64) atomic_size_t next;
    struct worker {
        zs_pool *pool;
        int number;
        pthread_t thread;
    } workers[THREADS_MAX];
};

/* NULL on failure; free with CPU_FREE. */
static cpu_set_t *allowed_cpus(int *cpus, size_t *bytes)
{
    for (*cpus = CPU_SETSIZE; *cpus <= CPUS_MAX; *cpus *= 2) {
        cpu_set_t *set = CPU_ALLOC(*cpus);
        *bytes = CPU_ALLOC_SIZE(*cpus);
        if (!set)
            return NULL;
        if (!sched_getaffinity(0, *bytes, set))
            return set;
        CPU_FREE(set);
        if (errno != EINVAL) /* EINVAL: the kernel has more CPUs than the set */
            return NULL;
    }
    return NULL;
}

int zs_cpu_count(void)
{
    int cpus, count = 1;
    size_t bytes;
    cpu_set_t *set = allowed_cpus(&cpus, &bytes);

    if (set) {
        count = CPU_COUNT_S(bytes, set);
        CPU_FREE(set);
    }
    return count;
}

static void work(zs_pool *pool, int worker)
{
    void (*fn)(void *arg, size_t index, int worker) = pool->fn;
    void *arg = pool->arg;
    size_t count = pool->count;

    for (;;) {
        size_t index = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (index >= count)
            return;
        fn(arg, index, worker);
    }
}

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void *worker_main(void *cookie)
{
    struct worker *self = cookie;
    zs_pool *pool = self->pool;

    pthread_mutex_lock(&pool->lock);
    for (;;) {
        if (!pool->seats && !pool->stop) {
            pthread_mutex_unlock(&pool->lock);
            for (int i = 0; i < SPINS && !atomic_load_explicit(&pool->seats, memory_order_relaxed);
                 i++)
                pause_briefly();
            pthread_mutex_lock(&pool->lock);
        }
        while (!pool->seats && !pool->stop)
            pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->stop)
            break;
        /* Seats are taken and withdrawn under the lock: fn, arg and count stay put until this
         * thread is no longer active. */
        pool->seats--;
        pool->active++;
        pthread_mutex_unlock(&pool->lock);
        work(pool, self->number);
        pthread_mutex_lock(&pool->lock);
        if (--pool->active == 0)
            pthread_cond_signal(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

void zs_pool_run(zs_pool *pool, void (*fn)(void *arg, size_t index, int worker), void *arg,
                 size_t count)
{
    int helpers;

    if (!count)
        return;
    pthread_mutex_lock(&pool->caller);
    helpers = (int)ZS_MIN(count, (size_t)pool->threads) - 1;
    if (helpers == 0) {
        for (size_t i = 0; i < count; i++)
            fn(arg, i, 0);
        pthread_mutex_unlock(&pool->caller);
        return;
    }

    pthread_mutex_lock(&pool->lock);
    pool->fn = fn;
    pool->arg = arg;
    pool->count = count;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    pool->seats = helpers;
    if (helpers == pool->threads - 1)
        pthread_cond_broadcast(&pool->work);
    else
        for (int i = 0; i < helpers; i++)
            pthread_cond_signal(&pool->work);
    pthread_mutex_unlock(&pool->lock);

    work(pool, 0);

    /* All indices are handed out: whoever has not woken up by now need not. */
    pthread_mutex_lock(&pool->lock);
    pool->seats = 0;
    if (pool->active) {
        pthread_mutex_unlock(&pool->lock);
        for (int i = 0; i < SPINS && atomic_load_explicit(&pool->active, memory_order_relaxed); i++)
            pause_briefly();
        pthread_mutex_lock(&pool->lock);
    }
    while (pool->active)
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_unlock(&pool->caller);
}

int zs_pool_threads(const zs_pool *pool)
{
    return pool->threads;
}

static void join_workers(zs_pool *pool, int started)
{
    pthread_mutex_lock(&pool->lock);
    pool->stop = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 1; i < started; i++)
        pthread_join(pool->workers[i].thread, NULL);
}

static void destroy(zs_pool *pool)
{
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    pthread_mutex_destroy(&pool->caller);
    free(pool);
}

static zs_status start_worker(zs_pool *pool, int number, int cpu)
{
    struct worker *worker = &pool->workers[number];
    pthread_attr_t attr;
    cpu_set_t *set = NULL;
    int error;

    worker->pool = pool;
    worker->number = number;
    pthread_attr_init(&attr);
    if (cpu >= 0) {
        size_t bytes = CPU_ALLOC_SIZE(cpu + 1);
        set = CPU_ALLOC(cpu + 1);
        if (!set) {
            pthread_attr_destroy(&attr);
            return zs_fail(ZS_ERR_NOMEM, "thread pool: out of memory");
        }
        CPU_ZERO_S(bytes, set);
        CPU_SET_S(cpu, bytes, set);
        pthread_attr_setaffinity_np(&attr, bytes, set);
    }
    error = pthread_create(&worker->thread, &attr, worker_main, worker);
    pthread_attr_destroy(&attr);
    if (set)
        CPU_FREE(set);
    if (error)
        return zs_fail(ZS_ERR_NOMEM,
                       "thread pool: thread %d of %d could not be started: %s; use fewer threads "
                       "or raise the limit on processes (ulimit -u, pids.max of the container)",
                       number + 1, pool->threads, strerror(error));
    return ZS_OK;
}

/* cpus[i] = the (first_core + i)-th allowed CPU, or -1. */
static zs_status choose_cpus(int threads, int first_core, int cpus[THREADS_MAX])
{
    int all, seen = 0, allowed;
    size_t bytes;
    cpu_set_t *set;

    for (int i = 0; i < THREADS_MAX; i++)
        cpus[i] = -1;
    if (first_core < 0)
        return ZS_OK;
    set = allowed_cpus(&all, &bytes);
    if (!set)
        return zs_fail(ZS_ERR_UNSUPPORTED, "thread pool: sched_getaffinity: %s; use first_core -1",
                       strerror(errno));
    allowed = CPU_COUNT_S(bytes, set);
    for (int cpu = 0; cpu < all; cpu++) {
        if (!CPU_ISSET_S((size_t)cpu, bytes, set))
            continue;
        if (seen >= first_core && seen - first_core < threads)
            cpus[seen - first_core] = cpu;
        seen++;
    }
    CPU_FREE(set);
    if (threads > allowed || first_core > allowed - threads)
        return zs_fail(
            ZS_ERR_ARG,
            "thread pool: first_core %d with %d threads goes beyond the %d CPUs that "
            "this process may run on; use fewer threads, or first_core -1 for no binding",
            first_core, threads, allowed);
    return ZS_OK;
}

zs_status zs_pool_open(int threads, int first_core, zs_pool **out)
{
    int cpus[THREADS_MAX];
    sigset_t all, before;
    zs_pool *pool;
    zs_status status = ZS_OK;

    if (!out)
        return zs_fail(ZS_ERR_ARG, "zs_pool_open: out is NULL");
    *out = NULL;
    if (threads < 0 || threads > THREADS_MAX)
        return zs_fail(ZS_ERR_ARG,
                       "thread pool: %d threads: use 1 to %d, or 0 for all allowed CPUs", threads,
                       THREADS_MAX);
    if (first_core < -1)
        return zs_fail(ZS_ERR_ARG, "thread pool: first_core %d: use -1 for no binding, or 0 and up",
                       first_core);
    if (!threads)
        threads = ZS_MIN(zs_cpu_count(), THREADS_MAX);
    ZS_CHECK(choose_cpus(threads, first_core, cpus));

    pool = aligned_alloc(64, zs_round_up(sizeof *pool, 64));
    if (!pool)
        return zs_fail(ZS_ERR_NOMEM, "thread pool: out of memory");
    memset(pool, 0, sizeof *pool);
    pool->threads = threads;
    pool->pid = getpid();
    pthread_mutex_init(&pool->caller, NULL);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);

    /* Threads inherit the mask: signals are the caller's business. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < threads && status == ZS_OK; i++) {
        status = start_worker(pool, i, cpus[i]);
        if (status != ZS_OK)
            join_workers(pool, i);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != ZS_OK) {
        destroy(pool);
        return status;
    }
    *out = pool;
    return ZS_OK;
}

void zs_pool_close(zs_pool **pool)
{
    if (!pool || !*pool)
        return;
    /* In the child of a fork the threads do not exist and the locks may be held for ever: leave
     * them be. */
    if ((*pool)->pid == getpid()) {
        join_workers(*pool, (*pool)->threads);
        destroy(*pool);
    }
    *pool = NULL;
}
