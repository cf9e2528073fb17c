/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer step: norm, clip, Adam over this rank's shards, new weights to all. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "zero/engine.h"

void zs_step_config_init(zs_step_config *config)
{
    *config = (zs_step_config){.size = sizeof *config, .grad_scale = 1};
}

double zs_loss_scale(const zs_engine *e)
{
    return e ? e->loss_scale : 1;
}

/* ---- norm ---- */

/* Sum of squares of the reduced gradients as they are: this rank's shards block by block, then the
 * ranks in order, at every stage. *found_inf: in: this rank's; out: any rank's. Waits for the
 * gradients: the one time in a step that the host waits for a device, but for chunks on their way
 * to disk. */
static zs_status sum_squares(zs_engine *e, double *total, int *found_inf)
{
    double values[2] = {0, 0};
    ZS_CHECK(zs_engine_settle(e));
    for (size_t i = 0; i < e->flat_count; i++)
        if (e->flats[i].trainable && e->flats[i].layout.shard)
            values[0] += e->sums[i];
    values[1] = *found_inf != 0;
    ZS_CHECK(zs_comm_all_reduce(e->comm, "the gradient norm", ZS_OP_SUM, values, 2));
    *total = values[0];
    *found_inf = values[1] > 0;
    return ZS_OK;
}

zs_status zs_grad_norm(zs_engine *e, double grad_scale, double *out)
{
    double total;
    int found_inf = 0;
    ZS_CHECK(zs_engine_enter(e, "zs_grad_norm"));
    ZS_CHECK(zs_engine_expect(e, 1u << ZS_PHASE_READY, "zs_grad_norm"));
    if (!out)
        return zs_fail(ZS_ERR_ARG, "zs_grad_norm: out is NULL");
    zs_status status = sum_squares(e, &total, &found_inf);
    if (status == ZS_OK)
        *out = sqrt(total) * grad_scale / e->loss_scale;
    return zs_engine_break(e, status);
}

/* ---- loss scale ---- */

static int at_smallest_scale(const zs_engine *e)
{
    return e->config.loss_scale != 0 || e->loss_scale <= e->config.min_loss_scale;
}

/* After a step (skipped or not). Doubles after a window of good steps, halves at each overflow. */
static void adapt_loss_scale(zs_engine *e, int skipped)
{
    if (e->config.loss_scale != 0)
        return;
    if (skipped) {
        e->loss_scale = ZS_MAX(e->loss_scale / 2, e->config.min_loss_scale);
        e->good_steps = 0;
    } else if (++e->good_steps >= e->config.loss_scale_window) {
        e->loss_scale *= 2;
        e->good_steps = 0;
    }
}

static zs_status skip(zs_engine *e, double norm)
{
    const int counts = at_smallest_scale(e);
    e->skipped_in_row = counts ? e->skipped_in_row + 1 : 0;
    zs_log_print(&e->log, ZS_LOG_WARN,
                 "step %llu skipped: %s, the gradient norm is %g (loss scale %g); %d in a row",
                 (unsigned long long)e->step + 1, isfinite(norm) ? "found_inf was set" : "overflow",
                 norm, e->loss_scale, e->skipped_in_row);
    adapt_loss_scale(e, 1);
    if (e->skipped_in_row >= e->config.max_skipped_steps) {
        e->all_know = 1; /* every rank counts the same */
        return zs_fail(
            ZS_ERR_NONFINITE,
            "the gradient norm was not finite in %d steps in a row, up to step %llu: lower the "
            "learning rate, check the data, or use a dtype with a larger range",
            e->skipped_in_row, (unsigned long long)e->step + 1);
    }
    return ZS_OK;
}

/* ---- Adam ---- */

/* The coefficients of parameter p's update; equal ones are shared. *count entries of e->coefs
 * are in use. */
static const zs_adam_coef *coef_of(zs_engine *e, const zs_param_info *p, double grad_scale,
                                   const zs_param_info **owners, size_t *count)
{
    for (size_t i = *count; i-- > 0;)
        if (owners[i]->group == p->group && owners[i]->steps == p->steps)
            return &e->coefs[i];
    owners[*count] = p;
    zs_adam_coef_make(&e->coefs[*count], &e->groups[p->group], p->steps + 1, grad_scale);
    return &e->coefs[(*count)++];
}

