/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients: from contributions of a micro-batch to each rank's reduced shard.
 *
 * Local gradients of a unit lie in its bucket: at stages 0 and 1 the full gradient buffers, which
 * are there anyway, above that a buffer that lives until the unit is reduced. Every stage reduces
 * the same flat buffers in the same order of additions, which is why all stages give the same bits.
 */
#include "base/util.h"
#include "zero/engine.h"

/* The local gradient stays and grows over the micro-batches of a step. */
static int at_boundary(const zs_engine *e)
{
    return e->config.reduce == ZS_REDUCE_BOUNDARY;
}

/* Ranks may miss different gradients, so units complete in different orders: reduce in one fixed
 * order instead. */
static int fixed_order(const zs_engine *e)
{
    return e->config.missing_grad != ZS_MISSING_ERROR;
}

static char *flat_bucket(const zs_engine *e, const zs_flat *f)
{
    if (f->grad_full.ptr)
        return f->grad_full.ptr;
    const zs_mem *bucket = e->units[f->unit].bucket;
    return bucket ? (char *)bucket->ptr + f->bucket_at : NULL;
}

static char *param_bucket(const zs_engine *e, const zs_param_info *p)
{
    const zs_flat *f = &e->flats[p->flat];
    char *base = flat_bucket(e, f);
    return base ? base + f->layout.offset[p->at] * zs_dtype_size(e->config.grad_dtype) : NULL;
}

/* Between parameters, and behind the last one, a bucket must hold zeros: they are summed and
 * squared like the rest. */
static zs_status clear_gaps(zs_engine *e, const zs_flat *f)
{
    const size_t size = zs_dtype_size(e->config.grad_dtype);
    char *base = flat_bucket(e, f);
    uint64_t end = 0;
    for (size_t i = 0; i <= f->count; i++) {
        uint64_t next = i < f->count ? f->layout.offset[i] : f->layout.padded;
        if (next > end)
            ZS_CHECK(e->device->ops->zero(e->device, base + end * size, (next - end) * size, NULL));
        if (i < f->count)
            end = f->layout.offset[i] + f->layout.numel[i];
    }
    return ZS_OK;
}

static zs_status need_bucket(zs_engine *e, size_t unit)
{
    zs_unit_info *u = &e->units[unit];
    if (e->config.zero_stage < 2 || u->bucket || !u->bucket_bytes)
        return ZS_OK;
    ZS_CHECK(zs_cache_get(&e->bucket_cache, u->bucket_bytes, &u->bucket));
    for (size_t i = u->flat_begin; i < u->flat_end; i++)
        if (e->flats[i].trainable)
            ZS_CHECK(clear_gaps(e, &e->flats[i]));
    return ZS_OK;
}

/* ---- reduction ---- */

static zs_status reduce_flat(zs_engine *e, zs_flat *f)
{
    const zs_dtype dtype = e->config.grad_dtype;
    const uint64_t shard = f->layout.shard;
    char label[96];
    char *local = flat_bucket(e, f);
    char *mine = local + (uint64_t)e->rank * shard * zs_dtype_size(dtype);
    char *sum = zs_flat_grad_shard(e, f);
    zs_unit_label(e, f->unit, label);
    const int first = e->micro_index == 0 || at_boundary(e);
    ZS_CHECK(
        zs_comm_reduce_scatter(e->comm, e->math, label, local, first ? sum : mine, shard, dtype));
    if (!first)
        ZS_CHECK(e->math->ops->add(e->math, NULL, sum, dtype, mine, dtype, shard));
    if (e->config.zero_stage == 0 && e->last_micro)
        ZS_CHECK(zs_comm_all_gather(e->comm, label, sum, local, shard * zs_dtype_size(dtype)));
    return ZS_OK;
}

static zs_status reduce_unit(zs_engine *e, size_t unit)
{
    zs_unit_info *u = &e->units[unit];
    if (u->reduced)
        return ZS_OK;
    u->reduced = 1;
    if (!u->bucket_bytes || (at_boundary(e) && !e->last_micro))
        return ZS_OK;
    uint64_t begin = zs_trace_now();
    ZS_CHECK(need_bucket(e, unit));
    for (size_t i = u->flat_begin; i < u->flat_end; i++)
        if (e->flats[i].trainable)
            ZS_CHECK(reduce_flat(e, &e->flats[i]));
    if (u->bucket)
        zs_cache_put(&e->bucket_cache, u->bucket);
    u->bucket = NULL;
    if (e->config.trace)
        zs_trace_span(e->config.trace, e->rank, "gradients", "reduce", begin, zs_trace_now());
    return ZS_OK;
}

