/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs that are no part of the project: in the folder that ZSPILL_TEST_DATA names, or in shared/
 * beside the checkout. Tests without them skip. tests/data.py is the same for Python. */
#ifndef ZS_TESTS_DATA_H
#define ZS_TESTS_DATA_H

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* The path of name in the folder, malloc'ed; NULL: not there. */
static inline char *data_path(const char *name)
{
    const char *folder = getenv("ZSPILL_TEST_DATA"), *root = getenv("ZSPILL_SOURCE_ROOT");
    char *path;
    int length = folder && *folder ? asprintf(&path, "%s/%s", folder, name)
                                   : asprintf(&path, "%s/../shared/%s", root ? root : ".", name);
    if (length < 0)
        abort();
    if (access(path, R_OK) == 0)
        return path;
    free(path);
    return NULL;
}

#endif
