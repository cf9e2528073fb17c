/* SPDX-License-Identifier: Apache-2.0 */
#include "states_rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

enum { HEADER_BYTES = 100, RUNS = 4 };

static const struct {
    uint64_t numel;
    zs_dtype working, grad;
} table[RIG_SHARDS] = {
    {20000, ZS_BF16, ZS_FP32}, {4096, ZS_FP32, ZS_FP32},  {0, ZS_BF16, ZS_BF16},
    {300, ZS_FP16, ZS_BF16},   {70001, ZS_BF16, ZS_BF16}, {33000, ZS_FP32, ZS_BF16},
};

uint64_t rig_numel(uint64_t scale, size_t shard)
{
    return table[shard].numel * (scale ? scale : 1);
}

/* ---- made-up numbers ---- */

static float made_up(uint64_t step, size_t shard, uint64_t i)
{
    uint64_t x = (step * 0x9e3779b97f4a7c15ull) ^ (shard * 0xbf58476d1ce4e5b9ull) ^ (i << 17) ^ i;
    x ^= x >> 31;
    x *= 0x94d049bb133111ebull;
    x ^= x >> 29;
    return ((float)(x & 0xffff) - 32768.0f) / 32768.0f;
}

static void make_gradient(void *out, zs_dtype dtype, uint64_t step, size_t shard, uint64_t n)
{
    float *values = malloc((n + 1) * sizeof *values);
    for (uint64_t i = 0; i < n; i++)
        values[i] = made_up(step, shard, i);
    zs_kernels_get()->cast[dtype][ZS_FP32](n, out, values);
    free(values);
}

typedef struct plan {
    zs_adam_coef coef[2];
    zs_adam_run runs[RUNS];
    size_t count;
} plan;

/* Two groups, gaps between them and a frozen run; every third step a shard sits out. */
static void make_plan(plan *p, uint64_t step, size_t shard, uint64_t n)
{
    zs_group_config group = {.size = sizeof group,
                             .lr = 1e-2,
                             .beta1 = 0.9,
                             .beta2 = 0.99,
                             .eps = 1e-8,
                             .weight_decay = 0.1,
                             .decoupled = 1};
    zs_adam_coef_make(&p->coef[0], &group, step, 0.5);
    group.decoupled = 0;
    group.lr = 3e-3;
    zs_adam_coef_make(&p->coef[1], &group, step, 0.25);
    p->count = 0;
    if ((step + shard) % 3 == 0 || n < 100)
        return;
    uint64_t third = n / 3;
    p->runs[p->count++] = (zs_adam_run){1, third - 1, &p->coef[0]};
    p->runs[p->count++] = (zs_adam_run){third + 17, third, &p->coef[1]};
    p->runs[p->count++] = (zs_adam_run){2 * third + 17, 20, NULL};
    if (shard != 4) /* there whole chunks at the end sit out */
        p->runs[p->count++] = (zs_adam_run){2 * third + 37, n - (2 * third + 37) - 5, &p->coef[0]};
}

/* ---- reference ---- */

static void cast_master(zs_dtype dtype, void *working, const float *master, uint64_t n)
{
    zs_kernels_get()->cast[dtype][ZS_FP32](n, working, master);
}

void rig_reference_open(rig_reference *ref, uint64_t scale)
{
    *ref = (rig_reference){.scale = scale};
    for (size_t s = 0; s < RIG_SHARDS; s++) {
        uint64_t n = rig_numel(scale, s);
        for (int a = 0; a < 3; a++)
            ref->array[s][a] = calloc(n + 1, sizeof(float));
        ref->working[s] = calloc(n + 1, sizeof(float));
        for (uint64_t i = 0; i < n; i++)
            ref->array[s][0][i] = made_up(0, s, i);
        cast_master(table[s].working, ref->working[s], ref->array[s][0], n);
    }
}

void rig_reference_close(rig_reference *ref)
{
    for (size_t s = 0; s < RIG_SHARDS; s++) {
        for (int a = 0; a < 3; a++)
            free(ref->array[s][a]);
        free(ref->working[s]);
    }
}

void rig_reference_advance(rig_reference *ref, uint64_t to)
{
    for (; ref->step < to; ref->step++)
        for (size_t s = 0; s < RIG_SHARDS; s++) {
            uint64_t n = rig_numel(ref->scale, s);
            zs_dtype dtype = table[s].grad;
            void *grad = calloc(n + 1, sizeof(float));
            plan p;
            make_gradient(grad, dtype, ref->step + 1, s, n);
            make_plan(&p, ref->step + 1, s, n);
            for (size_t r = 0; r < p.count; r++) {
                uint64_t first = p.runs[r].first;
                if (p.runs[r].coef)
                    zs_kernels_get()->adam[dtype][table[s].working](
                        p.runs[r].count, ref->array[s][0] + first, ref->array[s][1] + first,
                        ref->array[s][2] + first, (char *)grad + first * zs_dtype_size(dtype),
                        (char *)ref->working[s] + first * zs_dtype_size(table[s].working),
                        p.runs[r].coef);
            }
            free(grad);
        }
}

