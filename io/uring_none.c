/* SPDX-License-Identifier: Apache-2.0 */
/* In place of uring.c in builds without liburing. */
#include <stdio.h>

#include "base/status.h"
#include "io/backend.h"

static const char why[] =
    "io_uring is not in this build; install liburing-dev and configure with -Dio_uring=enabled";

zs_status zs_io_uring_probe(char *reason, size_t bytes)
{
    snprintf(reason, bytes, "%s", why);
    return zs_fail(ZS_ERR_UNSUPPORTED, "%s", why);
}

zs_status zs_io_uring_open(unsigned depth, zs_io_backend **out)
{
    *out = NULL;
    return zs_fail(ZS_ERR_UNSUPPORTED, "%s", why);
}