/* Reduces what is complete, as far as the order allows. */
static zs_status reduce_ready(zs_engine *e, size_t unit)
{
    if (!fixed_order(e))
        return e->units[unit].missing ? ZS_OK : reduce_unit(e, unit);
    while (e->next_reduce >= 0 && !e->units[e->next_reduce].missing)
        ZS_CHECK(reduce_unit(e, (size_t)e->next_reduce--));
    return ZS_OK;
}

/* ---- a micro-batch ---- */

static void begin_unit(zs_engine *e, size_t unit)
{
    zs_unit_info *u = &e->units[unit];
    u->missing = 0;
    u->reduced = 0;
    for (size_t i = 0; i < u->count; i++) {
        zs_param_info *p = &e->params[u->params[i]];
        p->uses = 0;
        if (!at_boundary(e) || e->micro_index == 0)
            p->contributed = 0;
        if (e->micro_index == 0)
            p->got_grad = 0;
        u->missing += !p->frozen && p->numel;
    }
}

zs_status zs_grad_begin(zs_engine *e, int last)
{
    ZS_CHECK(zs_engine_enter(e, "zs_grad_begin"));
    ZS_CHECK(zs_engine_expect(e, 1u << ZS_PHASE_IDLE | 1u << ZS_PHASE_MORE, "zs_grad_begin"));
    if (e->phase == ZS_PHASE_IDLE)
        e->micro_index = 0;
    if (e->micro_index >= e->config.grad_accum_steps)
        return zs_fail(ZS_ERR_MISUSE,
                       "zs_grad_begin: micro-batch %d of a step, but grad_accum_steps is %d: pass "
                       "last = 1 in time or open the engine with more",
                       e->micro_index + 1, e->config.grad_accum_steps);
    e->last_micro = last != 0;
    e->next_reduce = (int32_t)e->unit_count - 1;
    for (size_t u = 0; u < e->unit_count; u++)
        begin_unit(e, u);
    e->phase = ZS_PHASE_MICRO;
    /* The first chunks of the step can be on their way while backward runs. */
    if (e->last_micro)
        return zs_engine_break(e, zs_states_prefetch(e->states));
    return ZS_OK;
}

/* Within a micro-batch, a trainable parameter that is not complete yet. */
static zs_status enter_grad(zs_engine *e, zs_param param, const char *what)
{
    ZS_CHECK(zs_engine_enter_param(e, param, what));
    const zs_param_info *p = &e->params[param];
    if (e->phase != ZS_PHASE_MICRO)
        return zs_fail(ZS_ERR_MISUSE,
                       "%s of parameter '%s': no micro-batch is in progress: "
                       "zs_grad_begin starts one",
                       what, p->name);
    if (p->frozen)
        return zs_fail(ZS_ERR_MISUSE, "%s: parameter '%s' is frozen and takes no gradient", what,
                       p->name);
    if (p->uses >= p->grad_uses)
        return zs_fail(ZS_ERR_MISUSE,
                       "%s: parameter '%s' of unit '%s' had its %d contribution(s) "
                       "of this micro-batch (grad_uses)",
                       what, p->name, e->units[p->unit].name, p->grad_uses);
    return ZS_OK;
}

zs_status zs_grad_buffer(zs_engine *e, zs_param param, void **out, int *accumulate)
{
    ZS_CHECK(enter_grad(e, param, "zs_grad_buffer"));
    if (!out || !accumulate)
        return zs_fail(ZS_ERR_ARG, "zs_grad_buffer: out or accumulate is NULL");
    zs_param_info *p = &e->params[param];
    ZS_CHECK(need_bucket(e, (size_t)p->unit));
    *out = p->numel ? (void *)param_bucket(e, p) : (void *)e->scratch;
    *accumulate = p->contributed;
    return ZS_OK;
}

