/* SPDX-License-Identifier: Apache-2.0 */
/* Adam over the states: straight over whole shards where all of them are resident, else chunk by
 * chunk through the ring. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "offload/lanes.h"

typedef struct step {
    const zs_states_input *inputs;
    double adam_seconds;
} step;

/* ---- runs ---- */

static zs_status check_inputs(zs_states *states, const zs_states_input *inputs)
{
    size_t most = 0;
    for (size_t s = 0; s < states->shard_count; s++) {
        const zs_states_input *input = &inputs[s];
        uint64_t end = 0;
        most = ZS_MAX(most, input->run_count);
        for (size_t r = 0; r < input->run_count; r++) {
            const zs_adam_run *run = &input->runs[r];
            if (run->first < end || run->first > states->shards[s].numel ||
                run->count > states->shards[s].numel - run->first)
                return zs_fail(ZS_ERR_ARG,
                               "shard %zu: run %zu covers elements %llu to %llu of %llu, after a "
                               "run that ends at %llu",
                               s, r, (unsigned long long)run->first,
                               (unsigned long long)(run->first + run->count),
                               (unsigned long long)states->shards[s].numel,
                               (unsigned long long)end);
            end = run->first + run->count;
            if (run->coef && run->count && !input->grad)
                return zs_fail(ZS_ERR_ARG, "shard %zu: no gradient for elements %llu to %llu", s,
                               (unsigned long long)run->first, (unsigned long long)end);
        }
    }
    if (most > states->cut_capacity) {
        zs_adam_run *cut = realloc(states->cut, most * sizeof *cut);
        if (!cut)
            return zs_fail(ZS_ERR_NOMEM, "optimizer step: no memory for a table of %zu runs", most);
        states->cut = cut;
        states->cut_capacity = most;
    }
    return ZS_OK;
}

