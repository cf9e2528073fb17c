/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/engine/harness.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/status.h"
#include "base/util.h"
#include "kernels/element.h"
#include "tests/engine/harness_gpu.h"

#define HYPER_LR    1e-2
#define HYPER_DECAY 0.1

/* Odd sizes, several dtypes in one unit, a frozen one, a scalar, a tied one, more ranks than
 * elements in places. */
const job_param job_small[] = {
    {"embed", 2, {37, 19}, ZS_FP32, 0, 0, 2, 0},
    {"block0.norm", 1, {19}, ZS_FP32, 1, 0, 1, 1},
    {"block0.w", 2, {23, 19}, ZS_FP32, 0, 0, 1, 1},
    {"block0.half", 2, {5, 129}, ZS_BF16, 0, 0, 1, 1},
    {"block0.frozen", 2, {11, 7}, ZS_BF16, 0, 1, 1, 1},
    {"block1.norm", 1, {1}, ZS_FP32, 1, 0, 1, 2},
    {"block1.w", 2, {131, 67}, ZS_FP32, 0, 0, 1, 2},
    {"block1.fp16", 1, {3}, ZS_FP16, 1, 0, 1, 2},
    {"head.scalar", 0, {0}, ZS_FP32, 1, 0, 1, 3},
    {"head.empty", 1, {0}, ZS_FP32, 1, 0, 1, 3},
};
const int job_small_count = (int)(sizeof job_small / sizeof job_small[0]);

uint64_t job_numel(const job_param *p)
{
    uint64_t n = 1;
    for (int i = 0; i < p->ndim; i++)
        n *= (uint64_t)p->shape[i];
    return n;
}

/* splitmix64 to [-1, 1) */
static float noise(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    x ^= x >> 31;
    return (float)((int32_t)(x >> 32)) * (1.0f / 2147483648.0f);
}

static float bf16_round(float v)
{
    uint32_t u;
    memcpy(&u, &v, 4);
    u = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
    memcpy(&v, &u, 4);
    return v;
}

static float fp16_round(float v)
{
    return zs_fp32_from_fp16(zs_fp16_from_fp32(v)); /* clang 14 has no _Float16 here */
}

float job_round(zs_dtype dtype, float v)
{
    return dtype == ZS_BF16 ? bf16_round(v) : dtype == ZS_FP16 ? fp16_round(v) : v;
}

static float initial(int param, uint64_t i)
{
    return noise(((uint64_t)param + 1) * 1000003u + i);
}

float job_grad(const job *j, int rank, int step, int micro, int param, uint64_t i)
{
    if (j->poison_step && (uint64_t)step + 1 == j->poison_step && rank == j->world - 1 && i == 0)
        return INFINITY;
    /* 1/world: the sum over the ranks is a mean. */
    float g = noise(i * 31 + (uint64_t)param * 7919 + (uint64_t)rank * 104729 +
                    (uint64_t)micro * 1299709 + (uint64_t)step * 15485863) /
              (float)j->world;
    return job_round(j->grad_dtype, g);
}

static zs_group_config group_config(int group)
{
    zs_group_config g;
    zs_group_config_init(&g);
    g.lr = HYPER_LR;
    g.weight_decay = group == 0 ? HYPER_DECAY : 0;
    return g;
}

void job_init(job *j, const char *dir)
{
    memset(j, 0, sizeof *j);
    j->params = job_small;
    j->param_count = job_small_count;
    j->unit_count = JOB_SMALL_UNITS;
    j->world = 1;
    j->steps = 4;
    j->micros = 2;
    j->max_norm = 1;
    j->dir = dir;
    zs_engine_config_init(&j->config);
    j->config.grad_accum_steps = j->micros;
    j->config.threads = 1;
}

typedef struct rank_args {
    job *j;
    zs_comm *comm;
    int rank;
} rank_args;

static zs_status register_all(job *j, zs_engine *e)
{
    zs_status s;
    for (int g = 0; g < 2; g++) {
        zs_group_config config = group_config(g);
        if ((s = zs_group_add(e, &config, NULL)))
            return s;
    }
    for (int p = 0; p < j->param_count; p++) {
        zs_param_config config;
        zs_param_config_init(&config);
        config.name = j->params[p].name;
        config.ndim = j->params[p].ndim;
        config.shape = j->params[p].shape;
        config.dtype = j->params[p].dtype;
        config.group = j->params[p].group;
        config.frozen = j->params[p].frozen;
        config.grad_uses = j->params[p].grad_uses;
        if ((s = zs_param_add(e, &config, NULL)))
            return s;
    }
    for (int u = 0; u < j->unit_count; u++) {
        zs_param members[JOB_MAX_PARAMS];
        size_t n = 0;
        char name[16];
        for (int p = 0; p < j->param_count; p++)
            if (j->params[p].unit == u)
                members[n++] = p;
        snprintf(name, sizeof name, "unit%d", u);
        if ((s = zs_unit_add(e, name, members, n, NULL)))
            return s;
    }
    return zs_engine_commit(e);
}

