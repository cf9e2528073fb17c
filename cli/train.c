/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/pool.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/cli.h"
#include "cli/options.h"
#include "cli/outdir.h"
#include "cli/relocate.h"
#include "cli/run.h"
#include "cli/signals.h"

enum { RANKS_MAX = 64, MESSAGE_BYTES = 1024 };

typedef struct job job;

/* A rank of this process, with what became of it. */
typedef struct rank_result {
    job *job;
    zs_comm *comm;
    pthread_t thread;
    zs_status status;
    char message[MESSAGE_BYTES];
} rank_result;

struct job {
    zs_options options;
    zs_run run;
    zs_outdir dirs;
    int out_lock; /* descriptor of --out, locked; -1: none */
    char *state_dir;
    int rank, world; /* of the first rank here; of all */
    int ranks;       /* of this process */
    rank_result results[RANKS_MAX];
};

/* What MPICH's UCX, below it, may use unless the user said. It ends the process when a peer whose
 * memory it copies from (cma) has died; other transports let zspill say so. And MPI_Finalize can
 * wait for ever for a flush over tcp, which nobody needs where all ranks share one host (Hydra
 * tells both numbers). */
static void choose_mpi_transports(void)
{
    const char *here = getenv("MPI_LOCALNRANKS"), *all = getenv("PMI_SIZE");
    setenv("UCX_TLS", here && all && !strcmp(here, all) ? "^cma,tcp" : "^cma", 0);
}

static zs_status open_ranks(job *j)
{
    const zs_options *o = &j->options;
    zs_comm *comms[RANKS_MAX];
    if (o->comm == ZS_TRANSPORT_MPI) {
        choose_mpi_transports();
        ZS_CHECK(zs_comm_open_mpi(o->timeout, &comms[0]));
        j->ranks = 1;
    } else {
        j->ranks = ZS_MAX(o->ranks, 1);
        ZS_CHECK(zs_comm_open_threads(j->ranks, o->timeout, comms));
    }
    for (int i = 0; i < j->ranks; i++)
        j->results[i] = (rank_result){.job = j, .comm = comms[i]};
    j->rank = zs_comm_rank(comms[0]);
    j->world = zs_comm_world(comms[0]);
    if (o->ranks && o->ranks != j->world)
        return zs_fail(ZS_ERR_ARG,
                       "--ranks %d, but MPI started %d: leave --ranks out, or start "
                       "`mpiexec -n %d`",
                       o->ranks, j->world, o->ranks);
    return ZS_OK;
}

static void choose_threads(job *j)
{
    int cpus = zs_cpu_count(), here = zs_comm_local_ranks(j->results[0].comm);
    j->run.threads = j->options.threads;
    if (!j->run.threads)
        j->run.threads = ZS_MIN(ZS_MAX(cpus / here, 1), 64);
    /* Bound threads that share a CPU with another job's would wait for it: bind only where this job
     * takes all. MPI launchers bind by themselves. */
    j->run.bind = j->options.comm == ZS_TRANSPORT_THREADS && j->run.threads * here == cpus;
}

static zs_status load_config(job *j)
{
    zs_run *run = &j->run;
    if (j->options.init) {
        run->source = j->options.init;
        return zs_model_config_load(run->source, &run->config);
    }
    char *path;
    run->source = j->options.model;
    if (asprintf(&path, "%s/config.json", run->source) < 0)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a path");
    zs_status status = zs_model_config_load(path, &run->config);
    free(path);
    return status;
}

static zs_status open_data(job *j, const char *option, const char *path, int seq_len, int text_seq,
                           zs_data **out)
{
    const zs_data_options options = {
        .path = path,
        .option = option,
        .seq_len = seq_len,
        .text_seq = text_seq,
        .vocab = j->run.config.vocab,
        .max_positions = j->run.config.max_positions,
        .scan = j->rank == 0,
    };
    return zs_data_open(&options, out);
}

static zs_status open_training_data(job *j)
{
    const zs_options *o = &j->options;
    zs_run *run = &j->run;
    ZS_CHECK(open_data(j, "--data", o->data, o->seq_len, 0, &run->data));
    ZS_CHECK(zs_record_init(&run->record, o, &run->config, run->data, j->world));
    uint64_t rows = zs_data_rows(run->data), batch = run->record.global_batch;
    if (rows < batch)
        return zs_fail(ZS_ERR_ARG,
                       "--data %s has %llu rows of %d tokens, fewer than the %llu of a step (%d "
                       "ranks x --micro-batch %d x --grad-accum %d): lower one of them",
                       o->data, (unsigned long long)rows, zs_data_seq(run->data),
                       (unsigned long long)batch, j->world, o->micro_batch, o->grad_accum);
    run->steps = (uint64_t)o->steps;
    if (o->steps < 0 && zs_mul_overflow(rows, (uint64_t)o->epochs, &run->steps))
        return zs_fail(ZS_ERR_ARG, "--epochs %lld is too many for %llu rows", (long long)o->epochs,
                       (unsigned long long)rows);
    if (o->steps < 0)
        run->steps /= batch;
    if ((uint64_t)o->warmup > run->steps)
        return zs_fail(ZS_ERR_ARG, "--warmup %lld is longer than the run's %llu steps",
                       (long long)o->warmup, (unsigned long long)run->steps);
    return ZS_OK;
}

