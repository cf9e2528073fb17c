/* SPDX-License-Identifier: Apache-2.0 */
/* Whole parameters from shards, for as long as they are needed (stage 3). What is kept, dropped and
 * prefetched depends only on the order of acquires and releases and on sizes, so that every rank
 * decides alike and enters the same collectives. */
#include <string.h>

#include "base/util.h"
#include "zero/engine.h"

/* Nothing to gather: the shard is the whole and stays in memory. */
static int in_place(const zs_engine *e)
{
    return e->config.zero_stage < 3 || (e->world == 1 && !e->param_file);
}

/* ---- order of units ---- */

static void learn(zs_engine *e, int32_t unit)
{
    if (e->last_unit >= 0) {
        zs_unit_info *last = &e->units[e->last_unit];
        int i = 0;
        while (i < last->successor_at && last->successors[i].before != e->before_last_unit)
            i++;
        if (i == ZS_SUCCESSORS)
            i = (int)(e->clock % ZS_SUCCESSORS);
        else if (i == last->successor_at)
            last->successor_at++;
        last->successors[i] = (zs_successor){e->before_last_unit, unit};
    }
    e->before_last_unit = e->last_unit;
    e->last_unit = unit;
}

/* Steps (before, now) on by one; -1 when nothing was learned. */
static int32_t predict(const zs_engine *e, int32_t before, int32_t now)
{
    const zs_unit_info *u = &e->units[now];
    for (int i = 0; i < u->successor_at; i++)
        if (u->successors[i].before == before)
            return u->successors[i].after;
    return -1;
}

/* How many acquires from now unit is likely to be needed; a large number when unknown. */
static uint64_t distance(const zs_engine *e, int32_t unit)
{
    const uint64_t far = 4 * (uint64_t)e->unit_count;
    int32_t before = e->before_last_unit, now = e->last_unit;
    for (uint64_t d = 1; now >= 0 && d < far; d++) {
        int32_t next = predict(e, before, now);
        if (next == unit)
            return d;
        before = now;
        now = next;
    }
    return far;
}

/* ---- room ---- */

static zs_status drop(zs_engine *e, zs_unit_info *u)
{
    zs_status status = ZS_OK;
    if (u->state == ZS_UNIT_AWAY)
        return ZS_OK;
    if (u->state == ZS_UNIT_READING)
        status = zs_io_wait(e->io, &u->read);
    u->state = ZS_UNIT_AWAY;
    if (u->gathered)
        zs_cache_put(&e->gather_cache, u->gathered);
    if (u->staging)
        zs_cache_put(&e->staging_cache, u->staging);
    u->gathered = u->staging = NULL;
    e->live_numel -= u->numel;
    return status;
}

/* Drops the unit that is needed last, but only one that is needed later than `than`; *dropped:
 * whether there was one. */
static zs_status drop_farthest(zs_engine *e, uint64_t than, int *dropped)
{
    zs_unit_info *victim = NULL;
    uint64_t worst = than;
    *dropped = 0;
    for (size_t i = 0; i < e->unit_count; i++) {
        zs_unit_info *u = &e->units[i];
        if (u->state == ZS_UNIT_AWAY || u->acquired)
            continue;
        uint64_t d = distance(e, (int32_t)i);
        if (d > worst) {
            worst = d;
            victim = u;
        }
    }
    if (!victim)
        return ZS_OK;
    *dropped = 1;
    return drop(e, victim);
}

/* Makes room for unit, at the cost of units needed later than `than`. *fits: 0 when that was not
 * enough. */
static zs_status make_room(zs_engine *e, const zs_unit_info *u, uint64_t than, int *fits)
{
    *fits = 1;
    while (e->live_numel + u->numel > e->live_budget && *fits)
        ZS_CHECK(drop_farthest(e, than, fits));
    return ZS_OK;
}

/* ---- fetching ---- */

/* Shards that come from NVMe are read beside their place and moved there: it lies at an odd offset,
 * or in memory that no file is read to. Alone on the host, the shard is the whole. */
static int staged(const zs_engine *e)
{
    return e->param_file && (e->world > 1 || !e->device->host_access);
}