/* ---- rig ---- */

static int is_aliased(const rig *r, size_t s)
{
    return r->config.aliased && table[s].working == ZS_FP32;
}

static zs_status open_params(rig *r)
{
    uint64_t bytes[RIG_SHARDS];
    for (size_t s = 0; s < RIG_SHARDS; s++) {
        bytes[s] = r->shards[s].numel * zs_dtype_size(table[s].working);
        r->shards[s].param_shard = s;
    }
    return zs_param_file_open(r->config.dir, r->config.rank, r->io, r->ledger, bytes, RIG_SHARDS,
                              &r->params);
}

zs_status rig_open(rig *r, const rig_config *config)
{
    *r = (rig){.config = *config};
    ZS_CHECK(zs_ledger_open(&r->ledger));
    ZS_CHECK(zs_device_open_host(&r->device));
    ZS_CHECK(zs_pool_open(config->threads ? config->threads : 1, -1, &r->pool));
    ZS_CHECK(zs_math_open_host(r->pool, &r->math));
    ZS_CHECK(config->open_io ? config->open_io(&r->io)
                             : zs_io_open(config->engine, 8, NULL, &r->io));
    for (size_t s = 0; s < RIG_SHARDS; s++) {
        uint64_t n = rig_numel(config->scale, s);
        r->shards[s] = (zs_states_shard){.numel = n, .working_dtype = table[s].working};
        r->working[s] = calloc(n + 1, sizeof(float));
        r->grad[s] = calloc(n + 1, sizeof(float));
        r->own_master[s] = calloc(n + 1, sizeof(float));
        if (is_aliased(r, s))
            r->shards[s].master = r->own_master[s];
    }
    if (config->params)
        ZS_CHECK(open_params(r));
    zs_states_config states = {.tier = config->tier,
                               .dir = config->no_store ? NULL : config->dir,
                               .rank = config->rank,
                               .world = config->world ? config->world : 1,
                               .buffer_bytes = config->buffer,
                               .chunk_numel = config->chunk,
                               .fingerprint = config->fingerprint,
                               .resume = config->resume,
                               .slots = config->slots,
                               .run = config->run,
                               .io = r->io,
                               .device = r->device,
                               .math = r->math,
                               .pool = config->threads > 1 ? r->pool : NULL,
                               .ledger = r->ledger,
                               .log = &r->config.log,
                               .params = r->params,
                               .shards = r->shards,
                               .shard_count = RIG_SHARDS};
    return zs_states_open(&states, &r->states);
}

void rig_close(rig *r)
{
    zs_states_close(&r->states);
    zs_param_file_close(&r->params);
    zs_io_close(&r->io);
    zs_math_close(&r->math);
    zs_pool_close(&r->pool);
    zs_device_close(&r->device);
    zs_ledger_close(&r->ledger);
    for (size_t s = 0; s < RIG_SHARDS; s++) {
        free(r->working[s]);
        free(r->grad[s]);
        free(r->own_master[s]);
    }
    memset(r, 0, sizeof *r);
}

/* Working copies are made from the masters, as the engine does it. */
static zs_status publish_working(rig *r)
{
    for (size_t s = 0; s < RIG_SHARDS; s++) {
        uint64_t n = r->shards[s].numel;
        float *master = calloc(n + 1, sizeof(float));
        zs_status status = zs_states_read(r->states, s, ZS_MASTER, 0, n, master);
        cast_master(table[s].working, r->working[s], master, n);
        free(master);
        ZS_CHECK(status);
        if (!r->params || is_aliased(r, s) || !n)
            continue;
        zs_io_req req = {0};
        void *buffer = NULL;
        uint64_t bytes = zs_param_file_extent(r->params, s);
        if (posix_memalign(&buffer, ZS_IO_ALIGN, bytes) != 0)
            abort();
        memset(buffer, 0, bytes);
        memcpy(buffer, r->working[s], n * zs_dtype_size(table[s].working));
        status = zs_param_file_write(r->params, s, 0, buffer, bytes, &req);
        if (status == ZS_OK)
            status = zs_io_wait(r->io, &req);
        free(buffer);
        ZS_CHECK(status);
    }
    return ZS_OK;
}

