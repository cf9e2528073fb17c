/* SPDX-License-Identifier: Apache-2.0 */
#include "zero/comm.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "comm_cases.h"

enum { RANKS = 8 };

/* ---- collectives of a caller, over the memory of this process ---- */

typedef struct wire {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int world, arrived, down;
    unsigned rounds;
    const void *sent[RANKS];
} wire;

static void wire_open(wire *w, int world)
{
    memset(w, 0, sizeof *w);
    w->world = world;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->wake, NULL);
}

/* A rank that failed will not come: those that wait for it must not hang. */
static void wire_down(wire *w)
{
    pthread_mutex_lock(&w->lock);
    w->down = 1;
    pthread_cond_broadcast(&w->wake);
    pthread_mutex_unlock(&w->lock);
}

static int wire_meet(wire *w)
{
    pthread_mutex_lock(&w->lock);
    unsigned round = w->rounds;
    if (++w->arrived == w->world) {
        w->arrived = 0;
        w->rounds++;
        pthread_cond_broadcast(&w->wake);
    }
    while (w->rounds == round && !w->down)
        pthread_cond_wait(&w->wake, &w->lock);
    int bad = w->rounds == round;
    pthread_mutex_unlock(&w->lock);
    return bad;
}

typedef struct wire_end {
    wire *wire;
    int rank;
    int broken; /* calls fail */
    int closed;
    const char *text;
} wire_end;

static int overlap(const void *a, size_t na, const void *b, size_t nb)
{
    return (const char *)a < (const char *)b + nb && (const char *)b < (const char *)a + na;
}

static int move(wire_end *end, const void *send, size_t send_bytes, void *recv, size_t bytes,
                size_t stride)
{
    if (end->broken)
        return 7;
    wire *w = end->wire;
    w->sent[end->rank] = send;
    /* what zs_comm_callbacks promises */
    int bad = overlap(send, send_bytes, recv, (size_t)w->world * bytes);
    end->text = "buffers overlap, or a rank is gone";
    if (wire_meet(w))
        return 1;
    for (int r = 0; r < w->world; r++)
        memcpy((char *)recv + (size_t)r * bytes,
               (const char *)w->sent[r] + stride * (size_t)end->rank, bytes);
    return wire_meet(w) || bad;
}

static int wire_all_gather(void *cookie, const void *send, void *recv, size_t bytes)
{
    return move(cookie, send, bytes, recv, bytes, 0);
}

static int wire_all_to_all(void *cookie, const void *send, void *recv, size_t bytes)
{
    wire_end *end = cookie;
    return move(end, send, bytes * (size_t)end->wire->world, recv, bytes, bytes);
}

static int wire_barrier(void *cookie)
{
    wire_end *end = cookie;
    return wire_meet(end->wire);
}

static const char *wire_error(void *cookie)
{
    return ((wire_end *)cookie)->text;
}

static void wire_close(void *cookie)
{
    ((wire_end *)cookie)->closed++;
}

static zs_comm_callbacks callbacks_of(wire_end *end)
{
    return (zs_comm_callbacks){.size = sizeof(zs_comm_callbacks),
                               .cookie = end,
                               .all_gather = wire_all_gather,
                               .all_to_all = wire_all_to_all,
                               .barrier = wire_barrier,
                               .error = wire_error,
                               .close = wire_close};
}

/* ---- running ranks ---- */

typedef struct rank_run {
    zs_comm *comm;
    comm_case body;
    wire *wire;
    char failure[2048];
} rank_run;

static void *run_rank(void *arg)
{
    rank_run *run = arg;
    zs_pool *pool = NULL;
    zs_math *math = NULL;
    const char *bad = "cannot open pool and maths";
    if (!zs_pool_open(1, -1, &pool) && !zs_math_open_host(pool, &math))
        bad = run->body(run->comm, math);
    snprintf(run->failure, sizeof run->failure, "%s", bad ? bad : "");
    if (bad && run->wire)
        wire_down(run->wire);
    zs_math_close(&math);
    zs_pool_close(&pool);
    return NULL;
}

/* shared: the wire under comms, or NULL */
static void run_all(zs_comm **comms, int world, comm_case body, wire *shared)
{
    pthread_t thread[RANKS];
    rank_run run[RANKS];
    for (int r = 0; r < world; r++) {
        run[r] = (rank_run){.comm = comms[r], .body = body, .wire = shared};
        assert_int_equal(pthread_create(&thread[r], NULL, run_rank, &run[r]), 0);
    }
    for (int r = 0; r < world; r++)
        pthread_join(thread[r], NULL);
    for (int r = 0; r < world; r++)
        if (run[r].failure[0])
            fail_msg("world %d, rank %d: %s", world, r, run[r].failure);
}