/* Takes buffers for unit and, where its shards are on NVMe, starts reading them. */
static zs_status start(zs_engine *e, zs_unit_info *u)
{
    ZS_CHECK(zs_cache_get(&e->gather_cache, u->gather_bytes, e->work, &u->gathered));
    u->state = ZS_UNIT_READING;
    e->live_numel += u->numel;
    if (!e->param_file)
        return ZS_OK;
    uint64_t bytes = 0;
    for (size_t i = u->flat_begin; i < u->flat_end; i++)
        bytes += zs_param_file_extent(e->param_file, e->flats[i].param_shard);
    if (staged(e))
        ZS_CHECK(zs_cache_get_host(&e->staging_cache, bytes, &u->staging));
    char *to = staged(e) ? u->staging->mem.ptr : u->gathered->mem.ptr;
    for (size_t i = u->flat_begin; i < u->flat_end; i++) {
        const zs_flat *f = &e->flats[i];
        char *at = staged(e) ? to : to + f->gather_at;
        ZS_CHECK(zs_param_file_read(e->param_file, f->param_shard, at, &u->read));
        to += staged(e) ? zs_param_file_extent(e->param_file, f->param_shard) : 0;
    }
    zs_io_poll(e->io);
    return ZS_OK;
}

/* Where rank's shard of f is gathered from: as it lies there, or in its place already. */
static zs_status source(zs_engine *e, const zs_flat *f, const void *read, char *to, size_t bytes,
                        const void **out)
{
    const int far = !e->device->host_access && (read || zs_mem_is_far(e, &f->working));
    const void *from = !e->param_file ? f->working.ptr : read ? read : to;
    *out = from;
    if (!far)
        return ZS_OK;
    *out = to + (uint64_t)e->rank * bytes;
    return e->device->ops->copy(e->device, to + (uint64_t)e->rank * bytes, from, bytes, e->work);
}

static zs_status complete(zs_engine *e, size_t unit)
{
    zs_unit_info *u = &e->units[unit];
    zs_piece pieces[ZS_UNIT_FLATS];
    size_t count = 0;
    char label[96];
    zs_unit_label(e, unit, label);
    if (e->param_file) {
        zs_status status = zs_io_wait(e->io, &u->read);
        if (status != ZS_OK)
            return zs_fail_prefix(status, "%s: ", label);
    }
    const char *read = u->staging ? u->staging->mem.ptr : NULL;
    for (size_t i = u->flat_begin; i < u->flat_end; i++) {
        const zs_flat *f = &e->flats[i];
        const size_t bytes = f->layout.shard * zs_dtype_size(f->dtype);
        char *to = (char *)u->gathered->mem.ptr + f->gather_at;
        zs_piece *piece = &pieces[count++];
        *piece = (zs_piece){.recv = to, .count = bytes};
        ZS_CHECK(source(e, f, read, to, bytes, &piece->send));
        if (read)
            read += zs_param_file_extent(e->param_file, f->param_shard);
    }
    ZS_CHECK(zs_bulk_all_gather(e->bulk, label, pieces, count, e->work));
    ZS_CHECK(zs_mark_set(e->device, &u->weights, e->work));
    if (u->staging) {
        ZS_CHECK(zs_mark_set(e->device, &u->staging->used, e->work));
        zs_cache_put(&e->staging_cache, u->staging);
    }
    u->staging = NULL;
    u->state = ZS_UNIT_LIVE;
    return ZS_OK;
}

zs_status zs_gather_prefetch(zs_engine *e)
{
    /* On the host, gathering from memory ahead of time would only be done earlier. */
    if (in_place(e) || (!e->param_file && e->device->host_access))
        return ZS_OK;
    int32_t before = e->before_last_unit, now = e->last_unit;
    for (uint64_t d = 1; now >= 0 && d <= e->unit_count; d++) {
        int32_t next = predict(e, before, now);
        if (next < 0)
            break;
        zs_unit_info *u = &e->units[next];
        if (u->state == ZS_UNIT_AWAY) {
            int fits;
            ZS_CHECK(make_room(e, u, d, &fits));
            if (!fits)
                break;
            ZS_CHECK(start(e, u));
            if (!e->param_file)
                ZS_CHECK(complete(e, (size_t)next));
        }
        before = now;
        now = next;
    }
    return ZS_OK;
}

