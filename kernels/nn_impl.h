/* SPDX-License-Identifier: Apache-2.0 */
/* The one source of the nn kernels, compiled once per level. Written on vectors of eight floats,
 * which the compiler splits where the level's registers are narrower, so that the order of every
 * sum is fixed here and not by the vectorizer. Define ZS_NN_TABLE and ZS_NN_NAME first. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/nn.h"

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef uint32_t v8n __attribute__((vector_size(32))); /* wraps */

enum { VEC = 8, STEP = 4 * VEC };

#define INLINE static inline __attribute__((always_inline))

INLINE v8 splat(float x)
{
    return (v8){x, x, x, x, x, x, x, x};
}

INLINE v8 load(const float *p)
{
    v8 x;
    memcpy(&x, p, sizeof(x));
    return x;
}

INLINE void store(float *p, v8 x)
{
    memcpy(p, &x, sizeof(x));
}

/* The first n < 8 elements, then fill. */
INLINE v8 load_part(const float *p, size_t n, float fill)
{
    float x[VEC];
    for (size_t i = 0; i < VEC; i++)
        x[i] = i < n ? p[i] : fill;
    return load(x);
}

INLINE void store_part(float *p, size_t n, v8 v)
{
    float x[VEC];
    store(x, v);
    for (size_t i = 0; i < n; i++)
        p[i] = x[i];
}

INLINE v8 select_v8(v8i mask, v8 yes, v8 no)
{
    return (v8)((mask & (v8i)yes) | (~mask & (v8i)no));
}

/* The 32 lanes of a sum. */
typedef struct lanes {
    v8 a[4];
} lanes;

INLINE float add_lanes(lanes l)
{
    float x[VEC];
    store(x, (l.a[0] + l.a[1]) + (l.a[2] + l.a[3]));
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

/* Cephes' expf: 2^n * p(r). Below -87.3 it is 0 (no denormals), above 88.3 it saturates. */
INLINE v8 exp_v8(v8 x)
{
    const v8 low = splat(-87.3f), high = splat(88.3f), magic = splat(12582912.0f);
    v8i under = x < low;
    v8 c = select_v8(under, low, x);
    c = select_v8(c > high, high, c);
    v8 shifted = c * splat(1.44269504088896341f) + magic;
    v8 n = shifted - magic;
    v8 r = c - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    v8 p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    v8n power = ((v8n)shifted - (v8n)magic + 127) << 23;
    return select_v8(under, splat(0.0f), p * (v8)power);
}

INLINE v8 sigmoid(v8 x)
{
    return splat(1.0f) / (splat(1.0f) + exp_v8(-x));
}

static float dot(size_t n, const float *a, const float *b)
{
    lanes l = {{{0}}};
    size_t i = 0;
    for (; i + STEP <= n; i += STEP)
        for (size_t j = 0; j < 4; j++)
            l.a[j] += load(a + i + j * VEC) * load(b + i + j * VEC);
    for (size_t j = 0; i < n; i += VEC, j++) {
        if (n - i >= VEC)
            l.a[j] += load(a + i) * load(b + i);
        else
            l.a[j] += load_part(a + i, n - i, 0.0f) * load_part(b + i, n - i, 0.0f);
    }
    return add_lanes(l);
}

static float dot3(size_t n, const float *a, const float *b, const float *c)
{
    lanes l = {{{0}}};
    size_t i = 0;
    for (; i + STEP <= n; i += STEP)
        for (size_t j = 0; j < 4; j++)
            l.a[j] += load(a + i + j * VEC) * load(b + i + j * VEC) * load(c + i + j * VEC);
    for (size_t j = 0; i < n; i += VEC, j++) {
        if (n - i >= VEC)
            l.a[j] += load(a + i) * load(b + i) * load(c + i);
        else
            l.a[j] += load_part(a + i, n - i, 0.0f) * load_part(b + i, n - i, 0.0f) *
                      load_part(c + i, n - i, 0.0f);
    }
    return add_lanes(l);
}

static float rms(size_t n, float *y, const float *x, const float *w, float eps)
{
    float rstd = 1.0f / sqrtf(dot(n, x, x) / (float)n + eps);
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] * rstd * w[i];
    return rstd;
}

static void rms_grad(size_t n, float *dx, const float *base, const float *dy, const float *x,
                     const float *w, float rstd, float *dw, float *y)
{
    float pull = dot3(n, dy, w, x) / (float)n * rstd * rstd;
    for (size_t i = 0; i < n; i++) {
        float norm = x[i] * rstd, grad = dy[i];
        dw[i] += grad * norm;
        if (y)
            y[i] = norm * w[i];
        float d = (grad * w[i] - x[i] * pull) * rstd;
        dx[i] = base ? base[i] + d : d;
    }
}

