/* SPDX-License-Identifier: Apache-2.0 */
/* Opening, registering, closing. */
#include "zero/engine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/util.h"
#include "device/cuda.h"

void zs_engine_config_init(zs_engine_config *config)
{
    *config = (zs_engine_config){
        .size = sizeof *config,
        .grad_accum_steps = 1,
        .loss_scale = 1,
        .initial_loss_scale = 65536,
        .loss_scale_window = 1000,
        .min_loss_scale = 1,
        .max_skipped_steps = 5,
        .slots = 2,
        .keep = -1,
        .log_level = ZS_LOG_INFO,
    };
}

void zs_group_config_init(zs_group_config *config)
{
    *config = (zs_group_config){
        .size = sizeof *config,
        .lr = 1e-3,
        .beta1 = 0.9,
        .beta2 = 0.999,
        .eps = 1e-8,
        .weight_decay = 0.01,
        .decoupled = 1,
    };
}

void zs_param_config_init(zs_param_config *config)
{
    *config = (zs_param_config){.size = sizeof *config, .grad_uses = 1};
}

zs_status zs_engine_enter(const zs_engine *e, const char *what)
{
    if (!e)
        return zs_fail(ZS_ERR_ARG, "%s: the engine is NULL", what);
    if (e->pid != getpid())
        return zs_fail(ZS_ERR_FORKED,
                       "%s: this engine belongs to process %d; after fork() a child (here %d) "
                       "cannot use it: open one in the process that uses it",
                       what, (int)e->pid, (int)getpid());
    if (atomic_load(&e->canceled))
        return zs_fail(ZS_ERR_CANCELED, "%s: the engine was canceled", what);
    if (e->broken != ZS_OK)
        return zs_fail(e->broken, "%s: the engine failed earlier (%s); close it", what,
                       e->broken_why ? e->broken_why : zs_status_name(e->broken));
    return ZS_OK;
}

zs_status zs_engine_enter_param(const zs_engine *e, zs_param param, const char *what)
{
    ZS_CHECK(zs_engine_enter(e, what));
    if (param < 0 || (size_t)param >= e->param_count)
        return zs_fail(ZS_ERR_ARG, "%s: no parameter %d; there are %zu", what, (int)param,
                       e->param_count);
    return ZS_OK;
}

zs_status zs_engine_enter_unit(const zs_engine *e, zs_unit unit, const char *what)
{
    ZS_CHECK(zs_engine_enter(e, what));
    if (unit < 0 || (size_t)unit >= e->unit_count)
        return zs_fail(ZS_ERR_ARG, "%s: no unit %d; there are %zu", what, (int)unit, e->unit_count);
    return ZS_OK;
}

zs_status zs_engine_break(zs_engine *e, zs_status status)
{
    if (status == ZS_OK || e->broken != ZS_OK)
        return status;
    e->broken = status;
    e->broken_why = strdup(zs_last_error());
    zs_bulk_abort(e->bulk, zs_last_error());
    /* When a peer or the transport failed, the others know already. */
    if (!e->all_know && status != ZS_ERR_COMM && status != ZS_ERR_TIMEOUT &&
        status != ZS_ERR_MISMATCH)
        zs_comm_abort(e->comm, zs_last_error());
    return status;
}

zs_status zs_engine_agree(zs_engine *e, const char *what, zs_status local)
{
    zs_status status = zs_comm_agree(e->comm, what, local);
    e->all_know = status != ZS_OK;
    return status;
}

zs_status zs_engine_expect(const zs_engine *e, unsigned mask, const char *what)
{
    static const char *const now[] = {
        [ZS_PHASE_OPEN] = "the engine is not committed yet: call zs_engine_commit first",
        [ZS_PHASE_IDLE] = "there are no gradients: zs_grad_begin starts a micro-batch",
        [ZS_PHASE_MICRO] = "a micro-batch is in progress: zs_grad_finish ends it",
        [ZS_PHASE_MORE] = "the last micro-batch of the step is still to come",
        [ZS_PHASE_READY] =
            "the gradients of a step are complete: zs_step or zs_grad_discard is next",
    };
    if (mask & 1u << e->phase)
        return ZS_OK;
    if (!(mask & ~(1u << ZS_PHASE_OPEN)))
        return zs_fail(ZS_ERR_MISUSE, "%s: the engine is committed; register everything before",
                       what);
    return zs_fail(ZS_ERR_MISUSE, "%s: %s", what, now[e->phase]);
}

