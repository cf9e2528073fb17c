/* SPDX-License-Identifier: Apache-2.0 */
/* zs_math on a CUDA device against zs_math on the host: tables of runs, the chain from the norm to
 * the update without the host in between, several streams, what is refused. */
#include "kernels/math.h"

#include "base/status.h"
#include "check.h"
#include "device/cuda.h"

enum { N = 5 * 65536 + 4321, MANY = 600001, RUNS = 3000, COEFS = 40 };

static zs_device *device;
static zs_ledger *ledger;
static zs_pool *pool;
static zs_math *cuda, *host;

static void need(zs_status status)
{
    if (status == ZS_OK)
        return;
    printf("FAIL %s\n", zs_last_error());
    exit(1);
}

/* An array in device memory, or (pinned) in memory of host_alloc. */
typedef struct array {
    void *ptr;
    size_t bytes;
    int pinned;
} array;

static array array_make(size_t bytes, int pinned)
{
    array a = {.bytes = bytes, .pinned = pinned};
    need(pinned ? device->ops->host_alloc(device, bytes, &a.ptr)
                : device->ops->alloc(device, bytes, &a.ptr));
    return a;
}

static void array_free(array *a)
{
    if (a->pinned)
        device->ops->host_free(device, a->ptr, a->bytes);
    else
        device->ops->free(device, a->ptr, a->bytes);
}

/* Waits for stream, then copies. */
static void array_get(const array *a, void *to, zs_stream *stream)
{
    array by = array_make(a->bytes, 1);
    need(device->ops->copy(device, by.ptr, a->ptr, a->bytes, stream));
    need(device->ops->stream_sync(device, stream));
    memcpy(to, by.ptr, a->bytes);
    array_free(&by);
}

static array array_of(const void *from, size_t bytes, int pinned)
{
    array by = array_make(bytes, 1), a;
    memcpy(by.ptr, from, bytes);
    if (pinned)
        return by;
    a = array_make(bytes, 0);
    need(device->ops->copy(device, a.ptr, by.ptr, bytes, NULL));
    need(device->ops->stream_sync(device, NULL));
    array_free(&by);
    return a;
}

/* ---- adam ---- */

enum { MASTER, EXP_AVG, EXP_AVG_SQ, GRAD, WORKING, ARRAYS };
static const char *const names[] = {"master", "exp_avg", "exp_avg_sq", "grad", "working"};
static const zs_dtype dtypes[] = {ZS_FP32, ZS_FP32, ZS_FP32, ZS_BF16, ZS_BF16};

typedef struct state {
    check_array on_host[ARRAYS];
    array on_device[ARRAYS];
} state;

static state state_make(size_t n, int pinned)
{
    state s;
    for (int a = 0; a < ARRAYS; a++) {
        const size_t bytes = n * zs_dtype_size(dtypes[a]);
        s.on_host[a] = check_array_make(0, bytes);
        check_fill(&s.on_host[a], dtypes[a], RANDOM, (uint64_t)a + 1);
        if (a == EXP_AVG_SQ)
            memset(s.on_host[a].data, 0, bytes);
        s.on_device[a] = array_of(s.on_host[a].data, bytes, pinned);
    }
    return s;
}

static zs_adam_arrays arrays_at(void *const at[ARRAYS])
{
    return (zs_adam_arrays){.master = at[MASTER],
                            .exp_avg = at[EXP_AVG],
                            .exp_avg_sq = at[EXP_AVG_SQ],
                            .grad = at[GRAD],
                            .grad_dtype = dtypes[GRAD],
                            .working = at[WORKING],
                            .working_dtype = dtypes[WORKING]};
}

static zs_adam_arrays arrays_on_host(const state *s)
{
    void *at[ARRAYS];
    for (int a = 0; a < ARRAYS; a++)
        at[a] = s->on_host[a].data;
    return arrays_at(at);
}

static zs_adam_arrays arrays_on_device(const state *s)
{
    void *at[ARRAYS];
    for (int a = 0; a < ARRAYS; a++)
        at[a] = s->on_device[a].ptr;
    return arrays_at(at);
}

/* The device's arrays are the host's, once stream has done its work. */
static void state_done(const char *what, state *s, zs_stream *stream)
{
    for (int a = 0; a < ARRAYS; a++) {
        check_array got = check_array_make(0, s->on_host[a].bytes);
        array_get(&s->on_device[a], got.data, stream);
        check_same(what, names[a], dtypes[a], &got, &s->on_host[a]);
        free(got.base);
        free(s->on_host[a].base);
        array_free(&s->on_device[a]);
    }
}

