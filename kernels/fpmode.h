/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels' bits are those of the default floating-point mode (round to nearest, denormals
 * kept). Callers may have set another (torch.set_flush_denormal): enter before a kernel, leave
 * after. Not inline, so that no arithmetic of the caller is moved across. */
#ifndef ZS_KERNELS_FPMODE_H
#define ZS_KERNELS_FPMODE_H

#include <fenv.h>

#if defined(__SSE__)
typedef unsigned zs_fpmode;
#else
typedef fenv_t zs_fpmode;
#endif

zs_fpmode zs_fpmode_enter(void);
void zs_fpmode_leave(zs_fpmode mode);

#endif