const char *zs_unit_label(const zs_engine *e, size_t unit, char buf[96])
{
    snprintf(buf, 96, "unit '%s'", e->units[unit].name);
    return buf;
}

/* ---- open ---- */

static zs_status check_config(const zs_engine_config *c)
{
    if (c->zero_stage < 0 || c->zero_stage > 3)
        return zs_fail(ZS_ERR_ARG, "zero_stage is %d; it must be 0, 1, 2 or 3", c->zero_stage);
    if ((unsigned)c->optimizer_tier >= ZS_TIERS || (unsigned)c->param_tier >= ZS_TIERS)
        return zs_fail(ZS_ERR_ARG, "optimizer_tier %d, param_tier %d: tiers are 0, 1 and 2",
                       (int)c->optimizer_tier, (int)c->param_tier);
    if (c->param_tier != ZS_TIER_DEVICE && c->zero_stage != 3)
        return zs_fail(ZS_ERR_ARG,
                       "param_tier %s needs zero_stage 3, and zero_stage is %d: below stage 3 "
                       "every rank keeps all parameters on its device",
                       zs_tier_name(c->param_tier), c->zero_stage);
    if (c->optimizer_tier == ZS_TIER_NVME && !c->state_dir)
        return zs_fail(ZS_ERR_ARG, "optimizer_tier nvme needs state_dir");
    if (c->param_tier == ZS_TIER_NVME && !c->param_dir)
        return zs_fail(ZS_ERR_ARG, "param_tier nvme needs param_dir");
    if (c->grad_dtype != ZS_FP32 && c->grad_dtype != ZS_BF16)
        return zs_fail(ZS_ERR_ARG, "grad_dtype is %d (%s); it must be fp32 or bf16",
                       (int)c->grad_dtype, zs_dtype_name(c->grad_dtype));
    if (c->reduce != ZS_REDUCE_MICRO && c->reduce != ZS_REDUCE_BOUNDARY)
        return zs_fail(ZS_ERR_ARG, "reduce is %d; it must be micro (0) or boundary (1)",
                       (int)c->reduce);
    if (c->reduce == ZS_REDUCE_BOUNDARY && c->zero_stage > 1)
        return zs_fail(ZS_ERR_ARG,
                       "reduce boundary needs whole local gradients, which zero_stage %d does not "
                       "keep: use stage 0 or 1, or reduce micro",
                       c->zero_stage);
    if (c->grad_accum_steps < 1)
        return zs_fail(ZS_ERR_ARG, "grad_accum_steps is %d; it must be at least 1",
                       c->grad_accum_steps);
    if ((unsigned)c->missing_grad > ZS_MISSING_SKIP)
        return zs_fail(ZS_ERR_ARG, "missing_grad is %d; it must be 0, 1 or 2",
                       (int)c->missing_grad);
    if ((unsigned)c->adam > ZS_ADAM_ZERO_COPY)
        return zs_fail(ZS_ERR_ARG,
                       "adam is %d; it must be auto (0), device (1), host (2) or zero copy (3)",
                       (int)c->adam);
    if (c->threads < 0 || c->threads > 64)
        return zs_fail(ZS_ERR_ARG, "threads is %d; it must be 0 (chosen) to 64", c->threads);
    if (c->chunk_numel % 4096)
        return zs_fail(ZS_ERR_ARG, "chunk_numel is %llu; it must be a multiple of 4096",
                       (unsigned long long)c->chunk_numel);
    if (c->slots != 1 && c->slots != 2)
        return zs_fail(ZS_ERR_ARG, "slots is %d; it must be 1 or 2", c->slots);
    if (c->keep < -1 || c->keep > ZS_KEEP_MOST)
        return zs_fail(ZS_ERR_ARG, "keep is %d; it must be -1 to %d", c->keep, ZS_KEEP_MOST);
    if (c->keep > 0 && (c->slots == 1 || !c->state_dir))
        return zs_fail(ZS_ERR_ARG, "keep is %d: older commits need a state_dir and slots 2, not %d",
                       c->keep, c->slots);
    if (c->resume_commit && !c->resume)
        return zs_fail(ZS_ERR_ARG, "resume_commit is %llu, but resume is 0: set it to 1",
                       (unsigned long long)c->resume_commit);
    if (!(c->loss_scale >= 0) || !isfinite(c->loss_scale))
        return zs_fail(ZS_ERR_ARG, "loss_scale is %g; it must be 0 (dynamic) or positive",
                       c->loss_scale);
    if (c->loss_scale == 0 &&
        (!(c->min_loss_scale > 0) || !isfinite(c->initial_loss_scale) ||
         c->initial_loss_scale < c->min_loss_scale || c->loss_scale_window < 1))
        return zs_fail(
            ZS_ERR_ARG,
            "dynamic loss scaling from %g, at least %g, window %d: they must be positive "
            "and the first not below the second",
            c->initial_loss_scale, c->min_loss_scale, c->loss_scale_window);
    if (c->max_skipped_steps < 1)
        return zs_fail(ZS_ERR_ARG, "max_skipped_steps is %d; it must be at least 1",
                       c->max_skipped_steps);
    return ZS_OK;
}

