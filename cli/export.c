/* SPDX-License-Identifier: Apache-2.0 */
/* zspill export: a Hugging Face directory, and the states by parameter, from a run's committed
 * state, whatever shape that has. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/arguments.h"
#include "cli/cli.h"
#include "cli/states_file.h"
#include "kernels/kernels.h"
#include "model/config.h"
#include "model/weights.h"
#include "zero/header.h"
#include "zero/manifest.h"
#include "zero/saved.h"

enum { PIECE_ELEMENTS = 1 << 20 };

typedef struct export
{
    const char *dir, *model, *out, *states;
    uint64_t commit; /* 0: the newest */
    zs_dtype dtype;
    zs_manifest *manifest;
    zs_saved *saved;
    zs_weight *weights;
    zs_saved_param *params; /* of each weight */
    size_t count;
    zs_header header;
    float *piece; /* PIECE_ELEMENTS */
    zs_log log;
}
export;

static void log_warning(void *cookie, zs_log_level level, const char *text)
{
    (void)cookie;
    (void)level;
    zs_cli_error("%s", text);
}

static zs_status open_state(export *x, const char *dtype)
{
    ZS_CHECK(zs_manifest_load(x->dir, &x->manifest));
    if (!x->manifest)
        return zs_fail(ZS_ERR_ARG,
                       "'%s' holds no state: there is no zspill.manifest in it (a run keeps its "
                       "state in OUT/state, or in the directory of --offload-optimizer nvme:)",
                       x->dir);
    x->dtype = x->manifest->flat_count ? x->manifest->flats[0].dtype : ZS_FP32;
    if (dtype)
        x->dtype = !strcmp(dtype, "bf16") ? ZS_BF16 : ZS_FP32;
    return zs_saved_open(x->dir, x->manifest, 1, &x->log, x->commit, &x->saved);
}

static zs_status find_weights(export *x)
{
    zs_model_config config;
    const void *data;
    size_t bytes;
    ZS_CHECK(zs_model_config_find(x->model, &config));
    ZS_CHECK(zs_model_weights(&config, &x->weights, &x->count));
    x->params = calloc(x->count + 1, sizeof *x->params);
    x->header.steps = calloc(x->count + 1, sizeof *x->header.steps);
    x->header.param_count = x->count;
    x->piece = malloc(PIECE_ELEMENTS * sizeof *x->piece);
    if (!x->params || !x->header.steps || !x->piece)
        return zs_fail(ZS_ERR_NOMEM, "no memory to export %zu weights", x->count);
    for (size_t i = 0; i < x->count; i++)
        ZS_CHECK(zs_saved_find(x->saved, x->weights[i].name, zs_weight_numel(&x->weights[i]),
                               &x->params[i]));
    ZS_CHECK(zs_saved_header(x->saved, &data, &bytes));
    /* It is gone with the next read: what is needed of it is copied. */
    ZS_CHECK(zs_header_decode(data, bytes, &x->header));
    void *user = malloc(x->header.user_bytes + 1);
    if (!user)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the run's record");
    memcpy(user, x->header.user, x->header.user_bytes);
    ((char *)user)[x->header.user_bytes] = '\0';
    x->header.user = user;
    return ZS_OK;
}

/* ---- the model ---- */

static zs_status whole_range(void *cookie, size_t i, uint64_t *first, uint64_t *count)
{
    const export *x = cookie;
    *first = 0;
    *count = zs_weight_numel(&x->weights[i]);
    return ZS_OK;
}

/* What training keeps as working copy is the master rounded once: the same here. */
static zs_status read_weight(void *cookie, size_t i, uint64_t first, uint64_t count, zs_dtype dtype,
                             void *dst)
{
    const export *x = cookie;
    const zs_kernels *kernels = zs_kernels_get();
    char *to = dst;
    while (count) {
        const uint64_t n = ZS_MIN(count, (uint64_t)PIECE_ELEMENTS);
        ZS_CHECK(zs_saved_read(x->saved, x->params[i], ZS_MASTER, first, n, x->piece));
        kernels->cast[dtype][ZS_FP32]((size_t)n, to, x->piece);
        to += n * zs_dtype_size(dtype);
        first += n;
        count -= n;
    }
    return ZS_OK;
}