/* More coefficients and runs than one launch takes; more tiles than blocks of threads. */
static void runs_with_gaps(void)
{
    static zs_adam_run runs[RUNS];
    zs_adam_coef coefs[COEFS];
    for (int c = 0; c < COEFS; c++) {
        const zs_group_config group = {.lr = 0.01 + c,
                                       .beta1 = 0.9,
                                       .beta2 = 0.95,
                                       .eps = 1e-8,
                                       .weight_decay = 0.1,
                                       .decoupled = c % 2};
        zs_adam_coef_make(&coefs[c], &group, 1 + (uint64_t)c, 0.5);
    }
    const size_t count = check_runs(runs, RUNS, N, coefs, COEFS);
    check_that(count > 100 && count < RUNS, "emu math: number of runs");
    for (int pinned = 0; pinned < 2; pinned++) {
        state s = state_make(N, pinned);
        zs_adam_arrays on_host = arrays_on_host(&s), on_device = arrays_on_device(&s);
        need(host->ops->adam(host, NULL, &on_host, runs, count));
        need(cuda->ops->adam(cuda, NULL, &on_device, runs, count));
        const zs_adam_run whole = {0, N, &coefs[0]};
        need(host->ops->adam(host, NULL, &on_host, &whole, 1));
        need(cuda->ops->adam(cuda, NULL, &on_device, &whole, 1));
        need(cuda->ops->adam(cuda, NULL, &on_device, NULL, 0));
        state_done(pinned ? "adam, runs, pinned memory" : "adam, runs", &s, NULL);
    }
}

