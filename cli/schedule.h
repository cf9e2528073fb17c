/* SPDX-License-Identifier: Apache-2.0 */
/* Learning-rate schedules: transformers' get_constant_schedule_with_warmup,
 * get_linear_schedule_with_warmup and get_cosine_schedule_with_warmup (half a cosine). */
#ifndef ZS_CLI_SCHEDULE_H
#define ZS_CLI_SCHEDULE_H

#include <stdint.h>

typedef enum zs_schedule {
    ZS_SCHEDULE_CONSTANT = 0,
    ZS_SCHEDULE_LINEAR = 1,
    ZS_SCHEDULE_COSINE = 2
} zs_schedule;

/* Factor on the learning rate for the update after `taken` updates; total: updates of the run. */
double zs_schedule_factor(zs_schedule schedule, uint64_t taken, uint64_t warmup, uint64_t total);

#endif