static zs_status load_all(job *j, zs_engine *e)
{
    zs_status s;
    for (int p = 0; p < j->param_count; p++) {
        uint64_t first, count;
        if ((s = zs_param_local(e, p, &first, &count)))
            return s;
        float *values = malloc((count + 1) * sizeof *values);
        for (uint64_t i = 0; i < count; i++)
            values[i] = initial(p, first + i);
        s = zs_param_write(e, p, first, count, ZS_FP32, values);
        free(values);
        if (s)
            return s;
    }
    return zs_params_publish(e);
}

static size_t dtype_size(zs_dtype dtype)
{
    return dtype == ZS_FP32 ? 4 : 2;
}

/* Looks at all weights of a unit. */
static zs_status look(job *j, zs_engine *e, int rank, int unit)
{
    zs_status s;
    for (int p = 0; p < j->param_count; p++) {
        void *data;
        const void *copy;
        if (j->params[p].unit != unit)
            continue;
        const size_t bytes = job_numel(&j->params[p]) * dtype_size(j->params[p].dtype);
        if ((s = zs_param_data(e, p, &data)))
            return s;
        if (bytes && j->gpu[rank] && (s = job_gpu_get(j->gpu[rank], data, bytes, &copy)))
            return s;
        if (bytes && !j->gpu[rank] && rank == 0)
            j->seen = zs_hash_bytes(j->seen, data, bytes);
    }
    return ZS_OK;
}

/* Forward: every unit is seen, in order. */
static zs_status forward(job *j, zs_engine *e, int rank)
{
    zs_status s;
    for (int u = 0; u < j->unit_count; u++) {
        if ((s = zs_unit_acquire(e, u)) || (s = look(j, e, rank, u)) || (s = zs_unit_release(e, u)))
            return s;
    }
    return ZS_OK;
}

/* Hands over n elements of dtype that the caller's stream makes. */
static zs_status give_on_gpu(job *j, zs_engine *e, int rank, int p, const void *data,
                             zs_dtype dtype)
{
    const size_t bytes = job_numel(&j->params[p]) * dtype_size(dtype);
    void *to = NULL;
    int add = 0;
    zs_status s = ZS_OK;
    if (j->use_buffer && dtype == j->grad_dtype)
        s = zs_grad_buffer(e, p, &to, &add);
    if (!s && bytes)
        s = job_gpu_put(j->gpu[rank], data, bytes, add ? NULL : to, &to);
    return s ? s : zs_grad_ready(e, p, to, dtype);
}

static zs_status give_grad(job *j, zs_engine *e, int rank, int step, int micro, int p, int use)
{
    const job_param *param = &j->params[p];
    const uint64_t n = job_numel(param);
    zs_status s = ZS_OK;
    float *g = malloc((n + 1) * sizeof *g);
    uint16_t *half = malloc((n + 1) * sizeof *half);
    void *to = NULL;
    int add = 0;
    /* Contributions of a tied parameter: all in the first, zeros in the second. */
    for (uint64_t i = 0; i < n; i++)
        g[i] = use ? 0 : job_grad(j, rank, step, micro, p, i);
    if (j->gpu[rank] && j->grad_dtype == ZS_FP32) {
        s = give_on_gpu(j, e, rank, p, g, ZS_FP32);
    } else if (j->use_buffer && j->grad_dtype == ZS_FP32) {
        s = zs_grad_buffer(e, p, &to, &add);
        for (uint64_t i = 0; !s && i < n; i++)
            ((float *)to)[i] = add ? ((float *)to)[i] + g[i] : g[i];
        s = s ? s : zs_grad_ready(e, p, to, ZS_FP32);
    } else if (j->grad_dtype == ZS_BF16) {
        for (uint64_t i = 0; i < n; i++) {
            uint32_t u;
            memcpy(&u, &g[i], 4);
            half[i] = (uint16_t)(u >> 16);
        }
        s = j->gpu[rank] ? give_on_gpu(j, e, rank, p, half, ZS_BF16)
                         : zs_grad_ready(e, p, half, ZS_BF16);
    } else {
        s = zs_grad_ready(e, p, g, ZS_FP32);
    }
    free(g);
    free(half);
    return s;
}

