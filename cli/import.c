/* SPDX-License-Identifier: Apache-2.0 */
/* zspill import: a run's state, in a shape of choice, from the states that export wrote. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/pool.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/arguments.h"
#include "cli/cli.h"
#include "cli/outdir.h"
#include "cli/states_file.h"
#include "model/model.h"

enum { RANKS_MAX = 64, PIECE_ELEMENTS = 1 << 20, MESSAGE_BYTES = 1024, WAIT_SECONDS = 600 };

typedef struct import {
    const char *states, *model, *dir;
    int ranks, stage, slots;
    zs_dtype dtype;
    zs_model_config config;
    zs_weight *weights;
    size_t count;
    zs_outdir dirs;
    zs_states_file file; /* only read once the ranks run */
} import;

typedef struct importer {
    const import *job;
    zs_comm *comm;
    pthread_t thread;
    zs_pool *pool;
    zs_engine *engine;
    zs_model *model;
    float *piece;
    zs_status status;
    char message[MESSAGE_BYTES];
} importer;

static zs_status open_engine(importer *r)
{
    const import *job = r->job;
    zs_engine_config config;
    zs_group_config group;
    zs_model_options options = {.rows = 1, .seq = 2, .dtype = job->dtype};
    ZS_CHECK(zs_pool_open(1, -1, &r->pool));
    zs_engine_config_init(&config);
    config.zero_stage = job->stage;
    config.optimizer_tier = ZS_TIER_NVME;
    config.state_dir = job->dir;
    config.slots = job->slots;
    config.pool = r->pool;
    config.fingerprint = job->file.fingerprint;
    ZS_CHECK(zs_engine_open(&config, r->comm, &r->engine));
    /* Hyper-parameters are no state: every run brings its own. */
    zs_group_config_init(&group);
    ZS_CHECK(zs_group_add(r->engine, &group, &options.decay));
    options.no_decay = options.decay;
    ZS_CHECK(zs_model_open(&job->config, &options, r->engine, r->pool, &r->model));
    return zs_engine_commit(r->engine);
}

static zs_status load_weight(importer *r, size_t i, zs_param param)
{
    const zs_states_file *file = &r->job->file;
    uint64_t first, left;
    ZS_CHECK(zs_param_local(r->engine, param, &first, &left));
    while (left) {
        const uint64_t n = ZS_MIN(left, (uint64_t)PIECE_ELEMENTS);
        ZS_CHECK(zs_states_file_read(file, i, ZS_MASTER, first, n, r->piece));
        ZS_CHECK(zs_param_write(r->engine, param, first, n, ZS_FP32, r->piece));
        for (zs_array a = ZS_EXP_AVG; a <= ZS_EXP_AVG_SQ; a++) {
            ZS_CHECK(zs_states_file_read(file, i, a, first, n, r->piece));
            ZS_CHECK(zs_param_write_moment(r->engine, param, a, first, n, r->piece));
        }
        first += n;
        left -= n;
    }
    return zs_param_set_steps(r->engine, param, file->header.steps[i]);
}

static zs_status import_rank(importer *r)
{
    const zs_weight *weights;
    const zs_param *params;
    size_t count;
    ZS_CHECK(open_engine(r));
    r->piece = malloc(PIECE_ELEMENTS * sizeof *r->piece);
    if (!r->piece)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a buffer of %d elements", PIECE_ELEMENTS);
    zs_model_params(r->model, &weights, &params, &count);
    for (size_t i = 0; i < count; i++)
        ZS_CHECK(load_weight(r, i, params[i]));
    ZS_CHECK(zs_params_publish(r->engine));
    return zs_state_commit(r->engine, r->job->file.header.user, r->job->file.header.user_bytes);
}

static void *run_rank(void *arg)
{
    importer *r = arg;
    r->status = import_rank(r);
    snprintf(r->message, sizeof r->message, "%s", zs_last_error());
    if (r->status != ZS_OK)
        zs_comm_abort(r->comm, r->message);
    free(r->piece);
    zs_model_close(&r->model);
    zs_engine_close(&r->engine);
    zs_pool_close(&r->pool);
    return NULL;
}

/* A rank that only heard of another's failure has least to say. */
static zs_status worst(const importer *ranks, int count)
{
    const importer *found = &ranks[0];
    for (int i = 1; i < count; i++)
        if (found->status == ZS_OK || (found->status == ZS_ERR_COMM && ranks[i].status != ZS_OK))
            found = &ranks[i];
    return found->status == ZS_OK ? ZS_OK : zs_fail(found->status, "%s", found->message);
}

