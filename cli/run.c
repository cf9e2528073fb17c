/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/cli.h"
#include "cli/progress.h"
#include "cli/relocate.h"
#include "cli/signals.h"
#include "model/model.h"
#include "model/weights.h"

enum { LEDGER_ROWS = 64, MESSAGE_BYTES = 1024 };
static const uint64_t never = UINT64_MAX;

typedef struct rank {
    const zs_run *run;
    const zs_options *options;
    zs_comm *comm;
    int number, world;
    zs_device *device;
    zs_pool *pool;
    zs_engine *engine;
    zs_model *model;
    zs_group groups[2]; /* with weight decay, without */
    const zs_weight *weights;
    const zs_param *params;
    size_t weight_count;
    int32_t *tokens;             /* ids, labels and positions of this rank's rows of a step */
    size_t row_tokens, capacity; /* of each of the three: of the longest row, of all rows */
    zs_record record;            /* how far this run is */
    int noted;                   /* OUT says where the state is */
    uint64_t saved, evaluated;   /* steps at which the state was committed and evaluated */
    zs_memory_row ledger[LEDGER_ROWS];
    size_t ledger_rows;
} rank;

static void print_log(void *cookie, zs_log_level level, const char *text)
{
    const rank *r = cookie;
    (void)level;
    if (r->world > 1)
        zs_cli_error("rank %d: %s", r->number, text);
    else
        zs_cli_error("%s", text);
}

/* What the library's own spans lie in. */
static void trace_since(const rank *r, const char *name, uint64_t begin)
{
    zs_trace_span(r->run->trace, r->number, "program", name, begin, zs_trace_now());
}

/* The machine's rank r works on its device r; ranks fill one machine after the other. */
static zs_status open_device(rank *r)
{
    char name[32];
    if (r->options->device == ZS_DEVICE_CPU)
        return zs_device_open("host", &r->device);
    snprintf(name, sizeof(name), "cuda:%d", r->number % zs_comm_local_ranks(r->comm));
    zs_status status = zs_device_open(name, &r->device);
    return status == ZS_OK ? ZS_OK : zs_fail_prefix(status, "--device cuda: ");
}

static zs_status open_engine(rank *r)
{
    const zs_options *o = r->options;
    zs_engine_config config;
    zs_engine_config_init(&config);
    config.zero_stage = o->zero_stage;
    config.param_tier = o->params.tier;
    config.param_dir = o->params.dir;
    if (r->run->state_dir) {
        config.optimizer_tier = o->optimizer.tier;
        config.state_dir = r->run->state_dir;
        config.resume = o->resume;
        config.slots = o->slots;
        config.keep = o->keep;
        config.resume_commit = (uint64_t)o->resume_commit;
        config.fingerprint = r->record.config;
    }
    config.adam = (zs_adam_side)o->adam;
    config.device = r->device;
    config.io_engine = (zs_io_engine)o->io_engine;
    config.grad_dtype = (zs_dtype)o->grad_dtype;
    config.reduce = (zs_reduce)o->reduce;
    config.grad_accum_steps = o->grad_accum;
    config.pool = r->pool;
    config.buffer_bytes = (uint64_t)o->buffer_bytes;
    config.max_live_params = (uint64_t)o->max_live_params;
    config.log = print_log;
    config.log_cookie = r;
    config.log_level = (zs_log_level)o->log_level;
    config.trace = r->run->trace;
    return zs_engine_open(&config, r->comm, &r->engine);
}

static zs_group_config group_config(const rank *r, int decay, double lr)
{
    const zs_options *o = r->options;
    zs_group_config config;
    zs_group_config_init(&config);
    config.lr = lr;
    config.beta1 = o->beta1;
    config.beta2 = o->beta2;
    config.eps = o->eps;
    config.weight_decay = decay ? o->weight_decay : 0;
    return config;
}

