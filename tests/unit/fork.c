/* SPDX-License-Identifier: Apache-2.0 */
#include "base/fork.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { FDS = 40 };

static int is_open(int fd)
{
    return fcntl(fd, F_GETFD) != -1;
}

static void test_child_closes(void **state)
{
    int fds[FDS], plain = open("/dev/null", O_RDONLY), result = -1;
    pid_t pid;

    assert_true(plain >= 0);
    for (int i = 0; i < FDS; i++) {
        fds[i] = open("/dev/null", O_RDONLY);
        assert_true(fds[i] >= 0);
        assert_int_equal(zs_fork_guard_fd(fds[i]), ZS_OK);
    }
    zs_fork_unguard_fd(fds[3]);
    pid = fork();
    if (!pid) {
        int wrong = !is_open(plain);
        for (int i = 0; i < FDS; i++)
            wrong += is_open(fds[i]) != (i == 3);
        /* The list is the child's own now: guarding goes on, and its own child is guarded too. */
        if (zs_fork_guard_fd(plain) != ZS_OK)
            _exit(100);
        pid = fork();
        if (!pid)
            _exit(is_open(plain) ? 1 : 0);
        waitpid(pid, &result, 0);
        _exit(wrong + (result ? 50 : 0));
    }
    assert_int_equal(waitpid(pid, &result, 0), pid);
    assert_int_equal(result, 0);
    for (int i = 0; i < FDS; i++) {
        assert_true(is_open(fds[i])); /* the parent keeps them */
        zs_fork_unguard_fd(fds[i]);
        close(fds[i]);
    }
    zs_fork_unguard_fd(12345); /* never guarded: nothing happens */
    close(plain);
}

static void *guard_often(void *cookie)
{
    int fd = *(int *)cookie;
    for (int i = 0; i < 500; i++) {
        zs_fork_guard_fd(fd);
        zs_fork_unguard_fd(fd);
    }
    return NULL;
}

/* A fork while others register must not leave the list locked in the child. */
static void test_fork_amid_guarding(void **state)
{
    int fd = open("/dev/null", O_RDONLY);
    pthread_t threads[2];

    assert_true(fd >= 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, guard_often, &fd), 0);
    for (int i = 0; i < 20; i++) {
        int result = -1;
        pid_t pid = fork();
        if (!pid) {
            alarm(20);
            zs_fork_unguard_fd(fd);
            raise(SIGKILL); /* not _exit: the thread sanitizer would miss the parent's threads */
        }
        assert_int_equal(waitpid(pid, &result, 0), pid);
        assert_true(WIFSIGNALED(result));
        assert_int_equal(WTERMSIG(result), SIGKILL);
    }
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_child_closes),
        cmocka_unit_test(test_fork_amid_guarding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
