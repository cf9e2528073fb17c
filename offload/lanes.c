/* SPDX-License-Identifier: Apache-2.0 */
#include "offload/lanes.h"

#include <stdlib.h>

#include "base/status.h"
#include "base/util.h"
#include "device/mark.h"

enum { DEVICE_LANES = 3, HOST_LANES = 2, LANES = DEVICE_LANES + HOST_LANES };

typedef struct lane {
    int on_host, busy; /* busy: has a job that is not landed */
    uint64_t turn;
    zs_chunk_job job;
    char *device, *host; /* staging */
    zs_mark in;          /* what Adam reads is in the staging memory */
    zs_mark computed;    /* Adam is done (device) */
    zs_mark done;        /* the staging memory may be used again; home is up to date */
} lane;

struct zs_lanes {
    zs_stream *in, *out;
    zs_mark begun; /* what came before the step */
    zs_mem device, host;
    uint64_t chunk; /* elements of the largest */
    uint64_t turn;
    lane lane[LANES];
};

/* ---- where things are ---- */

/* Home of the states is host memory. */
static int far_states(const zs_states *states)
{
    return states->config.tier != ZS_TIER_DEVICE;
}

static int far_working(const zs_states *states)
{
    return states->config.far_working || states->config.params;
}

/* Places in a device lane's staging memory: the three arrays, gradient, working copy. */
static uint64_t array_at(const zs_lanes *lanes, int array)
{
    return (uint64_t)array * lanes->chunk * sizeof(float);
}

static uint64_t device_lane_bytes(const zs_states *states, uint64_t chunk)
{
    const uint64_t each = chunk * sizeof(float);
    if (states->config.adam == ZS_ADAM_HOST || states->config.adam == ZS_ADAM_ZERO_COPY)
        return 0;
    return each * ((far_states(states) ? ZS_STORE_ARRAYS : 0) + (states->config.far_grads ? 1 : 0) +
                   (far_working(states) ? 1 : 0));
}

/* A host lane's: gradient, working copy. */
static uint64_t host_lane_bytes(const zs_states *states, uint64_t chunk)
{
    const uint64_t each = chunk * sizeof(float);
    if (!far_states(states) || states->config.adam == ZS_ADAM_DEVICE ||
        states->config.adam == ZS_ADAM_ZERO_COPY)
        return 0;
    return each * ((states->config.far_grads ? 0 : 1) + (far_working(states) ? 0 : 1));
}

/* ---- open and close ---- */

static uint64_t longest_chunk(const zs_states *states)
{
    uint64_t most = 0;
    for (size_t c = 0; c < states->geometry.chunk_count; c++)
        most = ZS_MAX(most, states->geometry.chunks[c].numel);
    return zs_round_up(most, 64); /* every array then begins at a multiple of 256 bytes */
}

zs_status zs_lanes_open(zs_states *states)
{
    const zs_states_config *config = &states->config;
    zs_device *device = config->device;
    if (device->host_access || (!far_states(states) && !config->params))
        return ZS_OK;
    zs_lanes *lanes = calloc(1, sizeof *lanes);
    if (!lanes)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the lanes of the optimizer step");
    states->lanes = lanes;
    lanes->chunk = longest_chunk(states);
    const uint64_t on_device = device_lane_bytes(states, lanes->chunk);
    const uint64_t on_host = host_lane_bytes(states, lanes->chunk);
    ZS_CHECK(device->ops->stream_open(device, &lanes->in));
    ZS_CHECK(device->ops->stream_open(device, &lanes->out));
    ZS_CHECK(zs_mem_alloc(device, config->ledger, ZS_TIER_DEVICE, "adam staging",
                          on_device * DEVICE_LANES, &lanes->device));
    ZS_CHECK(zs_mem_alloc(device, config->ledger, ZS_TIER_HOST, "adam staging",
                          on_host * HOST_LANES, &lanes->host));
    for (int i = 0; i < LANES; i++) {
        lane *l = &lanes->lane[i];
        l->on_host = i >= DEVICE_LANES;
        if (!l->on_host && lanes->device.ptr)
            l->device = (char *)lanes->device.ptr + (uint64_t)i * on_device;
        if (l->on_host && lanes->host.ptr)
            l->host = (char *)lanes->host.ptr + (uint64_t)(i - DEVICE_LANES) * on_host;
    }
    return ZS_OK;
}

void zs_lanes_close(zs_states *states)
{
    zs_lanes *lanes = states->lanes;
    zs_device *device = states->config.device;
    if (!lanes)
        return;
    states->lanes = NULL;
    for (int i = 0; i < LANES; i++) {
        zs_mark_close(device, &lanes->lane[i].in);
        zs_mark_close(device, &lanes->lane[i].computed);
        zs_mark_close(device, &lanes->lane[i].done);
    }
    zs_mark_close(device, &lanes->begun);
    if (lanes->in)
        device->ops->stream_close(device, lanes->in);
    if (lanes->out)
        device->ops->stream_close(device, lanes->out);
    zs_mem_free(&lanes->device);
    zs_mem_free(&lanes->host);
    free(lanes);
}

