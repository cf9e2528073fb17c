/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/blas.h"

#include <cblas.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "base/status.h"
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

zs_status zs_blas_mend(char **argv)
{
    const char *core = getenv("OPENBLAS_CORETYPE") ? NULL : better_core();
    if (!core)
        return ZS_OK;
    if (!setenv("OPENBLAS_CORETYPE", core, 1))
        execv("/proc/self/exe", argv);
    /* To go on would be slow, and give other bits than the next start. */
    return zs_fail(errno == ENOMEM ? ZS_ERR_NOMEM : ZS_ERR_UNSUPPORTED,
                   "OpenBLAS takes this processor for a %s, and the program cannot start itself "
                   "again to say otherwise: %s: set OPENBLAS_CORETYPE=%s",
                   openblas_get_corename(), strerror(errno), core);
}