static void close_all(zs_comm **comms, int world)
{
    for (int r = world; r-- > 0;) {
        zs_comm_close(&comms[r]);
        assert_null(comms[r]);
    }
}

static void test_self(void **state)
{
    zs_comm *comm;
    assert_int_equal(zs_comm_open_self(&comm), ZS_OK);
    assert_int_equal(zs_comm_rank(comm), 0);
    assert_int_equal(zs_comm_world(comm), 1);
    assert_int_equal(zs_comm_local_ranks(comm), 1);
    for (int c = 0; c < COMM_CASES; c++)
        run_all(&comm, 1, comm_cases[c], NULL);
    close_all(&comm, 1);
}

static void test_threads(void **state)
{
    static const int worlds[] = {1, 2, 3, 4, 8};
    for (size_t w = 0; w < 5; w++) {
        zs_comm *comms[RANKS];
        assert_int_equal(zs_comm_open_threads(worlds[w], 60, comms), ZS_OK);
        for (int r = 0; r < worlds[w]; r++) {
            assert_int_equal(zs_comm_rank(comms[r]), r);
            assert_int_equal(zs_comm_local_ranks(comms[r]), worlds[w]);
        }
        for (int c = 0; c < COMM_CASES; c++)
            run_all(comms, worlds[w], comm_cases[c], NULL);
        close_all(comms, worlds[w]);
    }
}

static void test_callbacks(void **state)
{
    static const int worlds[] = {1, 2, 3, 4};
    for (size_t w = 0; w < 4; w++) {
        int world = worlds[w];
        wire shared;
        wire_open(&shared, world);
        wire_end ends[RANKS];
        zs_comm *comms[RANKS];
        for (int r = 0; r < world; r++) {
            ends[r] = (wire_end){.wire = &shared, .rank = r};
            zs_comm_callbacks callbacks = callbacks_of(&ends[r]);
            assert_int_equal(zs_comm_open_callbacks(&callbacks, r, world, &comms[r]), ZS_OK);
        }
        for (int c = 0; c < COMM_CASES; c++)
            run_all(comms, world, comm_cases[c], &shared);
        close_all(comms, world);
        for (int r = 0; r < world; r++)
            assert_int_equal(ends[r].closed, 1);
    }
}

/* ---- failures ---- */

static void assert_fails(zs_status got, zs_status expected, const char *text)
{
    assert_string_equal(zs_status_name(got), zs_status_name(expected));
    if (!strstr(zs_last_error(), text))
        fail_msg("'%s' lacks '%s'", zs_last_error(), text);
}

static const char *all_but_rank_1(zs_comm *comm, zs_math *math)
{
    int rank = zs_comm_rank(comm);
    EXPECT(!zs_comm_barrier(comm, "start"), "barrier: %s", zs_last_error());
    if (rank == 1)
        return NULL;
    float send[3] = {0}, recv;
    zs_status status = zs_comm_reduce_scatter(comm, math, "unit 'head'", send, &recv, 1, ZS_FP32);
    EXPECT(status == ZS_ERR_TIMEOUT, "rank %d got %d: %s", rank, status, zs_last_error());
    EXPECT(strstr(zs_last_error(),
                  "waited 0.3 s in reduce-scatter of unit 'head' (4 bytes fp32) for rank 1 (last "
                  "seen in barrier at start)"),
           "message: %s", zs_last_error());
    return NULL;
}

static void test_timeout(void **state)
{
    zs_comm *comms[3];
    assert_int_equal(zs_comm_open_threads(3, 0.3, comms), ZS_OK);
    run_all(comms, 3, all_but_rank_1, NULL);
    /* The late one, and everybody from now on. */
    for (int r = 0; r < 3; r++)
        assert_fails(zs_comm_barrier(comms[r], "later"), ZS_ERR_COMM,
                     "for rank 1 (last seen in barrier at start)");
    close_all(comms, 3);

    assert_int_equal(zs_comm_open_threads(3, 0.05, comms), ZS_OK);
    assert_fails(zs_comm_barrier(comms[1], "start"), ZS_ERR_TIMEOUT,
                 "rank 1 waited 0.05 s in barrier at start for rank 0 (which never came to any), "
                 "rank 2 (which never came to any)");
    close_all(comms, 3);
}

static const char *is_aborted(zs_comm *comm, zs_math *math)
{
    if (zs_comm_rank(comm) == 2) {
        zs_comm_abort(comm, "disk '/x' is full");
        zs_comm_abort(comm, "not the first reason");
    }
    for (int i = 0; i < 2; i++) {
        zs_status status = zs_comm_barrier(comm, "commit");
        EXPECT(status == ZS_ERR_COMM, "got %d", status);
        EXPECT(!strcmp(zs_last_error(), "rank 2 aborted: disk '/x' is full"), "message: %s",
               zs_last_error());
    }
    return NULL;
}