/* ---- a device's lane ---- */

/* *at, or the staging memory at offset that it is copied to. */
static zs_status stage_in(zs_states *states, const lane *l, void **at, uint64_t offset,
                          uint64_t bytes)
{
    zs_device *device = states->config.device;
    void *home = *at;
    *at = l->device + offset;
    return device->ops->copy(device, *at, home, bytes, states->lanes->in);
}

static zs_status start_device(zs_states *states, lane *l)
{
    zs_lanes *lanes = states->lanes;
    zs_device *device = states->config.device;
    const int zero_copy = states->config.adam == ZS_ADAM_ZERO_COPY;
    const zs_adam_arrays *home = &l->job.home;
    const uint64_t numel = states->geometry.chunks[l->job.number].numel;
    const int arrays_staged = far_states(states) && !zero_copy;
    const int working_staged = home->working && far_working(states) && !zero_copy;
    zs_adam_arrays here = *home;
    void **array[ZS_STORE_ARRAYS] = {(void **)&here.master, (void **)&here.exp_avg,
                                     (void **)&here.exp_avg_sq};
    ZS_CHECK(zs_mark_wait(device, &l->done, lanes->in));
    for (int a = 0; a < ZS_STORE_ARRAYS && arrays_staged; a++)
        ZS_CHECK(stage_in(states, l, array[a], array_at(lanes, a), numel * sizeof(float)));
    uint64_t at = array_at(lanes, arrays_staged ? ZS_STORE_ARRAYS : 0);
    if (states->config.far_grads && !zero_copy) {
        void *grad = (void *)(uintptr_t)here.grad;
        if (grad)
            ZS_CHECK(stage_in(states, l, &grad, at, numel * zs_dtype_size(here.grad_dtype)));
        here.grad = grad;
        at += lanes->chunk * sizeof(float);
    }
    if (working_staged)
        here.working = l->device + at;
    ZS_CHECK(zs_mark_set(device, &l->in, lanes->in));

    ZS_CHECK(zs_mark_wait(device, &l->in, states->config.stream));
    ZS_CHECK(zs_job_adam(states, &l->job, states->config.math, zs_states_native(states), &here));
    ZS_CHECK(zs_mark_set(device, &l->computed, states->config.stream));

    ZS_CHECK(zs_mark_wait(device, &l->computed, lanes->out));
    void *const back[ZS_STORE_ARRAYS] = {home->master, home->exp_avg, home->exp_avg_sq};
    for (int a = 0; a < ZS_STORE_ARRAYS && arrays_staged; a++)
        ZS_CHECK(device->ops->copy(device, back[a], *array[a], numel * sizeof(float), lanes->out));
    if (working_staged)
        ZS_CHECK(device->ops->copy(device, home->working, here.working,
                                   numel * zs_dtype_size(home->working_dtype), lanes->out));
    return zs_mark_set(device, &l->done, lanes->out);
}

/* ---- the host's ---- */

static zs_status start_host(zs_states *states, lane *l)
{
    zs_lanes *lanes = states->lanes;
    zs_device *device = states->config.device;
    const zs_adam_arrays *home = &l->job.home;
    const uint64_t numel = states->geometry.chunks[l->job.number].numel;
    if (states->config.far_grads || !home->grad)
        return ZS_OK;
    ZS_CHECK(device->ops->copy(device, l->host, home->grad, numel * zs_dtype_size(home->grad_dtype),
                               lanes->out));
    return zs_mark_set(device, &l->in, lanes->out);
}

static zs_status land_host(zs_states *states, lane *l)
{
    zs_lanes *lanes = states->lanes;
    zs_device *device = states->config.device;
    zs_math *math = states->config.host_math;
    const zs_adam_arrays *home = &l->job.home;
    const uint64_t numel = states->geometry.chunks[l->job.number].numel;
    const int grad_staged = home->grad && !states->config.far_grads;
    const int working_staged = home->working && !far_working(states);
    zs_adam_arrays here = *home;
    if (grad_staged) {
        ZS_CHECK(zs_mark_sync(device, &l->in));
        here.grad = l->host;
    }
    if (working_staged) {
        here.working = l->host + (states->config.far_grads ? 0 : lanes->chunk * sizeof(float));
        ZS_CHECK(zs_mark_sync(device, &l->done));
    }
    ZS_CHECK(zs_job_adam(states, &l->job, math, NULL, &here));
    if (!working_staged)
        return ZS_OK;
    ZS_CHECK(device->ops->copy(device, home->working, here.working,
                               numel * zs_dtype_size(home->working_dtype), lanes->in));
    return zs_mark_set(device, &l->done, lanes->in);
}

