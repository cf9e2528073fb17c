/* SPDX-License-Identifier: Apache-2.0 */
/* zs_math of a CUDA device, dressed as a level of kernels.h, so that tests/kernels compares it with
 * plain C as it does the levels of the CPU. Each call copies its arrays to the device (every other
 * one: leaves them in pinned memory, which kernels reach without a copy), between guards and with
 * the alignment that they have, and copies the results back. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "device/cuda.h"
#include "kernels/level.h"
#include "kernels/math.h"

ZS_DECLARE_LEVEL(cuda)
extern const zs_kernels zs_cuda_level;

enum { ROOM = 4 << 20, GUARD = 64, GUARD_BYTE = 0x5a, MOST = 16 };

static zs_device *device;
static zs_ledger *ledger;
static zs_math *math;
static unsigned char *on_device, *pinned; /* [ROOM] each */

/* The arrays of the call at hand. */
static struct staged {
    void *host;
    size_t at, bytes; /* in pinned and on_device */
} staged[MOST];
static size_t count, used;
static int zero_copy;

static void need(zs_status status)
{
    if (status == ZS_OK)
        return;
    printf("FAIL CUDA: %s\n", zs_last_error());
    exit(1);
}

static void finish(void)
{
    zs_math_close(&math);
    device->ops->free(device, on_device, ROOM);
    device->ops->host_free(device, pinned, ROOM);
    zs_device_close(&device);
    zs_ledger_close(&ledger);
}

static void begin(void)
{
    if (!device) {
        need(zs_device_open_cuda(0, &device));
        need(zs_ledger_open(&ledger));
        need(device->cuda->math_open(device, ledger, &math));
        need(device->ops->alloc(device, ROOM, (void **)&on_device));
        need(device->ops->host_alloc(device, ROOM, (void **)&pinned));
        atexit(finish);
    }
    count = used = 0;
    zero_copy = !zero_copy;
}

/* Where the kernel finds the array at host; NULL stays NULL. width: of its elements, to which CUDA
 * needs them aligned. */
static void *stage(const void *host, size_t n, size_t width)
{
    if (!host)
        return NULL;
    unsigned char *to = zero_copy ? pinned : on_device;
    for (size_t i = 0; i < count; i++)
        if (staged[i].host == host)
            return to + staged[i].at;
    if (count == MOST)
        abort();
    struct staged *s = &staged[count++];
    s->host = (void *)(uintptr_t)host;
    s->bytes = n * width;
    s->at = zs_round_up(used + GUARD, 64) + (uintptr_t)host % 64 / width * width;
    used = s->at + s->bytes + GUARD;
    if (used > ROOM)
        abort();
    memset(pinned + s->at - GUARD, GUARD_BYTE, s->bytes + 2 * GUARD);
    if (n)
        memcpy(pinned + s->at, host, s->bytes);
    if (!zero_copy)
        need(device->ops->copy(device, on_device + s->at - GUARD, pinned + s->at - GUARD,
                               s->bytes + 2 * GUARD, NULL));
    return to + s->at;
}

static void end(zs_status status)
{
    need(status);
    if (!zero_copy)
        need(device->ops->copy(device, pinned, on_device, used, NULL));
    need(device->ops->stream_sync(device, NULL));
    for (size_t i = 0; i < count; i++) {
        const struct staged *s = &staged[i];
        for (size_t b = 0; b < GUARD; b++)
            if (pinned[s->at - 1 - b] != GUARD_BYTE || pinned[s->at + s->bytes + b] != GUARD_BYTE) {
                printf("FAIL CUDA: bytes outside an array were written\n");
                exit(1);
            }
        /* What was read only may be constant. */
        if (s->bytes && memcmp(s->host, pinned + s->at, s->bytes))
            memcpy(s->host, pinned + s->at, s->bytes);
    }
}

static void adam(size_t n, float *master, float *exp_avg, float *exp_avg_sq, const void *grad,
                 zs_dtype grad_dtype, void *working, zs_dtype working_dtype,
                 const zs_adam_coef *coef)
{
    begin();
    const zs_adam_arrays arrays = {.master = stage(master, n, 4),
                                   .exp_avg = stage(exp_avg, n, 4),
                                   .exp_avg_sq = stage(exp_avg_sq, n, 4),
                                   .grad = stage(grad, n, zs_dtype_size(grad_dtype)),
                                   .grad_dtype = grad_dtype,
                                   .working = stage(working, n, zs_dtype_size(working_dtype)),
                                   .working_dtype = working_dtype};
    const zs_adam_run run = {0, n, coef};
    end(math->ops->adam(math, NULL, &arrays, &run, 1));
}

