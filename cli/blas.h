/* SPDX-License-Identifier: Apache-2.0 */
/* Which of its kernels OpenBLAS runs. */
#ifndef ZS_CLI_BLAS_H
#define ZS_CLI_BLAS_H

#include "zspill.h"

/* OpenBLAS takes a CPU model younger than itself for the oldest it knows, at a third of the speed.
 * Where that happened, starts the program again with OPENBLAS_CORETYPE set to what the CPU's flags
 * allow, since OpenBLAS looks only once, before main(). Returns ZS_OK when there is nothing to
 * mend, or the user has set the variable; an error when it cannot be mended. */
zs_status zs_blas_mend(char **argv);

#endif
