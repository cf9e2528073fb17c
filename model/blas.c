/* SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "model/internal.h"

/* OpenBLAS built for many CPUs falls back to its SSE3 kernels (a quarter of the speed) on CPUs that
 * are younger than itself. What the CPU's flags allow is asked for by name then, as a user would
 * with OPENBLAS_CORETYPE, which is obeyed when set. */
static void choose_core(void)
{
#if defined(__x86_64__)
    char *(*core_name)(void) = (char *(*)(void))dlsym(RTLD_DEFAULT, "openblas_get_corename");
    void (*quit)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "gotoblas_dynamic_quit");
    void (*init)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "gotoblas_dynamic_init");
    const char *wanted = NULL;
    if (!core_name || !quit || !init || getenv("OPENBLAS_CORETYPE"))
        return;
    if (strcmp(core_name(), "Prescott") != 0 && strcmp(core_name(), "Core2") != 0 &&
        strcmp(core_name(), "Nehalem") != 0)
        return;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        wanted = "SkylakeX";
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        wanted = "Haswell";
    if (!wanted)
        return;
    setenv("OPENBLAS_CORETYPE", wanted, 1);
    quit();
    init();
    unsetenv("OPENBLAS_CORETYPE");
#endif
}

static void setup(void)
{
    /* Not every CBLAS has it. */
    void (*set_threads)(int) = (void (*)(int))dlsym(RTLD_DEFAULT, "openblas_set_num_threads");
    if (set_threads)
        set_threads(1);
    choose_core();
}

void zs_blas_setup(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, setup);
}