static void plan_flat(zs_engine *e, zs_flat *f, double grad_scale, const zs_clip *clip,
                      const zs_param_info **owners, size_t *coefs)
{
    zs_states_input *in = &e->inputs[f->state_shard];
    *in = (zs_states_input){
        .grad = e->config.zero_stage == 0 ? f->grad_full.ptr : zs_flat_grad_shard(e, f),
        .grad_dtype = e->config.grad_dtype,
        .working = zs_flat_is_master(e, f) ? NULL : zs_flat_working_held(e, f),
        .runs = f->runs,
        .grad_scale = clip ? &clip->grad_scale : NULL,
        .skip = clip ? &clip->skip : NULL,
    };
    for (size_t i = 0; i < f->count; i++) {
        const zs_param_info *p = &e->params[f->params[i]];
        uint64_t first, count, at;
        zs_flat_locate(f, i, zs_flat_held_begin(e, f), zs_flat_held_numel(e, f), &first, &count,
                       &at);
        if (!count || !p->got_grad)
            continue;
        f->runs[in->run_count++] =
            (zs_adam_run){at, count, coef_of(e, p, grad_scale, owners, coefs)};
    }
}

/* clip: in the device's memory, where that decides; else NULL. */
static zs_status update(zs_engine *e, double grad_scale, const zs_clip *clip, zs_step_info *info)
{
    /* owners[i] is a parameter that coefs[i] was made for. */
    const zs_param_info **owners = calloc(e->param_count, sizeof *owners);
    size_t coefs = 0;
    if (!owners)
        return zs_fail(ZS_ERR_NOMEM, "zs_step: no memory for the owners of %zu parameters",
                       e->param_count);
    for (size_t i = 0; i < e->flat_count; i++)
        if (e->flats[i].trainable)
            plan_flat(e, &e->flats[i], grad_scale, clip, owners, &coefs);
    free(owners);
    return zs_states_step(e->states, e->inputs, info->tier, &info->adam_seconds);
}

/* Adam was queued. */
static zs_status conclude(zs_engine *e)
{
    e->step++;
    e->skipped_in_row = 0;
    for (size_t i = 0; i < e->param_count; i++)
        e->params[i].steps += !e->params[i].frozen && e->params[i].got_grad;
    adapt_loss_scale(e, 0);
    zs_window_drop(e);
    ZS_CHECK(zs_weights_spread(e));
    return zs_gather_prefetch(e);
}

/* What Adam has read of the gradient buffers. */
static zs_status mark_grads(zs_engine *e)
{
    for (size_t u = 0; u < e->unit_count && e->config.zero_stage < 2; u++)
        ZS_CHECK(zs_mark_set(e->device, &e->units[u].grads, e->work));
    return ZS_OK;
}

static zs_status apply(zs_engine *e, double grad_scale, zs_step_info *info)
{
    ZS_CHECK(zs_engine_agree(e, "the optimizer step", update(e, grad_scale, NULL, info)));
    ZS_CHECK(mark_grads(e));
    return conclude(e);
}

/* ---- decisions of the device ---- */

static zs_status queue_decision(zs_engine *e, const zs_clip_config *config)
{
    zs_decision *d = e->decision.ptr;
    void *native = zs_engine_native(e);
    const zs_piece piece = {&d->own, d->all, sizeof d->own};
    ZS_CHECK(e->math->ops->sum_doubles(e->math, native, e->sums, e->flat_count, &d->own));
    ZS_CHECK(zs_bulk_all_gather(e->bulk, "the gradient norm", &piece, 1, e->work));
    ZS_CHECK(e->math->ops->clip(e->math, native, config, d->all, (size_t)e->world, &d->clip));
    ZS_CHECK(e->device->ops->copy(e->device, e->verdict.ptr, &d->clip, sizeof d->clip, e->work));
    return zs_mark_set(e->device, &e->decided, e->work);
}

/* Adam is queued behind the decision and leaves all as it is when that is to skip; only then does
 * the host wait, and the device has work meanwhile. */
static zs_status step_deferred(zs_engine *e, zs_clip_config *config, zs_step_info *info)
{
    const zs_decision *d = e->decision.ptr;
    const zs_clip *clip = e->verdict.ptr;
    double found_inf = config->found_inf;
    ZS_CHECK(zs_comm_all_reduce(e->comm, "found_inf", ZS_OP_MAX, &found_inf, 1));
    config->found_inf = found_inf > 0;
    ZS_CHECK(queue_decision(e, config));
    ZS_CHECK(zs_engine_agree(e, "the optimizer step", update(e, 1, &d->clip, info)));
    ZS_CHECK(mark_grads(e));
    ZS_CHECK(zs_mark_sync(e->device, &e->decided));
    ZS_CHECK(zs_bulk_check(e->bulk));
    info->grad_norm = clip->norm;
    info->clip_factor = clip->factor;
    info->skipped = clip->skip;
    if (!clip->skip)
        return conclude(e);
    memset(info->tier, 0, sizeof info->tier);
    return skip(e, clip->norm);
}