static zs_status backward(job *j, zs_engine *e, int rank, int step, int micro)
{
    zs_status s;
    for (int p = 0; p < j->param_count; p++)
        for (int use = 0; use + 1 < j->params[p].grad_uses; use++)
            if ((s = give_grad(j, e, rank, step, micro, p, use)))
                return s;
    for (int u = j->unit_count - 1; u >= 0; u--) {
        if ((s = zs_unit_acquire(e, u)))
            return s;
        for (int p = j->param_count - 1; p >= 0; p--) {
            if (j->params[p].unit != u || j->params[p].frozen)
                continue;
            if ((s = give_grad(j, e, rank, step, micro, p, j->params[p].grad_uses - 1)))
                return s;
        }
        /* Gradients of inputs need the weights after those of the weights are handed over. */
        if ((s = look(j, e, rank, u)) || (s = zs_unit_release(e, u)))
            return s;
    }
    return ZS_OK;
}

static zs_status take_step(job *j, zs_engine *e, int rank, int step)
{
    zs_status s;
    for (int m = 0; m < j->micros; m++) {
        if ((s = zs_grad_begin(e, m + 1 == j->micros)) || (s = forward(j, e, rank)) ||
            (s = backward(j, e, rank, step, m)))
            return s;
        if (j->hook)
            j->hook(j, e, rank, step, m);
        if ((s = zs_grad_finish(e)))
            return s;
    }
    zs_step_config config;
    zs_step_info info = {.size = sizeof info};
    zs_step_config_init(&config);
    config.max_norm = j->max_norm;
    if ((s = zs_step(e, &config, &info)))
        return s;
    if (rank == 0) {
        j->norms[step] = info.grad_norm;
        j->skipped[step] = info.skipped;
    }
    return ZS_OK;
}

static zs_status collect(job *j, zs_engine *e)
{
    zs_status s;
    for (int p = 0; p < j->param_count; p++) {
        uint64_t first, count;
        if ((s = zs_param_owned(e, p, &first, &count)))
            return s;
        const uint64_t n = job_numel(&j->params[p]);
        if ((s = zs_param_read(e, p, ZS_WEIGHT, first, count, ZS_FP32, j->weights[p] + first)))
            return s;
        if (j->params[p].frozen)
            continue;
        if ((s = zs_param_read(e, p, ZS_EXP_AVG, first, count, ZS_FP32, j->moments[p] + first)) ||
            (s = zs_param_read(e, p, ZS_EXP_AVG_SQ, first, count, ZS_FP32,
                               j->moments[p] + n + first)) ||
            (s = zs_param_read(e, p, ZS_MASTER, first, count, ZS_FP32, j->masters[p] + first)))
            return s;
    }
    return ZS_OK;
}

/* What acquire gives must be what the ranks own, seen from every rank. */
static zs_status check_gathered(job *j, zs_engine *e, int rank)
{
    zs_status s;
    for (int u = 0; u < j->unit_count; u++) {
        if ((s = zs_unit_acquire(e, u)))
            return s;
        for (int p = 0; p < j->param_count; p++) {
            uint64_t first, count;
            void *data;
            const void *copy;
            if (j->params[p].unit != u)
                continue;
            if ((s = zs_param_data(e, p, &data)) || (s = zs_param_owned(e, p, &first, &count)))
                return s;
            if (j->gpu[rank] && job_numel(&j->params[p])) {
                if ((s = job_gpu_get(j->gpu[rank], data,
                                     job_numel(&j->params[p]) * dtype_size(j->params[p].dtype),
                                     &copy)) ||
                    (s = job_gpu_wait(j->gpu[rank])))
                    return s;
                data = (void *)copy;
            }
            if (j->params[p].dtype == ZS_FP32 && count &&
                memcmp((float *)data + first, j->weights[p] + first, count * 4)) {
                fprintf(stderr, "%s: gathered and owned weights differ\n", j->params[p].name);
                return ZS_ERR_INTERNAL;
            }
        }
        if ((s = zs_unit_release(e, u)))
            return s;
    }
    return ZS_OK;
}

