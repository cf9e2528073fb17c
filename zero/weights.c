/* SPDX-License-Identifier: Apache-2.0 */
/* Weights and states element by element: loading, saving, looking. Not on the path of a step. */
#include <string.h>

#include "base/util.h"
#include "zero/engine.h"

/* ---- the window on the parameter file ---- */

static zs_status window_io(zs_engine *e, int write)
{
    zs_io_req req = {0};
    const size_t shard = e->window_flat->param_shard;
    const uint64_t bytes = zs_param_file_extent(e->param_file, shard);
    if (!bytes)
        return ZS_OK;
    if (write)
        ZS_CHECK(zs_param_file_write(e->param_file, shard, 0, e->window.ptr, bytes, &req));
    else
        ZS_CHECK(zs_param_file_read(e->param_file, shard, e->window.ptr, &req));
    return zs_io_wait(e->io, &req);
}

zs_status zs_window_flush(zs_engine *e)
{
    if (!e->window_flat || !e->window_dirty)
        return ZS_OK;
    ZS_CHECK(window_io(e, 1));
    e->window_dirty = 0;
    return ZS_OK;
}

void zs_window_drop(zs_engine *e)
{
    e->window_flat = NULL;
    e->window_dirty = 0;
}

/* The held part of f's working copy, in memory. */
static zs_status working_at(zs_engine *e, zs_flat *f, int write, char **out)
{
    *out = zs_flat_working_held(e, f);
    if (*out || !e->param_file)
        return ZS_OK;
    if (e->window_flat != f) {
        ZS_CHECK(zs_window_flush(e));
        e->window_flat = f;
        zs_status status = window_io(e, 0);
        if (status != ZS_OK) {
            zs_window_drop(e); /* what it holds is no part of the file */
            return status;
        }
    }
    e->window_dirty |= write;
    *out = e->window.ptr;
    return ZS_OK;
}

/* ---- spreading ---- */

static zs_status spread_unit(zs_engine *e, size_t unit)
{
    zs_unit_info *u = &e->units[unit];
    zs_piece pieces[ZS_UNIT_FLATS];
    size_t count = 0;
    char label[96];
    for (size_t i = u->flat_begin; i < u->flat_end; i++) {
        const zs_flat *f = &e->flats[i];
        pieces[count++] = (zs_piece){zs_flat_working_held(e, f), f->working.ptr,
                                     f->layout.shard * zs_dtype_size(f->dtype)};
    }
    if (e->config.zero_stage == 1 || e->config.zero_stage == 2)
        ZS_CHECK(
            zs_bulk_all_gather(e->bulk, zs_unit_label(e, unit, label), pieces, count, e->work));
    return zs_mark_set(e->device, &u->weights, e->work);
}

zs_status zs_weights_spread(zs_engine *e)
{
    ZS_CHECK(zs_gather_invalidate(e));
    ZS_CHECK(zs_window_flush(e));
    for (size_t u = 0; u < e->unit_count; u++)
        ZS_CHECK(spread_unit(e, u));
    return ZS_OK;
}

static zs_status flat_from_master(zs_engine *e, zs_flat *f)
{
    const uint64_t numel = zs_flat_held_numel(e, f);
    for (uint64_t at = 0; at < numel; at += ZS_SCRATCH) {
        const uint64_t n = ZS_MIN(numel - at, (uint64_t)ZS_SCRATCH);
        char *to;
        ZS_CHECK(zs_states_read(e->states, f->state_shard, ZS_MASTER, at, n, e->scratch));
        ZS_CHECK(working_at(e, f, 1, &to));
        ZS_CHECK(e->math->ops->cast(e->math, zs_engine_native(e), to + at * zs_dtype_size(f->dtype),
                                    f->dtype, e->scratch, ZS_FP32, n));
        ZS_CHECK(zs_engine_settle(e)); /* scratch is filled again */
    }
    return ZS_OK;
}

zs_status zs_weights_from_masters(zs_engine *e)
{
    for (size_t i = 0; i < e->flat_count; i++) {
        zs_flat *f = &e->flats[i];
        if (f->trainable && !zs_flat_is_master(e, f))
            ZS_CHECK(flat_from_master(e, f));
    }
    return ZS_OK;
}

/* ---- public ---- */

static void local_range(const zs_engine *e, zs_param param, int owned, uint64_t *first,
                        uint64_t *count, uint64_t *at)
{
    const zs_param_info *p = &e->params[param];
    const zs_flat *f = &e->flats[p->flat];
    const uint64_t shard = f->layout.shard;
    if (owned)
        zs_flat_locate(f, p->at, (uint64_t)e->rank * shard, shard, first, count, at);
    else
        zs_flat_locate(f, p->at, zs_flat_held_begin(e, f), zs_flat_held_numel(e, f), first, count,
                       at);
}