static zs_status copy_string(const char *text, char **out)
{
    *out = text ? strdup(text) : NULL;
    if (text && !*out)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a copy of '%s'", text);
    return ZS_OK;
}

/* What was asked for by name must be what happens. */
static zs_status check_side(const zs_engine *e)
{
    const zs_adam_side side = e->config.adam;
    const int far = e->config.optimizer_tier != ZS_TIER_DEVICE;
    if (e->device->host_access && (side == ZS_ADAM_DEVICE || side == ZS_ADAM_ZERO_COPY))
        return zs_fail(ZS_ERR_ARG,
                       "adam %s needs a CUDA device, and the device is the host: use auto or host",
                       side == ZS_ADAM_DEVICE ? "device" : "zero copy");
    if (!e->device->host_access && !far && (side == ZS_ADAM_HOST || side == ZS_ADAM_ZERO_COPY))
        return zs_fail(ZS_ERR_ARG,
                       "adam %s needs states in host memory or on NVMe, and optimizer_tier is "
                       "device: use auto or device, or another tier",
                       side == ZS_ADAM_HOST ? "host" : "zero copy");
    return ZS_OK;
}

/* Where there is an accelerator, its streams and maths beside the host's. */
static zs_status open_device(zs_engine *e)
{
    const size_t bytes = ZS_SCRATCH * sizeof *e->scratch;
    e->device = e->config.device;
    if (!e->device) {
        ZS_CHECK(zs_device_open_host(&e->device));
        e->own_device = 1;
    }
    ZS_CHECK(check_side(e));
    ZS_CHECK(zs_math_open_host(e->pool, &e->host_math));
    if (e->device->host_access) {
        if (e->config.stream)
            return zs_fail(ZS_ERR_ARG,
                           "zs_engine_open: stream is %p, but the host has no streams: "
                           "leave it NULL, or set device",
                           e->config.stream);
        e->math = e->host_math;
        e->scratch = malloc(bytes);
        if (!e->scratch)
            return zs_fail(ZS_ERR_NOMEM, "zs_engine_open: no memory for %zu bytes of scratch",
                           bytes);
        return ZS_OK;
    }
    ZS_CHECK(e->device->cuda->math_open(e->device, e->ledger, &e->math));
    if (e->config.stream)
        ZS_CHECK(e->device->ops->stream_wrap(e->device, e->config.stream, &e->compute));
    ZS_CHECK(e->device->ops->stream_open(e->device, &e->work));
    ZS_CHECK(zs_mem_alloc(e->device, e->ledger, ZS_TIER_HOST, "scratch", bytes, &e->scratch_mem));
    e->scratch = e->scratch_mem.ptr;
    return ZS_OK;
}

static void close_device(zs_engine *e)
{
    if (!e->device)
        return;
    if (!e->scratch_mem.ptr)
        free(e->scratch);
    zs_mem_free(&e->scratch_mem);
    zs_mark_close(e->device, &e->joined);
    if (e->math != e->host_math)
        zs_math_close(&e->math);
    zs_math_close(&e->host_math);
    e->device->ops->stream_close(e->device, e->work);
    e->device->ops->stream_close(e->device, e->compute);
    if (e->own_device)
        zs_device_close(&e->device);
}

zs_status zs_engine_join(zs_engine *e)
{
    ZS_CHECK(zs_mark_set(e->device, &e->joined, e->compute));
    return zs_mark_wait(e->device, &e->joined, e->work);
}

zs_status zs_engine_settle(zs_engine *e)
{
    ZS_CHECK(e->device->ops->stream_sync(e->device, e->work));
    return e->bulk ? zs_bulk_check(e->bulk) : ZS_OK;
}

