/* SPDX-License-Identifier: Apache-2.0 */
/* A small job on the public API: some units of odd sizes, gradients that depend on rank,
 * micro-batch, step and element, and an AdamW in double to compare with. */
#ifndef ZS_TESTS_ENGINE_HARNESS_H
#define ZS_TESTS_ENGINE_HARNESS_H

#include <stddef.h>
#include <stdint.h>

#include "zspill.h"

typedef struct job_param {
    const char *name;
    int ndim;
    int64_t shape[2];
    zs_dtype dtype;
    int group; /* 0: decay, 1: none */
    int frozen;
    int grad_uses;
    int unit;
} job_param;

enum { JOB_MAX_PARAMS = 16, JOB_MAX_UNITS = 6, JOB_MAX_WORLD = 8, JOB_MAX_STEPS = 64 };

typedef struct job {
    const job_param *params;
    int param_count, unit_count;
    int world;
    int steps, micros;
    double max_norm;
    zs_dtype grad_dtype;     /* also what gradients are handed in as */
    zs_engine_config config; /* state_dir and param_dir are filled in below dir */
    const char *dir;
    const char *device;   /* "cuda": rank r uses cuda:r; NULL: the host */
    double timeout_s;     /* of the communicator; 0: 60 */
    int use_buffer;       /* write into zs_grad_buffer in place of handing over a pointer */
    int commit_at;        /* commit after this many steps; 0: never */
    int stop_at;          /* end after this many steps; 0: at `steps` */
    int use_resume;       /* resume in place of loading */
    uint64_t poison_step; /* gradients are Inf in this step; 0: never */
    /* hook for one rank, after gradients of (step, micro); NULL: none */
    void (*hook)(struct job *job, zs_engine *engine, int rank, int step, int micro);
    void *hook_data;

    /* results */
    zs_status status[JOB_MAX_WORLD];
    char error[JOB_MAX_WORLD][1024];
    float *weights[JOB_MAX_PARAMS]; /* final working copies, fp32; free with job_free */
    float *moments[JOB_MAX_PARAMS]; /* exp_avg then exp_avg_sq */
    float *masters[JOB_MAX_PARAMS]; /* of those that are trained; zeros for others */
    double norms[JOB_MAX_STEPS];
    int skipped[JOB_MAX_STEPS];
    uint64_t resumed_at;
    uint64_t seen; /* hash of all that rank 0's forward saw of the weights */
    zs_memory_row rows[64];
    size_t row_count; /* of rank 0 */

    struct job_gpu *gpu[JOB_MAX_WORLD]; /* while it runs */
} job;

extern const job_param job_small[];
extern const int job_small_count;
enum { JOB_SMALL_UNITS = 4 };

uint64_t job_numel(const job_param *p);
/* An fp32, stage 0 job of the small model in dir. */
void job_init(job *j, const char *dir);
/* Runs the ranks as threads; status[] and results are set. */
void job_run(job *j);
void job_free(job *j);
/* 0 when weights, moments and masters are equal bit by bit; else 1 + a parameter that differs. */
int job_differ(const job *a, const job *b);
/* AdamW in double over the same gradients; weights (rounded to their dtype on the way, as the
 * working copy is) into out[param]. */
void job_reference(const job *j, double **out, double *norms);
/* The local gradient of an element. */
float job_grad(const job *j, int rank, int step, int micro, int param, uint64_t i);
/* v as a dtype holds it. */
float job_round(zs_dtype dtype, float v);
/* Removes everything below dir that tests make. */
void job_clean(const char *dir);
/* A fresh directory under the build's temporary place; remove with job_clean. */
const char *job_temp_dir(void);

#endif
