/* SPDX-License-Identifier: Apache-2.0 */
#include "base/pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { COUNT_MAX = 1000, WORKERS_MAX = 64 };

typedef struct job {
    int hits[COUNT_MAX];             /* not atomic: each index belongs to one thread */
    long by_worker[WORKERS_MAX][16]; /* nor these: a worker is one thread at a time */
    int workers;
    atomic_int bad;
} job;

static void hit(void *arg, size_t index, int worker)
{
    job *j = arg;

    if (worker < 0 || worker >= j->workers || index >= COUNT_MAX) {
        atomic_fetch_add(&j->bad, 1);
        return;
    }
    j->hits[index]++;
    j->by_worker[worker][0]++;
}

static void run_and_check(zs_pool *pool, size_t count)
{
    static _Thread_local job j;
    long sum = 0;

    memset(&j, 0, sizeof j);
    j.workers = zs_pool_threads(pool);
    zs_pool_run(pool, hit, &j, count);
    assert_int_equal(atomic_load(&j.bad), 0);
    for (size_t i = 0; i < COUNT_MAX; i++)
        assert_int_equal(j.hits[i], i < count);
    for (int i = 0; i < WORKERS_MAX; i++)
        sum += j.by_worker[i][0];
    assert_int_equal(sum, count);
}

static void test_each_index_once(void **state)
{
    static const size_t counts[] = {0, 1, 2, 3, 7, 8, 9, 100, 1000};

    for (int threads = 1; threads <= 8; threads++) {
        zs_pool *pool = NULL;
        assert_int_equal(zs_pool_open(threads, -1, &pool), ZS_OK);
        assert_int_equal(zs_pool_threads(pool), threads);
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
            run_and_check(pool, counts[i]);
        zs_pool_close(&pool);
        assert_null(pool);
        zs_pool_close(&pool);
    }
}

static void count_up(void *arg, size_t index, int worker)
{
    atomic_fetch_add_explicit((atomic_long *)arg, (long)index + 1, memory_order_relaxed);
}

static void test_many_small_runs(void **state)
{
    zs_pool *pool = NULL;
    atomic_long sum = 0;

    assert_int_equal(zs_pool_open(4, -1, &pool), ZS_OK);
    for (int i = 0; i < 5000; i++)
        zs_pool_run(pool, count_up, &sum, 3);
    assert_int_equal(atomic_load(&sum), 5000 * 6);
    zs_pool_close(&pool);
}

/* What the caller wrote before is seen by all, what they wrote is seen by the caller. */
static void square(void *arg, size_t index, int worker)
{
    long *values = arg;
    values[index] *= values[index];
}

static void test_memory_is_handed_over(void **state)
{
    zs_pool *pool = NULL;
    long values[64];

    assert_int_equal(zs_pool_open(3, -1, &pool), ZS_OK);
    for (long round = 0; round < 300; round++) {
        for (long i = 0; i < 64; i++)
            values[i] = i + round;
        zs_pool_run(pool, square, values, 64);
        for (long i = 0; i < 64; i++)
            assert_int_equal(values[i], (i + round) * (i + round));
    }
    zs_pool_close(&pool);
}

typedef struct caller {
    zs_pool *pool;
    atomic_long *sum;
} caller;

static void *call_often(void *cookie)
{
    caller *c = cookie;
    for (int i = 0; i < 500; i++)
        zs_pool_run(c->pool, count_up, c->sum, 4);
    return NULL;
}

