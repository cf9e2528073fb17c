/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "kernels/level.h"

#if defined(__x86_64__)
#include <cpuid.h>

static int have_avx2(void)
{
    unsigned a, b, c, d;
    /* The operating system must save the upper halves too: this builtin asks XGETBV. */
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return 0;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static int have_always(void)
{
    return 1;
}

typedef struct level {
    zs_kernels kernels;
    int (*have)(void);
} level;

/* Best first. */
static const level levels[] = {
#if defined(__x86_64__)
    {ZS_LEVEL(avx2), have_avx2},
#endif
    {ZS_LEVEL(c), have_always},
};

const char *const *zs_kernels_names(void)
{
    static const char *const names[] = {
#if defined(__x86_64__)
        "avx2",
#endif
        "c",
        NULL,
    };
    return names;
}

static const level *level_named(const char *name)
{
    for (size_t i = 0; i < ZS_COUNT(levels); i++)
        if (strcmp(levels[i].kernels.name, name) == 0)
            return &levels[i];
    return NULL;
}

const zs_kernels *zs_kernels_find(const char *name)
{
    const level *found = level_named(name);
    return found && found->have() ? &found->kernels : NULL;
}

const zs_kernels *zs_kernels_get(void)
{
    const char *mask = getenv("ZSPILL_ISA");
    const level *best = mask ? level_named(mask) : NULL;
    for (best = best ? best : levels; !best->have(); best++)
        ;
    return &best->kernels;
}
