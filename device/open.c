/* SPDX-License-Identifier: Apache-2.0 */
/* Devices by name. */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "device/cuda.h"

static zs_status parse(const char *name, int *ordinal)
{
    *ordinal = -1;
    if (!strcmp(name, "host"))
        return ZS_OK;
    if (!strncmp(name, "cuda", 4)) {
        char *end = NULL;
        long n = 0;
        if (name[4] == ':' && name[5] >= '0' && name[5] <= '9') {
            errno = 0;
            n = strtol(name + 5, &end, 10);
        }
        if (!name[4] || (end && !*end && !errno && n <= INT_MAX)) {
            *ordinal = (int)n;
            return ZS_OK;
        }
    }
    return zs_fail(ZS_ERR_ARG, "device '%s' is not known: host, cuda, or cuda:N with N from 0",
                   name);
}

zs_status zs_device_open(const char *name, zs_device **out)
{
    int ordinal;
    if (!out)
        return zs_fail(ZS_ERR_ARG, "zs_device_open: out is NULL");
    *out = NULL;
    if (!name)
        return zs_fail(ZS_ERR_ARG, "zs_device_open: name is NULL");
    ZS_CHECK(parse(name, &ordinal));
    return ordinal < 0 ? zs_device_open_host(out) : zs_device_open_cuda(ordinal, out);
}

void zs_device_close(zs_device **device)
{
    if (!device || !*device)
        return;
    (*device)->ops->close(*device);
    *device = NULL;
}