zs_status zs_grad_ready(zs_engine *e, zs_param param, const void *grad, zs_dtype dtype)
{
    ZS_CHECK(enter_grad(e, param, "zs_grad_ready"));
    zs_param_info *p = &e->params[param];
    const zs_dtype own = e->config.grad_dtype;
    if (!p->numel)
        return ZS_OK;
    if (!grad || (unsigned)dtype > ZS_FP16)
        return zs_fail(ZS_ERR_ARG,
                       "zs_grad_ready: parameter '%s': grad is NULL or dtype %d is not "
                       "known",
                       p->name, (int)dtype);
    ZS_CHECK(need_bucket(e, (size_t)p->unit));
    char *to = param_bucket(e, p);
    if (grad == to && dtype != own)
        return zs_fail(ZS_ERR_ARG, "zs_grad_ready: parameter '%s': its own buffer holds %s, not %s",
                       p->name, zs_dtype_name(own), zs_dtype_name(dtype));
    if (grad != to && p->contributed)
        ZS_CHECK(e->math->ops->add(e->math, NULL, to, own, grad, dtype, p->numel));
    else if (grad != to)
        ZS_CHECK(e->math->ops->cast(e->math, NULL, to, own, grad, dtype, p->numel));
    p->contributed = 1;
    p->got_grad = 1;
    if (++p->uses < p->grad_uses)
        return ZS_OK;
    e->units[p->unit].missing--;
    return zs_engine_break(e, reduce_ready(e, (size_t)p->unit));
}

/* ---- the end of a micro-batch ---- */

/* Parameters that no rank has a gradient for keep got_grad 0. */
static zs_status share_presence(zs_engine *e)
{
    double seen[512];
    for (size_t begin = 0; begin < e->param_count; begin += ZS_COUNT(seen)) {
        const size_t n = ZS_MIN(e->param_count - begin, ZS_COUNT(seen));
        for (size_t i = 0; i < n; i++)
            seen[i] = e->params[begin + i].got_grad;
        ZS_CHECK(
            zs_comm_all_reduce(e->comm, "which parameters have gradients", ZS_OP_MAX, seen, n));
        for (size_t i = 0; i < n; i++)
            e->params[begin + i].got_grad = seen[i] > 0;
    }
    return ZS_OK;
}

static zs_status fill_missing(zs_engine *e, size_t unit)
{
    zs_unit_info *u = &e->units[unit];
    const size_t size = zs_dtype_size(e->config.grad_dtype);
    for (size_t i = 0; u->missing && i < u->count; i++) {
        zs_param_info *p = &e->params[u->params[i]];
        if (p->frozen || !p->numel || p->uses >= p->grad_uses)
            continue;
        if (e->config.missing_grad == ZS_MISSING_ERROR)
            return zs_fail(ZS_ERR_MISUSE,
                           "zs_grad_finish: unit '%s': parameter '%s' got %d of %d gradient "
                           "contribution(s); hand them in, freeze it, or set missing_grad",
                           u->name, p->name, p->uses, p->grad_uses);
        if (!p->contributed) {
            ZS_CHECK(need_bucket(e, unit));
            ZS_CHECK(e->device->ops->zero(e->device, param_bucket(e, p), p->numel * size, NULL));
            p->contributed = 1;
        }
        if (e->config.missing_grad == ZS_MISSING_ZERO)
            p->got_grad = 1;
        u->missing--;
    }
    return ZS_OK;
}

zs_status zs_grad_finish(zs_engine *e)
{
    ZS_CHECK(zs_engine_enter(e, "zs_grad_finish"));
    ZS_CHECK(zs_engine_expect(e, 1u << ZS_PHASE_MICRO, "zs_grad_finish"));
    for (size_t i = e->unit_count; i-- > 0;) {
        zs_status status = fill_missing(e, i);
        if (status == ZS_OK)
            status = reduce_ready(e, i);
        if (status != ZS_OK)
            return zs_engine_break(e, status);
    }
    if (e->last_micro && e->config.missing_grad == ZS_MISSING_SKIP) {
        zs_status status = share_presence(e);
        if (status != ZS_OK)
            return zs_engine_break(e, status);
    }
    e->micro_index++;
    e->phase = e->last_micro ? ZS_PHASE_READY : ZS_PHASE_MORE;
    return ZS_OK;
}

zs_status zs_grad_discard(zs_engine *e)
{
    ZS_CHECK(zs_engine_enter(e, "zs_grad_discard"));
    ZS_CHECK(zs_engine_expect(e, ~(1u << ZS_PHASE_OPEN), "zs_grad_discard"));
    for (size_t u = 0; u < e->unit_count; u++) {
        if (e->units[u].bucket)
            zs_cache_put(&e->bucket_cache, e->units[u].bucket);
        e->units[u].bucket = NULL;
    }
    e->phase = ZS_PHASE_IDLE;
    return ZS_OK;
}
