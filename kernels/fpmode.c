/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/fpmode.h"

#if defined(__SSE__)
#include <xmmintrin.h>

enum { MXCSR_DEFAULT = 0x1f80 };

/* Only the SSE control word: kernels use no x87, and this costs a few cycles where fegetenv takes a
 * hundred. */
zs_fpmode zs_fpmode_enter(void)
{
    zs_fpmode mode = _mm_getcsr();
    _mm_setcsr(MXCSR_DEFAULT);
    return mode;
}

void zs_fpmode_leave(zs_fpmode mode)
{
    _mm_setcsr(mode);
}
#else
zs_fpmode zs_fpmode_enter(void)
{
    zs_fpmode mode;
    fegetenv(&mode);
    fesetenv(FE_DFL_ENV);
    return mode;
}

void zs_fpmode_leave(zs_fpmode mode)
{
    fesetenv(&mode);
}
#endif