/* ---- under way ---- */

static lane *oldest(zs_lanes *lanes, int on_host, int on_device)
{
    lane *first = NULL;
    for (int i = 0; i < LANES; i++) {
        lane *l = &lanes->lane[i];
        if (l->busy && (l->on_host ? on_host : on_device) && (!first || l->turn < first->turn))
            first = l;
    }
    return first;
}

static zs_status land(zs_states *states, lane *l)
{
    l->busy = 0;
    if (l->on_host)
        ZS_CHECK(land_host(states, l));
    if (!l->job.entry)
        return ZS_OK;
    if (!l->on_host)
        ZS_CHECK(zs_mark_sync(states->config.device, &l->done));
    l->job.entry->under_way = 0;
    return zs_job_store(states, &l->job);
}

zs_status zs_lanes_land(zs_states *states, int *landed)
{
    lane *l = oldest(states->lanes, 1, 1);
    *landed = l != NULL;
    return l ? land(states, l) : ZS_OK;
}

/* The device's lane that is free soonest; *free: 1 when it is by now. */
static zs_status next_device(zs_states *states, lane **out, int *is_free)
{
    zs_lanes *lanes = states->lanes;
    lane *l = &lanes->lane[0];
    for (int i = 1; i < DEVICE_LANES; i++)
        if (lanes->lane[i].turn < l->turn)
            l = &lanes->lane[i];
    *out = l;
    return zs_mark_done(states->config.device, &l->done, is_free);
}

static zs_status choose(zs_states *states, lane **out)
{
    zs_lanes *lanes = states->lanes;
    const zs_adam_side side = far_states(states) ? states->config.adam : ZS_ADAM_DEVICE;
    int is_free = 0;
    if (side != ZS_ADAM_HOST)
        ZS_CHECK(next_device(states, out, &is_free));
    /* By itself, work goes to the side that is done with what it had: each gets as much as its
     * bandwidth allows. */
    if (side == ZS_ADAM_HOST || (side == ZS_ADAM_AUTO && !is_free)) {
        lane *l = &lanes->lane[DEVICE_LANES];
        *out = l->busy ? l + 1 : l;
    }
    return (*out)->busy ? land(states, *out) : ZS_OK;
}

zs_status zs_lanes_start(zs_states *states, const zs_chunk_job *job)
{
    zs_lanes *lanes = states->lanes;
    lane *l;
    ZS_CHECK(choose(states, &l));
    l->job = *job;
    l->turn = ++lanes->turn;
    ZS_CHECK(l->on_host ? start_host(states, l) : start_device(states, l));
    l->busy = l->on_host || job->entry;
    if (job->entry)
        job->entry->under_way = 1;
    /* While the next gradient is on its way, the host computes on the one before. */
    lane *before = l->on_host ? oldest(lanes, 1, 0) : NULL;
    return before && before != l ? land(states, before) : ZS_OK;
}

zs_status zs_lanes_begin(zs_states *states)
{
    zs_lanes *lanes = states->lanes;
    zs_device *device = states->config.device;
    if (!lanes)
        return ZS_OK;
    ZS_CHECK(zs_mark_set(device, &lanes->begun, states->config.stream));
    ZS_CHECK(zs_mark_wait(device, &lanes->begun, lanes->in));
    ZS_CHECK(zs_mark_wait(device, &lanes->begun, lanes->out));
    if (!far_states(states) || states->config.adam == ZS_ADAM_DEVICE ||
        states->config.adam == ZS_ADAM_ZERO_COPY)
        return ZS_OK;
    /* What the host reads, gradients and states, must be there. */
    return zs_mark_sync(device, &lanes->begun);
}

zs_status zs_lanes_end(zs_states *states)
{
    zs_lanes *lanes = states->lanes;
    if (!lanes)
        return ZS_OK;
    for (int landed = 1; landed;)
        ZS_CHECK(zs_lanes_land(states, &landed));
    for (int i = 0; i < LANES; i++)
        ZS_CHECK(zs_mark_wait(states->config.device, &lanes->lane[i].done, states->config.stream));
    return ZS_OK;
}

void zs_lanes_abandon(zs_states *states)
{
    zs_lanes *lanes = states->lanes;
    zs_device *device = states->config.device;
    if (!lanes || !lanes->out)
        return;
    (void)device->ops->stream_sync(device, lanes->in);
    (void)device->ops->stream_sync(device, states->config.stream);
    (void)device->ops->stream_sync(device, lanes->out);
    for (int i = 0; i < LANES; i++)
        lanes->lane[i].busy = 0;
}
