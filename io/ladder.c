/* SPDX-License-Identifier: Apache-2.0 */
/* Which engine: the rungs, best first, and why one was not taken. */
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/fault.h"

enum { DEPTH_DEFAULT = 64, DEPTH_MAX = 1024, DEPTH_PROBE = 8 };

typedef struct rung {
    zs_io_engine engine;
    const char *name;
    /* ZS_ERR_UNSUPPORTED, with the reason and the fix, where it is not to be had. */
    zs_status (*open)(unsigned depth, zs_io_backend **out);
} rung;

static const rung rungs[] = {
    {ZS_IO_URING, "io_uring", zs_io_uring_open},
    {ZS_IO_URING_PLAIN, "io_uring_plain", zs_io_uring_plain_open},
    {ZS_IO_LIBAIO, "libaio", zs_io_aio_open},
    {ZS_IO_POSIX, "posix", zs_io_posix_open},
};

static const rung *find_rung(zs_io_engine engine)
{
    for (size_t i = 0; i < ZS_COUNT(rungs); i++)
        if (rungs[i].engine == engine)
            return &rungs[i];
    return NULL;
}

static zs_status fail_name(zs_io_engine engine)
{
    return zs_fail(ZS_ERR_ARG,
                   "I/O engine %d: use auto (0), io_uring (1), posix (2), libaio (3) or "
                   "io_uring_plain (4)",
                   (int)engine);
}

static zs_status open_best(unsigned depth, const zs_log *log, zs_io_backend **out)
{
    char note[ZS_IO_NOTE_BYTES] = "", last[256] = "";
    size_t used = 0;
    zs_status status = ZS_ERR_UNSUPPORTED;

    for (size_t i = 0; i < ZS_COUNT(rungs) && status == ZS_ERR_UNSUPPORTED; i++) {
        status = rungs[i].open(depth, out);
        if (status != ZS_ERR_UNSUPPORTED)
            break;
        zs_log_print(log, ZS_LOG_INFO, "I/O engine %s is not taken: %s", rungs[i].name,
                     zs_last_error());
        /* What stands in the way of both kinds of io_uring is told once. */
        if (used < sizeof note && strcmp(last, zs_last_error()) != 0)
            used += (size_t)snprintf(note + used, sizeof note - used, "; not %s: %s", rungs[i].name,
                                     zs_last_error());
        snprintf(last, sizeof last, "%s", zs_last_error());
    }
    if (status != ZS_OK)
        return status;
    memcpy((*out)->note, note, sizeof note);
    if (used)
        zs_log_print(log, ZS_LOG_INFO, "I/O engine %s it is", (*out)->description);
    return ZS_OK;
}

zs_status zs_io_open_faults(zs_io_engine engine, unsigned depth, const zs_log *log,
                            zs_faults *faults, zs_io **out)
{
    const rung *asked = find_rung(engine);
    zs_io_backend *backend = NULL;

    *out = NULL;
    if (depth > DEPTH_MAX)
        return zs_fail(ZS_ERR_ARG, "block files: depth %u: use 1 to %d, or 0 for %d", depth,
                       DEPTH_MAX, DEPTH_DEFAULT);
    if (!asked && engine != ZS_IO_AUTO)
        return fail_name(engine);
    depth = depth ? depth : DEPTH_DEFAULT;
    ZS_CHECK(asked ? asked->open(depth, &backend) : open_best(depth, log, &backend));
    if (faults)
        ZS_CHECK(zs_io_fault_open(backend, depth, faults, log, &backend));
    return zs_io_open_backend(backend, depth, log, out);
}

zs_status zs_io_open(zs_io_engine engine, unsigned depth, const zs_log *log, zs_io **out)
{
    zs_faults *faults = NULL;

    *out = NULL;
    ZS_CHECK(zs_faults_of_environment(&faults));
    if (faults)
        zs_log_print(log, ZS_LOG_WARN, "faults are injected as ZSPILL_FAULTS says");
    return zs_io_open_faults(engine, depth, log, faults, out);
}

zs_status zs_io_probe(zs_io_engine engine, char *reason, size_t bytes)
{
    const rung *asked = find_rung(engine);
    zs_io_backend *backend = NULL;
    zs_status status;

    if (!asked)
        return fail_name(engine);
    status = asked->open(DEPTH_PROBE, &backend);
    snprintf(reason, bytes, "%s", status == ZS_OK ? "" : zs_last_error());
    if (backend)
        backend->ops->close(backend);
    return status;
}
