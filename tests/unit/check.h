/* SPDX-License-Identifier: Apache-2.0 */
/* What every test of this folder includes. */
#ifndef ZS_TESTS_UNIT_CHECK_H
#define ZS_TESTS_UNIT_CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "zspill.h"

/* The last error's message has part in it. */
static inline void check_message(const char *part)
{
    if (!strstr(zs_last_error(), part))
        fail_msg("no '%s' in: %s", part, zs_last_error());
}

#endif
