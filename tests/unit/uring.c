/* SPDX-License-Identifier: Apache-2.0 */
/* What stands in io_uring's way, and what is said about it. Each case runs in a child, for it
 * cannot be undone. */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/util.h"
#include "check.h"
#include "io/io.h"

static char logged[4096];

static void log_line(void *cookie, zs_log_level level, const char *text)
{
    size_t used = strlen(logged);
    snprintf(logged + used, sizeof logged - used, "%d %s\n", (int)level, text);
}

static const zs_log test_log = {log_line, NULL, ZS_LOG_DEBUG};

static unsigned char *map_pages(size_t bytes)
{
    void *ptr = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(ptr, MAP_FAILED);
    return ptr;
}

/* With little memory to lock: unregistered, said so, and it works. */
static void test_memlock(void **state)
{
    enum { BYTES = 64 << 20 };
    int result = -1;
    pid_t pid;
    char reason[256], path[] = "/tmp/zspill-uring-XXXXXX";
    uid_t user = 10000 + (uid_t)getpid() % 50000;
    int fd;

    if (zs_io_uring_probe(reason, sizeof reason) != ZS_OK)
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

/* As container runtimes do: io_uring_setup fails with that error. */
static int forbid_io_uring(int error)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {ZS_COUNT(code), code};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        return -1;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

/* 0: all as it should be; 77: no seccomp here. */
static int see_it_forbidden(int error, const char *expected)
{
    zs_io *io = NULL;
    char reason[256] = "";

    if (forbid_io_uring(error))
        return 77;
    if (zs_io_uring_probe(reason, sizeof reason) != ZS_ERR_UNSUPPORTED)
        return 1;
    if (!strstr(reason, expected) || !strstr(zs_last_error(), expected))
        return 2;
    /* By name it is an error, with auto it is the next engine, and the log says why. */
    if (zs_io_open(ZS_IO_URING, 0, &test_log, &io) != ZS_ERR_UNSUPPORTED || io)
        return 3;
    if (!strstr(zs_last_error(), expected))
        return 4;
    logged[0] = '\0';
    if (zs_io_open(ZS_IO_AUTO, 0, &test_log, &io) != ZS_OK)
        return 5;
    if (!strstr(zs_io_describe(io), "posix (") || !strstr(logged, expected) ||
        !strstr(logged, "; using posix threads instead"))
        return 6;
    zs_io_close(&io);
    return 0;
}

static void check_forbidden(int error, const char *expected)
{
    char reason[256];
    int result = -1;
    pid_t pid;

    if (zs_io_uring_probe(reason, sizeof reason) != ZS_OK)
        skip();
    pid = fork();
    if (!pid)
        _exit(see_it_forbidden(error, expected));
    assert_int_equal(waitpid(pid, &result, 0), pid);
    assert_true(WIFEXITED(result));
    if (WEXITSTATUS(result) == 77)
        skip();
    assert_int_equal(WEXITSTATUS(result), 0);
}

static void test_eperm(void **state)
{
    check_forbidden(EPERM, "forbidden, most likely by a seccomp profile (EPERM)");
}

static void test_enosys(void **state)
{
    check_forbidden(ENOSYS, "not in this kernel or hidden by a seccomp profile (ENOSYS)");
}

static void test_enomem(void **state)
{
    check_forbidden(ENOMEM, "raise it with ulimit -l");
}

static void test_emfile(void **state)
{
    check_forbidden(EMFILE, "raise the limit with ulimit -n");
}

static void test_other_error(void **state)
{
    check_forbidden(EIO, "io_uring cannot be set up: Input/output error");
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

    if (zs_io_uring_probe(reason, sizeof reason) != ZS_OK)
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
        cmocka_unit_test(test_memlock),      cmocka_unit_test(test_eperm),
        cmocka_unit_test(test_enosys),       cmocka_unit_test(test_enomem),
        cmocka_unit_test(test_emfile),       cmocka_unit_test(test_other_error),
        cmocka_unit_test(test_large_buffer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