static void test_abort(void **state)
{
    zs_comm *comms[4];
    assert_int_equal(zs_comm_open_threads(4, 60, comms), ZS_OK);
    run_all(comms, 4, is_aborted, NULL);
    close_all(comms, 4);
}

static void *abort_from_outside(void *comm)
{
    usleep(20000);
    zs_comm_abort(comm, NULL);
    return NULL;
}

static void test_abort_from_another_thread(void **state)
{
    zs_comm *comms[2];
    pthread_t thread;
    assert_int_equal(zs_comm_open_threads(2, 60, comms), ZS_OK);
    assert_int_equal(pthread_create(&thread, NULL, abort_from_outside, comms[0]), 0);
    assert_fails(zs_comm_barrier(comms[0], "commit"), ZS_ERR_COMM,
                 "rank 0 aborted: no reason given");
    pthread_join(thread, NULL);
    close_all(comms, 2);
}

static void *close_late(void *comm)
{
    usleep(20000);
    zs_comm *mine = comm;
    zs_comm_close(&mine);
    return NULL;
}

static void *meet_and_close(void *comm)
{
    zs_comm *mine = comm;
    char all[8] = {0};
    int bad = zs_comm_all_gather(mine, "unit 'x'", "abc", all, 4) || strcmp(all + 4, "abc") ||
              zs_comm_barrier(mine, "end");
    zs_comm_close(&mine);
    return bad ? comm : NULL;
}

static void test_close(void **state)
{
    zs_comm *comms[2];
    pthread_t thread;
    assert_int_equal(zs_comm_open_threads(2, 60, comms), ZS_OK);
    assert_int_equal(pthread_create(&thread, NULL, close_late, comms[1]), 0);
    assert_fails(zs_comm_barrier(comms[0], "commit"), ZS_ERR_COMM,
                 "rank 1 closed its communicator while rank 0 is in barrier at commit");
    pthread_join(thread, NULL);
    zs_comm_close(&comms[0]);
    zs_comm_close(&comms[0]);
    zs_comm_close(NULL);

    /* Each closes right behind a collective: the slower one must still see that it succeeded. */
    for (int i = 0; i < 50; i++) {
        zs_comm *two[2];
        assert_int_equal(zs_comm_open_threads(2, 60, two), ZS_OK);
        assert_int_equal(pthread_create(&thread, NULL, meet_and_close, two[1]), 0);
        assert_null(meet_and_close(two[0]));
        void *other;
        pthread_join(thread, &other);
        assert_null(other);
    }
}

static void test_failing_callback(void **state)
{
    wire shared = {.world = 2};
    wire_end end = {.wire = &shared, .broken = 1, .text = "cable cut"};
    zs_comm_callbacks callbacks = callbacks_of(&end);
    zs_comm *comm;
    assert_int_equal(zs_comm_open_callbacks(&callbacks, 1, 2, &comm), ZS_OK);
    assert_fails(zs_comm_barrier(comm, "start"), ZS_ERR_COMM,
                 "rank 1 in barrier at start: all_gather cable cut");
    /* It stays failed: ranks are out of step. */
    end.broken = 0;
    assert_fails(zs_comm_barrier(comm, "later"), ZS_ERR_COMM, "barrier at start");
    zs_comm_close(&comm);

    end = (wire_end){.wire = &shared, .broken = 1};
    callbacks.error = NULL;
    callbacks.close = NULL;
    assert_int_equal(zs_comm_open_callbacks(&callbacks, 1, 2, &comm), ZS_OK);
    assert_fails(zs_comm_barrier(comm, "start"), ZS_ERR_COMM, "all_gather returned 7");
    zs_comm_close(&comm);

    assert_int_equal(zs_comm_open_callbacks(&callbacks, 1, 2, &comm), ZS_OK);
    zs_comm_abort(comm, "canceled");
    assert_fails(zs_comm_barrier(comm, "start"), ZS_ERR_COMM, "rank 1 aborted: canceled");
    zs_comm_close(&comm);
}

static const char *finds_twins(zs_comm *comm, zs_math *math)
{
    zs_status status = zs_comm_barrier(comm, "start");
    EXPECT(status == ZS_ERR_MISMATCH, "got %d", status);
    EXPECT(strstr(zs_last_error(), "puts what rank 0 sent in the place of rank 1"), "message: %s",
           zs_last_error());
    return NULL;
}