static void rope(size_t half, float *x, const float *cos, const float *sin, int inverse)
{
    float sign = inverse ? -1.0f : 1.0f;
    float *lo = x, *hi = x + half;
    size_t i = 0;
    for (; i + VEC <= half; i += VEC) {
        v8 a = load(lo + i), b = load(hi + i), c = load(cos + i), s = load(sin + i) * splat(sign);
        store(lo + i, a * c - b * s);
        store(hi + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = lo[i], b = hi[i], c = cos[i], s = sin[i] * sign;
        lo[i] = a * c - b * s;
        hi[i] = b * c + a * s;
    }
}

static void swiglu(size_t n, float *y, const float *gate, const float *up)
{
    size_t i = 0;
    for (; i + VEC <= n; i += VEC) {
        v8 g = load(gate + i);
        store(y + i, g * sigmoid(g) * load(up + i));
    }
    if (i < n) {
        v8 g = load_part(gate + i, n - i, 0.0f);
        store_part(y + i, n - i, g * sigmoid(g) * load_part(up + i, n - i, 0.0f));
    }
}

INLINE void swiglu_grad_v8(v8 *act, v8 *gate, v8 *up, v8 d)
{
    v8 g = *gate, u = *up, s = sigmoid(g), silu = g * s;
    *act = silu * u;
    *gate = d * u * (s + silu * (splat(1.0f) - s));
    *up = d * silu;
}

static void swiglu_grad(size_t n, float *act, float *gate, float *up, const float *dact)
{
    size_t i = 0;
    for (; i + VEC <= n; i += VEC) {
        v8 a, g = load(gate + i), u = load(up + i);
        swiglu_grad_v8(&a, &g, &u, load(dact + i));
        store(act + i, a);
        store(gate + i, g);
        store(up + i, u);
    }
    if (i < n) {
        size_t left = n - i;
        v8 a, g = load_part(gate + i, left, 0.0f), u = load_part(up + i, left, 0.0f);
        swiglu_grad_v8(&a, &g, &u, load_part(dact + i, left, 0.0f));
        store_part(act + i, left, a);
        store_part(gate + i, left, g);
        store_part(up + i, left, u);
    }
}

/* A NaN may or may not be found; it comes back through the sum of exp. */
static float max_of(size_t n, const float *x)
{
    v8 m[4] = {splat(x[0]), splat(x[0]), splat(x[0]), splat(x[0])};
    size_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        for (size_t j = 0; j < 4; j++) {
            v8 v = load(x + i + j * VEC);
            m[j] = select_v8(v > m[j], v, m[j]);
        }
    }
    for (; i < n; i += VEC) {
        v8 v = n - i >= VEC ? load(x + i) : load_part(x + i, n - i, x[0]);
        m[0] = select_v8(v > m[0], v, m[0]);
    }
    float all[STEP], best = x[0];
    for (size_t j = 0; j < 4; j++)
        store(all + j * VEC, m[j]);
    for (size_t j = 0; j < STEP; j++)
        best = all[j] > best ? all[j] : best;
    return best;
}

static float softmax(size_t n, float *x, float *max)
{
    float m = max_of(n, x);
    v8 shift = splat(m);
    lanes l = {{{0}}};
    size_t i = 0;
    *max = m;
    for (; i + STEP <= n; i += STEP) {
        for (size_t j = 0; j < 4; j++) {
            v8 e = exp_v8(load(x + i + j * VEC) - shift);
            store(x + i + j * VEC, e);
            l.a[j] += e;
        }
    }
    for (size_t j = 0; i < n; i += VEC, j++) {
        if (n - i >= VEC) {
            v8 e = exp_v8(load(x + i) - shift);
            store(x + i, e);
            l.a[j] += e;
        } else {
            store_part(x + i, n - i, exp_v8(load_part(x + i, n - i, 0.0f) - shift));
            l.a[j] += load_part(x + i, n - i, 0.0f);
        }
    }
    return add_lanes(l);
}

static void softmax_grad(size_t n, float *p, float *dp, float lse, float delta)
{
    v8 shift = splat(lse), d = splat(delta);
    size_t i = 0;
    for (; i + VEC <= n; i += VEC) {
        v8 e = exp_v8(load(p + i) - shift);
        store(p + i, e);
        store(dp + i, e * (load(dp + i) - d));
    }
    if (i < n) {
        v8 e = exp_v8(load_part(p + i, n - i, 0.0f) - shift);
        store_part(p + i, n - i, e);
        store_part(dp + i, n - i, e * (load_part(dp + i, n - i, 0.0f) - d));
    }
}

static void add(size_t n, float *dst, const float *src)
{
    for (size_t i = 0; i < n; i++)
        dst[i] += src[i];
}

static void scale(size_t n, float *x, float factor)
{
    for (size_t i = 0; i < n; i++)
        x[i] *= factor;
}

static void widen(size_t n, float *dst, const unsigned short *src)
{
    for (size_t i = 0; i < n; i++) {
        union {
            uint32_t bits;
            float value;
        } word = {.bits = (uint32_t)src[i] << 16};
        dst[i] = word.value;
    }
}

extern const zs_nn ZS_NN_TABLE;
const zs_nn ZS_NN_TABLE = {
    .name = ZS_NN_NAME,
    .rms = rms,
    .rms_grad = rms_grad,
    .rope = rope,
    .swiglu = swiglu,
    .swiglu_grad = swiglu_grad,
    .softmax = softmax,
    .softmax_grad = softmax_grad,
    .add = add,
    .scale = scale,
    .dot = dot,
    .widen = widen,
};
