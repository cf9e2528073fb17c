/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>

void zs_log_print(const zs_log *log, zs_log_level level, const char *format, ...)
{
    char text[1024];
    va_list args;

    if (!log || !log->fn || level > log->level)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    log->fn(log->cookie, level, text);
}