static zs_status open_model(rank *r)
{
    const zs_run *run = r->run;
    zs_model_options options = {
        .rows = r->options->micro_batch,
        .seq = (int)r->row_tokens,
        .dtype = (zs_dtype)r->options->dtype,
        .grad_dtype = (zs_dtype)r->options->grad_dtype,
        .checkpointing = r->options->checkpointing,
        .frozen = !run->data,
        .device = r->device,
    };
    for (int i = 0; i < 2; i++) {
        zs_group_config config = group_config(r, i == 0, r->options->lr);
        ZS_CHECK(zs_group_add(r->engine, &config, &r->groups[i]));
    }
    options.decay = r->groups[0];
    options.no_decay = r->groups[1];
    ZS_CHECK(zs_model_open(&run->config, &options, r->engine, r->pool, &r->model));
    zs_model_params(r->model, &r->weights, &r->params, &r->weight_count);
    zs_status status = zs_engine_commit(r->engine);
    if (status == ZS_ERR_EXISTS)
        return zs_fail(status, "%s (--resume resumes it, %s chooses the directory)",
                       zs_last_error(),
                       r->options->optimizer.dir ? "--offload-optimizer nvme:DIR" : "--out");
    return status == ZS_OK ? zs_model_prepare(r->model) : status;
}

static zs_status open_buffers(rank *r)
{
    size_t rows =
        (size_t)r->options->micro_batch * (size_t)(r->run->data ? r->options->grad_accum : 1);
    r->capacity = rows * r->row_tokens;
    size_t bytes = 3 * r->capacity * sizeof(*r->tokens);
    r->tokens = malloc(bytes);
    if (!r->tokens)
        return zs_fail(ZS_ERR_NOMEM,
                       "no memory for a step's %zu rows of tokens: lower "
                       "--micro-batch or --grad-accum",
                       rows);
    return zs_memory_note(r->engine, ZS_TIER_HOST, "token rows", (int64_t)bytes);
}

static zs_status open_rank(rank *r)
{
    const zs_run *run = r->run;
    r->row_tokens = (size_t)ZS_MAX(run->data ? zs_data_seq(run->data) : 0,
                                   run->eval ? zs_data_seq(run->eval) : 0);
    ZS_CHECK(zs_pool_open(run->threads, run->bind ? r->number * run->threads : -1, &r->pool));
    ZS_CHECK(open_device(r));
    ZS_CHECK(open_engine(r));
    ZS_CHECK(open_model(r));
    return open_buffers(r);
}

static void close_rank(rank *r)
{
    free(r->tokens);
    zs_model_close(&r->model);
    zs_engine_close(&r->engine);
    zs_device_close(&r->device);
    zs_pool_close(&r->pool);
}

static zs_status save_state(rank *r)
{
    char text[ZS_USER_BYTES_MAX];
    size_t bytes;
    uint64_t span = zs_trace_now();
    ZS_CHECK(zs_record_pack(&r->record, text, &bytes));
    /* First: a state that nothing leads to would be none to a resume elsewhere. */
    if (r->number == 0 && !r->noted)
        ZS_CHECK(zs_state_note(r->options->out, r->run->state_dir));
    r->noted = 1;
    ZS_CHECK(zs_state_commit(r->engine, text, bytes));
    trace_since(r, "commit", span);
    r->saved = r->record.step;
    return ZS_OK;
}

/* The record of the run whose state is there, refused before anything of it is taken up when it is
 * another's: a change of shape rewrites the files. */
static zs_status check_record(rank *r, int *found)
{
    const zs_run *run = r->run;
    char text[ZS_USER_BYTES_MAX];
    size_t bytes = sizeof(text);
    ZS_CHECK(zs_state_peek(r->engine, found, text, &bytes));
    if (!*found)
        return ZS_OK;
    return zs_record_unpack(text, bytes, &run->record, run->steps, &r->record);
}

