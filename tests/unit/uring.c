/* SPDX-License-Identifier: Apache-2.0 */
/* What stands in the way of io_uring and libaio, and what is said about it. Each case runs in a
 * child, for it cannot be undone. */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/util.h"
#include "io_common.h"

/* With little memory to lock: unregistered, said so, and it works. */
static void test_memlock(void **state)
{
    enum { BYTES = 64 << 20 };
    int result = -1;
    pid_t pid;
    char reason[256], path[] = "/tmp/zspill-uring-XXXXXX";
    uid_t user = 10000 + (uid_t)getpid() % 50000;
    int fd;

    if (zs_io_probe(ZS_IO_URING, reason, sizeof reason) != ZS_OK)
        skip();
    assert_string_equal(reason, "");
    fd = mkstemp(path);
    assert_true(fd >= 0);
    /* The limit counts all processes of a user, and root has none: become one that has no other. */
    if (!getuid() && fchown(fd, user, (gid_t)-1)) {
        close(fd);
        unlink(path);
        skip(); /* a container without that user */
    }
    close(fd);
    pid = fork();
    if (!pid) {
        struct rlimit rl = {1 << 20, 1 << 20};
        zs_io *io = NULL;
        zs_file *file = NULL;
        zs_io_req req = {0};
        unsigned char *a = map_pages(BYTES);
        logged[0] = '\0';
        if (setrlimit(RLIMIT_MEMLOCK, &rl) || (!getuid() && setuid(user)))
            _exit(2);
        if (zs_io_open(ZS_IO_URING, 0, &test_log, &io) != ZS_OK)
            _exit(3);
        if (zs_io_register(io, a, BYTES) != ZS_OK)
            _exit(4);
        if (!strstr(logged, "64.00 MiB of buffers stay unregistered") ||
            !strstr(logged, "RLIMIT_MEMLOCK allows 1.00 MiB") ||
            !strstr(zs_io_describe(io), "plain buffers"))
            _exit(5);
        /* Once is enough of a warning. */
        logged[0] = '\0';
        if (zs_io_register(io, a, BYTES) != ZS_OK || strncmp(logged, "3 ", 2))
            _exit(8);
        if (zs_file_open(io, path, ZS_FILE_CREATE, BYTES, &file) != ZS_OK)
            _exit(6);
        if (zs_io_write(io, file, 0, a, BYTES, &req) != ZS_OK || zs_io_wait(io, &req) != ZS_OK)
            _exit(7);
        zs_file_close(&file);
        zs_io_close(&io);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &result, 0), pid);
    unlink(path);
    assert_true(WIFEXITED(result));
    assert_int_equal(WEXITSTATUS(result), 0);
}

/* With none at all it is no io_uring that was asked for by name, and another rung with auto. */
static int see_no_memlock(uid_t user)
{
    struct rlimit rl = {0, 0};
    zs_io *io = NULL;

    if (setrlimit(RLIMIT_MEMLOCK, &rl) || (!getuid() && setuid(user)))
        return 77;
    if (zs_io_open(ZS_IO_URING, 0, &test_log, &io) != ZS_ERR_UNSUPPORTED || io)
        return 1;
    if (!strstr(zs_last_error(), "RLIMIT_MEMLOCK ") || !strstr(zs_last_error(), "ulimit -l"))
        return 2;
    logged[0] = '\0';
    if (zs_io_open(ZS_IO_AUTO, 0, &test_log, &io) != ZS_OK)
        return 3;
    if (!strstr(logged, "I/O engine io_uring is not taken: io_uring ") ||
        !strstr(zs_io_describe(io), "; not io_uring: io_uring ") ||
        !strstr(zs_io_describe(io), "ulimit -l"))
        return 4;
    zs_io_close(&io);
    return 0;
}

static void check_child(pid_t pid)
{
    int result = -1;

    assert_int_equal(waitpid(pid, &result, 0), pid);
    assert_true(WIFEXITED(result));
    if (WEXITSTATUS(result) == 77)
        skip();
    assert_int_equal(WEXITSTATUS(result), 0);
}

