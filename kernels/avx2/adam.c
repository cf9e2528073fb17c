/* SPDX-License-Identifier: Apache-2.0 */
#include "base/util.h"
#include "kernels/avx2/lanes.h"
#include "kernels/level.h"

typedef struct coef8 {
    __m256 grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2, step_size, bias2_sqrt_inv,
        eps, decay;
} coef8;

static inline coef8 coef8_make(const zs_adam_coef *c)
{
    return (coef8){
        _mm256_set1_ps(c->grad_scale),      _mm256_set1_ps(c->beta1),
        _mm256_set1_ps(c->beta2),           _mm256_set1_ps(c->one_minus_beta1),
        _mm256_set1_ps(c->one_minus_beta2), _mm256_set1_ps(c->step_size),
        _mm256_set1_ps(c->bias2_sqrt_inv),  _mm256_set1_ps(c->eps),
        _mm256_set1_ps(c->decay),
    };
}

/* zs_adam_element, line by line. */
static inline void adam8(const coef8 *c, int decoupled, __m256 grad, __m256 *master,
                         __m256 *exp_avg, __m256 *exp_avg_sq)
{
    __m256 g = _mm256_mul_ps(grad, c->grad_scale);
    __m256 w = *master;
    if (decoupled)
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

enum {
    UNROLL = 32,  /* elements: whole cache lines of every array */
    NEAR = 512,   /* elements between what is fetched into L1 and what is computed */
    FAR = 2048,   /* the same for L2 */
    STREAM = 2048 /* least elements for which the working copy goes past the caches */
};

enum how { MASTER_ONLY, STORED, STREAMED };

/* Division and square root fill the reorder window, so the hardware sees too few loads ahead: the
 * prefetches are what brings this to the speed of the memory. They stop before the end, behind
 * which another thread may be at work. (Without always_inline gcc takes the call for one without
 * effect, and drops it.) */
static inline __attribute__((always_inline)) void prefetch(const void *array, size_t i,
                                                           size_t width, const int hint)
{
    for (size_t line = 0; line < UNROLL * width; line += 64) {
        if (hint == _MM_HINT_T0)
            _mm_prefetch((const char *)array + i * width + line, _MM_HINT_T0);
        else
            _mm_prefetch((const char *)array + i * width + line, _MM_HINT_T1);
    }
}

#define PREFETCH(g, w, i, hint)                                                                    \
    prefetch(a.master, i, 4, hint);                                                                \
    prefetch(a.exp_avg, i, 4, hint);                                                               \
    prefetch(a.exp_avg_sq, i, 4, hint);                                                            \
    prefetch(a.grad, i, WIDTH_##g, hint);                                                          \
    if (how == STORED)                                                                             \
        prefetch(a.working, i, WIDTH_##w, hint);

/* Passed by value: once its address is known elsewhere, each store could have changed it. */
typedef struct arrays {
    float *master, *exp_avg, *exp_avg_sq;
    const void *grad;
    void *working;
} arrays;

#define ADAM_LANES(g, w)                                                                           \
    static inline __attribute__((always_inline)) void lanes_##g##_##w(                             \
        const arrays a, size_t i, const coef8 *c8, enum how how, int decoupled)                    \
    {                                                                                              \
        __m256 weight = zs_load8_fp32(a.master, i);                                                \
        __m256 m = zs_load8_fp32(a.exp_avg, i);                                                    \
        __m256 v = zs_load8_fp32(a.exp_avg_sq, i);                                                 \
        adam8(c8, decoupled, zs_load8_##g(a.grad, i), &weight, &m, &v);                            \
        zs_store8_fp32(a.master, i, weight);                                                       \
        zs_store8_fp32(a.exp_avg, i, m);                                                           \
        zs_store8_fp32(a.exp_avg_sq, i, v);                                                        \
        if (how == STORED)                                                                         \
            zs_store8_##w(a.working, i, weight);                                                   \
        else if (how == STREAMED)                                                                  \
            zs_stream8_##w(a.working, i, weight);                                                  \
    }                                                                                              \
    /* Returns where it stopped, fewer than 8 elements before n. */                                \
    static inline __attribute__((always_inline)) size_t many_##g##_##w(                            \
        const arrays a, size_t i, size_t n, const coef8 *c8, enum how how, int decoupled)          \
    {                                                                                              \
        for (; n - i >= NEAR + UNROLL; i += UNROLL) {                                              \
            size_t far = ZS_MIN(i + FAR, n - UNROLL);                                              \
            PREFETCH(g, w, far, _MM_HINT_T1)                                                       \
            PREFETCH(g, w, i + NEAR, _MM_HINT_T0)                                                  \
            for (size_t j = 0; j < UNROLL; j += 8)                                                 \
                lanes_##g##_##w(a, i + j, c8, how, decoupled);                                     \
        }                                                                                          \
        for (; n - i >= 8; i += 8)                                                                 \
            lanes_##g##_##w(a, i, c8, how, decoupled);                                             \
        return i;                                                                                  \
    }                                                                                              \
    static size_t few_##g##_##w(const arrays a, size_t i, size_t n, const zs_adam_coef *coef)      \
    {                                                                                              \
        for (; i < n; i++) {                                                                       \
            float weight = zs_load_fp32(a.master, i);                                              \
            float m = zs_load_fp32(a.exp_avg, i);                                                  \
            float v = zs_load_fp32(a.exp_avg_sq, i);                                               \
            zs_adam_element(coef, zs_load_##g(a.grad, i), &weight, &m, &v);                        \
            zs_store_fp32(a.master, i, weight);                                                    \
            zs_store_fp32(a.exp_avg, i, m);                                                        \
            zs_store_fp32(a.exp_avg_sq, i, v);                                                     \
            if (a.working)                                                                         \
                zs_store_##w(a.working, i, weight);                                                \
        }                                                                                          \
        return i;                                                                                  \
    }

/* The two kinds of decay apart, so that the loop has no branch. */
#define MANY(g, w, i, how)                                                                         \
    (coef->decoupled ? many_##g##_##w(a, i, n, &c8, how, 1) : many_##g##_##w(a, i, n, &c8, how, 0))

/* Nobody reads the working copy before the whole step is through, so its old contents need not be
 * fetched to be overwritten (2 of 32 bytes an element), nor its new ones be kept: measured 8 %
 * faster. */
#define ADAM(level, g, w)                                                                          \
    ADAM_LANES(g, w)                                                                               \
    void zs_##level##_adam_##g##_##w(size_t n, float *master, float *exp_avg, float *exp_avg_sq,   \
                                     const void *grad, void *working, const zs_adam_coef *coef)    \
    {                                                                                              \
        const arrays a = {master, exp_avg, exp_avg_sq, grad, working};                             \
        const coef8 c8 = coef8_make(coef);                                                         \
        size_t i = 0;                                                                              \
        if (!working) {                                                                            \
            i = MANY(g, w, 0, MASTER_ONLY);                                                        \
        } else if (n < STREAM || (uintptr_t)working % WIDTH_##w) {                                 \
            i = MANY(g, w, 0, STORED);                                                             \
        } else {                                                                                   \
            i = few_##g##_##w(a, 0, -((uintptr_t)working / WIDTH_##w) % 8, coef);                  \
            i = MANY(g, w, i, STREAMED);                                                           \
            /* Streamed stores are not ordered with those that publish the result. */              \
            _mm_sfence();                                                                          \
        }                                                                                          \
        few_##g##_##w(a, i, n, coef);                                                              \
    }
enum { WIDTH_fp32 = 4, WIDTH_bf16 = 2, WIDTH_fp16 = 2 };
ZS_EACH_PAIR(ADAM, avx2)