static zs_status get_range(const zs_engine *e, zs_param param, int owned, const char *what,
                           uint64_t *first, uint64_t *count)
{
    uint64_t at;
    ZS_CHECK(zs_engine_enter_param(e, param, what));
    ZS_CHECK(zs_engine_expect(e, ~(1u << ZS_PHASE_OPEN), what));
    if (!first || !count)
        return zs_fail(ZS_ERR_ARG, "%s: first or count is NULL", what);
    local_range(e, param, owned, first, count, &at);
    return ZS_OK;
}

zs_status zs_param_local(const zs_engine *e, zs_param param, uint64_t *first, uint64_t *count)
{
    return get_range(e, param, 0, "zs_param_local", first, count);
}

zs_status zs_param_owned(const zs_engine *e, zs_param param, uint64_t *first, uint64_t *count)
{
    return get_range(e, param, 1, "zs_param_owned", first, count);
}

/* Checks [first, first + count) and turns it into a place in the held part of the flat buffer. */
static zs_status find_range(const zs_engine *e, zs_param param, uint64_t first, uint64_t count,
                            const void *data, zs_dtype dtype, const char *what, uint64_t *at)
{
    ZS_CHECK(zs_engine_enter_param(e, param, what));
    ZS_CHECK(zs_engine_expect(e, ~(1u << ZS_PHASE_OPEN), what));
    uint64_t have_first, have_count, have_at;
    local_range(e, param, 0, &have_first, &have_count, &have_at);
    if (count &&
        (first < have_first || count > have_count || first - have_first > have_count - count))
        return zs_fail(ZS_ERR_ARG,
                       "%s: elements %llu to %llu of parameter '%s' are not this rank's, which are "
                       "%llu to %llu (zs_param_local)",
                       what, (unsigned long long)first, (unsigned long long)(first + count),
                       e->params[param].name, (unsigned long long)have_first,
                       (unsigned long long)(have_first + have_count));
    if ((count && !data) || (unsigned)dtype > ZS_FP16)
        return zs_fail(ZS_ERR_ARG, "%s: parameter '%s': the data is NULL or dtype %d is not known",
                       what, e->params[param].name, (int)dtype);
    *at = have_at + (first - have_first);
    return ZS_OK;
}

zs_status zs_param_write(zs_engine *e, zs_param param, uint64_t first, uint64_t count,
                         zs_dtype dtype, const void *src)
{
    uint64_t at;
    ZS_CHECK(find_range(e, param, first, count, src, dtype, "zs_param_write", &at));
    zs_flat *f = &e->flats[e->params[param].flat];
    const char *from = src;
    ZS_CHECK(zs_engine_join(e));
    while (count) {
        const uint64_t n = ZS_MIN(count, (uint64_t)ZS_SCRATCH);
        char *to;
        ZS_CHECK(e->host_math->ops->cast(e->host_math, NULL, e->scratch, ZS_FP32, from, dtype, n));
        ZS_CHECK(working_at(e, f, 1, &to));
        ZS_CHECK(e->math->ops->cast(e->math, zs_engine_native(e), to + at * zs_dtype_size(f->dtype),
                                    f->dtype, e->scratch, ZS_FP32, n));
        if (f->trainable)
            ZS_CHECK(zs_states_write(e->states, f->state_shard, ZS_MASTER, at, n, e->scratch));
        ZS_CHECK(zs_engine_settle(e)); /* scratch is filled again */
        from += n * zs_dtype_size(dtype);
        at += n;
        count -= n;
    }
    return ZS_OK;
}

static zs_status need_trained(const zs_engine *e, zs_param param, const char *what)
{
    if (e->params[param].frozen)
        return zs_fail(ZS_ERR_MISUSE, "%s: parameter '%s' is frozen: it has no moments", what,
                       e->params[param].name);
    return ZS_OK;
}

zs_status zs_param_write_moment(zs_engine *e, zs_param param, zs_array array, uint64_t first,
                                uint64_t count, const float *src)
{
    uint64_t at;
    ZS_CHECK(find_range(e, param, first, count, src, ZS_FP32, "zs_param_write_moment", &at));
    ZS_CHECK(need_trained(e, param, "zs_param_write_moment"));
    if (array != ZS_EXP_AVG && array != ZS_EXP_AVG_SQ)
        return zs_fail(ZS_ERR_ARG,
                       "zs_param_write_moment: array is %d, not ZS_EXP_AVG or ZS_EXP_AVG_SQ: "
                       "zs_param_write sets masters",
                       (int)array);
    const zs_flat *f = &e->flats[e->params[param].flat];
    while (count) {
        const uint64_t n = ZS_MIN(count, (uint64_t)ZS_SCRATCH);
        memcpy(e->scratch, src, n * sizeof *src);
        ZS_CHECK(zs_states_write(e->states, f->state_shard, array, at, n, e->scratch));
        src += n;
        at += n;
        count -= n;
    }
    return ZS_OK;
}

