/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as processes. Started alone it runs itself under mpiexec and reads what the ranks print;
 * skips (77) without MPI. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "../unit/comm_cases.h"

/* ---- a rank ---- */

static int rank_cases(zs_comm *comm)
{
    zs_pool *pool = NULL;
    zs_math *math = NULL;
    if (zs_pool_open(1, -1, &pool) || zs_math_open_host(pool, &math))
        return 1;
    const char *bad = NULL;
    for (int c = 0; c < COMM_CASES && !bad; c++) {
        bad = comm_cases[c](comm, math);
        if (bad)
            printf("rank %d, %s: %s\n", zs_comm_rank(comm), comm_case_names[c], bad);
    }
    /* A second communicator of the same job, closed first and last. */
    zs_comm *second = NULL;
    if (!bad && (zs_comm_open_mpi(60, &second) || zs_comm_barrier(second, "second")))
        printf("rank %d: second: %s\n", zs_comm_rank(comm), zs_last_error());
    else if (!bad)
        printf("rank %d of %d good, %d here\n", zs_comm_rank(comm), zs_comm_world(comm),
               zs_comm_local_ranks(comm));
    zs_comm_close(&second);
    zs_math_close(&math);
    zs_pool_close(&pool);
    return 0;
}

/* Rank 1 goes away, by a signal or silently; rank 0 tells what it was told. */
static int rank_alone(zs_comm *comm, const char *mode)
{
    if (zs_comm_barrier(comm, "start")) {
        printf("barrier: %s\n", zs_last_error());
        return 1;
    }
    if (zs_comm_rank(comm) == 1) {
        if (!strcmp(mode, "killed"))
            raise(SIGKILL);
        sleep(2);
        return 0;
    }
    static char buffer[100000];
    zs_status status = ZS_OK;
    if (!strcmp(mode, "aborted")) {
        zs_comm_abort(comm, "disk '/x' is full");
        status = zs_comm_barrier(comm, "next");
    } else {
        status = zs_comm_all_gather(comm, "unit 'head'", buffer, buffer, sizeof buffer / 2);
    }
    printf("%s: %s\n", zs_status_name(status), zs_last_error());
    return 0;
}

static int run_rank(const char *mode, const char *answer)
{
    if (answer && !freopen(answer, "a", stdout))
        return 1;
    zs_comm *comm;
    zs_status status = zs_comm_open_mpi(strcmp(mode, "cases") ? 0.3 : 60, &comm);
    if (status) {
        printf("%s: %s\n", zs_status_name(status), zs_last_error());
        return status == ZS_ERR_UNSUPPORTED ? 77 : 1;
    }
    int code = strcmp(mode, "cases") ? rank_alone(comm, mode) : rank_cases(comm);
    fflush(stdout);
    zs_comm_close(&comm);
    return code;
}

/* ---- the one that starts them ---- */

static char own_path[4096];
static char output[65536];

static int run_command(const char *arguments)
{
    char command[8192];
    snprintf(command, sizeof command, "mpiexec %s 2>&1", arguments);
    FILE *job = popen(command, "r");
    assert_non_null(job);
    size_t used = fread(output, 1, sizeof output - 1, job);
    output[used] = 0;
    return pclose(job);
}

static int run_job(int world, const char *mode)
{
    char arguments[6000];
    snprintf(arguments, sizeof arguments, "-n %d '%s' %s", world, own_path, mode);
    return run_command(arguments);
}

static void assert_output(const char *text)
{
    if (!strstr(output, text))
        fail_msg("'%s' is not in: %s", text, output);
}

static void test_cases(void **state)
{
    for (int world = 1; world <= 3; world++) {
        int code = run_job(world, "cases");
        for (int r = 0; r < world; r++) {
            char text[64];
            snprintf(text, sizeof text, "rank %d of %d good, %d here", r, world, world);
            assert_output(text);
        }
        assert_int_equal(code, 0);
    }
}

static void test_absent(void **state)
{
    run_job(2, "absent");
    assert_output("ZS_ERR_TIMEOUT: rank 0 in all-gather of unit 'head' (50000 bytes): all_gather "
                  "waited 0.3 s for the other ranks");
}

static void test_killed(void **state)
{
    char arguments[6000], file[] = "/tmp/zspill-mpi-XXXXXX";
    int fd = mkstemp(file);
    assert_true(fd >= 0);
    /* Hydra would end the survivors itself, by signals and by closing their output: told not to,
     * and with shells that outlive the ranks, it leaves that to us. */
    snprintf(arguments, sizeof arguments,
             "-disable-auto-cleanup -n 2 sh -c 'trap \"\" USR1; \"%s\" killed %s; sleep 1'",
             own_path, file);
    run_command(arguments);
    ssize_t used = pread(fd, output, sizeof output - 1, 0);
    output[used > 0 ? used : 0] = 0;
    close(fd);
    unlink(file);
    /* Some transports notice the death at once. */
    assert_output("rank 0 in all-gather of unit 'head' (50000 bytes): all_gather ");
    if (!strstr(output, "ZS_ERR_TIMEOUT: "))
        assert_output("ZS_ERR_COMM: ");
}

static void test_aborted(void **state)
{
    run_job(2, "aborted");
    assert_output("ZS_ERR_COMM: rank 0 aborted: disk '/x' is full");
}

int main(int argc, char **argv)
{
    if (argc > 1)
        return run_rank(argv[1], argc > 2 ? argv[2] : NULL);
    ssize_t length = readlink("/proc/self/exe", own_path, sizeof own_path - 1);
    if (length <= 0)
        return 1;
    if (system("mpiexec --version 2>&1 | grep -qi hydra")) {
        puts("skipped: no mpiexec of MPICH");
        return 77;
    }
    if (WEXITSTATUS(run_job(1, "cases")) == 77) {
        printf("skipped: %s\n", output);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_absent),
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_aborted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