/* Takes up the run's state, or the weights that it starts from. */
static zs_status start(rank *r)
{
    const zs_run *run = r->run;
    if (r->options->resume && run->state_dir) {
        int found = 0;
        zs_status status = check_record(r, &found);
        if (status == ZS_OK)
            status = zs_state_resume(r->engine, &found, NULL, NULL);
        if (status != ZS_OK)
            return zs_fail_prefix(status, "cannot resume from %s: ", run->state_dir);
        if (found) {
            r->saved = r->record.step;
            /* From now on, and not only from the next commit on, this is where the run is. */
            return r->options->resume_commit ? save_state(r) : ZS_OK;
        }
    }
    if (r->options->model)
        return zs_weights_load(r->engine, r->options->model, r->weights, r->params,
                               r->weight_count);
    return zs_weights_init(r->engine, &run->config, (uint64_t)r->options->seed, r->weights,
                           r->params, r->weight_count);
}

static zs_status read_ledger(rank *r)
{
    size_t count;
    ZS_CHECK(zs_memory_report(r->engine, r->ledger, LEDGER_ROWS, &count));
    r->ledger_rows = ZS_MIN(count, LEDGER_ROWS);
    return ZS_OK;
}

/* Rows [row, row + rows) of the buffers. */
static zs_batch batch_at(const rank *r, const zs_data *data, size_t row, int rows)
{
    size_t first = row * (size_t)zs_data_seq(data);
    return (zs_batch){
        .rows = rows,
        .seq = zs_data_seq(data),
        .ids = r->tokens + first,
        .labels = r->tokens + r->capacity + first,
        .positions = zs_data_has_positions(data) ? r->tokens + 2 * r->capacity + first : NULL,
    };
}

static zs_status read_row(const rank *r, const zs_data *data, uint64_t row, size_t to)
{
    size_t first = to * (size_t)zs_data_seq(data);
    return zs_data_read(data, row, 1, r->tokens + first, r->tokens + r->capacity + first,
                        zs_data_has_positions(data) ? r->tokens + 2 * r->capacity + first : NULL);
}

/* A row that counts for nothing. */
static void mask_row(const rank *r, const zs_data *data, size_t to)
{
    size_t seq = (size_t)zs_data_seq(data), first = to * seq;
    for (size_t i = first; i < first + seq; i++) {
        r->tokens[i] = 0;
        r->tokens[r->capacity + i] = ZS_LABEL_NONE;
        r->tokens[2 * r->capacity + i] = (int32_t)(i - first);
    }
}

static zs_status evaluate(rank *r)
{
    const zs_data *data = r->run->eval;
    uint64_t micro = (uint64_t)r->options->micro_batch, rows = zs_data_rows(data);
    double begin = zs_now(), sums[2] = {0, 0}; /* loss, tokens */
    uint64_t span = zs_trace_now();
    for (uint64_t base = 0; base < rows; base += (uint64_t)r->world * micro) {
        double loss;
        for (uint64_t i = 0; i < micro; i++) {
            uint64_t row = base + (uint64_t)r->number * micro + i;
            if (row < rows)
                ZS_CHECK(read_row(r, data, row, i));
            else
                mask_row(r, data, i);
        }
        zs_batch batch = batch_at(r, data, 0, (int)micro);
        ZS_CHECK(zs_model_evaluate(r->model, &batch, &loss));
        sums[0] += loss;
        sums[1] += (double)zs_batch_tokens(&batch);
    }
    ZS_CHECK(zs_comm_all_reduce(r->comm, "evaluation loss", ZS_OP_SUM, sums, 2));
    if (sums[1] == 0)
        return zs_fail(ZS_ERR_ARG, "--eval-data %s has no counted token: all labels are %d",
                       r->options->eval_data, ZS_LABEL_NONE);
    r->evaluated = r->record.step;
    trace_since(r, "evaluation", span);
    if (r->number != 0)
        return ZS_OK;
    printf("eval_loss %.9f  (step %llu, %.0f tokens)\n", sums[0] / sums[1],
           (unsigned long long)r->record.step, sums[1]);
    ZS_CHECK(zs_progress_flush());
    if (!r->run->metrics)
        return ZS_OK;
    return zs_metrics_eval(r->run->metrics, r->record.step, sums[0] / sums[1], (uint64_t)sums[1],
                           zs_now() - begin);
}