static zs_status write_model(export *x)
{
    zs_comm *comm;
    const zs_weights_source values = {x, whole_range, read_weight};
    ZS_CHECK(zs_comm_open_self(&comm));
    const zs_status status =
        zs_weights_save_from(&values, comm, x->out, x->model, x->dtype, 0, x->weights, x->count);
    zs_comm_close(&comm);
    if (status == ZS_OK)
        printf("wrote %s (step %llu, %s)\n", x->out, (unsigned long long)x->header.step,
               zs_dtype_name(x->dtype));
    return status;
}

/* ---- the states ---- */

static zs_status write_states(export *x)
{
    zs_status status;
    zs_states_file file = {.weights = x->weights,
                           .count = x->count,
                           .header = x->header,
                           .fingerprint = x->manifest->fingerprint};
    ZS_CHECK(zs_states_file_create(&file, x->states));
    for (size_t i = 0; i < x->count; i++) {
        uint64_t left = zs_weight_numel(&x->weights[i]);
        for (uint64_t first = 0; left;) {
            const uint64_t n = zs_saved_span(x->saved, x->params[i], first,
                                             ZS_MIN(left, (uint64_t)PIECE_ELEMENTS));
            for (zs_array a = ZS_MASTER; a <= ZS_EXP_AVG_SQ; a++) {
                ZS_TRY(zs_saved_read(x->saved, x->params[i], a, first, n, x->piece));
                ZS_TRY(zs_states_file_write(&file, i, a, first, n, x->piece));
            }
            first += n;
            left -= n;
        }
    }
    ZS_TRY(zs_states_file_finish(&file));
    printf("wrote %s (states of step %llu)\n", x->states, (unsigned long long)x->header.step);
    return ZS_OK;
fail:
    zs_states_file_discard(&file);
    return status;
}

static zs_status run(export *x, const char *dtype)
{
    ZS_CHECK(open_state(x, dtype));
    ZS_CHECK(find_weights(x));
    if (x->out)
        ZS_CHECK(write_model(x));
    return x->states ? write_states(x) : ZS_OK;
}

int zs_cli_export(int argc, char **argv)
{
    static const char usage[] =
        "usage: zspill export STATE --model SOURCE --out DIR [--dtype fp32|bf16] [--states FILE]\n"
        "                     [--commit N]\n"
        "  STATE          the directory of a run's state (also --state STATE): OUT/state, or that "
        "of\n"
        "                 --offload-optimizer nvme:\n"
        "  --model        the model the run started from: its directory (whose tokenizer is "
        "copied) "
        "or\n"
        "                 config.json\n"
        "  --out          Hugging Face directory to write\n"
        "  --dtype        of the weights there (default: that of the run)\n"
        "  --states       safetensors file to write NAME.master, NAME.exp_avg and NAME.exp_avg_sq "
        "to,\n"
        "                 in fp32; `zspill import` reads it back\n"
        "  --commit       one of those that `zspill inspect STATE` lists (default: the newest)\n"
        "Reads what was committed, by any number of ranks; changes nothing in STATE.\n";
    const char *dtype = NULL, *state = NULL, *commit = NULL;
    export x = {.log = {.fn = log_warning, .level = ZS_LOG_ERROR}};
    const zs_argument arguments[] = {{"", &x.dir},       {"state", &state}, {"model", &x.model},
                                     {"out", &x.out},    {"dtype", &dtype}, {"states", &x.states},
                                     {"commit", &commit}};
    int code = zs_arguments_parse(argc, argv, usage, arguments, ZS_COUNT(arguments));
    if (code >= 0)
        return code;
    if (!x.dir)
        x.dir = state;
    if (!x.dir || !x.model || (!x.out && !x.states)) {
        fputs(usage, stderr);
        return ZS_EXIT_USAGE;
    }
    const long long number = zs_arguments_number("commit", commit, 1, INT64_MAX, 0);
    if (number < 0 || zs_arguments_word("dtype", dtype, "fp32|bf16", 0) < 0)
        return ZS_EXIT_USAGE;
    x.commit = (uint64_t)number;
    code = ZS_EXIT_OK;
    if (run(&x, dtype) != ZS_OK) {
        zs_cli_error("%s", zs_last_error());
        code = ZS_EXIT_FAILED;
    }
    zs_saved_close(&x.saved);
    zs_manifest_free(&x.manifest);
    free((void *)x.header.user);
    free(x.header.steps);
    free(x.weights);
    free(x.params);
    free(x.piece);
    return code;
}
