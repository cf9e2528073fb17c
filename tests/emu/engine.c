/* SPDX-License-Identifier: Apache-2.0 */
/* The engine on a CUDA device (emulated) gives the bits of the engine on the host: norms, weights,
 * moments, and what each forward pass saw. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "tests/engine/harness.h"

static const char *dir;

static void run_ok(job *j, const char *what)
{
    job_run(j);
    for (int r = 0; r < j->world; r++)
        if (j->status[r])
            fail_msg("%s: rank %d: %s", what, r, j->error[r]);
}

static void compare(const job *base, const job *j, const char *what)
{
    const int p = job_differ(base, j);
    if (p)
        fail_msg("%s: parameter '%s' differs from the host", what, j->params[p - 1].name);
    if (memcmp(base->norms, j->norms, sizeof base->norms))
        fail_msg("%s: gradient norms differ from the host", what);
    if (base->seen != j->seen)
        fail_msg("%s: forward saw other weights than on the host", what);
}

typedef struct variant {
    int world, micros;
    zs_dtype grad_dtype;
    int use_buffer, boundary;
} variant;

static void init(job *j, const variant *v)
{
    job_init(j, dir);
    j->world = v->world;
    j->micros = v->micros;
    j->grad_dtype = v->grad_dtype;
    j->use_buffer = v->use_buffer;
    if (v->boundary)
        j->config.reduce = ZS_REDUCE_BOUNDARY;
}

static void matrix(const variant *v)
{
    job base, j;
    int runs = 0;
    init(&base, v);
    run_ok(&base, "host");
    for (int stage = 0; stage <= (v->boundary ? 1 : 3); stage++)
        for (int states = 0; states < 1; states++)
            for (int params = 0; params < (stage == 3 ? (int)ZS_TIERS : 1); params++) {
                char what[128];
                init(&j, v);
                j.device = "cuda";
                j.config.zero_stage = stage;
                j.config.optimizer_tier = (zs_tier)states;
                j.config.param_tier = (zs_tier)params;
                j.config.chunk_numel = states ? 4096 : 0;
                snprintf(what, sizeof what,
                         "world %d, %d micro-batches, stage %d, states %d, "
                         "params %d",
                         v->world, v->micros, stage, states, params);
                run_ok(&j, what);
                compare(&base, &j, what);
                job_free(&j);
                runs++;
            }
    job_free(&base);
    print_message("emulated: world %d, %d micro-batches: %d runs equal the host\n", v->world,
                  v->micros, runs);
}

static void one_rank(void **state)
{
    (void)state;
    matrix(&(variant){.world = 1, .micros = 2, .use_buffer = 1});
    matrix(&(variant){.world = 1, .micros = 1});
    matrix(&(variant){.world = 1, .micros = 3, .boundary = 1});
    matrix(&(variant){.world = 1, .micros = 2, .grad_dtype = ZS_BF16});
}

int main(void)
{
    dir = job_temp_dir();
    if (!dir)
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_rank),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    job_clean(dir);
    return failed;
}