/* A resume, before which the state says what it will. */
static zs_status take_up(zs_engine *e, int *found, uint64_t *begin)
{
    zs_status s;
    int expected;
    uint64_t peeked = 0;
    size_t peeked_bytes = sizeof peeked, bytes = sizeof *begin;
    if ((s = zs_state_peek(e, &expected, &peeked, &peeked_bytes)) ||
        (s = zs_state_resume(e, found, begin, &bytes)))
        return s;
    if (expected != *found || peeked != *begin || peeked_bytes != bytes)
        return zs_fail(
            ZS_ERR_INTERNAL,
            "zs_state_peek gave found %d, %zu bytes, %llu; zs_state_resume %d, %zu, %llu", expected,
            peeked_bytes, (unsigned long long)peeked, *found, bytes, (unsigned long long)*begin);
    return ZS_OK;
}

static zs_status run(job *j, zs_engine *e, zs_comm *comm, int rank)
{
    zs_status s;
    uint64_t begin = 0;
    int found = 0;
    if ((s = register_all(j, e)))
        return s;
    if (j->use_resume && (s = take_up(e, &found, &begin)))
        return s;
    if (!found && (s = load_all(j, e)))
        return s;
    if (found) { /* frozen parameters are not part of the state */
        for (int p = 0; p < j->param_count; p++) {
            uint64_t first, count;
            if (!j->params[p].frozen)
                continue;
            if ((s = zs_param_local(e, p, &first, &count)))
                return s;
            for (uint64_t i = first; i < first + count; i++) {
                float v = initial(p, i);
                if ((s = zs_param_write(e, p, i, 1, ZS_FP32, &v)))
                    return s;
            }
        }
        if ((s = zs_params_publish(e)))
            return s;
    }
    if (rank == 0)
        j->resumed_at = begin;
    const int end = j->stop_at ? j->stop_at : j->steps;
    for (int step = (int)begin; step < end; step++) {
        if ((s = take_step(j, e, rank, step)))
            return s;
        uint64_t next = (uint64_t)step + 1;
        if (j->commit_at && step + 1 == j->commit_at &&
            (s = zs_state_commit(e, &next, sizeof next)))
            return s;
    }
    if ((s = collect(j, e)))
        return s;
    if (j->gpu[rank]) {
        if ((s = job_gpu_wait(j->gpu[rank])))
            return s;
        if (rank == 0)
            j->seen = job_gpu_seen(j->gpu[rank]);
    }
    if ((s = check_gathered(j, e, rank)))
        return s;
    if (rank == 0)
        zs_memory_report(e, j->rows, sizeof j->rows / sizeof j->rows[0], &j->row_count);
    double one = 1;
    return zs_comm_all_reduce(comm, "the end", ZS_OP_SUM, &one, 1);
}

static void *rank_main(void *arg)
{
    rank_args *a = arg;
    job *j = a->j;
    zs_engine *e = NULL;
    zs_engine_config config = j->config;
    char params[512];
    snprintf(params, sizeof params, "%s-params", j->dir ? j->dir : "");
    config.state_dir =
        j->dir && (config.optimizer_tier == ZS_TIER_NVME || j->commit_at || j->use_resume) ? j->dir
                                                                                           : NULL;
    config.param_dir = config.param_tier == ZS_TIER_NVME ? params : NULL;
    config.grad_dtype = j->grad_dtype;
    config.grad_accum_steps = j->micros;
    zs_status s = j->device ? job_gpu_open(j->device, a->rank, &j->gpu[a->rank]) : ZS_OK;
    if (!s && j->device) {
        config.device = job_gpu_device(j->gpu[a->rank]);
        config.stream = job_gpu_stream(j->gpu[a->rank]);
    }
    if (!s)
        s = zs_engine_open(&config, a->comm, &e);
    if (!s)
        s = run(j, e, a->comm, a->rank);
    j->status[a->rank] = s;
    snprintf(j->error[a->rank], sizeof j->error[0], "%s", s ? zs_last_error() : "");
    if (s)
        zs_comm_abort(a->comm, zs_last_error());
    zs_engine_close(&e);
    job_gpu_close(&j->gpu[a->rank]);
    return NULL;
}

