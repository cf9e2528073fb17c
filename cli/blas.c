/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/blas.h"

#include <cblas.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/util.h"

/* NULL: leave OpenBLAS alone. */
static const char *better_core(void)
{
#if defined(__x86_64__)
    static const char *const enough[] = {"Haswell", "Zen", "SkylakeX", "Cooperlake",
                                         "SapphireRapids"};
    const char *core = openblas_get_corename();
    for (size_t i = 0; i < ZS_COUNT(enough); i++)
        if (!strcasecmp(core, enough[i]))
            return NULL;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return "SkylakeX";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return "Haswell";
#endif
    return NULL;
}

void zs_blas_mend(char **argv)
{
    const char *core = getenv("OPENBLAS_CORETYPE") ? NULL : better_core();
    if (core && !setenv("OPENBLAS_CORETYPE", core, 1))
        execv("/proc/self/exe", argv);
}
