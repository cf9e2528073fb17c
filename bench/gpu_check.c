/* SPDX-License-Identifier: Apache-2.0 */
/* Adam on a CUDA device: the same bits as the host's, wherever its arrays lie, and how near it
 * comes to what the device can copy. scripts/gpu-check.sh builds and runs it.
 *
 *   gpu-check [DEVICE | --build]
 *
 * prints a row for each check, with its limit where it has one; the exit code is how many failed.
 * An emulated device gets small sizes, and its speed is not judged. --build: what the plug-in says
 * it was built with, and nothing else. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "device/cuda.h"
#include "kernels/math.h"

enum { SLOTS = 3, STATES = 3, ROUNDS = 9, ADAMS = 10 };

static zs_device *device;
static const zs_device_ops *ops;
static zs_ledger *ledger;
static zs_pool *pool;
static zs_math *cuda, *host;
static int small, failed;
/* Elements: resident in device memory, in pinned memory, and of a chunk on its way. */
static uint64_t resident, pinned, chunk;

static void need(zs_status status)
{
    if (status == ZS_OK)
        return;
    printf("FAIL: %s\n", zs_last_error());
    exit(1);
}

/* ---- rows ---- */

static void row(const char *what, const char *found, const char *limit, int good)
{
    printf("%-46s %-26s %-12s %s\n", what, found, limit, good ? "ok" : "FAIL");
    failed += !good;
}

static void row_bits(const char *what, uint64_t got, uint64_t want)
{
    char found[40];
    snprintf(found, sizeof found, "%016llx", (unsigned long long)got);
    row(what, found, "the host's", got == want);
}

/* least: of the limit; 0: for information. */
static void row_speed(const char *what, double bytes, double seconds, double limit_seconds,
                      double least)
{
    char found[40], limit[24] = "";
    snprintf(found, sizeof found, "%.0f GB/s, %.3f of %.0f", 1e-9 * bytes / seconds,
             limit_seconds / seconds, 1e-9 * bytes / limit_seconds);
    if (least > 0)
        snprintf(limit, sizeof limit, small ? "(>= %.2f)" : ">= %.2f", least);
    row(what, found, limit, small || limit_seconds / seconds >= least);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, size_t count)
{
    qsort(values, count, sizeof *values, by_value);
    return values[count / 2];
}

/* ---- memory ---- */

static void *get_device(uint64_t bytes)
{
    void *ptr;
    need(ops->alloc(device, bytes, &ptr));
    return ptr;
}

static void *get_pinned(uint64_t bytes)
{
    void *ptr;
    need(ops->host_alloc(device, bytes, &ptr));
    return ptr;
}

static void copy(void *dst, const void *src, uint64_t bytes, zs_stream *stream)
{
    need(ops->copy(device, dst, src, bytes, stream));
}

static void sync(zs_stream *stream)
{
    need(ops->stream_sync(device, stream));
}

