/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"

#include <stdio.h>
#include <string.h>

#include "base/util.h"

enum { MESSAGE_BYTES = 1024 };
static _Thread_local char message[MESSAGE_BYTES];

const char *zs_last_error(void)
{
    return message;
}

zs_status zs_vfail(zs_status status, const char *format, va_list args)
{
    /* Arguments may point into message: format aside first. */
    char text[MESSAGE_BYTES];
    vsnprintf(text, sizeof text, format, args);
    memcpy(message, text, sizeof text);
    return status;
}

zs_status zs_fail(zs_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    zs_vfail(status, format, args);
    va_end(args);
    return status;
}

zs_status zs_vfail_prefix(zs_status status, const char *format, va_list args)
{
    char prefix[768];
    vsnprintf(prefix, sizeof prefix, format, args);
    return zs_fail(status, "%s%s", prefix, message);
}

zs_status zs_fail_prefix(zs_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    zs_vfail_prefix(status, format, args);
    va_end(args);
    return status;
}

const char *zs_status_name(zs_status status)
{
    static const char *const names[] = {
        "ZS_OK",
        "ZS_ERR_ARG",
        "ZS_ERR_MISUSE",
        "ZS_ERR_NOMEM",
        "ZS_ERR_IO",
        "ZS_ERR_NOSPACE",
        "ZS_ERR_CORRUPT",
        "ZS_ERR_LOCKED",
        "ZS_ERR_EXISTS",
        "ZS_ERR_MISMATCH",
        "ZS_ERR_COMM",
        "ZS_ERR_TIMEOUT",
        "ZS_ERR_UNSUPPORTED",
        "ZS_ERR_NONFINITE",
        "ZS_ERR_CANCELED",
        "ZS_ERR_FORKED",
        "ZS_ERR_INTERNAL",
        "ZS_ERR_DEVICE",
    };
    return (unsigned)status < ZS_COUNT(names) ? names[status] : "ZS_ERR_?";
}

const char *zs_version(void)
{
    return ZS_VERSION;
}
