/* SPDX-License-Identifier: Apache-2.0 */
/* In place of uring.c in builds without liburing. */
#include "base/status.h"
#include "io/backend.h"

static zs_status refuse(zs_io_backend **out)
{
    *out = NULL;
    return zs_fail(ZS_ERR_UNSUPPORTED, "io_uring is not in this build; install liburing-dev and "
                                       "configure with -Dio_uring=enabled");
}

zs_status zs_io_uring_open(unsigned depth, zs_io_backend **out)
{
    return refuse(out);
}

zs_status zs_io_uring_plain_open(unsigned depth, zs_io_backend **out)
{
    return refuse(out);
}
