/* SPDX-License-Identifier: Apache-2.0 */
/* From registered parameters to flat buffers, with everything allocated before the first step. */
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "zero/engine.h"

/* ---- agreement ---- */

static uint64_t double_bits(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static zs_status agree_on_config(zs_engine *e)
{
    const zs_engine_config *c = &e->config;
    const struct {
        const char *what;
        uint64_t value;
    } checks[] = {
        {"the kind of device (0: the host)", !e->device->host_access},
        {"zero_stage", (uint64_t)c->zero_stage},
        {"optimizer_tier", (uint64_t)c->optimizer_tier},
        {"param_tier", (uint64_t)c->param_tier},
        {"adam", (uint64_t)c->adam},
        {"grad_dtype", (uint64_t)c->grad_dtype},
        {"reduce", (uint64_t)c->reduce},
        {"missing_grad", (uint64_t)c->missing_grad},
        {"whether grad_accum_steps is above 1", c->grad_accum_steps > 1},
        {"max_live_params", c->max_live_params},
        {"loss_scale", double_bits(c->loss_scale)},
        {"initial_loss_scale", double_bits(c->initial_loss_scale)},
        {"min_loss_scale", double_bits(c->min_loss_scale)},
        {"loss_scale_window", (uint64_t)c->loss_scale_window},
        {"max_skipped_steps", (uint64_t)c->max_skipped_steps},
        {"resume", (uint64_t)(c->resume != 0)},
        {"whether state_dir is set", c->state_dir != NULL},
        {"chunk_numel", c->chunk_numel},
        {"slots", (uint64_t)c->slots},
        {"keep", (uint64_t)c->keep},
        {"resume_commit", c->resume_commit},
        {"the fingerprint", c->fingerprint},
        {"the number of parameter groups", e->group_count},
        {"the number of parameters", e->param_count},
        {"the number of units", e->unit_count},
    };
    for (size_t i = 0; i < ZS_COUNT(checks); i++)
        ZS_CHECK(zs_comm_same(e->comm, checks[i].what, checks[i].value));
    for (size_t u = 0; u < e->unit_count; u++) {
        uint64_t h = zs_hash_bytes(ZS_HASH_START, e->units[u].name, strlen(e->units[u].name));
        char label[96];
        for (size_t i = 0; i < e->units[u].count; i++) {
            const zs_param_info *p = &e->params[e->units[u].params[i]];
            h = zs_hash_bytes(h, p->name, strlen(p->name) + 1);
            h = zs_hash_bytes(h, p->shape, (size_t)p->ndim * sizeof *p->shape);
            h = zs_hash_bytes(h, &p->dtype, sizeof p->dtype);
            h = zs_hash_bytes(h, &p->group, sizeof p->group);
            h = zs_hash_bytes(h, &p->frozen, sizeof p->frozen);
            h = zs_hash_bytes(h, &p->grad_uses, sizeof p->grad_uses);
        }
        ZS_CHECK(zs_comm_same(e->comm, zs_unit_label(e, u, label), h));
    }
    return ZS_OK;
}

/* ---- flat buffers ---- */

static zs_status add_flat(zs_engine *e, size_t unit, zs_dtype dtype, int trainable)
{
    zs_status status = ZS_OK;
    const zs_unit_info *u = &e->units[unit];
    zs_flat *f = &e->flats[e->flat_count];
    *f = (zs_flat){.dtype = dtype, .trainable = trainable, .unit = unit};
    for (size_t i = 0; i < u->count; i++) {
        const zs_param_info *p = &e->params[u->params[i]];
        f->count += p->dtype == dtype && p->frozen != trainable;
    }
    if (!f->count)
        return ZS_OK;
    uint64_t *numel = malloc(f->count * sizeof *numel);
    f->params = malloc(f->count * sizeof *f->params);
    if (trainable)
        f->runs = malloc(f->count * sizeof *f->runs);
    /* From here on zs_engine_free_layout sees the flat. */
    size_t index = e->flat_count++;
    if (!numel || !f->params || (trainable && !f->runs)) {
        status = zs_fail(ZS_ERR_NOMEM, "unit '%s': no memory for tables of %zu parameters", u->name,
                         f->count);
        goto fail;
    }
    size_t at = 0;
    for (size_t i = 0; i < u->count; i++) {
        zs_param_info *p = &e->params[u->params[i]];
        if (p->dtype != dtype || p->frozen == trainable)
            continue;
        p->flat = index;
        p->at = at;
        numel[at] = p->numel;
        f->params[at++] = u->params[i];
    }
    status = zs_layout_init(&f->layout, numel, f->count, e->world);
    if (status != ZS_OK)
        zs_fail_prefix(status, "unit '%s': ", u->name);
fail:
    free(numel);
    return status;
}

static zs_status lay_out(zs_engine *e)
{
    e->flats = calloc(e->unit_count * ZS_DTYPES * 2, sizeof *e->flats);
    if (!e->flats)
        return zs_fail(ZS_ERR_NOMEM, "zs_engine_commit: no memory for the tables of %zu units",
                       e->unit_count);
    for (size_t u = 0; u < e->unit_count; u++) {
        zs_unit_info *unit = &e->units[u];
        unit->flat_begin = e->flat_count;
        for (int trainable = 1; trainable >= 0; trainable--)
            for (int d = 0; d < ZS_DTYPES; d++)
                ZS_CHECK(add_flat(e, u, (zs_dtype)d, trainable));
        unit->flat_end = e->flat_count;
        for (size_t i = unit->flat_begin; i < unit->flat_end; i++) {
            zs_flat *f = &e->flats[i];
            f->gather_at = unit->gather_bytes;
            unit->gather_bytes +=
                zs_round_up(f->layout.padded * zs_dtype_size(f->dtype), ZS_IO_ALIGN);
            unit->numel += f->layout.padded;
            if (f->trainable) {
                f->bucket_at = unit->bucket_bytes;
                unit->bucket_bytes += f->layout.padded * zs_dtype_size(e->config.grad_dtype);
            }
        }
    }
    return ZS_OK;
}

/* ---- memory ---- */

static zs_status alloc_flat(zs_engine *e, zs_flat *f)
{
    const int stage = e->config.zero_stage;
    const size_t size = zs_dtype_size(f->dtype);
    const size_t grad_size = zs_dtype_size(e->config.grad_dtype);
    if (stage < 3)
        ZS_CHECK(zs_mem_alloc(e->device, e->ledger, ZS_TIER_DEVICE, "parameters",
                              f->layout.padded * size, &f->working));
    else if (e->config.param_tier != ZS_TIER_NVME)
        ZS_CHECK(zs_mem_alloc(e->device, e->ledger, e->config.param_tier, "parameters",
                              f->layout.shard * size, &f->working));
    if (!f->trainable)
        return ZS_OK;
    if (stage < 2)
        ZS_CHECK(zs_mem_alloc(e->device, e->ledger, ZS_TIER_DEVICE, "gradients",
                              f->layout.padded * grad_size, &f->grad_full));
    /* Gradients of offloaded states wait in host memory for the step. Stages 0 and 1 keep the sum
     * in their own part of the full buffer, unless later micro-batches need that for their local
     * gradients. */
    zs_tier tier = e->config.optimizer_tier == ZS_TIER_DEVICE ? ZS_TIER_DEVICE : ZS_TIER_HOST;
    if (stage >= 2)
        ZS_CHECK(zs_mem_alloc(e->device, e->ledger, tier, "gradients", f->layout.shard * grad_size,
                              &f->grad_shard));
    else if (e->config.grad_accum_steps > 1 && e->config.reduce == ZS_REDUCE_MICRO)
        ZS_CHECK(zs_mem_alloc(e->device, e->ledger, tier, "gradient accumulators",
                              f->layout.shard * grad_size, &f->grad_shard));
    return ZS_OK;
}

static zs_status open_param_file(zs_engine *e)
{
    uint64_t *bytes = malloc(e->flat_count * sizeof *bytes);
    if (!bytes)
        return zs_fail(ZS_ERR_NOMEM, "zs_engine_commit: no memory for a table of %zu shards",
                       e->flat_count);
    uint64_t largest = 0;
    for (size_t i = 0; i < e->flat_count; i++) {
        e->flats[i].param_shard = i;
        bytes[i] = e->flats[i].layout.shard * zs_dtype_size(e->flats[i].dtype);
        largest = ZS_MAX(largest, zs_round_up(bytes[i], ZS_IO_ALIGN));
    }
    zs_status status = zs_param_file_open(e->config.param_dir, e->rank, e->io, e->ledger, bytes,
                                          e->flat_count, &e->param_file);
    free(bytes);
    ZS_CHECK(status);
    return zs_mem_alloc(e->device, e->ledger, ZS_TIER_HOST, "parameter window", largest,
                        &e->window);
}

/* What Adam reads is in host memory. */
static int far_grads(const zs_engine *e)
{
    for (size_t i = 0; i < e->flat_count && e->config.zero_stage > 0; i++)
        if (zs_mem_is_far(e, &e->flats[i].grad_shard))
            return 1;
    return 0;
}

static zs_status open_states(zs_engine *e)
{
    const zs_engine_config *c = &e->config;
    size_t count = 0;
    zs_states_shard *shards = calloc(e->flat_count, sizeof *shards);
    e->inputs = calloc(e->flat_count, sizeof *e->inputs);
    e->coefs = calloc(e->param_count, sizeof *e->coefs);
    if (!shards || !e->inputs || !e->coefs) {
        free(shards);
        return zs_fail(ZS_ERR_NOMEM, "zs_engine_commit: no memory for a table of %zu shards",
                       e->flat_count);
    }
    for (size_t i = 0; i < e->flat_count; i++) {
        zs_flat *f = &e->flats[i];
        if (!f->trainable)
            continue;
        f->state_shard = count;
        shards[count++] = (zs_states_shard){
            .numel = zs_flat_held_numel(e, f),
            .working_dtype = f->dtype,
            .master = zs_flat_is_master(e, f) ? zs_flat_working_held(e, f) : NULL,
            .param_shard = f->param_shard,
        };
    }
    const zs_states_config states = {
        .tier = c->optimizer_tier,
        .dir = c->state_dir,
        .rank = e->rank,
        .world = e->world,
        .buffer_bytes = c->buffer_bytes,
        .chunk_numel = c->chunk_numel,
        .fingerprint = c->fingerprint,
        .run = e->own ? e->own->run : 0,
        .slots = e->own ? e->own->slots : 0,
        .generation = e->own ? e->own->generation : 0,
        .abandon = e->own && (!e->manifest || e->manifest->generation != e->own->generation),
        .resume = c->resume,
        .io = e->io,
        .device = e->device,
        .stream = e->work,
        .math = e->math,
        .host_math = e->host_math,
        .far_grads = far_grads(e),
        .far_working = !e->device->host_access && c->param_tier == ZS_TIER_HOST,
        .adam = c->adam,
        .pool = e->pool,
        .ledger = e->ledger,
        .log = &e->log,
        .trace = c->trace,
        .params = e->param_file,
        .shards = shards,
        .shard_count = count,
    };
    zs_status status = zs_states_open(&states, &e->states);
    free(shards);
    if (status == ZS_OK && e->own)
        e->own->chunk_numel = zs_states_chunk_numel(e->states);
    return status;
}

static zs_status check_units(const zs_engine *e)
{
    for (size_t i = 0; i < e->param_count; i++)
        if (e->params[i].unit < 0)
            return zs_fail(ZS_ERR_MISUSE,
                           "parameter '%s' is in no unit: add it to one with "
                           "zs_unit_add",
                           e->params[i].name);
    if (!e->unit_count)
        return zs_fail(ZS_ERR_MISUSE, "zs_engine_commit: there are no units; add parameters and "
                                      "units first");
    return ZS_OK;
}

static zs_status set_live_budget(zs_engine *e)
{
    uint64_t first = 0, second = 0;
    for (size_t u = 0; u < e->unit_count; u++) {
        uint64_t numel = e->units[u].numel;
        if (numel >= first) {
            second = first;
            first = numel;
        } else if (numel > second) {
            second = numel;
        }
    }
    e->live_budget = e->config.max_live_params ? e->config.max_live_params : first + second;
    if (e->live_budget < first && e->config.zero_stage == 3)
        return zs_fail(ZS_ERR_ARG,
                       "max_live_params is %llu, but the largest unit alone has %llu elements: "
                       "raise it to at least that, or split the unit",
                       (unsigned long long)e->live_budget, (unsigned long long)first);
    return ZS_OK;
}

static zs_status build(zs_engine *e)
{
    ZS_CHECK(check_units(e));
    ZS_CHECK(lay_out(e));
    ZS_CHECK(set_live_budget(e));
    if (e->config.state_dir)
        ZS_CHECK(zs_state_open(e));
    if (e->config.state_dir || e->config.param_tier == ZS_TIER_NVME)
        ZS_CHECK(zs_io_open(e->config.io_engine, 0, &e->log, &e->io));
    for (size_t i = 0; i < e->flat_count; i++)
        ZS_CHECK(alloc_flat(e, &e->flats[i]));
    if (e->config.param_tier == ZS_TIER_NVME)
        ZS_CHECK(open_param_file(e));
    ZS_CHECK(open_states(e));
    if (!e->device->host_access)
        ZS_CHECK(zs_mem_alloc(e->device, e->ledger, ZS_TIER_HOST, "gradient norms",
                              e->flat_count * sizeof *e->sums, &e->sums_mem));
    e->sums = e->device->host_access ? calloc(e->flat_count, sizeof *e->sums) : e->sums_mem.ptr;
    if (!e->sums)
        return zs_fail(ZS_ERR_NOMEM, "zs_engine_commit: no memory for %zu sums", e->flat_count);
    if (zs_engine_defers(e)) {
        ZS_CHECK(zs_mem_alloc(e->device, e->ledger, ZS_TIER_DEVICE, "clipping", sizeof(zs_decision),
                              &e->decision));
        ZS_CHECK(zs_mem_alloc(e->device, e->ledger, ZS_TIER_HOST, "clipping", sizeof(zs_clip),
                              &e->verdict));
    }
    zs_cache_init(&e->gather_cache, e->device, e->ledger, ZS_TIER_DEVICE, "gathered parameters");
    zs_cache_init(&e->staging_cache, e->device, e->ledger, ZS_TIER_HOST, "parameter staging");
    zs_cache_init(&e->bucket_cache, e->device, e->ledger, ZS_TIER_DEVICE, "gradient buckets");
    return ZS_OK;
}

zs_status zs_engine_commit(zs_engine *e)
{
    ZS_CHECK(zs_engine_enter(e, "zs_engine_commit"));
    ZS_CHECK(zs_engine_expect(e, 1u << ZS_PHASE_OPEN, "zs_engine_commit"));
    zs_status status = agree_on_config(e);
    if (status == ZS_OK)
        status = zs_bulk_open(e->comm, e->device, e->host_math, &e->bulk);
    if (status == ZS_OK && e->config.state_dir)
        status = zs_state_draw(e);
    if (status == ZS_OK && e->config.state_dir)
        status = zs_engine_agree(e, "zs_engine_commit: locking", zs_state_lock(e));
    if (status == ZS_OK)
        status = zs_engine_agree(e, "zs_engine_commit", build(e));
    if (status == ZS_OK && e->config.state_dir)
        status = zs_state_settle(e);
    if (status == ZS_OK)
        e->phase = ZS_PHASE_IDLE;
    return zs_engine_break(e, status);
}

void zs_engine_free_layout(zs_engine *e)
{
    for (size_t i = 0; i < e->flat_count; i++) {
        zs_flat *f = &e->flats[i];
        zs_mem_free(&f->working);
        zs_mem_free(&f->grad_full);
        zs_mem_free(&f->grad_shard);
        zs_layout_free(&f->layout);
        free(f->params);
        free(f->runs);
    }
    for (size_t u = 0; u < e->unit_count; u++) {
        if (e->units[u].bucket)
            zs_cache_put(&e->bucket_cache, e->units[u].bucket);
        zs_mark_close(e->device, &e->units[u].weights);
        zs_mark_close(e->device, &e->units[u].grads);
    }
    zs_cache_free(&e->gather_cache);
    zs_cache_free(&e->staging_cache);
    zs_cache_free(&e->bucket_cache);
    zs_mem_free(&e->window);
    if (!e->sums_mem.ptr)
        free(e->sums);
    zs_mem_free(&e->sums_mem);
    zs_mem_free(&e->decision);
    zs_mem_free(&e->verdict);
    zs_mark_close(e->device, &e->decided);
    free(e->flats);
    free(e->inputs);
    free(e->coefs);
    e->flats = NULL;
    e->flat_count = 0;
}

/* ---- where things lie ---- */

void zs_flat_locate(const zs_flat *f, size_t at, uint64_t begin, uint64_t numel, uint64_t *first,
                    uint64_t *count, uint64_t *held_at)
{
    const uint64_t lo = ZS_MAX(f->layout.offset[at], begin);
    const uint64_t hi = ZS_MIN(f->layout.offset[at] + f->layout.numel[at], begin + numel);
    *first = *count = *held_at = 0;
    if (lo >= hi)
        return;
    *first = lo - f->layout.offset[at];
    *count = hi - lo;
    *held_at = lo - begin;
}

void *zs_flat_working_held(const zs_engine *e, const zs_flat *f)
{
    if (!f->working.ptr || e->config.zero_stage == 0 || e->config.zero_stage == 3)
        return f->working.ptr;
    return (char *)f->working.ptr + zs_flat_held_begin(e, f) * zs_dtype_size(f->dtype);
}

int zs_flat_is_master(const zs_engine *e, const zs_flat *f)
{
    const int far = e->config.optimizer_tier != ZS_TIER_DEVICE;
    if (f->dtype != ZS_FP32 || !zs_flat_working_held(e, f))
        return 0;
    return e->device->host_access || far == (f->working.tier == ZS_TIER_HOST);
}

void *zs_flat_grad_shard(const zs_engine *e, const zs_flat *f)
{
    if (f->grad_shard.ptr || !f->grad_full.ptr)
        return f->grad_shard.ptr;
    return (char *)f->grad_full.ptr +
           (uint64_t)e->rank * f->layout.shard * zs_dtype_size(e->config.grad_dtype);
}