/* First run that ends after element. */
static size_t find_run(const zs_states_input *input, uint64_t element)
{
    size_t low = 0, high = input->run_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (input->runs[middle].first + input->runs[middle].count > element)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The runs that have a coefficient and elements of chunk, counted from its start, into states->cut.
 */
static size_t cut_runs(zs_states *states, const zs_states_input *input, const zs_store_chunk *chunk)
{
    size_t count = 0;
    for (size_t r = find_run(input, chunk->first); r < input->run_count; r++) {
        const zs_adam_run *run = &input->runs[r];
        if (run->first >= chunk->first + chunk->numel)
            break;
        uint64_t first = ZS_MAX(run->first, chunk->first);
        uint64_t end = ZS_MIN(run->first + run->count, chunk->first + chunk->numel);
        if (run->coef && end > first)
            states->cut[count++] =
                (zs_adam_run){.first = first - chunk->first, .count = end - first, run->coef};
    }
    return count;
}

/* ---- one chunk ---- */

static void *element(const void *array, zs_dtype dtype, uint64_t first)
{
    return array ? (char *)array + first * zs_dtype_size(dtype) : NULL;
}

static zs_chunk_job describe(const zs_states *states, const step *work, size_t number,
                             zs_entry *entry)
{
    const zs_store_chunk *chunk = &states->geometry.chunks[number];
    const zs_states_shard *shard = &states->shards[chunk->shard];
    const zs_states_input *input = &work->inputs[chunk->shard];
    float *at[ZS_STORE_ARRAYS];
    for (int a = 0; a < ZS_STORE_ARRAYS; a++) {
        float *resident = states->resident[chunk->shard * ZS_STORE_ARRAYS + a];
        at[a] = resident ? resident + chunk->first : zs_entry_array(states, entry, a);
    }
    const int spills = !input->working && zs_states_spills_working(states, chunk->shard);
    return (zs_chunk_job){
        .number = number,
        .input = input,
        .entry = entry,
        .spills = spills,
        .home = {.master = at[0],
                 .exp_avg = at[1],
                 .exp_avg_sq = at[2],
                 .grad = element(input->grad, input->grad_dtype, chunk->first),
                 .grad_dtype = input->grad_dtype,
                 .working = spills ? zs_entry_working(states, entry)
                                   : element(input->working, shard->working_dtype, chunk->first),
                 .working_dtype = shard->working_dtype}};
}

/* A working copy in the ring is written whole: what no run computes comes from the master. */
static zs_status fill_gaps(zs_states *states, zs_math *math, void *stream,
                           const zs_adam_arrays *arrays, size_t run_count, uint64_t numel)
{
    uint64_t at = 0;
    for (size_t r = 0; r <= run_count; r++) {
        uint64_t end = r < run_count ? states->cut[r].first : numel;
        if (end > at)
            ZS_CHECK(
                math->ops->cast(math, stream, element(arrays->working, arrays->working_dtype, at),
                                arrays->working_dtype, arrays->master + at, ZS_FP32, end - at));
        if (r < run_count)
            at = end + states->cut[r].count;
    }
    return ZS_OK;
}

zs_status zs_job_adam(zs_states *states, const zs_chunk_job *job, zs_math *math, void *stream,
                      const zs_adam_arrays *arrays)
{
    const zs_store_chunk *chunk = &states->geometry.chunks[job->number];
    const size_t run_count = cut_runs(states, job->input, chunk);
    ZS_CHECK(math->ops->adam(math, stream, arrays, states->cut, run_count));
    return job->spills ? fill_gaps(states, math, stream, arrays, run_count, chunk->numel) : ZS_OK;
}

zs_status zs_job_store(zs_states *states, const zs_chunk_job *job)
{
    const zs_store_chunk *chunk = &states->geometry.chunks[job->number];
    const zs_states_shard *shard = &states->shards[chunk->shard];
    zs_entry *entry = job->entry;
    if (entry->mask)
        ZS_CHECK(zs_entry_write(states, entry, entry->mask,
                                zs_chunk_target(states, &states->chunks[job->number])));
    if (!job->spills)
        return ZS_OK;
    size_t bytes = chunk->numel * zs_dtype_size(shard->working_dtype);
    states->written_bytes += zs_round_up(bytes, ZS_IO_ALIGN);
    return zs_param_file_write(states->config.params, shard->param_shard,
                               chunk->first * zs_dtype_size(shard->working_dtype),
                               job->home.working, bytes, &entry->write);
}

/* Adam over a chunk where it is, or on its way through a lane. */
static zs_status step_job(zs_states *states, step *work, const zs_chunk_job *job)
{
    zs_trace *trace = states->config.trace;
    uint64_t span = trace ? zs_trace_now() : 0;
    double begin = zs_now();
    if (states->lanes)
        ZS_CHECK(zs_lanes_start(states, job));
    else
        ZS_CHECK(zs_job_adam(states, job, states->config.math, NULL, &job->home));
    work->adam_seconds += zs_now() - begin;
    if (trace)
        zs_trace_span(trace, states->config.rank, "adam", "adam", span, zs_trace_now());
    return ZS_OK;
}

static zs_status step_chunk(zs_states *states, zs_entry *entry, void *arg)
{
    step *work = arg;
    const zs_chunk_job job = describe(states, work, entry->chunk, entry);
    /* The last sweep may still be writing from this memory. */
    ZS_CHECK(zs_ring_finish(states, entry));
    ZS_CHECK(step_job(states, work, &job));
    return states->lanes ? ZS_OK : zs_job_store(states, &job);
}

/* ---- sweeps ---- */

/* The next sweep starts where the last one ended: what is in the ring comes first, latest first. */
static void open_sweep(zs_states *states)
{
    if (states->sweep_open)
        return;
    states->sweep_open = 1;
    states->backwards = !states->backwards;
    uint64_t last = states->turn;
    for (size_t i = 0; i < ZS_RING_ENTRIES; i++) {
        zs_entry *entry = &states->entries[i];
        if (entry->state == ZS_ENTRY_FREE)
            continue;
        entry->turn = last + 1 + (last - entry->turn);
        states->turn = ZS_MAX(states->turn, entry->turn);
    }
}

static size_t nth_chunk(const zs_states *states, size_t i)
{
    return states->backwards ? states->geometry.chunk_count - 1 - i : i;
}

static void shape(zs_states *states, size_t chunk, zs_shape *out)
{
    size_t shard = states->geometry.chunks[chunk].shard;
    out->room = out->read = zs_states_streamed(states, shard);
    out->working = zs_states_spills_working(states, shard);
}

/* Whether a chunk's step goes through the ring. */
static int streams(const zs_states *states, const zs_states_input *inputs, size_t shard)
{
    return zs_states_streamed(states, shard) ||
           (zs_states_spills_working(states, shard) && !inputs[shard].working);
}

static zs_status sweep(zs_states *states, step *work)
{
    zs_status status;
    zs_pass pass = {.arg = work,
                    .order = states->order,
                    .keep = states->config.tier == ZS_TIER_NVME,
                    .shape = shape,
                    .process = step_chunk,
                    .land = states->lanes ? zs_lanes_land : NULL};
    ZS_CHECK(zs_states_flush(states));
    open_sweep(states);
    for (size_t i = 0; i < ZS_RING_ENTRIES; i++)
        if (states->entries[i].state != ZS_ENTRY_FREE)
            states->entries[i].state = ZS_ENTRY_DONE;
    for (size_t i = 0; i < states->geometry.chunk_count; i++) {
        size_t c = nth_chunk(states, i);
        const zs_store_chunk *chunk = &states->geometry.chunks[c];
        if (!streams(states, work->inputs, chunk->shard) ||
            !cut_runs(states, &work->inputs[chunk->shard], chunk))
            continue;
        zs_entry *entry = pass.keep ? zs_ring_find(states, c) : NULL;
        if (entry) {
            entry->state = ZS_ENTRY_WAITING;
            if (entry->mask & ~entry->valid)
                ZS_TRY(zs_entry_read(states, entry, entry->mask & ~entry->valid));
        } else {
            states->order[pass.count++] = c;
        }
        states->chunks[c].dirty = 1;
    }
    ZS_TRY(zs_pass_run(states, &pass));
    states->sweep_open = 0;
    /* Whoever reads the parameter file next must find this step in it. */
    if (states->config.params)
        ZS_TRY(zs_ring_settle(states));
    return ZS_OK;
fail:
    zs_ring_abandon(states);
    return status;
}

/* A shard that is resident altogether: at once where Adam works on it in place, else chunk by
 * chunk. */
static zs_status step_shard(zs_states *states, step *work, size_t s)
{
    const zs_states_input *input = &work->inputs[s];
    float **at = &states->resident[s * ZS_STORE_ARRAYS];
    zs_math *math = states->config.math;
    if (!states->lanes) {
        zs_adam_arrays arrays = {.master = at[0],
                                 .exp_avg = at[1],
                                 .exp_avg_sq = at[2],
                                 .grad = input->grad,
                                 .grad_dtype = input->grad_dtype,
                                 .working = input->working,
                                 .working_dtype = states->shards[s].working_dtype,
                                 .grad_scale = input->grad_scale,
                                 .skip = input->skip};
        return math->ops->adam(math, zs_states_native(states), &arrays, input->runs,
                               input->run_count);
    }
    for (size_t c = states->first_chunk[s]; c < states->first_chunk[s + 1]; c++) {
        const zs_chunk_job job = describe(states, work, c, NULL);
        if (cut_runs(states, input, &states->geometry.chunks[c]))
            ZS_CHECK(zs_lanes_start(states, &job));
    }
    return ZS_OK;
}

static zs_status step_resident(zs_states *states, step *work)
{
    zs_trace *trace = states->config.trace;
    for (size_t s = 0; s < states->shard_count; s++) {
        const zs_states_input *input = &work->inputs[s];
        if (!states->shards[s].numel || streams(states, work->inputs, s))
            continue;
        uint64_t span = trace ? zs_trace_now() : 0;
        double begin = zs_now();
        ZS_CHECK(step_shard(states, work, s));
        work->adam_seconds += zs_now() - begin;
        if (trace)
            zs_trace_span(trace, states->config.rank, "adam", "adam", span, zs_trace_now());
        for (size_t c = states->first_chunk[s]; c < states->first_chunk[s + 1]; c++)
            states->chunks[c].dirty |= cut_runs(states, input, &states->geometry.chunks[c]) != 0;
    }
    return ZS_OK;
}

/* What Adam reads and writes of the states in memory, and what went through the disk. */
static void count_traffic(zs_states *states, const zs_states_input *inputs,
                          zs_tier_traffic traffic[ZS_TIERS])
{
    zs_tier tier = states->config.tier;
    for (size_t s = 0; tier != ZS_TIER_NVME && s < states->shard_count; s++) {
        uint64_t numel = 0;
        for (size_t r = 0; r < inputs[s].run_count; r++)
            if (inputs[s].runs[r].coef)
                numel += inputs[s].runs[r].count;
        uint64_t bytes = numel * sizeof(float) * (states->shards[s].master ? 2 : 3);
        traffic[tier].read_bytes += bytes;
        traffic[tier].written_bytes += bytes;
    }
    traffic[ZS_TIER_NVME].read_bytes += states->read_bytes;
    traffic[ZS_TIER_NVME].written_bytes += states->written_bytes;
    traffic[ZS_TIER_NVME].seconds += states->wait_seconds;
}

/* Only what a step, or the prefetch before it, moves counts as the step's traffic. */
static void reset_traffic(zs_states *states)
{
    states->read_bytes = states->written_bytes = 0;
    states->wait_seconds = 0;
}

zs_status zs_states_step(zs_states *states, const zs_states_input *inputs,
                         zs_tier_traffic traffic[ZS_TIERS], double *adam_seconds)
{
    step work = {.inputs = inputs};
    ZS_CHECK(zs_states_usable(states));
    ZS_CHECK(check_inputs(states, inputs));
    if (!states->sweep_open)
        reset_traffic(states);
    zs_status status = zs_lanes_begin(states);
    if (status == ZS_OK)
        status = step_resident(states, &work);
    if (status == ZS_OK && states->config.io)
        status = sweep(states, &work);
    if (status == ZS_OK)
        status = zs_lanes_end(states);
    if (status != ZS_OK) {
        states->broken = 1;
        return status;
    }
    count_traffic(states, inputs, traffic);
    *adam_seconds += work.adam_seconds;
    return ZS_OK;
}

zs_status zs_states_prefetch(zs_states *states)
{
    ZS_CHECK(zs_states_usable(states));
    if (states->config.tier != ZS_TIER_NVME || states->sweep_open)
        return ZS_OK;
    ZS_CHECK(zs_states_flush(states));
    reset_traffic(states);
    open_sweep(states);
    zs_status status;
    for (size_t i = 0; i < states->geometry.chunk_count; i++) {
        size_t c = nth_chunk(states, i);
        size_t shard = states->geometry.chunks[c].shard;
        unsigned arrays = zs_states_streamed(states, shard);
        zs_entry *entry = zs_ring_find(states, c);
        if (!entry) {
            ZS_TRY(zs_ring_take(states, c, arrays, zs_states_spills_working(states, shard),
                                ZS_EVICT_NONE, &entry));
            if (!entry)
                break;
            entry->keep = 1;
        }
        if (arrays & ~entry->valid)
            ZS_TRY(zs_entry_read(states, entry, arrays & ~entry->valid));
    }
    zs_io_poll(states->config.io);
    return ZS_OK;
fail:
    zs_ring_abandon(states);
    return status;
}