static void test_no_memlock(void **state)
{
    char reason[256];
    pid_t pid;

    if (zs_io_probe(ZS_IO_URING, reason, sizeof reason) != ZS_OK)
        skip();
    pid = fork();
    if (!pid)
        _exit(see_no_memlock(10000 + (uid_t)getpid() % 50000));
    check_child(pid);
}

/* As container runtimes do: setting a ring or a context up fails with that error. */
static int forbid(long call, int error)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {ZS_COUNT(code), code};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        return -1;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

/* By name it is an error. 0: all as it should be; 77: no seccomp here. */
static int see_it_forbidden(zs_io_engine engine, int error, const char *expected)
{
    zs_io *io = NULL;
    char reason[256] = "";

    if (forbid(engine == ZS_IO_LIBAIO ? SYS_io_setup : SYS_io_uring_setup, error))
        return 77;
    if (zs_io_probe(engine, reason, sizeof reason) != ZS_ERR_UNSUPPORTED)
        return 1;
    if (!strstr(reason, expected) || !strstr(zs_last_error(), expected))
        return 2;
    if (zs_io_open(engine, 0, &test_log, &io) != ZS_ERR_UNSUPPORTED || io)
        return 3;
    if (!strstr(zs_last_error(), expected))
        return 4;
    return 0;
}

static void check_forbidden(zs_io_engine engine, int error, const char *expected)
{
    char reason[256];
    pid_t pid;

    if (zs_io_probe(engine, reason, sizeof reason) != ZS_OK)
        skip();
    pid = fork();
    if (!pid)
        _exit(see_it_forbidden(engine, error, expected));
    check_child(pid);
}

static void test_uring_forbidden(void **state)
{
    static const struct {
        int error;
        const char *expected;
    } cases[] = {{EPERM, "forbidden, most likely by a seccomp profile (EPERM)"},
                 {ENOSYS, "not in this kernel or hidden by a seccomp profile (ENOSYS)"},
                 {ENOMEM, "raise it with ulimit -l"},
                 {EMFILE, "raise the limit with ulimit -n"},
                 {EIO, "io_uring cannot be set up: Input/output error"}};

    for (size_t i = 0; i < ZS_COUNT(cases); i++) {
        check_forbidden(ZS_IO_URING, cases[i].error, cases[i].expected);
        check_forbidden(ZS_IO_URING_PLAIN, cases[i].error, cases[i].expected);
    }
}

static void test_libaio_forbidden(void **state)
{
    check_forbidden(ZS_IO_LIBAIO, EPERM, "libaio is forbidden, most likely by a seccomp profile");
    check_forbidden(ZS_IO_LIBAIO, ENOSYS, "libaio is not in this kernel or hidden");
    check_forbidden(ZS_IO_LIBAIO, EAGAIN, " of fs.aio-max-nr = ");
    check_forbidden(ZS_IO_LIBAIO, EAGAIN, "as root: sysctl fs.aio-max-nr=1048576");
    check_forbidden(ZS_IO_LIBAIO, EIO, "libaio cannot be set up: Input/output error");
}

/* With auto it is the next rung, then the one below; log and description say why. */
static int see_descent(void)
{
    zs_io *io = NULL;

    if (forbid(SYS_io_uring_setup, EPERM))
        return 77;
    logged[0] = '\0';
    if (zs_io_open(ZS_IO_AUTO, 0, &test_log, &io) != ZS_OK)
        return 1;
    if (strncmp(zs_io_describe(io), "libaio; not io_uring: io_uring is forbidden", 43) != 0 ||
        strstr(zs_io_describe(io), "not io_uring_plain"))
        return 2;
    if (!strstr(logged, "I/O engine io_uring is not taken: io_uring is forbidden") ||
        !strstr(logged, "I/O engine io_uring_plain is not taken: ") ||
        !strstr(logged, "I/O engine libaio it is"))
        return 3;
    zs_io_close(&io);
    if (forbid(SYS_io_setup, EAGAIN))
        return 4;
    logged[0] = '\0';
    if (zs_io_open(ZS_IO_AUTO, 0, &test_log, &io) != ZS_OK)
        return 5;
    if (strncmp(zs_io_describe(io), "posix (8 threads); not io_uring: ", 33) != 0 ||
        !strstr(zs_io_describe(io), "; not libaio: libaio gets no room for 64 requests"))
        return 6;
    if (!strstr(logged, "I/O engine libaio is not taken: libaio gets no room") ||
        !strstr(logged, "I/O engine posix (8 threads) it is"))
        return 7;
    zs_io_close(&io);
    return 0;
}

