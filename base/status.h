/* SPDX-License-Identifier: Apache-2.0 */
/* Errors: a status code that travels up, and one message a thread that says what happened. */
#ifndef ZS_BASE_STATUS_H
#define ZS_BASE_STATUS_H

#include <stdarg.h>

#include "zspill.h"

/* Sets this thread's message (printf style) and returns status, so that callers write
 * `return zs_fail(ZS_ERR_ARG, "...")`. Messages name the object, the number and the fix. */
zs_status zs_fail(zs_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Puts text in front of the present message ("unit 'layers.3': ..."); returns status. */
zs_status zs_fail_prefix(zs_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
zs_status zs_vfail(zs_status status, const char *format, va_list args)
    __attribute__((format(printf, 2, 0)));
zs_status zs_vfail_prefix(zs_status status, const char *format, va_list args)
    __attribute__((format(printf, 2, 0)));

/* Within a function that owns something: goto fail with `status` set. */
#define ZS_TRY(expr)                                                                               \
    do {                                                                                           \
        status = (expr);                                                                           \
        if (status != ZS_OK)                                                                       \
            goto fail;                                                                             \
    } while (0)
/* Within a function that owns nothing. */
#define ZS_CHECK(expr)                                                                             \
    do {                                                                                           \
        zs_status zs_check_status = (expr);                                                        \
        if (zs_check_status != ZS_OK)                                                              \
            return zs_check_status;                                                                \
    } while (0)

#endif