/* All rows of this rank's micro-batches of the step; *targets: their counted tokens. */
static zs_status read_step(const rank *r, uint64_t *targets)
{
    const zs_data *data = r->run->data;
    uint64_t micro = (uint64_t)r->options->micro_batch, accum = (uint64_t)r->options->grad_accum;
    uint64_t base = r->record.step * r->record.global_batch;
    for (uint64_t m = 0; m < accum; m++)
        for (uint64_t i = 0; i < micro; i++) {
            uint64_t place =
                base + m * (uint64_t)r->world * micro + (uint64_t)r->number * micro + i;
            uint64_t row =
                zs_data_order(zs_data_rows(data), r->record.shuffle, r->record.seed, place);
            ZS_CHECK(read_row(r, data, row, m * micro + i));
        }
    zs_batch batch = batch_at(r, data, 0, (int)(micro * accum));
    *targets = zs_batch_tokens(&batch);
    return ZS_OK;
}

static zs_status set_rate(rank *r, double *lr)
{
    *lr = r->options->lr * zs_schedule_factor((zs_schedule)r->options->schedule, r->record.updates,
                                              (uint64_t)r->options->warmup, r->run->steps);
    for (int i = 0; i < 2; i++) {
        zs_group_config config = group_config(r, i == 0, *lr);
        ZS_CHECK(zs_group_set(r->engine, r->groups[i], &config));
    }
    return ZS_OK;
}

/* Forward, backward and update; *loss_sum over this rank's rows. */
static zs_status update(rank *r, double targets, double *loss_sum, zs_step_info *info)
{
    int accum = r->options->grad_accum, micro = r->options->micro_batch;
    zs_step_config config;
    zs_step_config_init(&config);
    config.max_norm = r->options->clip;
    for (int m = 0; m < accum; m++) {
        const int last = m == accum - 1;
        uint64_t span = zs_trace_now();
        zs_batch batch = batch_at(r, r->run->data, (size_t)m * (size_t)micro, micro);
        ZS_CHECK(zs_grad_begin(r->engine, last));
        ZS_CHECK(zs_model_train(r->model, &batch, 1 / targets, last ? loss_sum : NULL));
        ZS_CHECK(zs_grad_finish(r->engine));
        trace_since(r, "forward and backward", span);
    }
    return zs_step(r->engine, &config, info);
}

/* One global batch. *stop: a rank was asked to stop, and nothing was done. */
static zs_status take_step(rank *r, zs_step_row *row, int *stop)
{
    zs_step_info info = {.size = sizeof(info)};
    double begin = zs_now(), loss_sum = 0;
    uint64_t targets, span = zs_trace_now();
    ZS_CHECK(read_step(r, &targets));
    trace_since(r, "rows", span);
    double sums[2] = {(double)targets, zs_signals_stop() != 0};
    ZS_CHECK(zs_comm_all_reduce(r->comm, "counted tokens", ZS_OP_SUM, sums, 2));
    *stop = sums[1] > 0;
    if (*stop)
        return ZS_OK;
    memset(row, 0, sizeof(*row));
    ZS_CHECK(set_rate(r, &row->lr));
    if (sums[0] > 0) {
        ZS_CHECK(update(r, sums[0], &loss_sum, &info));
        ZS_CHECK(zs_comm_all_reduce(r->comm, "loss", ZS_OP_SUM, &loss_sum, 1));
        row->loss = loss_sum / sums[0];
        row->grad_norm = info.grad_norm;
    } else {
        row->loss = row->grad_norm = NAN;
    }
    row->skipped = sums[0] == 0 || info.skipped;
    r->record.step++;
    r->record.updates += !row->skipped;
    row->step = r->record.step;
    row->tokens = r->record.global_batch * r->record.seq;
    row->targets = (uint64_t)sums[0];
    row->seconds = zs_now() - begin;
    memcpy(row->tier, info.tier, sizeof(row->tier));
    return ZS_OK;
}

