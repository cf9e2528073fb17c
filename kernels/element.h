/* SPDX-License-Identifier: Apache-2.0 */
/* What happens to one element: the definition that every level and every backend must reproduce bit
 * for bit. Loads and stores go through memcpy because arrays need no alignment. */
#ifndef ZS_KERNELS_ELEMENT_H
#define ZS_KERNELS_ELEMENT_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"

#if FLT_EVAL_METHOD != 0
#error "zspill needs float arithmetic in float precision (on x86: SSE, not x87)"
#endif

/* A backend that compiles these for its own device defines its qualifiers before. */
#ifndef ZS_ELEMENT
#define ZS_ELEMENT static inline
#endif

ZS_ELEMENT uint32_t zs_fp32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

ZS_ELEMENT float zs_fp32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

ZS_ELEMENT float zs_fp32_from_bf16(uint16_t h)
{
    return zs_fp32_from_bits((uint32_t)h << 16);
}

ZS_ELEMENT uint16_t zs_bf16_from_fp32(float x)
{
    uint32_t bits = zs_fp32_bits(x);
    uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    /* Rounding could carry a NaN's mantissa away: truncate it and make it quiet. */
    uint32_t nan = (bits >> 16) | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : even);
}

ZS_ELEMENT float zs_fp32_from_fp16(uint16_t h)
{
    uint32_t magnitude = h & 0x7fffu;
    uint32_t wide = magnitude << 13;
    /* Exact: at most 10 bits times a power of two. */
    uint32_t denormal = zs_fp32_bits((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t bits = wide + (112u << 23);
    bits = magnitude >= 0x7c00 ? wide | 0x7f800000 : bits;
    bits = magnitude > 0x7c00 ? bits | 0x400000 : bits;
    bits = magnitude < 0x0400 ? denormal : bits;
    return zs_fp32_from_bits(bits | (uint32_t)(h & 0x8000) << 16);
}

ZS_ELEMENT uint16_t zs_fp16_from_fp32(float x)
{
    uint32_t bits = zs_fp32_bits(x);
    uint32_t magnitude = bits & 0x7fffffff;
    uint32_t half = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
    /* In [0.5, 1) an ulp is 2^-24, the step of fp16's denormals: the sum rounds to that. */
    uint32_t denormal = zs_fp32_bits(zs_fp32_from_bits(magnitude) + 0.5f) - 0x3f000000;
    half = magnitude < 0x38800000 ? denormal : half;
    half = magnitude >= 0x477ff000 ? 0x7c00 : half;
    half = magnitude > 0x7f800000 ? 0x7e00 | ((magnitude >> 13) & 0x3ff) : half;
    return (uint16_t)(half | (bits >> 16 & 0x8000));
}

ZS_ELEMENT float zs_load_fp32(const void *array, size_t i)
{
    float x;
    memcpy(&x, (const char *)array + i * 4, sizeof x);
    return x;
}

ZS_ELEMENT void zs_store_fp32(void *array, size_t i, float x)
{
    memcpy((char *)array + i * 4, &x, sizeof x);
}

ZS_ELEMENT uint16_t zs_load_16(const void *array, size_t i)
{
    uint16_t h;
    memcpy(&h, (const char *)array + i * 2, sizeof h);
    return h;
}

ZS_ELEMENT void zs_store_16(void *array, size_t i, uint16_t h)
{
    memcpy((char *)array + i * 2, &h, sizeof h);
}

ZS_ELEMENT float zs_load_bf16(const void *array, size_t i)
{
    return zs_fp32_from_bf16(zs_load_16(array, i));
}

ZS_ELEMENT void zs_store_bf16(void *array, size_t i, float x)
{
    zs_store_16(array, i, zs_bf16_from_fp32(x));
}

ZS_ELEMENT float zs_load_fp16(const void *array, size_t i)
{
    return zs_fp32_from_fp16(zs_load_16(array, i));
}

ZS_ELEMENT void zs_store_fp16(void *array, size_t i, float x)
{
    zs_store_16(array, i, zs_fp16_from_fp32(x));
}

/* torch.optim.AdamW (decoupled) or Adam with L2 decay; grad as it is in memory. */
ZS_ELEMENT void zs_adam_element(const zs_adam_coef *c, float grad, float *master, float *exp_avg,
                                float *exp_avg_sq)
{
    float g = grad * c->grad_scale;
    float w = *master;
    if (c->decoupled)
        w = w * c->decay;
    else
        g = g + c->decay * w;
    float m = c->beta1 * *exp_avg + c->one_minus_beta1 * g;
    float v = c->beta2 * *exp_avg_sq + (c->one_minus_beta2 * g) * g;
    float denominator = sqrtf(v) * c->bias2_sqrt_inv + c->eps;
    *master = w - (c->step_size * m) / denominator;
    *exp_avg = m;
    *exp_avg_sq = v;
}

/* torch.nn.utils.clip_grad_norm_. */
ZS_ELEMENT zs_clip zs_clip_element(const zs_clip_config *c, double sum_squares)
{
    zs_clip clip;
    clip.norm = sqrt(sum_squares) * c->unscale;
    clip.skip = c->found_inf || !isfinite(clip.norm);
    clip.factor = 1;
    if (!clip.skip && c->clip_factor > 0)
        clip.factor = c->clip_factor;
    else if (!clip.skip && c->max_norm > 0 && c->max_norm / (clip.norm + 1e-6) < 1)
        clip.factor = c->max_norm / (clip.norm + 1e-6);
    clip.grad_scale = (float)(c->unscale * clip.factor);
    return clip;
}

#endif