/* Finite, of all magnitudes that weights and gradients have. */
static float value(uint64_t i, uint64_t seed)
{
    uint64_t x = (i + seed * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
    x ^= x >> 31;
    x *= 0x94d049bb133111ebu;
    const float sign = x & 1 ? 1.0f : -1.0f;
    return sign * (float)(x >> 40) * (1.0f / (1u << 24)) / (float)(1u << (x >> 1 & 15));
}

typedef struct task {
    float *at[STATES]; /* master, exp_avg, exp_avg_sq: pinned */
    uint16_t *grad;    /* bf16, pinned */
    uint64_t count;
} task;

static void fill_block(void *arg, size_t index, int worker)
{
    const task *t = arg;
    const uint64_t end = ZS_MIN((index + 1) * (uint64_t)ZS_SUM_BLOCK, t->count);
    (void)worker;
    for (uint64_t i = index * (uint64_t)ZS_SUM_BLOCK; i < end; i++) {
        const float g = value(i, 3);
        uint32_t bits;
        memcpy(&bits, &g, sizeof bits);
        t->grad[i] = (uint16_t)(bits >> 16);
        t->at[0][i] = value(i, 0);
        t->at[1][i] = value(i, 1);
        t->at[2][i] = value(i, 2) * value(i, 2);
    }
}

static void fill(task *t)
{
    zs_pool_run(pool, fill_block, t, zs_div_up(t->count, ZS_SUM_BLOCK));
}

static task task_make(uint64_t count)
{
    task t = {.grad = get_pinned(count * 2), .count = count};
    for (int s = 0; s < STATES; s++)
        t.at[s] = get_pinned(count * sizeof(float));
    fill(&t);
    return t;
}

static void task_free(task *t)
{
    for (int s = 0; s < STATES; s++)
        ops->host_free(device, t->at[s], t->count * sizeof(float));
    ops->host_free(device, t->grad, t->count * 2);
}

static zs_adam_coef coef_make(void)
{
    zs_adam_coef coef;
    const zs_group_config group = {
        .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1, .decoupled = 1};
    zs_adam_coef_make(&coef, &group, 3, 0.37);
    return coef;
}

static void adam(zs_math *math, zs_stream *stream, float *const at[STATES], const void *grad,
                 zs_dtype grad_dtype, void *working, uint64_t count)
{
    const zs_adam_coef coef = coef_make();
    const zs_adam_run run = {0, count, &coef};
    const zs_adam_arrays arrays = {.master = at[0],
                                   .exp_avg = at[1],
                                   .exp_avg_sq = at[2],
                                   .grad = grad,
                                   .grad_dtype = grad_dtype,
                                   .working = working,
                                   .working_dtype = ZS_BF16};
    need(math->ops->adam(math, math == cuda ? ops->stream_native(device, stream) : NULL, &arrays,
                         &run, 1));
}

/* ---- states in device memory ---- */

static void measure_resident(zs_dtype grad_dtype, int with_working, const char *what)
{
    const uint64_t bytes = resident * sizeof(float);
    const double moved =
        (24.0 + (double)zs_dtype_size(grad_dtype) + 2 * with_working) * (double)resident;
    const uint64_t copied = (uint64_t)(moved / 2) / 16 * 16;
    double step[ROUNDS], limit[ROUNDS], norm[ROUNDS], ratio[ROUNDS];
    float *at[STATES];
    for (int s = 0; s < STATES; s++)
        at[s] = get_device(bytes);
    void *grad = get_device(bytes), *working = with_working ? get_device(bytes / 2) : NULL;
    char *from = get_device(copied), *to = get_device(copied);
    double *sum = get_device(sizeof *sum);
    for (int r = -1; r < ROUNDS; r++) { /* the first one warms up */
        const double t0 = zs_now();
        for (int i = 0; i < ADAMS; i++)
            adam(cuda, NULL, at, grad, grad_dtype, working, resident);
        sync(NULL);
        const double t1 = zs_now();
        for (int i = 0; i < ADAMS; i++)
            copy(to, from, copied, NULL);
        sync(NULL);
        const double t2 = zs_now();
        for (int i = 0; i < ADAMS; i++)
            need(cuda->ops->sum_squares(cuda, NULL, grad, grad_dtype, resident, sum));
        sync(NULL);
        if (r < 0)
            continue;
        step[r] = (t1 - t0) / ADAMS;
        limit[r] = (t2 - t1) / ADAMS;
        norm[r] = (zs_now() - t2) / ADAMS;
        ratio[r] = limit[r] / step[r];
    }
    const double seconds = median(step, ROUNDS);
    row_speed(what, moved, seconds, seconds * median(ratio, ROUNDS), 0.92);
    const double read = (double)(resident * zs_dtype_size(grad_dtype));
    row_speed(grad_dtype == ZS_FP32 ? "norm, fp32" : "norm, bf16", read, median(norm, ROUNDS),
              median(limit, ROUNDS) * read / moved, 0);
    for (int s = 0; s < STATES; s++)
        ops->free(device, at[s], bytes);
    ops->free(device, grad, bytes);
    ops->free(device, working, bytes / 2);
    ops->free(device, from, copied);
    ops->free(device, to, copied);
    ops->free(device, sum, sizeof *sum);
}

/* ---- states in pinned memory ---- */

typedef struct slot {
    float *at[STATES]; /* [chunk], device */
    zs_event *fetched, *updated, *stored;
} slot;

typedef struct pipe {
    zs_stream *in, *out; /* Adam runs on the device's first */
    slot slots[SLOTS];
    uint16_t *grad, *working; /* [pinned], device */
} pipe;

static pipe pipe_make(void)
{
    pipe p = {.grad = get_device(pinned * 2), .working = get_device(pinned * 2)};
    need(ops->stream_open(device, &p.in));
    need(ops->stream_open(device, &p.out));
    for (int i = 0; i < SLOTS; i++) {
        for (int s = 0; s < STATES; s++)
            p.slots[i].at[s] = get_device(chunk * sizeof(float));
        need(ops->event_open(device, &p.slots[i].fetched));
        need(ops->event_open(device, &p.slots[i].updated));
        need(ops->event_open(device, &p.slots[i].stored));
    }
    return p;
}

static void pipe_free(pipe *p)
{
    for (int i = 0; i < SLOTS; i++) {
        for (int s = 0; s < STATES; s++)
            ops->free(device, p->slots[i].at[s], chunk * sizeof(float));
        ops->event_close(device, p->slots[i].fetched);
        ops->event_close(device, p->slots[i].updated);
        ops->event_close(device, p->slots[i].stored);
    }
    ops->stream_close(device, p->in);
    ops->stream_close(device, p->out);
    ops->free(device, p->grad, pinned * 2);
    ops->free(device, p->working, pinned * 2);
}

/* Copies in, Adam, copies out, chunk after chunk; a slot is filled again once it has been stored.
 */
static void step_by_copies(pipe *p, const task *t)
{
    for (uint64_t first = 0, c = 0; first < t->count; first += chunk, c++) {
        slot *s = &p->slots[c % SLOTS];
        const uint64_t count = ZS_MIN(chunk, t->count - first);
        if (c >= SLOTS)
            need(ops->event_wait(device, s->stored, p->in));
        for (int a = 0; a < STATES; a++)
            copy(s->at[a], t->at[a] + first, count * sizeof(float), p->in);
        need(ops->event_record(device, s->fetched, p->in));
        need(ops->event_wait(device, s->fetched, NULL));
        adam(cuda, NULL, s->at, p->grad + first, ZS_BF16, p->working + first, count);
        need(ops->event_record(device, s->updated, NULL));
        need(ops->event_wait(device, s->updated, p->out));
        for (int a = 0; a < STATES; a++)
            copy(t->at[a] + first, s->at[a], count * sizeof(float), p->out);
        need(ops->event_record(device, s->stored, p->out));
    }
    sync(p->out);
}

/* The kernel reads and writes the host's memory itself. */
static void step_in_place(pipe *p, const task *t)
{
    adam(cuda, NULL, t->at, p->grad, ZS_BF16, p->working, t->count);
    sync(NULL);
}

/* The same bytes in both directions at once, and nothing else: one half of each array goes in while
 * the other comes out, then the other way about. */
static void copies_both_ways(pipe *p, const task *t)
{
    const uint64_t half = t->count / 2;
    for (int way = 0; way < 2; way++) {
        for (uint64_t first = 0; first < half; first += chunk) {
            const uint64_t bytes = ZS_MIN(chunk, half - first) * sizeof(float);
            for (int a = 0; a < STATES; a++) {
                copy(p->slots[0].at[a], t->at[a] + (uint64_t)way * half + first, bytes, p->in);
                copy(t->at[a] + (uint64_t)!way * half + first, p->slots[1].at[a], bytes, p->out);
            }
        }
        sync(p->in);
        sync(p->out);
    }
}

static uint64_t hash_states(const task *t, const uint16_t *working)
{
    uint64_t h = ZS_HASH_START;
    for (int a = 0; a < STATES; a++)
        h = zs_hash_bytes(h, t->at[a], t->count * sizeof(float));
    return zs_hash_bytes(h, working, t->count * sizeof *working);
}

static void check_pinned(void)
{
    static const struct {
        const char *bits, *speed;
        void (*step)(pipe *p, const task *t);
    } ways[] = {{"Adam by copies: bits", "Adam by copies", step_by_copies},
                {"Adam in place (zero copy): bits", "Adam in place (zero copy)", step_in_place}};
    task t = task_make(pinned);
    pipe p = pipe_make();
    uint16_t *working = get_pinned(pinned * 2);
    adam(host, NULL, t.at, t.grad, ZS_BF16, working, pinned);
    const uint64_t want = hash_states(&t, working);
    copy(p.grad, t.grad, pinned * 2, NULL);
    sync(NULL); /* before it is filled again */
    for (size_t w = 0; w < ZS_COUNT(ways); w++) {
        fill(&t);
        ways[w].step(&p, &t);
        copy(working, p.working, pinned * 2, NULL);
        sync(NULL);
        row_bits(ways[w].bits, hash_states(&t, working), want);
    }
    double step[ZS_COUNT(ways)][ROUNDS], ratio[ZS_COUNT(ways)][ROUNDS], best[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        const double t0 = zs_now();
        copies_both_ways(&p, &t);
        const double limit = zs_now() - t0;
        best[r] = 0;
        for (size_t w = 0; w < ZS_COUNT(ways); w++) {
            const double begin = zs_now();
            ways[w].step(&p, &t);
            step[w][r] = zs_now() - begin;
            ratio[w][r] = limit / step[w][r];
            best[r] = ZS_MAX(best[r], ratio[w][r]);
        }
    }
    /* Both directions together. */
    const double moved = 2.0 * STATES * sizeof(float) * (double)pinned;
    for (size_t w = 0; w < ZS_COUNT(ways); w++) {
        const double seconds = median(step[w], ROUNDS);
        row_speed(ways[w].speed, moved, seconds, seconds * median(ratio[w], ROUNDS), 0);
    }
    char found[40];
    const double better = median(best, ROUNDS);
    snprintf(found, sizeof found, "%.3f", better);
    row("the better of them, of copies both ways", found, small ? "(>= 0.90)" : ">= 0.90",
        small || better >= 0.90);
    pipe_free(&p);
    task_free(&t);
    ops->host_free(device, working, pinned * 2);
}

int main(int argc, char **argv)
{
    const zs_cuda_plugin *plugin;
    zs_cuda_info info;
    int ordinal = 0, count;
    need(zs_cuda_open(&plugin));
    if (argc > 1 && strcmp(argv[1], "--build") == 0) {
        puts(plugin->build);
        return 0;
    }
    if (argc > 1 && sscanf(argv[1], "%d", &ordinal) != 1) {
        fputs("usage: gpu-check [DEVICE | --build]\n", stderr);
        return 2;
    }
    small = strcmp(plugin->build, "emulation") == 0;
    resident = small ? 70001 : UINT64_C(256) << 20;
    pinned = small ? 100002 : UINT64_C(64) << 20;
    chunk = small ? 9000 : UINT64_C(4) << 20;
    need(plugin->device_count(&count));
    if (!count) {
        puts("FAIL: no CUDA device is seen");
        return 1;
    }
    need(plugin->device_info(ordinal, &info));
    need(zs_device_open_cuda(ordinal, &device));
    ops = device->ops;
    need(zs_ledger_open(&ledger));
    need(plugin->math_open(device, ledger, &cuda));
    need(zs_pool_open(zs_cpu_count(), -1, &pool));
    need(zs_math_open_host(pool, &host));
    printf("%s (compute capability %d.%d), plug-in: %s\n", info.name, info.major, info.minor,
           plugin->build);

    measure_resident(ZS_BF16, 1, "Adam, bf16 weights and gradients");
    measure_resident(ZS_FP32, 0, "Adam, fp32");
    check_pinned();

    zs_math_close(&host);
    zs_math_close(&cuda);
    zs_pool_close(&pool);
    zs_ledger_close(&ledger);
    zs_device_close(&device);
    return failed;
}
