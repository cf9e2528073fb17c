/* SPDX-License-Identifier: Apache-2.0 */
/* What tests of whole jobs expect of them. Includes cmocka's assertions, so what cmocka.h wants
 * before it must be there. */
#ifndef ZS_TESTS_ENGINE_JOB_CHECK_H
#define ZS_TESTS_ENGINE_JOB_CHECK_H

#include <string.h>

#include "tests/engine/harness.h"

/* Runs it; every rank must come to its end. */
static inline void run_ok(job *j, const char *what)
{
    job_run(j);
    for (int r = 0; r < j->world; r++)
        if (j->status[r])
            fail_msg("%s: rank %d: %s", what, r, j->error[r]);
}

/* The same bits and norms as base, which is called `other`. */
static inline void expect_same(const job *base, const char *other, const job *j, const char *what)
{
    const int p = job_differ(base, j);
    if (p)
        fail_msg("%s: parameter '%s' differs from %s", what, j->params[p - 1].name, other);
    if (memcmp(base->norms, j->norms, sizeof base->norms))
        fail_msg("%s: gradient norms differ from %s", what, other);
}

#endif