void job_run(job *j)
{
    j->seen = ZS_HASH_START;
    zs_comm *comms[JOB_MAX_WORLD];
    pthread_t threads[JOB_MAX_WORLD];
    rank_args args[JOB_MAX_WORLD];
    for (int p = 0; p < j->param_count; p++) {
        const uint64_t n = job_numel(&j->params[p]);
        free(j->weights[p]);
        free(j->moments[p]);
        free(j->masters[p]);
        j->masters[p] = calloc(n + 1, sizeof(float));
        j->weights[p] = calloc(n + 1, sizeof(float));
        j->moments[p] = calloc(2 * n + 1, sizeof(float));
    }
    zs_status s = j->world == 1
                      ? zs_comm_open_self(comms)
                      : zs_comm_open_threads(j->world, j->timeout_s > 0 ? j->timeout_s : 60, comms);
    if (s) {
        j->status[0] = s;
        snprintf(j->error[0], sizeof j->error[0], "%s", zs_last_error());
        return;
    }
    for (int r = 0; r < j->world; r++) {
        args[r] = (rank_args){j, comms[r], r};
        pthread_create(&threads[r], NULL, rank_main, &args[r]);
    }
    for (int r = 0; r < j->world; r++)
        pthread_join(threads[r], NULL);
    for (int r = 0; r < j->world; r++)
        zs_comm_close(&comms[r]);
}

void job_free(job *j)
{
    for (int p = 0; p < j->param_count; p++) {
        free(j->weights[p]);
        free(j->moments[p]);
        free(j->masters[p]);
        j->weights[p] = j->moments[p] = j->masters[p] = NULL;
    }
}

int job_differ(const job *a, const job *b)
{
    for (int p = 0; p < a->param_count; p++) {
        const uint64_t n = job_numel(&a->params[p]);
        if (memcmp(a->weights[p], b->weights[p], n * 4) ||
            memcmp(a->moments[p], b->moments[p], 2 * n * 4) ||
            memcmp(a->masters[p], b->masters[p], n * 4))
            return p + 1;
    }
    return 0;
}

/* Summed as the engine does, in fp32: Adam divides by the size of what may be a rounding error. */
static float reduced_grad(const job *j, int step, int p, uint64_t i)
{
    const int boundary = j->config.reduce == ZS_REDUCE_BOUNDARY;
    const int outer = boundary ? j->world : j->micros, inner = boundary ? j->micros : j->world;
    float sum = 0;
    for (int a = 0; a < outer; a++) {
        float part = 0;
        for (int b = 0; b < inner; b++)
            part += job_grad(j, boundary ? a : b, step, boundary ? b : a, p, i);
        sum += part;
    }
    return sum;
}

void job_reference(const job *j, double **out, double *norms)
{
    double *m[JOB_MAX_PARAMS], *v[JOB_MAX_PARAMS], *g[JOB_MAX_PARAMS];
    for (int p = 0; p < j->param_count; p++) {
        const uint64_t n = job_numel(&j->params[p]);
        m[p] = calloc(n + 1, sizeof(double));
        v[p] = calloc(n + 1, sizeof(double));
        g[p] = calloc(n + 1, sizeof(double));
        for (uint64_t i = 0; i < n; i++)
            out[p][i] =
                j->params[p].frozen ? job_round(j->params[p].dtype, initial(p, i)) : initial(p, i);
    }
    for (int step = 0; step < j->steps; step++) {
        double sum = 0;
        for (int p = 0; p < j->param_count; p++) {
            for (uint64_t i = 0; !j->params[p].frozen && i < job_numel(&j->params[p]); i++) {
                g[p][i] = (double)reduced_grad(j, step, p, i);
                sum += g[p][i] * g[p][i];
            }
        }
        norms[step] = sqrt(sum);
        double factor = j->max_norm > 0 ? fmin(1, j->max_norm / (norms[step] + 1e-6)) : 1;
        for (int p = 0; p < j->param_count; p++) {
            const zs_group_config h = group_config(j->params[p].group);
            const double c1 = 1 - pow(h.beta1, step + 1), c2 = 1 - pow(h.beta2, step + 1);
            for (uint64_t i = 0; !j->params[p].frozen && i < job_numel(&j->params[p]); i++) {
                const double gi = g[p][i] * factor;
                out[p][i] *= 1 - h.lr * h.weight_decay;
                m[p][i] = h.beta1 * m[p][i] + (1 - h.beta1) * gi;
                v[p][i] = h.beta2 * v[p][i] + (1 - h.beta2) * gi * gi;
                out[p][i] -= h.lr * (m[p][i] / c1) / (sqrt(v[p][i] / c2) + h.eps);
            }
        }
    }
    for (int p = 0; p < j->param_count; p++) {
        free(m[p]);
        free(v[p]);
        free(g[p]);
    }
}

const char *job_temp_dir(void)
{
    static char dir[256];
    const char *base = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%s/zspill-test-XXXXXX", base ? base : "/tmp");
    return mkdtemp(dir);
}

void job_clean(const char *dir)
{
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s' '%s-params'", dir, dir);
    if (system(command))
        fprintf(stderr, "%s is left behind\n", dir);
}
