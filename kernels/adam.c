/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/element.h"
#include "kernels/level.h"

void zs_adam_coef_make(zs_adam_coef *out, const zs_group_config *group, uint64_t step,
                       double grad_scale)
{
    double bias1 = 1 - pow(group->beta1, (double)step);
    double bias2 = 1 - pow(group->beta2, (double)step);
    *out = (zs_adam_coef){
        .grad_scale = (float)grad_scale,
        .beta1 = (float)group->beta1,
        .beta2 = (float)group->beta2,
        .one_minus_beta1 = (float)(1 - group->beta1),
        .one_minus_beta2 = (float)(1 - group->beta2),
        .step_size = (float)(group->lr / bias1),
        .bias2_sqrt_inv = (float)(1 / sqrt(bias2)),
        .eps = (float)group->eps,
        .decay =
            (float)(group->decoupled ? 1 - group->lr * group->weight_decay : group->weight_decay),
        .decoupled = group->decoupled,
    };
}

#define ADAM(level, g, w)                                                                          \
    void zs_##level##_adam_##g##_##w(size_t n, float *restrict master, float *restrict exp_avg,    \
                                     float *restrict exp_avg_sq, const void *restrict grad,        \
                                     void *restrict working, const zs_adam_coef *coef)             \
    {                                                                                              \
        const zs_adam_coef c = *coef;                                                              \
        for (size_t i = 0; i < n; i++) {                                                           \
            float weight = zs_load_fp32(master, i);                                                \
            float m = zs_load_fp32(exp_avg, i);                                                    \
            float v = zs_load_fp32(exp_avg_sq, i);                                                 \
            zs_adam_element(&c, zs_load_##g(grad, i), &weight, &m, &v);                            \
            zs_store_fp32(master, i, weight);                                                      \
            zs_store_fp32(exp_avg, i, m);                                                          \
            zs_store_fp32(exp_avg_sq, i, v);                                                       \
            if (working)                                                                           \
                zs_store_##w(working, i, weight);                                                  \
        }                                                                                          \
    }
ZS_EACH_PAIR(ADAM, c)