static zs_status run_all(const import *job)
{
    zs_comm *comms[RANKS_MAX];
    importer *ranks = calloc((size_t)job->ranks, sizeof *ranks);
    int started = 0;
    if (!ranks)
        return zs_fail(ZS_ERR_NOMEM, "no memory for %d ranks", job->ranks);
    zs_status status = zs_comm_open_threads(job->ranks, WAIT_SECONDS, comms);
    if (status != ZS_OK) {
        free(ranks);
        return status;
    }
    for (; started < job->ranks; started++) {
        ranks[started].job = job;
        ranks[started].comm = comms[started];
        if (pthread_create(&ranks[started].thread, NULL, run_rank, &ranks[started]))
            break;
    }
    if (started < job->ranks)
        zs_comm_abort(comms[0], "a thread could not be started");
    for (int i = 0; i < started; i++)
        pthread_join(ranks[i].thread, NULL);
    status = started < job->ranks ? zs_fail(ZS_ERR_NOMEM, "only %d of %d threads could be started",
                                            started, job->ranks)
                                  : worst(ranks, started);
    for (int i = 0; i < job->ranks; i++)
        zs_comm_close(&comms[i]);
    free(ranks);
    return status;
}

static zs_status run(import *job)
{
    ZS_CHECK(zs_model_config_find(job->model, &job->config));
    ZS_CHECK(zs_model_weights(&job->config, &job->weights, &job->count));
    job->file.weights = job->weights;
    job->file.count = job->count;
    job->file.header.param_count = job->count;
    job->file.header.steps = calloc(job->count + 1, sizeof *job->file.header.steps);
    if (!job->file.header.steps)
        return zs_fail(ZS_ERR_NOMEM, "no memory for %zu step counts", job->count);
    ZS_CHECK(zs_states_file_open(&job->file, job->states));
    ZS_CHECK(zs_outdir_make(&job->dirs, "--state", job->dir));
    ZS_CHECK(run_all(job));
    printf("wrote %s (step %llu, %d rank(s), stage %d): `zspill train --resume` goes on from it\n",
           job->dir, (unsigned long long)job->file.header.step, job->ranks, job->stage);
    return ZS_OK;
}

int zs_cli_import(int argc, char **argv)
{
    static const char usage[] =
        "usage: zspill import FILE --model SOURCE --state DIR [--ranks N] [--zero-stage S]\n"
        "                     [--dtype fp32|bf16] [--slots 1|2]\n"
        "  FILE           what `zspill export --states FILE` wrote\n"
        "  --model        the model's directory, or config.json\n"
        "  --state        directory to make the run's state in: OUT/state for `zspill train --out "
        "OUT`,\n"
        "                 or DIR for its --offload-optimizer nvme:DIR\n"
        "  --ranks, --zero-stage, --dtype, --slots\n"
        "                 the shape that it is laid out for (default: 1, 0, fp32, 2); a resume in "
        "another\n"
        "                 one changes it\n";
    const char *ranks = NULL, *stage = NULL, *dtype = NULL, *slots = NULL;
import job = {0 };
    const zs_argument arguments[] = {{"", &job.states}, {"model", &job.model},  {"state", &job.dir},
                                     {"ranks", &ranks}, {"zero-stage", &stage}, {"dtype", &dtype},
                                     {"slots", &slots}};
    int code = zs_arguments_parse(argc, argv, usage, arguments, ZS_COUNT(arguments));
    if (code >= 0)
        return code;
    if (!job.states || !job.model || !job.dir) {
        fputs(usage, stderr);
        return ZS_EXIT_USAGE;
    }
    job.ranks = (int)zs_arguments_number("ranks", ranks, 1, RANKS_MAX, 1);
    job.stage = (int)zs_arguments_number("zero-stage", stage, 0, 3, 0);
    job.slots = (int)zs_arguments_number("slots", slots, 1, 2, 2);
    const int word = zs_arguments_word("dtype", dtype, "fp32|bf16", 0);
    if (job.ranks < 0 || job.stage < 0 || job.slots < 0 || word < 0)
        return ZS_EXIT_USAGE;
    job.dtype = (zs_dtype)word;
    code = ZS_EXIT_OK;
    if (run(&job) != ZS_OK) {
        zs_cli_error("%s", zs_last_error());
        code = ZS_EXIT_FAILED;
        zs_outdir_remove(&job.dirs);
    }
    zs_outdir_free(&job.dirs);
    zs_states_file_discard(&job.file);
    free(job.file.header.steps);
    free(job.weights);
    return code;
}
