/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/schedule.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

/* Values printed by transformers.optimization's _get_*_schedule_with_warmup_lr_lambda. */
static const struct {
    zs_schedule schedule;
    uint64_t taken, warmup, total;
    double factor;
} cases[] = {
    {ZS_SCHEDULE_CONSTANT, 0, 0, 10, 1.0},
    {ZS_SCHEDULE_CONSTANT, 9, 0, 10, 1.0},
    {ZS_SCHEDULE_CONSTANT, 0, 4, 10, 0.0},
    {ZS_SCHEDULE_CONSTANT, 3, 4, 10, 0.75},
    {ZS_SCHEDULE_CONSTANT, 4, 4, 10, 1.0},
    {ZS_SCHEDULE_CONSTANT, 100, 4, 10, 1.0},
    {ZS_SCHEDULE_LINEAR, 0, 0, 10, 1.0},
    {ZS_SCHEDULE_LINEAR, 1, 0, 10, 0.9},
    {ZS_SCHEDULE_LINEAR, 9, 0, 10, 0.1},
    {ZS_SCHEDULE_LINEAR, 10, 0, 10, 0.0},
    {ZS_SCHEDULE_LINEAR, 12, 0, 10, 0.0},
    {ZS_SCHEDULE_LINEAR, 2, 3, 10, 0.6666666666666666},
    {ZS_SCHEDULE_LINEAR, 3, 3, 10, 1.0},
    {ZS_SCHEDULE_LINEAR, 5, 3, 10, 0.7142857142857143},
    {ZS_SCHEDULE_LINEAR, 10, 10, 10, 0.0},
    {ZS_SCHEDULE_COSINE, 0, 0, 10, 1.0},
    {ZS_SCHEDULE_COSINE, 1, 0, 10, 0.9755282581475768},
    {ZS_SCHEDULE_COSINE, 5, 0, 10, 0.5000000000000001},
    {ZS_SCHEDULE_COSINE, 9, 0, 10, 0.024471741852423234},
    {ZS_SCHEDULE_COSINE, 10, 0, 10, 0.0},
    {ZS_SCHEDULE_COSINE, 1, 3, 10, 0.3333333333333333},
    {ZS_SCHEDULE_COSINE, 4, 3, 10, 0.9504844339512095},
    {ZS_SCHEDULE_COSINE, 10, 10, 10, 1.0},
};

static void test_transformers_values(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        double got =
            zs_schedule_factor(cases[i].schedule, cases[i].taken, cases[i].warmup, cases[i].total);
        if (fabs(got - cases[i].factor) > 1e-15)
            fail_msg("case %zu: %.17g, not %.17g", i, got, cases[i].factor);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_transformers_values)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
