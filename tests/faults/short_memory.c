/* SPDX-License-Identifier: Apache-2.0 */
/* To be preloaded into a program: its memory runs out as ZSPILL_TEST_MEMORY says. N: the N-th
 * allocation fails, N+: that one and all after it; counted from the start of main, over all
 * threads. At exit the number of allocations is written to the file ZSPILL_TEST_MEMORY_COUNT.
 * OpenBLAS is served always: it ends the process, or waits, when it is not. */
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>

#define EXPORT __attribute__((visibility("default")))

/* What glibc's own are called besides. */
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
extern void *__libc_memalign(size_t align, size_t bytes);

EXPORT void *malloc(size_t bytes);
EXPORT void *calloc(size_t count, size_t bytes);
EXPORT void *realloc(void *old, size_t bytes);
EXPORT void *aligned_alloc(size_t align, size_t bytes);
EXPORT int posix_memalign(void **out, size_t align, size_t bytes);
EXPORT void *mmap64(void *at, size_t bytes, int prot, int flags, int fd, off_t offset);

static struct {
    atomic_int armed;
    atomic_long count;
    long fail_at;
    int for_good;
    uintptr_t begin, end; /* of OpenBLAS */
    void *(*mmap)(void *, size_t, int, int, int, off_t);
} supply;

static int runs_out(void *caller)
{
    if (!atomic_load(&supply.armed) ||
        ((uintptr_t)caller >= supply.begin && (uintptr_t)caller < supply.end))
        return 0;
    long n = atomic_fetch_add(&supply.count, 1) + 1;
    if (supply.for_good ? n < supply.fail_at : n != supply.fail_at)
        return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t bytes)
{
    return runs_out(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
    return runs_out(__builtin_return_address(0)) ? NULL : __libc_calloc(count, bytes);
}

void *realloc(void *old, size_t bytes)
{
    return runs_out(__builtin_return_address(0)) ? NULL : __libc_realloc(old, bytes);
}

void *aligned_alloc(size_t align, size_t bytes)
{
    return runs_out(__builtin_return_address(0)) ? NULL : __libc_memalign(align, bytes);
}

int posix_memalign(void **out, size_t align, size_t bytes)
{
    void *ptr = runs_out(__builtin_return_address(0)) ? NULL : __libc_memalign(align, bytes);
    if (!ptr)
        return ENOMEM;
    *out = ptr;
    return 0;
}

void *mmap64(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    if (!supply.mmap)
        *(void **)&supply.mmap = dlsym(RTLD_NEXT, "mmap64");
    return runs_out(__builtin_return_address(0)) ? MAP_FAILED
                                                 : supply.mmap(at, bytes, prot, flags, fd, offset);
}

static int find_blas(struct dl_phdr_info *info, size_t size, void *cookie)
{
    if (!strstr(info->dlpi_name, "openblas"))
        return 0;
    supply.begin = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_LOAD)
            supply.end = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
    return 1;
}

__attribute__((constructor)) static void arm(void)
{
    const char *when = getenv("ZSPILL_TEST_MEMORY");
    char *end;
    if (!when)
        return;
    *(void **)&supply.mmap = dlsym(RTLD_NEXT, "mmap64");
    dl_iterate_phdr(find_blas, NULL);
    supply.fail_at = strtol(when, &end, 10);
    supply.for_good = *end == '+';
    atomic_store(&supply.armed, 1);
}

__attribute__((destructor)) static void report(void)
{
    const char *path = getenv("ZSPILL_TEST_MEMORY_COUNT");
    atomic_store(&supply.armed, 0);
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file)
        return;
    fprintf(file, "%ld\n", atomic_load(&supply.count));
    fclose(file);
}
