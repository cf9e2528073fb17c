/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/nn.h"

#include <string.h>

#include "kernels/kernels.h"

extern const zs_nn zs_nn_c;
#if defined(__x86_64__)
extern const zs_nn zs_nn_avx2;
#endif

const zs_nn *zs_nn_find(const char *name)
{
#if defined(__x86_64__)
    if (strcmp(name, "avx2") == 0)
        return zs_kernels_find(name) ? &zs_nn_avx2 : NULL;
#endif
    return strcmp(name, "c") == 0 ? &zs_nn_c : NULL;
}

const zs_nn *zs_nn_get(void)
{
    const zs_nn *best = zs_nn_find(zs_kernels_get()->name);
    return best ? best : &zs_nn_c;
}