static void run_callers(zs_pool *first, zs_pool *second)
{
    atomic_long sums[2] = {0, 0};
    caller callers[2] = {{first, &sums[0]}, {second, &sums[1]}};
    pthread_t threads[2];

    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, call_often, &callers[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(atomic_load(&sums[0]), 5000);
    assert_int_equal(atomic_load(&sums[1]), 5000);
}

static void test_two_callers(void **state)
{
    zs_pool *a = NULL, *b = NULL;

    assert_int_equal(zs_pool_open(3, -1, &a), ZS_OK);
    assert_int_equal(zs_pool_open(2, -1, &b), ZS_OK);
    run_callers(a, b); /* a pool each */
    run_callers(a, a); /* the same: one waits for the other */
    zs_pool_close(&a);
    zs_pool_close(&b);
}

typedef struct meeting {
    atomic_int arrived;
    int size;
    int cpu[WORKERS_MAX];
    int signals_blocked[WORKERS_MAX];
    pthread_t thread[WORKERS_MAX];
} meeting;

/* Nobody leaves before all are here: each index has a thread of its own. */
static void meet(void *arg, size_t index, int worker)
{
    meeting *m = arg;
    cpu_set_t set;
    sigset_t mask;

    m->thread[worker] = pthread_self();
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    m->signals_blocked[worker] = sigismember(&mask, SIGINT) && sigismember(&mask, SIGPROF);
    m->cpu[worker] = -1;
    if (!sched_getaffinity(0, sizeof set, &set) && CPU_COUNT(&set) == 1)
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
            if (CPU_ISSET(cpu, &set))
                m->cpu[worker] = cpu;
    atomic_fetch_add(&m->arrived, 1);
    while (atomic_load(&m->arrived) < m->size)
        sched_yield();
}

static void test_all_take_part(void **state)
{
    zs_pool *pool = NULL;
    meeting m = {.size = 5};

    assert_int_equal(zs_pool_open(5, -1, &pool), ZS_OK);
    zs_pool_run(pool, meet, &m, 5);
    assert_true(pthread_equal(m.thread[0], pthread_self()));
    assert_false(m.signals_blocked[0]);
    for (int i = 1; i < 5; i++) {
        assert_false(pthread_equal(m.thread[i], pthread_self()));
        assert_true(m.signals_blocked[i]);
    }
    zs_pool_close(&pool);
}

static void test_binding(void **state)
{
    zs_pool *pool = NULL;
    meeting m = {.size = 2};
    cpu_set_t set;
    int second = -1, seen = 0;

    assert_int_equal(sched_getaffinity(0, sizeof set, &set), 0);
    assert_int_equal(zs_cpu_count(), CPU_COUNT(&set));
    assert_int_equal(zs_pool_open(2, zs_cpu_count() - 1, &pool), ZS_ERR_ARG);
    assert_null(pool);
    check_message("with 2 threads goes beyond the");
    if (zs_cpu_count() < 2)
        skip();
    for (int cpu = 0; cpu < CPU_SETSIZE && second < 0; cpu++)
        if (CPU_ISSET(cpu, &set) && seen++ == 1)
            second = cpu;
    assert_int_equal(zs_pool_open(2, 0, &pool), ZS_OK);
    zs_pool_run(pool, meet, &m, 2);
    assert_int_equal(m.cpu[0], -1); /* the caller stays free */
    assert_int_equal(m.cpu[1], second);
    zs_pool_close(&pool);
}

static void test_arguments(void **state)
{
    zs_pool *pool = NULL;

    assert_int_equal(zs_pool_open(65, -1, &pool), ZS_ERR_ARG);
    check_message("65 threads: use 1 to 64");
    assert_int_equal(zs_pool_open(-1, -1, &pool), ZS_ERR_ARG);
    assert_int_equal(zs_pool_open(1, -2, &pool), ZS_ERR_ARG);
    check_message("first_core -2");
    assert_null(pool);
    assert_int_equal(zs_pool_open(1, -1, NULL), ZS_ERR_ARG);
    check_message("out is NULL");
    zs_pool_close(&pool);
    zs_pool_close(NULL);
    assert_int_equal(zs_pool_open(0, -1, &pool), ZS_OK);
    assert_int_equal(zs_pool_threads(pool), zs_cpu_count() < 64 ? zs_cpu_count() : 64);
    zs_pool_close(&pool);
    assert_int_equal(zs_pool_open(64, -1, &pool), ZS_OK);
    run_and_check(pool, 1000);
    zs_pool_close(&pool);
}

static void test_fork(void **state)
{
    zs_pool *pool = NULL;
    int result = -1;
    pid_t pid;

    assert_int_equal(zs_pool_open(3, -1, &pool), ZS_OK);
    run_and_check(pool, 10);
    pid = fork();
    if (!pid) {
        alarm(20);
        zs_pool_close(&pool); /* its threads are not here */
        _exit(pool ? 1 : 0);
    }
    assert_int_equal(waitpid(pid, &result, 0), pid);
    assert_int_equal(result, 0);
    run_and_check(pool, 10);
    zs_pool_close(&pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_index_once),
        cmocka_unit_test(test_many_small_runs),
        cmocka_unit_test(test_memory_is_handed_over),
        cmocka_unit_test(test_two_callers),
        cmocka_unit_test(test_all_take_part),
        cmocka_unit_test(test_binding),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_fork),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