static zs_status open_evaluation_data(job *j)
{
    const zs_options *o = &j->options;
    if (!o->eval_data)
        return ZS_OK;
    if (!j->run.data)
        return open_data(j, "--eval-data", o->eval_data, o->seq_len, 0, &j->run.eval);
    /* --seq-len speaks of --data; text is evaluated in rows as long as those trained on. */
    return open_data(j, "--eval-data", o->eval_data, 0, zs_data_seq(j->run.data), &j->run.eval);
}

static int same_file(const char *a, const char *b)
{
    struct stat one, other;
    return !stat(a, &one) && !stat(b, &other) && one.st_dev == other.st_dev &&
           one.st_ino == other.st_ino;
}

/* Writing starts with emptying: what is read must not be named by mistake. */
static zs_status check_output_file(const zs_options *o, const char *option, const char *path)
{
    const struct {
        const char *option, *path;
    } others[] = {
        {"--data", o->data},
        {"--eval-data", o->eval_data},
        {"--init", o->init},
        {"--config", o->config},
        {"--metrics", path == o->metrics ? NULL : o->metrics},
    };
    struct stat info;
    if (!stat(path, &info) && !S_ISREG(info.st_mode))
        return ZS_OK;
    for (size_t i = 0; i < ZS_COUNT(others); i++)
        if (others[i].path && (!strcmp(path, others[i].path) || same_file(path, others[i].path)))
            return zs_fail(ZS_ERR_ARG,
                           "%s %s is %s's file and would be overwritten: choose another", option,
                           path, others[i].option);
    return ZS_OK;
}

/* States have locks of their own; this is for runs whose states are elsewhere. File systems without
 * locks are let pass. */