/* ---- the step ---- */

/* Hyper-parameters that differ between ranks would let replicas drift apart unseen. */
static zs_status agree_on_hyper(zs_engine *e, const zs_step_config *c)
{
    const double own[] = {c->grad_scale, c->max_norm, c->clip_factor};
    uint64_t h = zs_hash_bytes(ZS_HASH_START, own, sizeof own);
    for (size_t g = 0; g < e->group_count; g++) {
        const zs_group_config *p = &e->groups[g];
        const double values[] = {p->lr, p->beta1, p->beta2, p->eps, p->weight_decay, p->decoupled};
        h = zs_hash_bytes(h, values, sizeof values);
    }
    return zs_comm_same(e->comm, "the hyper-parameters of a step", h);
}

static zs_status take_step(zs_engine *e, const zs_step_config *c, zs_step_info *info)
{
    double total;
    ZS_CHECK(agree_on_hyper(e, c));
    ZS_CHECK(zs_gather_invalidate(e));
    ZS_CHECK(zs_window_flush(e));
    /* The caller may still be reading the weights. */
    ZS_CHECK(zs_engine_join(e));
    zs_clip_config config = {.unscale = c->grad_scale / e->loss_scale,
                             .clip_factor = c->clip_factor,
                             .max_norm = c->max_norm,
                             .found_inf = c->found_inf};
    if (zs_engine_defers(e))
        return step_deferred(e, &config, info);
    ZS_CHECK(sum_squares(e, &total, &config.found_inf));
    zs_clip clip;
    ZS_CHECK(e->host_math->ops->clip(e->host_math, NULL, &config, &total, 1, &clip));
    info->grad_norm = clip.norm;
    info->clip_factor = clip.factor;
    info->skipped = clip.skip;
    return clip.skip ? skip(e, clip.norm) : apply(e, config.unscale * clip.factor, info);
}

static zs_status check_step(const zs_step_config *c)
{
    if (c->size != sizeof *c)
        return zs_fail(ZS_ERR_ARG,
                       "zs_step: config's size is %zu, not %zu; fill it with "
                       "zs_step_config_init",
                       c->size, sizeof *c);
    if (!(c->grad_scale > 0) || !isfinite(c->grad_scale))
        return zs_fail(ZS_ERR_ARG, "zs_step: grad_scale is %g; it must be positive", c->grad_scale);
    if (!(c->max_norm >= 0) || !(c->clip_factor >= 0) || !isfinite(c->clip_factor))
        return zs_fail(ZS_ERR_ARG,
                       "zs_step: max_norm %g, clip_factor %g: both must be 0 or more, the factor "
                       "finite",
                       c->max_norm, c->clip_factor);
    return ZS_OK;
}

zs_status zs_step(zs_engine *e, const zs_step_config *config, zs_step_info *info)
{
    zs_step_config defaults;
    zs_step_info own = {.size = sizeof own};
    const double begin = zs_now();
    const uint64_t begin_ns = zs_trace_now();
    ZS_CHECK(zs_engine_enter(e, "zs_step"));
    ZS_CHECK(zs_engine_expect(e, 1u << ZS_PHASE_READY, "zs_step"));
    if (!config) {
        zs_step_config_init(&defaults);
        config = &defaults;
    }
    ZS_CHECK(check_step(config));
    if (info && info->size != sizeof *info)
        return zs_fail(ZS_ERR_ARG, "zs_step: info's size is %zu, not %zu", info->size,
                       sizeof *info);

    zs_status status = take_step(e, config, &own);
    if (status != ZS_OK)
        return zs_engine_break(e, status);
    e->phase = ZS_PHASE_IDLE;
    own.step = e->step;
    own.loss_scale = e->loss_scale;
    own.seconds = zs_now() - begin;
    if (e->config.trace)
        zs_trace_span(e->config.trace, e->rank, "step", "step", begin_ns, zs_trace_now());
    if (info)
        *info = own;
    return ZS_OK;
}
