/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of block files share: a directory, a log, buffers, each test over each rung. */
#ifndef ZS_TESTS_UNIT_IO_COMMON_H
#define ZS_TESTS_UNIT_IO_COMMON_H

#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "io/backend.h"

static char io_dir[64];
static char logged[8192];

static inline void log_line(void *cookie, zs_log_level level, const char *text)
{
    size_t used = strlen(logged);
    snprintf(logged + used, sizeof logged - used, "%d %s\n", (int)level, text);
}

static const zs_log test_log = {log_line, NULL, ZS_LOG_DEBUG};

static inline const char *path_of(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", io_dir, name);
    return path;
}

static inline unsigned char *map_pages(size_t bytes)
{
    void *ptr = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(ptr, MAP_FAILED);
    return ptr;
}

static inline void fill(unsigned char *buf, size_t bytes, uint32_t seed)
{
    for (size_t i = 0; i < bytes; i++) {
        seed = seed * 1664525u + 1013904223u;
        buf[i] = (unsigned char)(seed >> 24);
    }
}

static inline void round_trip(zs_io *io, zs_file *file, size_t bytes, uint64_t offset,
                              unsigned char *a, unsigned char *b)
{
    zs_io_req req = {0};

    fill(a, bytes, (uint32_t)(bytes + offset));
    memset(b, 0, bytes);
    assert_int_equal(zs_io_write(io, file, offset, a, bytes, &req), ZS_OK);
    assert_int_equal(zs_io_wait(io, &req), ZS_OK);
    assert_int_equal(zs_io_read(io, file, offset, b, bytes, &req), ZS_OK);
    assert_int_equal(zs_io_wait(io, &req), ZS_OK);
    assert_memory_equal(a, b, bytes);
}

static inline int make_dir(void **state)
{
    /* A real file system where there is one: the build directory's, not /tmp. */
    const char *root = getenv("ZSPILL_BUILD_ROOT");
    snprintf(io_dir, sizeof io_dir, "%.40s/zspill-io-XXXXXX",
             root && strlen(root) < 40 ? root : "/tmp");
    return mkdtemp(io_dir) ? 0 : -1;
}

static inline int remove_dir(void **state)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", io_dir);
    return system(command);
}

static const zs_io_engine io_engines[] = {ZS_IO_URING, ZS_IO_URING_PLAIN, ZS_IO_LIBAIO,
                                          ZS_IO_POSIX};

static inline zs_io_engine engine_of(void **state)
{
    return *(zs_io_engine *)*state;
}

/* Each test over each rung. */
#define RUNGS(f)                                                                                   \
    {#f " io_uring", f, NULL, NULL, (void *)&io_engines[0]},                                       \
        {#f " io_uring_plain", f, NULL, NULL, (void *)&io_engines[1]},                             \
        {#f " libaio", f, NULL, NULL, (void *)&io_engines[2]},                                     \
    {                                                                                              \
#f " posix", f, NULL, NULL, (void *)&io_engines[3]                                         \
    }

#endif