zs_status zs_engine_open(const zs_engine_config *config, zs_comm *comm, zs_engine **out)
{
    zs_status status = ZS_OK;
    zs_engine *e = NULL;
    if (!out)
        return zs_fail(ZS_ERR_ARG, "zs_engine_open: out is NULL");
    *out = NULL;
    if (!config || config->size != sizeof *config)
        return zs_fail(ZS_ERR_ARG,
                       "zs_engine_open: config is NULL or its size is not %zu; fill it with "
                       "zs_engine_config_init of the same version",
                       sizeof *config);
    if (!comm)
        return zs_fail(ZS_ERR_ARG, "zs_engine_open: comm is NULL; zs_comm_open_self gives a world "
                                   "of one");
    ZS_CHECK(check_config(config));

    e = calloc(1, sizeof *e);
    if (!e)
        return zs_fail(ZS_ERR_NOMEM, "zs_engine_open: no memory for the engine");
    e->config = *config;
    e->dir_lock = -1;
    e->comm = comm;
    e->rank = zs_comm_rank(comm);
    e->world = zs_comm_world(comm);
    e->pid = getpid();
    e->phase = ZS_PHASE_OPEN;
    e->last_unit = e->before_last_unit = -1;
    e->log = (zs_log){config->log, config->log_cookie, config->log_level};
    e->loss_scale = config->loss_scale > 0 ? config->loss_scale : config->initial_loss_scale;
    ZS_TRY(copy_string(config->state_dir, &e->state_dir));
    ZS_TRY(copy_string(config->param_dir, &e->param_dir));
    e->config.state_dir = e->state_dir;
    e->config.param_dir = e->param_dir;
    ZS_TRY(zs_ledger_open(&e->ledger));
    e->pool = config->pool;
    if (!e->pool) {
        int threads = config->threads;
        if (threads == 0)
            threads = ZS_MAX(1, zs_cpu_count() / ZS_MAX(1, zs_comm_local_ranks(comm)));
        ZS_TRY(zs_pool_open(ZS_MIN(threads, 64), -1, &e->pool));
        e->own_pool = 1;
    }
    ZS_TRY(open_device(e));
    *out = e;
    return ZS_OK;
fail:
    zs_engine_close(&e);
    return status;
}

void zs_engine_close(zs_engine **engine)
{
    zs_engine *e = engine ? *engine : NULL;
    if (!e)
        return;
    *engine = NULL;
    if (e->pid != getpid())
        return; /* the child of a fork owns nothing of it */
    /* What is queued may still use what is about to go, the caller's part of it too. */
    if (e->device && !e->device->host_access) {
        if (e->broken != ZS_OK)
            zs_bulk_abort(e->bulk, "the engine is closed after a failure");
        (void)e->device->ops->stream_sync(e->device, e->compute);
        if (e->work)
            (void)zs_engine_settle(e);
    }
    zs_gather_close(e);
    zs_states_close(&e->states);
    zs_engine_free_layout(e);
    zs_bulk_close(&e->bulk);
    zs_param_file_close(&e->param_file);
    zs_io_close(&e->io);
    close_device(e);
    if (e->own_pool)
        zs_pool_close(&e->pool);
    zs_ledger_close(&e->ledger);
    for (size_t i = 0; i < e->param_count; i++)
        free(e->params[i].name);
    for (size_t i = 0; i < e->unit_count; i++) {
        free(e->units[i].name);
        free(e->units[i].params);
    }
    free(e->params);
    free(e->units);
    free(e->groups);
    zs_state_unlock(e);
    zs_manifest_free(&e->manifest);
    zs_manifest_free(&e->own);
    free(e->state_dir);
    free(e->param_dir);
    free(e->broken_why);
    free(e);
}

void zs_engine_cancel(zs_engine *e)
{
    if (e)
        atomic_store(&e->canceled, 1);
}

/* ---- registering ---- */

static zs_status grow(void **array, size_t count, size_t item, const char *what)
{
    /* Powers of two: a new size only when count has reached one. */
    if (count & (count - 1))
        return ZS_OK;
    size_t capacity = count ? 2 * count : 1;
    void *bigger = realloc(*array, capacity * item);
    if (!bigger)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a table of %zu %s", capacity, what);
    *array = bigger;
    return ZS_OK;
}

