/* SPDX-License-Identifier: Apache-2.0 */
/* In place of aio.c in builds without libaio. */
#include "base/status.h"
#include "io/backend.h"

zs_status zs_io_aio_open(unsigned depth, zs_io_backend **out)
{
    *out = NULL;
    return zs_fail(ZS_ERR_UNSUPPORTED, "libaio is not in this build; install libaio-dev and "
                                       "configure with -Dlibaio=enabled");
}