zs_status zs_param_set_steps(zs_engine *e, zs_param param, uint64_t steps)
{
    ZS_CHECK(zs_engine_enter_param(e, param, "zs_param_set_steps"));
    ZS_CHECK(zs_engine_expect(e, 1u << ZS_PHASE_IDLE, "zs_param_set_steps"));
    ZS_CHECK(need_trained(e, param, "zs_param_set_steps"));
    e->params[param].steps = steps;
    e->step = ZS_MAX(e->step, steps);
    return ZS_OK;
}

zs_status zs_param_get_steps(const zs_engine *e, zs_param param, uint64_t *out)
{
    ZS_CHECK(zs_engine_enter_param(e, param, "zs_param_get_steps"));
    if (!out)
        return zs_fail(ZS_ERR_ARG, "zs_param_get_steps: out is NULL");
    *out = e->params[param].steps;
    return ZS_OK;
}

zs_status zs_params_publish(zs_engine *e)
{
    ZS_CHECK(zs_engine_enter(e, "zs_params_publish"));
    ZS_CHECK(zs_engine_expect(e, 1u << ZS_PHASE_IDLE, "zs_params_publish"));
    zs_status status = zs_engine_agree(e, "zs_params_publish", zs_states_flush(e->states));
    if (status == ZS_OK)
        status = zs_weights_spread(e);
    return zs_engine_break(e, status);
}

/* n elements from `at` of the held part, as fp32 in e->scratch. */
static zs_status read_piece(zs_engine *e, zs_flat *f, zs_array array, uint64_t at, uint64_t n)
{
    const zs_dtype grad = e->config.grad_dtype;
    char *from;
    if (array == ZS_GRAD) {
        /* At stage 0 the full buffer holds what the shard does at the others. */
        from = f->grad_full.ptr && e->config.zero_stage == 0 ? f->grad_full.ptr
                                                             : zs_flat_grad_shard(e, f);
        ZS_CHECK(e->math->ops->cast(e->math, zs_engine_native(e), e->scratch, ZS_FP32,
                                    from + at * zs_dtype_size(grad), grad, n));
        return zs_engine_settle(e);
    }
    if (array == ZS_WEIGHT || (array == ZS_MASTER && !f->trainable)) {
        ZS_CHECK(working_at(e, f, 0, &from));
        ZS_CHECK(e->math->ops->cast(e->math, zs_engine_native(e), e->scratch, ZS_FP32,
                                    from + at * zs_dtype_size(f->dtype), f->dtype, n));
        return zs_engine_settle(e);
    }
    return zs_states_read(e->states, f->state_shard, array, at, n, e->scratch);
}

zs_status zs_param_read(zs_engine *e, zs_param param, zs_array array, uint64_t first,
                        uint64_t count, zs_dtype dtype, void *dst)
{
    uint64_t at;
    ZS_CHECK(find_range(e, param, first, count, dst, dtype, "zs_param_read", &at));
    zs_flat *f = &e->flats[e->params[param].flat];
    if ((unsigned)array > ZS_GRAD)
        return zs_fail(ZS_ERR_ARG, "zs_param_read: array is %d; see zs_array", (int)array);
    if (!f->trainable && array != ZS_WEIGHT && array != ZS_MASTER)
        return zs_fail(ZS_ERR_MISUSE,
                       "zs_param_read: parameter '%s' is frozen: it has neither "
                       "moments nor a gradient",
                       e->params[param].name);
    if (array == ZS_GRAD)
        ZS_CHECK(zs_engine_expect(e, 1u << ZS_PHASE_READY, "zs_param_read of a gradient"));
    char *to = dst;
    while (count) {
        const uint64_t n = ZS_MIN(count, (uint64_t)ZS_SCRATCH);
        ZS_CHECK(read_piece(e, f, array, at, n));
        ZS_CHECK(e->host_math->ops->cast(e->host_math, NULL, to, dtype, e->scratch, ZS_FP32, n));
        to += n * zs_dtype_size(dtype);
        at += n;
        count -= n;
    }
    return ZS_OK;
}