static void test_same_rank_twice(void **state)
{
    wire shared;
    wire_open(&shared, 2);
    wire_end ends[2];
    zs_comm *comms[2];
    for (int r = 0; r < 2; r++) {
        ends[r] = (wire_end){.wire = &shared, .rank = r};
        zs_comm_callbacks callbacks = callbacks_of(&ends[r]);
        assert_int_equal(zs_comm_open_callbacks(&callbacks, 0, 2, &comms[r]), ZS_OK);
    }
    run_all(comms, 2, finds_twins, &shared);
    close_all(comms, 2);
}

static void test_arguments(void **state)
{
    zs_comm *comms[64];
    assert_fails(zs_comm_open_threads(0, 1, comms), ZS_ERR_ARG, "world 0 is not in 1..64");
    assert_fails(zs_comm_open_threads(65, 1, comms), ZS_ERR_ARG, "world 65 is not in 1..64");
    assert_fails(zs_comm_open_threads(2, 0, comms), ZS_ERR_ARG, "timeout_s 0 is not above 0");
    assert_null(comms[1]);
    assert_fails(zs_comm_open_threads(2, (double)NAN, comms), ZS_ERR_ARG, "timeout_s");
    assert_fails(zs_comm_open_threads(2, 1, NULL), ZS_ERR_ARG, "out is NULL");
    assert_fails(zs_comm_open_mpi(-1, comms), ZS_ERR_ARG, "timeout_s -1 is not above 0");
    assert_null(comms[0]);

    wire_end end = {0};
    zs_comm_callbacks good = callbacks_of(&end), bad = good;
    assert_fails(zs_comm_open_callbacks(&good, 2, 2, comms), ZS_ERR_ARG, "rank 2 is not in 0..1");
    assert_fails(zs_comm_open_callbacks(&good, 0, 65, comms), ZS_ERR_ARG, "world 65");
    assert_fails(zs_comm_open_callbacks(NULL, 0, 1, comms), ZS_ERR_ARG, "callbacks is NULL");
    bad.size = 8;
    assert_fails(zs_comm_open_callbacks(&bad, 0, 2, comms), ZS_ERR_ARG, "size 8 is below");
    bad = good;
    bad.all_to_all = NULL;
    assert_fails(zs_comm_open_callbacks(&bad, 0, 2, comms), ZS_ERR_ARG, "all_to_all is NULL");

    double values[1] = {0};
    assert_int_equal(zs_comm_open_self(comms), ZS_OK);
    assert_fails(zs_comm_all_reduce(comms[0], "x", ZS_OP_SUM, values, 4097), ZS_ERR_ARG,
                 "4097 values are more than 4096");
    assert_fails(zs_comm_all_reduce(comms[0], "x", (zs_reduce_op)9, values, 1), ZS_ERR_ARG,
                 "unknown operation 9");
    assert_fails(zs_comm_all_reduce(NULL, "x", ZS_OP_SUM, values, 1), ZS_ERR_ARG, "NULL");
    assert_fails(zs_comm_all_gather(comms[0], "unit 'x'", values, values, SIZE_MAX), ZS_ERR_ARG,
                 "unit 'x'");
    zs_comm_close(&comms[0]);
}

static void test_fork(void **state)
{
    zs_comm *comm;
    assert_int_equal(zs_comm_open_self(&comm), ZS_OK);
    pid_t child = fork();
    if (!child) {
        int good = zs_comm_barrier(comm, "start") == ZS_ERR_FORKED &&
                   strstr(zs_last_error(), "a forked child may not use it");
        zs_comm_abort(comm, "x");
        zs_comm_close(&comm);
        _exit(good && !comm ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(zs_comm_barrier(comm, "start"), ZS_OK);
    zs_comm_close(&comm);
}

static void test_no_mpi(void **state)
{
    zs_comm *comm;
    setenv("ZSPILL_MPI_LIB", "/nonexistent/libzspill-mpi.so", 1);
    assert_fails(zs_comm_open_mpi(1, &comm), ZS_ERR_UNSUPPORTED,
                 "ZSPILL_MPI_LIB=/nonexistent/libzspill-mpi.so: cannot load the MPI plug-in");
    /* Something that is a library, but not the plug-in. */
    setenv("ZSPILL_MPI_LIB", "libm.so.6", 1);
    assert_fails(zs_comm_open_mpi(1, &comm), ZS_ERR_UNSUPPORTED, "belongs to another version");
    assert_null(comm);
    unsetenv("ZSPILL_MPI_LIB");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_self),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_callbacks),
        cmocka_unit_test(test_timeout),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_abort_from_another_thread),
        cmocka_unit_test(test_close),
        cmocka_unit_test(test_failing_callback),
        cmocka_unit_test(test_same_rank_twice),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_no_mpi),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