static void test_descent(void **state)
{
    char reason[256];
    pid_t pid;

    if (zs_io_probe(ZS_IO_URING, reason, sizeof reason) != ZS_OK ||
        zs_io_probe(ZS_IO_LIBAIO, reason, sizeof reason) != ZS_OK)
        skip();
    pid = fork();
    if (!pid)
        _exit(see_descent());
    check_child(pid);
}

/* The kernel takes at most 1 GiB a buffer: larger ones go in slices, and what straddles two works
 * too. */
static void test_large_buffer(void **state)
{
    enum { PIECE = 4 << 20 };
    static const size_t bytes = (1ull << 30) + PIECE, transfer = 2 << 20;
    static const size_t starts[] = {0, (1ull << 30) - (1 << 20) - 4096, (1ull << 30) + (1 << 20)};
    char reason[256], path[] = "/tmp/zspill-uring-XXXXXX";
    struct rlimit rl;
    unsigned char *buf, *copy;
    zs_io *io = NULL;
    zs_file *file = NULL;
    zs_io_req req = {0};
    int fd;

    if (zs_io_probe(ZS_IO_URING, reason, sizeof reason) != ZS_OK)
        skip();
    if ((getrlimit(RLIMIT_MEMLOCK, &rl) || rl.rlim_cur < 2 * bytes) && getuid())
        skip();
    /* The same few pages again and again: it is addresses that count here. */
    fd = memfd_create("zspill-test", MFD_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, PIECE), 0);
    buf = map_pages(bytes);
    for (size_t at = 0; at < bytes; at += PIECE)
        assert_ptr_equal(
            mmap(buf + at, PIECE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0), buf + at);
    close(fd);
    copy = map_pages(transfer);
    fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(zs_io_open(ZS_IO_URING, 0, &test_log, &io), ZS_OK);
    logged[0] = '\0';
    assert_int_equal(zs_io_register(io, buf, bytes), ZS_OK);
    assert_string_equal(logged, "");
    assert_non_null(strstr(zs_io_describe(io), "registered buffers"));
    assert_int_equal(zs_file_open(io, path, ZS_FILE_CREATE, transfer, &file), ZS_OK);
    for (size_t i = 0; i < ZS_COUNT(starts); i++) {
        for (size_t k = 0; k < transfer; k++)
            buf[starts[i] + k] = (unsigned char)(k * 7 + k / 4096 + i);
        memcpy(copy, buf + starts[i], transfer);
        assert_int_equal(zs_io_write(io, file, 0, buf + starts[i], transfer, &req), ZS_OK);
        assert_int_equal(zs_io_wait(io, &req), ZS_OK);
        memset(buf + starts[i], 0, transfer);
        assert_int_equal(zs_io_read(io, file, 0, buf + starts[i], transfer, &req), ZS_OK);
        assert_int_equal(zs_io_wait(io, &req), ZS_OK);
        assert_memory_equal(buf + starts[i], copy, transfer);
    }
    zs_io_unregister(io, buf);
    assert_non_null(strstr(zs_io_describe(io), "plain buffers"));
    zs_file_close(&file);
    zs_io_close(&io);
    unlink(path);
    munmap(buf, bytes);
    munmap(copy, transfer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memlock),         cmocka_unit_test(test_no_memlock),
        cmocka_unit_test(test_uring_forbidden), cmocka_unit_test(test_libaio_forbidden),
        cmocka_unit_test(test_descent),         cmocka_unit_test(test_large_buffer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