static zs_status report(rank *r, zs_progress *progress, zs_step_row *row)
{
    if (r->number != 0)
        return ZS_OK;
    ZS_CHECK(read_ledger(r));
    row->ledger = r->ledger;
    row->ledger_rows = r->ledger_rows;
    if (r->run->metrics)
        ZS_CHECK(zs_metrics_step(r->run->metrics, row));
    double flops = zs_model_flops(r->model, r->options->micro_batch, zs_data_seq(r->run->data)) *
                   r->options->grad_accum * r->world;
    return zs_progress_step(progress, row, row->targets ? flops : 0);
}

static zs_status train(rank *r, int *stopped)
{
    const zs_options *o = r->options;
    zs_progress progress;
    zs_progress_begin(&progress, r->record.step, r->run->steps);
    while (r->record.step < r->run->steps) {
        zs_step_row row;
        ZS_CHECK(take_step(r, &row, stopped));
        if (*stopped)
            return ZS_OK;
        ZS_CHECK(report(r, &progress, &row));
        if (o->commit_every && row.step % (uint64_t)o->commit_every == 0)
            ZS_CHECK(save_state(r));
        if (o->eval_every && row.step % (uint64_t)o->eval_every == 0)
            ZS_CHECK(evaluate(r));
    }
    return ZS_OK;
}

static zs_status finish(rank *r)
{
    if (r->saved != r->record.step)
        ZS_CHECK(save_state(r));
    if (r->run->eval && r->evaluated != r->record.step)
        ZS_CHECK(evaluate(r));
    ZS_CHECK(zs_weights_save(r->engine, r->comm, r->options->out, r->run->source,
                             (zs_dtype)r->options->dtype, (uint64_t)r->options->max_shard_size,
                             r->weights, r->params, r->weight_count));
    if (r->number != 0)
        return ZS_OK;
    ZS_CHECK(read_ledger(r));
    ZS_CHECK(zs_progress_ledger(r->ledger, r->ledger_rows));
    printf("wrote %s (step %llu)\n", r->options->out, (unsigned long long)r->record.step);
    return zs_progress_flush();
}

static zs_status stop(rank *r)
{
    if (r->saved != r->record.step)
        ZS_CHECK(save_state(r));
    if (r->number != 0)
        return ZS_OK;
    printf("stopped after step %llu of %llu: the state is in %s, --resume goes on\n",
           (unsigned long long)r->record.step, (unsigned long long)r->run->steps,
           r->run->state_dir);
    return zs_progress_flush();
}

static zs_status run_all(rank *r)
{
    int stopped = 0;
    ZS_CHECK(open_rank(r));
    ZS_CHECK(start(r));
    if (r->number == 0 && r->run->metrics)
        ZS_CHECK(zs_metrics_begin(r->run->metrics, r->record.step));
    if (!r->run->data)
        return evaluate(r);
    if (r->number == 0 && r->record.step)
        printf("resumed at step %llu\n", (unsigned long long)r->record.step);
    ZS_CHECK(train(r, &stopped));
    return stopped ? stop(r) : finish(r);
}

zs_status zs_run_rank(const zs_run *run, zs_comm *comm)
{
    rank r = {
        .run = run,
        .options = run->options,
        .comm = comm,
        .number = zs_comm_rank(comm),
        .world = zs_comm_world(comm),
        .record = run->record,
        .saved = never,
        .evaluated = never,
    };
    char message[MESSAGE_BYTES];
    zs_status status = run_all(&r);
    /* Closing may set messages of its own. */
    snprintf(message, sizeof(message), "%s", zs_last_error());
    /* The others may be waiting for this rank. */
    if (status != ZS_OK)
        zs_comm_abort(comm, message);
    close_rank(&r);
    return status == ZS_OK ? ZS_OK : zs_fail(status, "%s", message);
}
