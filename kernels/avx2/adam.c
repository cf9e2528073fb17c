/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/avx2/lanes.h"
#include "kernels/level.h"

typedef struct coef8 {
    __m256 grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2, step_size, bias2_sqrt_inv,
        eps, decay;
    int decoupled;
} coef8;

static inline coef8 coef8_make(const zs_adam_coef *c)
{
    return (coef8){
        _mm256_set1_ps(c->grad_scale),      _mm256_set1_ps(c->beta1),
        _mm256_set1_ps(c->beta2),           _mm256_set1_ps(c->one_minus_beta1),
        _mm256_set1_ps(c->one_minus_beta2), _mm256_set1_ps(c->step_size),
        _mm256_set1_ps(c->bias2_sqrt_inv),  _mm256_set1_ps(c->eps),
        _mm256_set1_ps(c->decay),           c->decoupled,
    };
}

/* zs_adam_element, line by line. */
static inline void adam8(const coef8 *c, __m256 grad, __m256 *master, __m256 *exp_avg,
                         __m256 *exp_avg_sq)
{
    __m256 g = _mm256_mul_ps(grad, c->grad_scale);
    __m256 w = *master;
    if (c->decoupled)
        w = _mm256_mul_ps(w, c->decay);
    else
        g = _mm256_add_ps(g, _mm256_mul_ps(c->decay, w));
    __m256 m =
        _mm256_add_ps(_mm256_mul_ps(c->beta1, *exp_avg), _mm256_mul_ps(c->one_minus_beta1, g));
    __m256 v = _mm256_add_ps(_mm256_mul_ps(c->beta2, *exp_avg_sq),
                             _mm256_mul_ps(_mm256_mul_ps(c->one_minus_beta2, g), g));
    __m256 denominator = _mm256_add_ps(_mm256_mul_ps(_mm256_sqrt_ps(v), c->bias2_sqrt_inv), c->eps);
    *master = _mm256_sub_ps(w, _mm256_div_ps(_mm256_mul_ps(c->step_size, m), denominator));
    *exp_avg = m;
    *exp_avg_sq = v;
}

#define ADAM(level, g, w)                                                                          \
    void zs_##level##_adam_##g##_##w(size_t n, float *master, float *exp_avg, float *exp_avg_sq,   \
                                     const void *grad, void *working, const zs_adam_coef *coef)    \
    {                                                                                              \
        const coef8 c8 = coef8_make(coef);                                                         \
        size_t i = 0;                                                                              \
        for (; n - i >= 8; i += 8) {                                                               \
            __m256 weight = zs_load8_fp32(master, i);                                              \
            __m256 m = zs_load8_fp32(exp_avg, i);                                                  \
            __m256 v = zs_load8_fp32(exp_avg_sq, i);                                               \
            adam8(&c8, zs_load8_##g(grad, i), &weight, &m, &v);                                    \
            zs_store8_fp32(master, i, weight);                                                     \
            zs_store8_fp32(exp_avg, i, m);                                                         \
            zs_store8_fp32(exp_avg_sq, i, v);                                                      \
            if (working)                                                                           \
                zs_store8_##w(working, i, weight);                                                 \
        }                                                                                          \
        for (; i < n; i++) {                                                                       \
            float weight = zs_load_fp32(master, i);                                                \
            float m = zs_load_fp32(exp_avg, i);                                                    \
            float v = zs_load_fp32(exp_avg_sq, i);                                                 \
            zs_adam_element(coef, zs_load_##g(grad, i), &weight, &m, &v);                          \
            zs_store_fp32(master, i, weight);                                                      \
            zs_store_fp32(exp_avg, i, m);                                                          \
            zs_store_fp32(exp_avg_sq, i, v);                                                       \
            if (working)                                                                           \
                zs_store_##w(working, i, weight);                                                  \
        }                                                                                          \
    }
ZS_EACH_PAIR(ADAM, avx2)