static void cast(size_t n, void *dst, zs_dtype d, const void *src, zs_dtype s)
{
    begin();
    const void *from = stage(src, n, zs_dtype_size(s));
    end(math->ops->cast(math, NULL, stage(dst, n, zs_dtype_size(d)), d, from, s, n));
}

static void add(size_t n, void *dst, zs_dtype d, const void *src, zs_dtype s)
{
    begin();
    const void *from = stage(src, n, zs_dtype_size(s));
    end(math->ops->add(math, NULL, stage(dst, n, zs_dtype_size(d)), d, from, s, n));
}

static void sum_sources(size_t n, void *dst, zs_dtype d, const void *const *src, size_t sources)
{
    const void *from[MOST] = {NULL};
    begin();
    for (size_t s = 0; s < sources; s++)
        from[s] = stage(src[s], n, zs_dtype_size(d));
    end(math->ops->sum_sources(math, NULL, stage(dst, n, zs_dtype_size(d)), d, from, sources, n));
}

static zs_clip norm(size_t n, const void *x, zs_dtype dtype, double *sum)
{
    static const zs_clip_config config = {.unscale = 1};
    zs_clip clip = {0};
    begin();
    double *on_its_way = stage(sum, 1, sizeof *sum);
    zs_clip *verdict = stage(&clip, 1, sizeof clip);
    need(math->ops->sum_squares(math, NULL, stage(x, n, zs_dtype_size(dtype)), dtype, n,
                                on_its_way));
    end(math->ops->clip(math, NULL, &config, on_its_way, 1, verdict));
    return clip;
}

static double sum_squares(size_t n, const void *x, zs_dtype dtype)
{
    double sum = -1;
    norm(n, x, dtype, &sum);
    return sum;
}

/* There is no kernel of its own: whoever asks needs the norm too. */
static int nonfinite(size_t n, const void *x, zs_dtype dtype)
{
    double sum;
    return norm(n, x, dtype, &sum).skip;
}

enum { DTYPE_fp32 = ZS_FP32, DTYPE_bf16 = ZS_BF16, DTYPE_fp16 = ZS_FP16 };

#define PAIR(level, a, b)                                                                          \
    void zs_##level##_adam_##a##_##b(size_t n, float *master, float *exp_avg, float *exp_avg_sq,   \
                                     const void *grad, void *working, const zs_adam_coef *coef)    \
    {                                                                                              \
        adam(n, master, exp_avg, exp_avg_sq, grad, (zs_dtype)DTYPE_##a, working,                   \
             (zs_dtype)DTYPE_##b, coef);                                                           \
    }                                                                                              \
    void zs_##level##_cast_##a##_##b(size_t n, void *dst, const void *src)                         \
    {                                                                                              \
        cast(n, dst, (zs_dtype)DTYPE_##a, src, (zs_dtype)DTYPE_##b);                               \
    }                                                                                              \
    void zs_##level##_add_##a##_##b(size_t n, void *dst, const void *src)                          \
    {                                                                                              \
        add(n, dst, (zs_dtype)DTYPE_##a, src, (zs_dtype)DTYPE_##b);                                \
    }
#define ONE(level, a)                                                                              \
    void zs_##level##_sum_sources_##a(size_t n, void *dst, const void *const *src, size_t sources) \
    {                                                                                              \
        sum_sources(n, dst, (zs_dtype)DTYPE_##a, src, sources);                                    \
    }                                                                                              \
    double zs_##level##_sum_squares_##a(size_t n, const void *x)                                   \
    {                                                                                              \
        return sum_squares(n, x, (zs_dtype)DTYPE_##a);                                             \
    }                                                                                              \
    int zs_##level##_nonfinite_##a(size_t n, const void *x)                                        \
    {                                                                                              \
        return nonfinite(n, x, (zs_dtype)DTYPE_##a);                                               \
    }
ZS_EACH_PAIR(PAIR, cuda)
ZS_EACH_DTYPE(ONE, cuda)

const zs_kernels zs_cuda_level = ZS_LEVEL(cuda);
