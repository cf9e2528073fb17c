/* SPDX-License-Identifier: Apache-2.0 */
/* libzspill-mpi.so: collectives over MPI. All are non-blocking and waited for with a deadline, so
 * that a rank that died or went elsewhere is an error and not a hang. */
#include "zero/mpi/plugin.h"

#include <limits.h>
#include <mpi.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct job {
    MPI_Comm comm;
    MPI_Comm leaving; /* only close meets here: nothing that a lost rank left can be taken for it */
    int rank;
    double timeout_s;
    int broken; /* a collective failed: MPI must not be called again, peers may be gone */
    atomic_int stop;
    char text[512];
} job;

/* Jobs open in this process, if it was us who initialized MPI: the last one to close finalizes it.
 * MPI itself is one state per process, hence the one global. */
static atomic_int open_jobs;

static double now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static int fail_code(job *j, int code)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    text[strcspn(text, "\n")] = 0;
    snprintf(j->text, sizeof j->text, "failed: MPI: %.400s", text);
    j->broken = 1;
    return ZS_MPI_FAILED;
}

/* started: what the call that made request returned. */
static int wait_for(job *j, int started, MPI_Request *request)
{
    if (started != MPI_SUCCESS)
        return fail_code(j, started);
    double start = now();
    for (;;) {
        int done = 0, code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS)
            return fail_code(j, code);
        if (done)
            return 0;
        if (atomic_load(&j->stop)) {
            snprintf(j->text, sizeof j->text, "was aborted");
            j->broken = 1;
            return ZS_MPI_FAILED;
        }
        double waited = now() - start;
        if (waited > j->timeout_s) {
            snprintf(j->text, sizeof j->text,
                     "waited %g s for the other ranks: one of them has died or does something else "
                     "(or is only slow: then raise the time-out)",
                     j->timeout_s);
            j->broken = 1;
            return ZS_MPI_LATE;
        }
        /* MPI moves data only while it is called: give way at first, sleep when it takes long. */
        if (waited < 0.02)
            sched_yield();
        else
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
}

/* Reasons not to call MPI. */
static int refuse(job *j, size_t bytes)
{
    if (j->broken)
        return 1;
    if (bytes <= INT_MAX)
        return 0;
    snprintf(j->text, sizeof j->text, "failed: %zu bytes in one call are more than MPI counts",
             bytes);
    return 1;
}

static int all_gather(void *cookie, const void *send, void *recv, size_t bytes)
{
    job *j = cookie;
    if (refuse(j, bytes))
        return ZS_MPI_FAILED;
    MPI_Request request;
    int in_place = send == (char *)recv + (size_t)j->rank * bytes;
    int started = MPI_Iallgather(in_place ? MPI_IN_PLACE : send, (int)bytes, MPI_BYTE, recv,
                                 (int)bytes, MPI_BYTE, j->comm, &request);
    return wait_for(j, started, &request);
}

static int all_to_all(void *cookie, const void *send, void *recv, size_t bytes)
{
    job *j = cookie;
    if (refuse(j, bytes))
        return ZS_MPI_FAILED;
    MPI_Request request;
    int started =
        MPI_Ialltoall(send, (int)bytes, MPI_BYTE, recv, (int)bytes, MPI_BYTE, j->comm, &request);
    return wait_for(j, started, &request);
}

static int barrier_on(job *j, MPI_Comm comm)
{
    if (refuse(j, 0))
        return ZS_MPI_FAILED;
    MPI_Request request;
    int started = MPI_Ibarrier(comm, &request);
    return wait_for(j, started, &request);
}

static int barrier(void *cookie)
{
    job *j = cookie;
    return barrier_on(j, j->comm);
}

static const char *error_text(void *cookie)
{
    return ((job *)cookie)->text;
}

static void abort_job(void *cookie)
{
    atomic_store(&((job *)cookie)->stop, 1);
}

static void close_job(void *cookie)
{
    job *j = cookie;
    /* MPI_Finalize waits for all ranks without limit: only when all are here. */
    int together = !atomic_load(&j->stop) && barrier_on(j, j->leaving) == 0;
    if (together) {
        MPI_Comm_free(&j->leaving);
        MPI_Comm_free(&j->comm);
    }
    int before = atomic_load(&open_jobs);
    if (before > 0 && atomic_fetch_sub(&open_jobs, 1) == 1 && together)
        MPI_Finalize();
    free(j);
}

static int fail_open(char *message, size_t bytes, job *j, const char *text)
{
    snprintf(message, bytes, "%s", text);
    free(j);
    return -1;
}

static int start_mpi(char *message, size_t bytes)
{
    int initialized = 0, finalized = 0, provided = MPI_THREAD_SINGLE;
    MPI_Finalized(&finalized);
    if (finalized)
        return fail_open(message, bytes, NULL,
                         "MPI was finalized already in this process and cannot start again: keep "
                         "the communicator open as long as one is needed");
    MPI_Initialized(&initialized);
    if (initialized) {
        MPI_Query_thread(&provided);
        if (atomic_load(&open_jobs))
            atomic_fetch_add(&open_jobs, 1);
    } else {
        if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
            return fail_open(message, bytes, NULL, "MPI_Init_thread failed");
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
        atomic_store(&open_jobs, 1);
    }
    if (provided < MPI_THREAD_FUNNELED)
        return fail_open(message, bytes, NULL,
                         "MPI was initialized for programs without threads: call MPI_Init_thread "
                         "with MPI_THREAD_FUNNELED");
    return 0;
}

int zs_mpi_entry_1(double timeout_s, zs_mpi_job *out, char *message, size_t bytes)
{
    if (start_mpi(message, bytes))
        return -1;
    job *j = calloc(1, sizeof *j);
    if (!j)
        return fail_open(message, bytes, j, "no memory");
    j->timeout_s = timeout_s;
    /* Our own communicators: what the program sends on others cannot be mistaken for ours. */
    MPI_Comm *own[] = {&j->comm, &j->leaving};
    for (int i = 0; i < 2; i++) {
        MPI_Request request;
        int started = MPI_Comm_idup(MPI_COMM_WORLD, own[i], &request);
        if (wait_for(j, started, &request))
            return fail_open(message, bytes, j, j->text);
        MPI_Comm_set_errhandler(*own[i], MPI_ERRORS_RETURN);
    }

    MPI_Comm node;
    int world = 1, local = 1;
    MPI_Comm_rank(j->comm, &j->rank);
    MPI_Comm_size(j->comm, &world);
    if (MPI_Comm_split_type(j->comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node) ==
        MPI_SUCCESS) {
        MPI_Comm_size(node, &local);
        MPI_Comm_free(&node);
    }
    *out = (zs_mpi_job){.callbacks = {.size = sizeof out->callbacks,
                                      .cookie = j,
                                      .all_gather = all_gather,
                                      .all_to_all = all_to_all,
                                      .barrier = barrier,
                                      .error = error_text,
                                      .close = close_job},
                        .rank = j->rank,
                        .world = world,
                        .local_ranks = local,
                        .abort = abort_job};
    return 0;
}
