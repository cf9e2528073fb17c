/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients: from contributions of a micro-batch to each rank's reduced shard.
 *
 * Local gradients of a unit lie in its bucket: at stages 0 and 1 the full gradient buffers, which
 * are there anyway, above that a buffer that lives until the unit is reduced. Every stage reduces
 * the same flat buffers in the same order of additions, which is why all stages give the same bits.
 *
 * On an accelerator the caller's stream writes the buckets, the engine's reduces them. */
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
    const zs_buffer *bucket = e->units[f->unit].bucket;
    return bucket ? (char *)bucket->mem.ptr + f->bucket_at : NULL;
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
            ZS_CHECK(e->device->ops->zero(e->device, base + end * size, (next - end) * size,
                                          e->compute));
        if (i < f->count)
            end = f->layout.offset[i] + f->layout.numel[i];
    }
    return ZS_OK;
}

/* From here on the caller's stream may write unit's local gradients. */
static zs_status need_bucket(zs_engine *e, size_t unit)
{
    zs_unit_info *u = &e->units[unit];
    if (e->config.zero_stage < 2) {
        if (!u->grads_joined)
            ZS_CHECK(zs_mark_wait(e->device, &u->grads, e->compute));
        u->grads_joined = 1;
        return ZS_OK;
    }
    if (u->bucket || !u->bucket_bytes)
        return ZS_OK;
    ZS_CHECK(zs_cache_get(&e->bucket_cache, u->bucket_bytes, e->compute, &u->bucket));
    for (size_t i = u->flat_begin; i < u->flat_end; i++)
        if (e->flats[i].trainable)
            ZS_CHECK(clear_gaps(e, &e->flats[i]));
    return ZS_OK;
}

/* ---- reduction ---- */

/* This rank's part of f's local gradients. */
static char *own_part(const zs_engine *e, const zs_flat *f)
{
    return flat_bucket(e, f) +
           (uint64_t)e->rank * f->layout.shard * zs_dtype_size(e->config.grad_dtype);
}

/* Whether sums go straight to where they are kept: the first of a step does, unless that is memory
 * which the device reaches over the bus only. */
static int direct(const zs_engine *e, const zs_flat *f, int first)
{
    return first && !zs_mem_is_far(e, &f->grad_shard);
}

/* Adds what the ranks' sum of this micro-batch is to what the shard holds. *out: where the new sum
 * is, in the device's memory. */
static zs_status accumulate(zs_engine *e, zs_flat *f, int first, const char **out)
{
    const zs_dtype dtype = e->config.grad_dtype;
    const uint64_t shard = f->layout.shard;
    const zs_math_ops *math = e->math->ops;
    void *native = zs_engine_native(e);
    char *mine = own_part(e, f);
    char *sum = zs_flat_grad_shard(e, f);
    if (!zs_mem_is_far(e, &f->grad_shard)) {
        *out = sum;
        return first ? ZS_OK : math->add(e->math, native, sum, dtype, mine, dtype, shard);
    }
    /* Read over the bus once and written once. */
    if (!first)
        ZS_CHECK(math->add(e->math, native, mine, dtype, sum, dtype, shard));
    *out = mine;
    return e->device->ops->copy(e->device, sum, mine, shard * zs_dtype_size(dtype), e->work);
}

static zs_status reduce_flats(zs_engine *e, zs_unit_info *u, const char *label)
{
    const zs_dtype dtype = e->config.grad_dtype;
    const int first = e->micro_index == 0 || at_boundary(e);
    zs_piece in[ZS_UNIT_FLATS], all[ZS_UNIT_FLATS];
    size_t count = 0;
    for (size_t i = u->flat_begin; i < u->flat_end; i++) {
        zs_flat *f = &e->flats[i];
        if (f->trainable)
            in[count++] = (zs_piece){
                flat_bucket(e, f), direct(e, f, first) ? zs_flat_grad_shard(e, f) : own_part(e, f),
                f->layout.shard};
    }
    ZS_CHECK(zs_bulk_reduce_scatter(e->bulk, label, in, count, dtype, e->work));
    count = 0;
    for (size_t i = u->flat_begin; i < u->flat_end; i++) {
        zs_flat *f = &e->flats[i];
        const char *sum;
        if (!f->trainable)
            continue;
        ZS_CHECK(accumulate(e, f, first, &sum));
        all[count++] = (zs_piece){sum, flat_bucket(e, f), f->layout.shard * zs_dtype_size(dtype)};
        /* While the sum is at hand; blocks are counted from the shard's start at every stage. */
        if (e->last_micro)
            ZS_CHECK(e->math->ops->sum_squares(e->math, zs_engine_native(e), sum, dtype,
                                               f->layout.shard, &e->sums[i]));
    }
    if (e->config.zero_stage == 0 && e->last_micro)
        ZS_CHECK(zs_bulk_all_gather(e->bulk, label, all, count, e->work));
    return ZS_OK;
}

static zs_status reduce_unit(zs_engine *e, size_t unit)
{
    zs_unit_info *u = &e->units[unit];
    char label[96];
    if (u->reduced)
        return ZS_OK;
    u->reduced = 1;
    if (!u->bucket_bytes || (at_boundary(e) && !e->last_micro))
        return ZS_OK;
    uint64_t begin = zs_trace_now();
    ZS_CHECK(need_bucket(e, unit));
    ZS_CHECK(zs_engine_join(e));
    ZS_CHECK(reduce_flats(e, u, zs_unit_label(e, unit, label)));
    if (u->bucket) {
        ZS_CHECK(zs_mark_set(e->device, &u->bucket->used, e->work));
        zs_cache_put(&e->bucket_cache, u->bucket);
    } else {
        ZS_CHECK(zs_mark_set(e->device, &u->grads, e->work));
    }
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
    u->grads_joined = 0;
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
    void *native = e->device->ops->stream_native(e->device, e->compute);
    char *to = param_bucket(e, p);
    if (grad == to && dtype != own)
        return zs_fail(ZS_ERR_ARG, "zs_grad_ready: parameter '%s': its own buffer holds %s, not %s",
                       p->name, zs_dtype_name(own), zs_dtype_name(dtype));
    if (grad != to && p->contributed)
        ZS_CHECK(e->math->ops->add(e->math, native, to, own, grad, dtype, p->numel));
    else if (grad != to)
        ZS_CHECK(e->math->ops->cast(e->math, native, to, own, grad, dtype, p->numel));
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
            ZS_CHECK(
                e->device->ops->zero(e->device, param_bucket(e, p), p->numel * size, e->compute));
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
        zs_buffer *bucket = e->units[u].bucket;
        if (bucket) {
            ZS_CHECK(zs_engine_break(e, zs_mark_set(e->device, &bucket->used, e->compute)));
            zs_cache_put(&e->bucket_cache, bucket);
        }
        e->units[u].bucket = NULL;
    }
    e->phase = ZS_PHASE_IDLE;
    return ZS_OK;
}