static zs_status lock_out(job *j)
{
    const char *out = j->options.out;
    j->out_lock = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (j->out_lock >= 0 && flock(j->out_lock, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
        return zs_fail(ZS_ERR_LOCKED,
                       "--out %s is held by another run: end it, or choose another directory", out);
    return ZS_OK;
}

static zs_status check_record(void *cookie, const char *text, size_t bytes)
{
    const job *j = cookie;
    zs_record record;
    return zs_record_unpack(text, bytes, &j->run.record, j->run.steps, &record);
}

static zs_status open_outputs(job *j)
{
    const zs_options *o = &j->options;
    zs_run *run = &j->run;
    if (o->metrics)
        ZS_CHECK(check_output_file(o, "--metrics", o->metrics));
    if (o->trace)
        ZS_CHECK(check_output_file(o, "--trace", o->trace));
    if (run->data) {
        if (o->model && same_file(o->model, o->out))
            return zs_fail(ZS_ERR_ARG,
                           "--out %s is --model's directory: choose another, the run "
                           "reads its model again at a resume",
                           o->out);
        ZS_CHECK(zs_outdir_make(&j->dirs, "--out", o->out));
        if (j->rank == 0)
            ZS_CHECK(lock_out(j));
        if (o->optimizer.dir)
            j->state_dir = strdup(o->optimizer.dir);
        else if (asprintf(&j->state_dir, "%s/state", o->out) < 0)
            j->state_dir = NULL;
        if (!j->state_dir)
            return zs_fail(ZS_ERR_NOMEM, "no memory for a path");
        ZS_CHECK(zs_outdir_make(&j->dirs, o->optimizer.dir ? "--offload-optimizer nvme:" : "--out",
                                j->state_dir));
        run->state_dir = j->state_dir;
        if (o->resume && j->rank == 0)
            ZS_CHECK(zs_state_relocate(o->out, j->state_dir, (uint64_t)o->resume_commit,
                                       check_record, j));
    }
    if (o->params.dir)
        ZS_CHECK(zs_outdir_make(&j->dirs, "--offload-params nvme:", o->params.dir));
    if (o->metrics && j->rank == 0)
        ZS_CHECK(zs_metrics_open(o->metrics, &run->metrics));
    if (o->trace && j->rank == 0)
        ZS_CHECK(zs_trace_open(o->trace, 0, &run->trace));
    return ZS_OK;
}

static zs_status prepare(job *j)
{
    j->run.options = &j->options;
    choose_threads(j);
    ZS_CHECK(load_config(j));
    if (j->options.steps != 0)
        ZS_CHECK(open_training_data(j));
    ZS_CHECK(open_evaluation_data(j));
    return open_outputs(j);
}

static void *run_rank(void *arg)
{
    rank_result *result = arg;
    result->status = zs_run_rank(&result->job->run, result->comm);
    if (result->status != ZS_OK)
        snprintf(result->message, sizeof(result->message), "%s", zs_last_error());
    return NULL;
}

static void run_threads(job *j)
{
    int started = 0;
    for (; started < j->ranks; started++) {
        rank_result *result = &j->results[started];
        int error = pthread_create(&result->thread, NULL, run_rank, result);
        if (!error)
            continue;
        result->status = ZS_ERR_NOMEM;
        snprintf(result->message, sizeof(result->message), "no thread for it: %s", strerror(error));
        zs_comm_abort(result->comm, result->message);
        break;
    }
    for (int i = 0; i < started; i++)
        pthread_join(j->results[i].thread, NULL);
}

/* Ranks that only heard of another's failure have least to say. */
static int weight(zs_status status)
{
    switch (status) {
    case ZS_OK:
        return 0;
    case ZS_ERR_COMM:
    case ZS_ERR_CANCELED:
        return 1;
    case ZS_ERR_TIMEOUT:
        return 2;
    default:
        return 3;
    }
}

static zs_status report(const job *j)
{
    const rank_result *worst = &j->results[0];
    for (int i = 1; i < j->ranks; i++)
        if (weight(j->results[i].status) > weight(worst->status))
            worst = &j->results[i];
    if (worst->status == ZS_OK)
        return ZS_OK;
    if (j->world == 1)
        zs_cli_error("%s", worst->message);
    else
        zs_cli_error("rank %d: %s", zs_comm_rank(worst->comm), worst->message);
    return worst->status;
}

/* MPI processes that prepared well must not wait for one that did not. *first: the lowest rank that
 * failed; world: none did. */
static zs_status agree(const job *j, int failed, int *first)
{
    double lowest = failed ? j->rank : j->world;
    zs_status status = ZS_OK;
    if (j->ranks < j->world)
        status = zs_comm_all_reduce(j->results[0].comm, "preparation", ZS_OP_MIN, &lowest, 1);
    *first = (int)lowest;
    return status;
}

static int train(job *j)
{
    char message[MESSAGE_BYTES];
    int first;
    zs_status status = open_ranks(j);
    if (status != ZS_OK) {
        if (j->rank == 0)
            zs_cli_error("%s", zs_last_error());
        return status == ZS_ERR_ARG ? ZS_EXIT_USAGE : ZS_EXIT_FAILED;
    }
    status = prepare(j);
    snprintf(message, sizeof(message), "%s", zs_last_error());
    if (agree(j, status != ZS_OK, &first) != ZS_OK) {
        zs_cli_error("%s", status == ZS_OK ? zs_last_error() : message);
        return ZS_EXIT_FAILED;
    }
    if (first < j->world) {
        if (first == j->rank)
            zs_cli_error("%s", message);
        return ZS_EXIT_FAILED;
    }
    if (j->options.comm == ZS_TRANSPORT_MPI)
        run_rank(&j->results[0]); /* MPI_THREAD_FUNNELED: on the thread that opened it */
    else
        run_threads(j);
    return report(j) == ZS_OK ? ZS_EXIT_OK : ZS_EXIT_FAILED;
}

static int close_job(job *j, int code)
{
    if (zs_trace_close(&j->run.trace) != ZS_OK) {
        zs_cli_error("%s", zs_last_error());
        code = ZS_EXIT_FAILED;
    }
    zs_metrics_close(&j->run.metrics);
    zs_data_close(&j->run.data);
    zs_data_close(&j->run.eval);
    if (j->out_lock >= 0)
        close(j->out_lock);
    for (int i = 0; i < j->ranks; i++)
        zs_comm_close(&j->results[i].comm);
    if (code != ZS_EXIT_OK)
        zs_outdir_remove(&j->dirs);
    zs_outdir_free(&j->dirs);
    free(j->state_dir);
    zs_options_free(&j->options);
    return code;
}

int zs_cli_train(int argc, char **argv)
{
    job *j = calloc(1, sizeof(*j));
    if (!j) {
        zs_cli_error("no memory");
        return ZS_EXIT_FAILED;
    }
    int code = ZS_EXIT_OK;
    j->out_lock = -1;
    const zs_status parsed = zs_options_parse(argc, argv, &j->options);
    if (parsed != ZS_OK) {
        zs_cli_error("%s", zs_last_error());
        code = parsed == ZS_ERR_NOMEM ? ZS_EXIT_FAILED : ZS_EXIT_USAGE;
    } else if (j->options.help) {
        zs_options_help(stdout);
        code = close_job(j, ZS_EXIT_OK);
    } else {
        zs_signals_install();
        code = close_job(j, train(j));
    }
    free(j);
    return code;
}