zs_status rig_load(rig *r)
{
    for (size_t s = 0; s < RIG_SHARDS; s++) {
        float piece[777]; /* as parameters do: no respect for chunks */
        for (uint64_t i = 0, n; i < r->shards[s].numel; i += n) {
            n = ZS_MIN(ZS_COUNT(piece), r->shards[s].numel - i);
            for (uint64_t j = 0; j < n; j++)
                piece[j] = made_up(0, s, i + j);
            ZS_CHECK(zs_states_write(r->states, s, ZS_MASTER, i, n, piece));
        }
    }
    ZS_CHECK(zs_states_flush(r->states));
    r->step = 0;
    return publish_working(r);
}

zs_status rig_step(rig *r)
{
    zs_states_input inputs[RIG_SHARDS];
    plan plans[RIG_SHARDS];
    double adam_seconds = 0;
    for (size_t s = 0; s < RIG_SHARDS; s++) {
        uint64_t n = r->shards[s].numel;
        make_gradient(r->grad[s], table[s].grad, r->step + 1, s, n);
        make_plan(&plans[s], r->step + 1, s, n);
        inputs[s] =
            (zs_states_input){.grad = r->grad[s],
                              .grad_dtype = table[s].grad,
                              .working = is_aliased(r, s) || r->params ? NULL : r->working[s],
                              .runs = plans[s].runs,
                              .run_count = plans[s].count};
    }
    memset(r->traffic, 0, sizeof r->traffic);
    ZS_CHECK(zs_states_step(r->states, inputs, r->traffic, &adam_seconds));
    r->step++;
    return ZS_OK;
}

static void make_header(char header[HEADER_BYTES], uint64_t step)
{
    memset(header, 0, HEADER_BYTES);
    snprintf(header, HEADER_BYTES, "step %llu", (unsigned long long)step);
}

zs_status rig_commit(rig *r)
{
    char header[HEADER_BYTES];
    make_header(header, r->step);
    ZS_CHECK(zs_states_commit_prepare(r->states));
    return zs_states_commit_publish(r->states, r->step, r->step, header, sizeof header);
}

zs_status rig_resume(rig *r, int *found)
{
    uint64_t steps[ZS_STATES_COMMITS_MOST];
    char header[HEADER_BYTES] = {0}, want[HEADER_BYTES];
    size_t bytes = sizeof header;
    ZS_CHECK(zs_states_committed(r->states, steps, found));
    if (!*found)
        return ZS_OK;
    ZS_CHECK(zs_states_resume(r->states, steps[0], header, &bytes));
    make_header(want, steps[0]);
    if (bytes != sizeof header || memcmp(header, want, sizeof header) != 0)
        return zs_fail(ZS_ERR_INTERNAL, "step %llu came back with another header",
                       (unsigned long long)steps[0]);
    r->step = steps[0];
    return publish_working(r);
}

static int read_working(rig *r, size_t s)
{
    if (!r->params)
        return 0;
    zs_io_req req = {0};
    void *buffer = NULL;
    uint64_t bytes = zs_param_file_extent(r->params, s);
    if (posix_memalign(&buffer, ZS_IO_ALIGN, bytes) != 0)
        abort();
    int failed = zs_param_file_read(r->params, s, buffer, &req) != ZS_OK;
    failed |= zs_io_wait(r->io, &req) != ZS_OK;
    memcpy(r->working[s], buffer, r->shards[s].numel * zs_dtype_size(table[s].working));
    free(buffer);
    return failed;
}

int rig_differs(rig *r, const rig_reference *ref, char what[128])
{
    static const char *const names[] = {"master", "exp_avg", "exp_avg_sq"};
    if (r->step != ref->step) {
        snprintf(what, 128, "step %llu, not %llu", (unsigned long long)r->step,
                 (unsigned long long)ref->step);
        return 1;
    }
    /* First what memory and disk hold apart from the ring: a read must not disturb it. */
    for (size_t s = 0; s < RIG_SHARDS; s++) {
        uint64_t n = r->shards[s].numel;
        if (!n)
            continue;
        if (!is_aliased(r, s)) {
            if (read_working(r, s)) {
                snprintf(what, 128, "shard %zu: %.90s", s, zs_last_error());
                return 1;
            }
            if (memcmp(r->working[s], ref->working[s], n * zs_dtype_size(table[s].working)) != 0) {
                snprintf(what, 128, "shard %zu: working copy", s);
                return 1;
            }
        }
        float *have = calloc(n, sizeof(float));
        for (int a = 0; a < 3; a++) {
            zs_status status = zs_states_read(r->states, s, (zs_array)(ZS_MASTER + a), 0, n, have);
            if (status == ZS_OK && memcmp(have, ref->array[s][a], n * sizeof(float)) == 0)
                continue;
            snprintf(what, 128, "shard %zu: %s %.80s", s, names[a],
                     status == ZS_OK ? "has other bits" : zs_last_error());
            free(have);
            return 1;
        }
        free(have);
    }
    return 0;
}
