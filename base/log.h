/* SPDX-License-Identifier: Apache-2.0 */
/* Messages to the caller's log callback. */
#ifndef ZS_BASE_LOG_H
#define ZS_BASE_LOG_H

#include "zspill.h"

/* Plain values, copied where needed. fn NULL: silent. */
typedef struct zs_log {
    zs_log_fn fn;
    void *cookie;
    zs_log_level level;
} zs_log;

/* log may be NULL. Only from threads that are inside a zs_ call (never from pool threads). */
void zs_log_print(const zs_log *log, zs_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