static zs_status check_group(const zs_group_config *c, const char *what)
{
    if (!c || c->size != sizeof *c)
        return zs_fail(ZS_ERR_ARG,
                       "%s: config is NULL or its size is not %zu; fill it with "
                       "zs_group_config_init",
                       what, sizeof *c);
    if (!(c->lr >= 0) || !isfinite(c->lr))
        return zs_fail(ZS_ERR_ARG, "%s: lr is %g; it must be 0 or more", what, c->lr);
    if (!(c->beta1 >= 0 && c->beta1 < 1) || !(c->beta2 >= 0 && c->beta2 < 1))
        return zs_fail(ZS_ERR_ARG, "%s: beta1 %g, beta2 %g: both must be in [0, 1)", what, c->beta1,
                       c->beta2);
    if (!(c->eps >= 0) || !isfinite(c->eps))
        return zs_fail(ZS_ERR_ARG, "%s: eps is %g; it must be 0 or more", what, c->eps);
    if (!(c->weight_decay >= 0) || !isfinite(c->weight_decay))
        return zs_fail(ZS_ERR_ARG, "%s: weight_decay is %g; it must be 0 or more", what,
                       c->weight_decay);
    return ZS_OK;
}

zs_status zs_group_add(zs_engine *e, const zs_group_config *config, zs_group *out)
{
    ZS_CHECK(zs_engine_enter(e, "zs_group_add"));
    ZS_CHECK(zs_engine_expect(e, 1u << ZS_PHASE_OPEN, "zs_group_add"));
    ZS_CHECK(check_group(config, "zs_group_add"));
    ZS_CHECK(grow((void **)&e->groups, e->group_count, sizeof *e->groups, "groups"));
    e->groups[e->group_count] = *config;
    if (out)
        *out = (zs_group)e->group_count;
    e->group_count++;
    return ZS_OK;
}

zs_status zs_group_set(zs_engine *e, zs_group group, const zs_group_config *config)
{
    ZS_CHECK(zs_engine_enter(e, "zs_group_set"));
    if (group < 0 || (size_t)group >= e->group_count)
        return zs_fail(ZS_ERR_ARG, "zs_group_set: no group %d; there are %zu", (int)group,
                       e->group_count);
    ZS_CHECK(check_group(config, "zs_group_set"));
    e->groups[group] = *config;
    return ZS_OK;
}

static zs_status check_param(const zs_engine *e, const zs_param_config *c, uint64_t *numel)
{
    if (!c || c->size != sizeof *c)
        return zs_fail(ZS_ERR_ARG,
                       "zs_param_add: config is NULL or its size is not %zu; fill it "
                       "with zs_param_config_init",
                       sizeof *c);
    if (!c->name || !*c->name)
        return zs_fail(ZS_ERR_ARG, "zs_param_add: parameter %zu has no name", e->param_count);
    for (const char *at = c->name; *at; at++)
        if ((unsigned char)*at < ' ')
            return zs_fail(ZS_ERR_ARG, "the name of parameter %zu has a control character (%d)",
                           e->param_count, *at);
    if (c->ndim < 0 || c->ndim > ZS_MAX_DIMS || (c->ndim && !c->shape))
        return zs_fail(ZS_ERR_ARG, "parameter '%s': ndim is %d; it must be 0 to %d, with a shape",
                       c->name, c->ndim, ZS_MAX_DIMS);
    *numel = 1;
    for (int i = 0; i < c->ndim; i++) {
        if (c->shape[i] < 0 || zs_mul_overflow(*numel, (uint64_t)c->shape[i], numel) ||
            *numel > INT64_MAX / 16)
            return zs_fail(ZS_ERR_ARG,
                           "parameter '%s': dimension %d is %lld, which is negative or "
                           "makes the size overflow",
                           c->name, i, (long long)c->shape[i]);
    }
    if ((unsigned)c->dtype > ZS_FP16)
        return zs_fail(ZS_ERR_ARG, "parameter '%s': dtype is %d; it must be fp32, bf16 or fp16",
                       c->name, (int)c->dtype);
    if (!c->frozen && (c->group < 0 || (size_t)c->group >= e->group_count))
        return zs_fail(ZS_ERR_ARG, "parameter '%s': no group %d; there are %zu: add groups first",
                       c->name, (int)c->group, e->group_count);
    if (c->grad_uses < 1)
        return zs_fail(ZS_ERR_ARG, "parameter '%s': grad_uses is %d; it must be at least 1",
                       c->name, c->grad_uses);
    for (size_t i = 0; i < e->param_count; i++)
        if (!strcmp(e->params[i].name, c->name))
            return zs_fail(ZS_ERR_ARG, "parameter '%s' is there already, as number %zu", c->name,
                           i);
    return ZS_OK;
}