/* The norm on one stream, the update on another: nothing but an event between them. */
static void norm_to_update(const zs_clip_config *config, int nan_at)
{
    enum { PARTS = 3 };
    static const uint64_t part_end[] = {100, 70000, N};
    zs_adam_coef coef;
    const zs_group_config group = {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    zs_adam_coef_make(&coef, &group, 1, 123);
    const zs_adam_run run = {0, N, &coef};
    state s = state_make(N, 0);
    if (nan_at >= 0) {
        zs_store_16(s.on_host[GRAD].data, (size_t)nan_at, 0x7fc0);
        array_free(&s.on_device[GRAD]);
        s.on_device[GRAD] = array_of(s.on_host[GRAD].data, s.on_host[GRAD].bytes, 0);
    }
    zs_adam_arrays on_host = arrays_on_host(&s), on_device = arrays_on_device(&s);
    array sums = array_make((PARTS + 1) * sizeof(double), 0), clip = array_make(sizeof(zs_clip), 0);
    double want_sums[PARTS + 1], got_sums[PARTS + 1];
    zs_clip want, got;
    zs_stream *streams[2];
    zs_event *decided;
    for (int i = 0; i < 2; i++)
        need(device->ops->stream_open(device, &streams[i]));
    need(device->ops->event_open(device, &decided));
    void *first = device->ops->stream_native(device, streams[0]);
    void *second = device->ops->stream_native(device, streams[1]);

    for (int p = 0; p < PARTS; p++) {
        const uint64_t begin = p ? part_end[p - 1] : 0, n = part_end[p] - begin;
        need(host->ops->sum_squares(host, NULL, (const uint16_t *)on_host.grad + begin, ZS_BF16, n,
                                    &want_sums[p]));
        need(cuda->ops->sum_squares(cuda, first, (const uint16_t *)on_device.grad + begin, ZS_BF16,
                                    n, (double *)sums.ptr + p));
    }
    need(host->ops->sum_doubles(host, NULL, want_sums, PARTS, &want_sums[PARTS]));
    need(host->ops->clip(host, NULL, config, &want_sums[PARTS], 1, &want));
    on_host.grad_scale = &want.grad_scale;
    on_host.skip = &want.skip;
    need(host->ops->adam(host, NULL, &on_host, &run, 1));

    zs_clip *verdict = clip.ptr;
    need(cuda->ops->sum_doubles(cuda, first, sums.ptr, PARTS, (double *)sums.ptr + PARTS));
    need(cuda->ops->clip(cuda, first, config, (double *)sums.ptr + PARTS, 1, verdict));
    need(device->ops->event_record(device, decided, streams[0]));
    need(device->ops->event_wait(device, decided, streams[1]));
    on_device.grad_scale = &verdict->grad_scale;
    on_device.skip = &verdict->skip;
    need(cuda->ops->adam(cuda, second, &on_device, &run, 1));

    array_get(&sums, got_sums, streams[1]);
    array_get(&clip, &got, streams[1]);
    state_done("from the norm to the update", &s, streams[1]);
    check_that(got.skip == want.skip && got.grad_scale == want.grad_scale, "emu math: verdict");
    check_that(want.skip || (memcmp(got_sums, want_sums, sizeof want_sums) == 0 &&
                             got.norm == want.norm && got.factor == want.factor),
               "emu math: norm and factor");
    device->ops->event_close(device, decided);
    for (int i = 0; i < 2; i++)
        device->ops->stream_close(device, streams[i]);
    array_free(&sums);
    array_free(&clip);
}

/* ---- sums and the others ---- */

/* Sums that share room for their parts, one after the other on two streams. */
static void squares_on_two_streams(void)
{
    enum { ROUNDS = 6 };
    check_array x = check_array_make(0, N * sizeof(float));
    check_fill(&x, ZS_FP32, RANDOM, 8);
    array on_device = array_of(x.data, x.bytes, 0), sums = array_make(ROUNDS * sizeof(double), 1);
    zs_stream *streams[2];
    for (int i = 0; i < 2; i++)
        need(device->ops->stream_open(device, &streams[i]));
    for (size_t r = 0; r < ROUNDS; r++)
        need(cuda->ops->sum_squares(cuda, device->ops->stream_native(device, streams[r % 2]),
                                    on_device.ptr, ZS_FP32, N - 60000 * r, (double *)sums.ptr + r));
    for (int i = 0; i < 2; i++) {
        need(device->ops->stream_sync(device, streams[i]));
        device->ops->stream_close(device, streams[i]);
    }
    for (size_t r = 0; r < ROUNDS; r++) {
        double want;
        need(host->ops->sum_squares(host, NULL, x.data, ZS_FP32, N - 60000 * r, &want));
        check_that(((double *)sums.ptr)[r] == want, "emu math: sums on two streams");
    }
    need(cuda->ops->sum_squares(cuda, NULL, on_device.ptr, ZS_FP32, 0, sums.ptr));
    need(device->ops->stream_sync(device, NULL));
    check_that(((double *)sums.ptr)[0] == 0, "emu math: sum of nothing");
    array_free(&on_device);
    array_free(&sums);
    free(x.base);
}

/* An array longer than there is room for partial sums: it is summed in two batches. */
static void squares_of_a_large_array(void)
{
    const uint64_t batch = (uint64_t)4096 * ZS_SUM_BLOCK, n = batch + 3 * ZS_SUM_BLOCK / 2;
    const uint64_t places[] = {5, batch - 1, batch, n - 1};
    array x = array_make(n * 2, 0), one = array_make(2, 1), sum = array_make(sizeof(double), 1);
    uint16_t ones[] = {0x3f80, 0x4000, 0x4040, 0x4080}; /* 1, 2, 3, 4 */
    for (int i = 0; i < 4; i++) {
        memcpy(one.ptr, &ones[i], 2);
        need(device->ops->copy(device, (uint16_t *)x.ptr + places[i], one.ptr, 2, NULL));
        need(device->ops->stream_sync(device, NULL));
    }
    need(cuda->ops->sum_squares(cuda, NULL, x.ptr, ZS_BF16, n, sum.ptr));
    need(device->ops->stream_sync(device, NULL));
    check_that(*(double *)sum.ptr == 1 + 4 + 9 + 16, "emu math: sum over two batches");
    array_free(&x);
    array_free(&one);
    array_free(&sum);
}

static void doubles_in_order(void)
{
    enum { COUNT = 5000 };
    static double x[COUNT];
    uint64_t random = 4;
    for (int i = 0; i < COUNT; i++)
        x[i] = ldexp(check_random(&random), (int)(check_random(&random) % 100));
    array on_device = array_of(x, sizeof x, 0), sum = array_make(sizeof(double), 1);
    double want;
    need(host->ops->sum_doubles(host, NULL, x, COUNT, &want));
    need(cuda->ops->sum_doubles(cuda, NULL, on_device.ptr, COUNT, sum.ptr));
    need(device->ops->stream_sync(device, NULL));
    check_that(*(double *)sum.ptr == want, "emu math: sum of doubles");
    array_free(&on_device);
    array_free(&sum);
}

/* More tiles than blocks of threads. */
static void long_arrays(void)
{
    check_array x = check_array_make(0, MANY * 4), want = check_array_make(0, MANY * 4);
    check_fill(&x, ZS_FP32, RANDOM, 11);
    check_fill(&want, ZS_FP32, RANDOM, 12);
    check_array got = check_array_copy(&want), half = check_array_make(0, MANY * 2);
    check_array got_half = check_array_copy(&half);
    array on_device = array_of(x.data, x.bytes, 0), sum = array_of(want.data, want.bytes, 0);
    array narrow = array_make(half.bytes, 0);
    const void *sources[] = {want.data, x.data, x.data};
    const void *device_sources[] = {sum.ptr, on_device.ptr, on_device.ptr};
    need(host->ops->add(host, NULL, want.data, ZS_FP32, x.data, ZS_FP32, MANY));
    need(host->ops->sum_sources(host, NULL, want.data, ZS_FP32, sources, 3, MANY));
    need(host->ops->cast(host, NULL, half.data, ZS_FP16, want.data, ZS_FP32, MANY));
    need(cuda->ops->add(cuda, NULL, sum.ptr, ZS_FP32, on_device.ptr, ZS_FP32, MANY));
    need(cuda->ops->sum_sources(cuda, NULL, sum.ptr, ZS_FP32, device_sources, 3, MANY));
    need(cuda->ops->cast(cuda, NULL, narrow.ptr, ZS_FP16, sum.ptr, ZS_FP32, MANY));
    array_get(&sum, got.data, NULL);
    array_get(&narrow, got_half.data, NULL);
    check_same("emu math: long", "sum", ZS_FP32, &got, &want);
    check_same("emu math: long", "narrow", ZS_FP16, &got_half, &half);
    array_free(&on_device);
    array_free(&sum);
    array_free(&narrow);
    free(x.base);
    free(want.base);
    free(got.base);
    free(half.base);
    free(got_half.base);
}

static void refuse(zs_status status, const char *part)
{
    check_that(status == ZS_ERR_INTERNAL && strstr(zs_last_error(), part) != NULL, part);
}

static void refusals(void)
{
    array x = array_make(64, 0);
    char *at = x.ptr;
    const void *sources[65] = {NULL};
    zs_adam_run runs[] = {{4, 4, NULL}, {3, 1, NULL}};
    zs_adam_arrays arrays = {.master = x.ptr, .exp_avg = x.ptr, .exp_avg_sq = x.ptr, .grad = at};
    refuse(cuda->ops->adam(cuda, NULL, &arrays, runs, 2), "run 1 starts at element 3");
    arrays.grad = at + 1;
    refuse(cuda->ops->adam(cuda, NULL, &arrays, runs, 1), "adam: grad is at");
    refuse(cuda->ops->cast(cuda, NULL, at, ZS_FP32, at + 1, ZS_FP16, 1), "cast: src is at");
    refuse(cuda->ops->add(cuda, NULL, at + 2, ZS_FP32, at, ZS_FP16, 1), "add: dst is at");
    refuse(cuda->ops->sum_squares(cuda, NULL, at + 2, ZS_FP32, 1, x.ptr), "sum_squares: x is at");
    refuse(cuda->ops->sum_sources(cuda, NULL, at, ZS_FP32, sources, 65, 1),
           "65 sources, at most 64");
    array_free(&x);
}

static void memory_is_in_the_ledger(void)
{
    zs_memory_row row;
    size_t rows;
    zs_ledger_rows(ledger, &row, 1, &rows);
    check_that(rows == 1 && row.tier == ZS_TIER_DEVICE && row.bytes == 4096 * sizeof(double),
               "emu math: its memory is in the ledger");
}

int main(int argc, char **argv)
{
    static const zs_clip_config unclipped = {.unscale = 0.25},
                                clipped = {.unscale = 0.25, .max_norm = 1};
    need(zs_device_open_cuda(0, &device));
    need(zs_ledger_open(&ledger));
    need(device->cuda->math_open(device, ledger, &cuda));
    need(zs_pool_open(1, -1, &pool));
    need(zs_math_open_host(pool, &host));
    if (argc > 1 && strcmp(argv[1], "--long") == 0) {
        squares_of_a_large_array();
    } else {
        memory_is_in_the_ledger();
        runs_with_gaps();
        norm_to_update(&unclipped, -1);
        norm_to_update(&clipped, -1);
        norm_to_update(&clipped, 80000);
        squares_on_two_streams();
        doubles_in_order();
        long_arrays();
        refusals();
    }
    zs_math_close(&host);
    zs_math_close(&cuda);
    zs_pool_close(&pool);
    zs_ledger_close(&ledger);
    zs_device_close(&device);
    return check_finish();
}