static zs_status gather(zs_engine *e, size_t unit)
{
    zs_unit_info *u = &e->units[unit];
    if (u->state == ZS_UNIT_AWAY) {
        int fits;
        ZS_CHECK(make_room(e, u, 0, &fits));
        if (!fits && e->config.max_live_params)
            return zs_fail(ZS_ERR_ARG,
                           "unit '%s' (%llu elements) does not fit beside the %llu that are "
                           "acquired: raise max_live_params from %llu to at least %llu",
                           u->name, (unsigned long long)u->numel, (unsigned long long)e->live_numel,
                           (unsigned long long)e->live_budget,
                           (unsigned long long)(e->live_numel + u->numel));
        ZS_CHECK(start(e, u));
    }
    if (u->state == ZS_UNIT_READING)
        ZS_CHECK(complete(e, unit));
    return zs_gather_prefetch(e);
}

/* ---- calls ---- */

zs_status zs_unit_acquire(zs_engine *e, zs_unit unit)
{
    ZS_CHECK(zs_engine_enter_unit(e, unit, "zs_unit_acquire"));
    ZS_CHECK(zs_engine_expect(e, ~(1u << ZS_PHASE_OPEN), "zs_unit_acquire"));
    zs_unit_info *u = &e->units[unit];
    e->clock++;
    if (u->acquired++)
        return ZS_OK;
    if (in_place(e))
        return zs_engine_break(e, zs_mark_wait(e->device, &u->weights, e->compute));
    learn(e, unit);
    uint64_t begin = zs_trace_now();
    zs_status status = gather(e, (size_t)unit);
    if (status == ZS_OK)
        status = zs_mark_wait(e->device, &u->weights, e->compute);
    if (e->config.trace)
        zs_trace_span(e->config.trace, e->rank, "gather", "acquire", begin, zs_trace_now());
    return zs_engine_break(e, status);
}

zs_status zs_unit_release(zs_engine *e, zs_unit unit)
{
    ZS_CHECK(zs_engine_enter_unit(e, unit, "zs_unit_release"));
    zs_unit_info *u = &e->units[unit];
    if (!u->acquired)
        return zs_fail(ZS_ERR_MISUSE, "unit '%s' is released, but it is not acquired", u->name);
    if (--u->acquired || !u->gathered)
        return ZS_OK;
    return zs_engine_break(e, zs_mark_set(e->device, &u->gathered->used, e->compute));
}

zs_status zs_param_data(zs_engine *e, zs_param param, void **out)
{
    ZS_CHECK(zs_engine_enter_param(e, param, "zs_param_data"));
    ZS_CHECK(zs_engine_expect(e, ~(1u << ZS_PHASE_OPEN), "zs_param_data"));
    const zs_param_info *p = &e->params[param];
    const zs_unit_info *u = &e->units[p->unit];
    if (!out)
        return zs_fail(ZS_ERR_ARG, "zs_param_data: out is NULL");
    if (!u->acquired)
        return zs_fail(ZS_ERR_MISUSE,
                       "parameter '%s': unit '%s' is not acquired: call "
                       "zs_unit_acquire first",
                       p->name, u->name);
    const zs_flat *f = &e->flats[p->flat];
    char *base = u->gathered ? (char *)u->gathered->mem.ptr + f->gather_at : f->working.ptr;
    /* A parameter without elements still gets a pointer. */
    *out = base ? base + f->layout.offset[p->at] * zs_dtype_size(f->dtype) : (void *)e->scratch;
    return ZS_OK;
}

zs_status zs_gather_invalidate(zs_engine *e)
{
    for (size_t i = 0; i < e->unit_count; i++)
        if (e->units[i].acquired)
            return zs_fail(ZS_ERR_MISUSE,
                           "the weights cannot change while unit '%s' is acquired "
                           "(%d times): release it first",
                           e->units[i].name, e->units[i].acquired);
    for (size_t i = 0; i < e->unit_count; i++)
        ZS_CHECK(drop(e, &e->units[i]));
    return ZS_OK;
}

void zs_gather_close(zs_engine *e)
{
    for (size_t i = 0; i < e->unit_count; i++)
        drop(e, &e->units[i]); /* waits for reads into the buffers that are about to go */
}