zs_status zs_param_add(zs_engine *e, const zs_param_config *config, zs_param *out)
{
    uint64_t numel = 0;
    ZS_CHECK(zs_engine_enter(e, "zs_param_add"));
    ZS_CHECK(zs_engine_expect(e, 1u << ZS_PHASE_OPEN, "zs_param_add"));
    ZS_CHECK(check_param(e, config, &numel));
    if (e->param_count == INT32_MAX)
        return zs_fail(ZS_ERR_ARG, "parameter '%s': too many parameters", config->name);
    ZS_CHECK(grow((void **)&e->params, e->param_count, sizeof *e->params, "parameters"));
    zs_param_info *p = &e->params[e->param_count];
    *p = (zs_param_info){
        .ndim = config->ndim,
        .numel = numel,
        .dtype = config->dtype,
        .group = config->frozen ? -1 : config->group,
        .frozen = config->frozen != 0,
        .grad_uses = config->grad_uses,
        .unit = -1,
    };
    if (config->ndim)
        memcpy(p->shape, config->shape, (size_t)config->ndim * sizeof *p->shape);
    ZS_CHECK(copy_string(config->name, &p->name));
    if (out)
        *out = (zs_param)e->param_count;
    e->param_count++;
    return ZS_OK;
}

zs_status zs_unit_add(zs_engine *e, const char *name, const zs_param *params, size_t count,
                      zs_unit *out)
{
    ZS_CHECK(zs_engine_enter(e, "zs_unit_add"));
    ZS_CHECK(zs_engine_expect(e, 1u << ZS_PHASE_OPEN, "zs_unit_add"));
    if (!name || !*name)
        return zs_fail(ZS_ERR_ARG, "zs_unit_add: unit %zu has no name", e->unit_count);
    if (!params || !count)
        return zs_fail(ZS_ERR_ARG, "unit '%s' has no parameters", name);
    for (size_t i = 0; i < count; i++) {
        if (params[i] < 0 || (size_t)params[i] >= e->param_count)
            return zs_fail(ZS_ERR_ARG, "unit '%s': no parameter %d; there are %zu", name,
                           (int)params[i], e->param_count);
        const zs_param_info *p = &e->params[params[i]];
        if (p->unit >= 0)
            return zs_fail(ZS_ERR_ARG, "unit '%s': parameter '%s' belongs to unit '%s' already",
                           name, p->name, e->units[p->unit].name);
        for (size_t j = 0; j < i; j++)
            if (params[j] == params[i])
                return zs_fail(ZS_ERR_ARG, "unit '%s': parameter '%s' is listed twice", name,
                               p->name);
    }
    ZS_CHECK(grow((void **)&e->units, e->unit_count, sizeof *e->units, "units"));
    zs_unit_info *u = &e->units[e->unit_count];
    *u = (zs_unit_info){.count = count};
    u->params = malloc(count * sizeof *u->params);
    u->name = strdup(name);
    if (!u->params || !u->name) {
        free(u->params);
        free(u->name);
        return zs_fail(ZS_ERR_NOMEM, "unit '%s': no memory for a list of %zu parameters", name,
                       count);
    }
    memcpy(u->params, params, count * sizeof *params);
    for (size_t i = 0; i < count; i++)
        e->params[params[i]].unit = (int32_t)e->unit_count;
    if (out)
        *out = (zs_unit)e->unit_count;
    e->unit_count++;
    return ZS_OK;
}

/* ---- ledger ---- */

zs_status zs_memory_report(const zs_engine *e, zs_memory_row *rows, size_t capacity, size_t *count)
{
    ZS_CHECK(zs_engine_enter(e, "zs_memory_report"));
    if (!count || (capacity && !rows))
        return zs_fail(ZS_ERR_ARG, "zs_memory_report: count is NULL, or rows is with capacity %zu",
                       capacity);
    zs_ledger_rows(e->ledger, rows, capacity, count);
    return ZS_OK;
}

zs_status zs_memory_note(zs_engine *e, zs_tier tier, const char *purpose, int64_t delta)
{
    ZS_CHECK(zs_engine_enter(e, "zs_memory_note"));
    if ((unsigned)tier >= ZS_TIERS || !purpose)
        return zs_fail(ZS_ERR_ARG, "zs_memory_note: tier %d, purpose %s", (int)tier,
                       purpose ? purpose : "NULL");
    return zs_ledger_add(e->ledger, tier, purpose, delta);
}
