/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/options.h"

#include <ctype.h>
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/cli.h"
#include "model/json.h"

typedef enum kind { FLAG, INT, COUNT, BYTES, REAL, CHOICE, PATH, PLACE, COMMITS } kind;

typedef struct option {
    const char *name;
    kind kind;
    size_t offset;
    const char *initial; /* default, as it would be typed; NULL: none */
    double min, max;     /* of INT, COUNT, BYTES, REAL */
    int open;            /* REAL: max itself is out of range */
    const char *words;   /* CHOICE: "a|b|c"; others: what --help shows for the value */
    const char *help;
    const char *section; /* starts one in --help */
} option;

enum { CONFIG_BYTES_MAX = 1 << 20 };

#define AT(field) offsetof(zs_options, field)
#define COUNT_MAX 9007199254740992.0 /* 2^53: also exact in JSON */

static const option table[] = {
    {"model", PATH, AT(model), NULL, .words = "DIR", .section = "What and where",
     .help = "Hugging Face model directory to start from"},
    {"init", PATH, AT(init), NULL, .words = "CONFIG",
     .help = "start from random weights for this config.json"},
    {"data", PATH, AT(data), NULL, .words = "FILE",
     .help = "token file (safetensors: input_ids, labels, position_ids) or text, taken as bytes"},
    {"out", PATH, AT(out), NULL, .words = "DIR",
     .help = "model directory to write; holds the run's state too, unless that is on nvme:DIR"},
    {"ranks", INT, AT(ranks), NULL, 1, 64, .words = "N",
     .help = "data-parallel ranks (default: 1; with --comm mpi: all of the job)"},
    {"comm", CHOICE, AT(comm), "threads", .words = "threads|mpi", .help = "what ranks are"},
    {"device", CHOICE, AT(device), "cpu", .words = "cpu|cuda",
     .help = "where the model, device memory and its states are; cuda: rank r of a machine takes "
             "GPU r"},
    {"threads", INT, AT(threads), "0", 0, 64, .words = "N",
     .help = "threads of each rank; 0: allowed CPUs / ranks here"},
    {"zero-stage", INT, AT(zero_stage), "0", 0, 3, .words = "0..3",
     .help = "1 shards optimizer states, 2 gradients too, 3 parameters too"},
    {"offload-optimizer", PLACE, AT(optimizer), "none", .words = "none|host|nvme:DIR",
     .help = "where optimizer states live"},
    {"offload-params", PLACE, AT(params), "none", .words = "none|host|nvme:DIR",
     .help = "where parameter shards live between uses (stage 3)"},
    {"adam", CHOICE, AT(adam), "auto", .words = "auto|device|host|zero-copy",
     .help = "where Adam runs over offloaded states of a GPU's parameters; the bits are the same"},
    {"io-engine", CHOICE, AT(io_engine), "auto",
     .words = "auto|io_uring|posix|libaio|io_uring_plain",
     .help = "how files of states and parameters are read and written"},
    {"buffer-bytes", BYTES, AT(buffer_bytes), "0", 0, COUNT_MAX, .words = "BYTES",
     .help = "memory each rank streams states through (64MiB and such); 0: chosen"},
    {"max-live-params", COUNT, AT(max_live_params), "0", 0, COUNT_MAX, .words = "N",
     .help = "stage 3: gathered elements kept at once; 0: the two largest units"},
    {"max-shard-size", BYTES, AT(max_shard_size), "0", 0, COUNT_MAX, .words = "BYTES",
     .help = "weights above this are written as several files with an index; 0: 5 GB"},
    {"timeout", REAL, AT(timeout), "600", 0.001, 1e9, .words = "SECONDS",
     .help = "how long a rank waits for another"},

    {"dtype", CHOICE, AT(dtype), "fp32", .words = "fp32|bf16", .section = "How",
     .help = "working weights, and the weights written to --out"},
    {"grad-dtype", CHOICE, AT(grad_dtype), "fp32", .words = "fp32|bf16",
     .help = "in which gradients are reduced and accumulated"},
    {"reduce", CHOICE, AT(reduce), "micro", .words = "micro|boundary",
     .help = "sum gradients over ranks each micro-batch, or once a step (stages 0 and 1)"},
    {"seq-len", INT, AT(seq_len), "0", 0, 1 << 24, .words = "N",
     .help = "tokens of a row; 0: a token file's own, for text 512 or the model's positions"},
    {"micro-batch", INT, AT(micro_batch), "1", 1, 1 << 16, .words = "N",
     .help = "rows that a rank takes through the model at once"},
    {"grad-accum", INT, AT(grad_accum), "1", 1, 1 << 16, .words = "N",
     .help = "micro-batches of a step"},
    {"steps", COUNT, AT(steps), NULL, 0, COUNT_MAX, .words = "N",
     .help =
         "steps in all, those before a resume included; 0: evaluate --eval-data, write nothing"},
    {"epochs", COUNT, AT(epochs), NULL, 1, 1e6, .words = "N",
     .help =
         "in place of --steps: as many whole steps as N passes over the data hold (default: 1)"},
    {"lr", REAL, AT(lr), "5e-5", 0, 1e6, .words = "X", .help = "highest learning rate"},
    {"beta1", REAL, AT(beta1), "0.9", 0, 1, 1, .words = "X", .help = "AdamW"},
    {"beta2", REAL, AT(beta2), "0.999", 0, 1, 1, .words = "X", .help = "AdamW"},
    {"eps", REAL, AT(eps), "1e-8", 0, 1, .words = "X", .help = "AdamW"},
    {"weight-decay", REAL, AT(weight_decay), "0.01", 0, 1e6, .words = "X",
     .help = "AdamW, of parameters of two or more dimensions"},
    {"clip", REAL, AT(clip), "1", 0, 1e30, .words = "X",
     .help = "clip gradients to this norm; 0: do not"},
    {"schedule", CHOICE, AT(schedule), "constant", .words = "constant|linear|cosine",
     .help = "of the learning rate, as transformers' get_*_schedule_with_warmup"},
    {"warmup", COUNT, AT(warmup), "0", 0, COUNT_MAX, .words = "N",
     .help = "steps over which the learning rate rises from 0"},
    {"seed", COUNT, AT(seed), "0", 0, COUNT_MAX, .words = "N",
     .help = "of --init and of the order of rows"},
    {"shuffle", CHOICE, AT(shuffle), "on", .words = "off|on",
     .help = "another order of rows in each epoch; off: file order"},
    {"checkpointing", CHOICE, AT(checkpointing), "on", .words = "off|on",
     .help = "recompute activations of each block in backward"},

    {"eval-data", PATH, AT(eval_data), NULL, .words = "FILE", .section = "Around it",
     .help = "data for the evaluation loss, at the end and each --eval-every steps"},
    {"eval-every", COUNT, AT(eval_every), "0", 0, COUNT_MAX, .words = "N",
     .help = "steps between evaluations; 0: at the end only"},
    {"durability", COMMITS, AT(commit_every), NULL, 1, COUNT_MAX, .words = "step|every=N|exit",
     .help =
         "when the state is made durable: after each step, each N steps, or only at the end and "
         "when\n      stopped, as the others do too (default: step with --offload-optimizer "
         "nvme:DIR, else exit)"},
    {"slots", INT, AT(slots), "2", 1, 2, .words = "1|2",
     .help = "copies of the state on disk; 1: half the space, for --durability exit: being killed "
             "in\n      mid-run leaves none"},
    {"keep", INT, AT(keep), NULL, 0, ZS_KEEP_MOST, .words = "N",
     .help =
         "older commits that stay on disk beside the newest, for --resume-commit; each takes as "
         "much\n      as the state (default: as many as the state has that is resumed, else 0)"},
    {"save-every", COUNT, AT(save_every), NULL, 0, COUNT_MAX, .words = "N",
     .help = "the same as --durability every=N; 0: exit"},
    {"config", PATH, AT(config), NULL, .words = "FILE",
     .help = "JSON object of these options; the command line wins"},
    {"metrics", PATH, AT(metrics), NULL, .words = "FILE.jsonl",
     .help = "one JSON object for each step and evaluation"},
    {"trace", PATH, AT(trace), NULL, .words = "FILE.json", .help = "trace for ui.perfetto.dev"},
    {"resume", FLAG, AT(resume), NULL,
     .help = "go on from the state of this run; start afresh where there is none"},
    {"resume-commit", COUNT, AT(resume_commit), NULL, 1, COUNT_MAX, .words = "N",
     .help = "with --resume: go back to this commit of those that `zspill inspect` lists"},
    {"log-level", CHOICE, AT(log_level), "warn", .words = "error|warn|info|debug",
     .help = "what the library says on standard error"},
    {"help", FLAG, AT(help), NULL, .help = "show this"},
};

/* Who set each option: command line beats file. */
typedef enum source { UNSET = 0, FROM_FILE, FROM_LINE } source;

typedef struct parser {
    zs_options *options;
    source from[ZS_COUNT(table)];
} parser;

static void *field(zs_options *options, const option *o)
{
    return (char *)options + o->offset;
}

static int same_name(const char *typed, const char *name)
{
    for (; *typed && *name; typed++, name++)
        if (*typed != *name && !(*typed == '_' && *name == '-'))
            return 0;
    return *typed == *name;
}

static const option *find(const char *name)
{
    for (size_t i = 0; i < ZS_COUNT(table); i++)
        if (same_name(name, table[i].name))
            return &table[i];
    return NULL;
}

static zs_status fail_unknown(const char *before, const char *name)
{
    const char *names[ZS_COUNT(table)];
    for (size_t i = 0; i < ZS_COUNT(table); i++)
        names[i] = table[i].name;
    const char *near = zs_cli_nearest(name, names, ZS_COUNT(names));
    if (near)
        return zs_fail(ZS_ERR_ARG, "unknown option '%s%s': did you mean '%s%s'?", before, name,
                       before, near);
    return zs_fail(ZS_ERR_ARG, "unknown option '%s%s': `zspill train --help` lists them", before,
                   name);
}

static zs_status fail_range(const option *o, const char *text)
{
    if (o->kind == REAL)
        return zs_fail(ZS_ERR_ARG, "--%s %s is out of range: %g to %g%s", o->name, text, o->min,
                       o->max, o->open ? " (exclusive)" : "");
    return zs_fail(ZS_ERR_ARG, "--%s %s is out of range: %.0f to %.0f", o->name, text, o->min,
                   o->max);
}

static zs_status parse_real(const option *o, const char *text, double *out)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || isspace((unsigned char)*text))
        return zs_fail(ZS_ERR_ARG, "--%s '%s' is not a number", o->name, text);
    if (!(value >= o->min && value <= o->max) || (o->open && value >= o->max))
        return fail_range(o, text);
    *out = value;
    return ZS_OK;
}

static zs_status parse_integer(const option *o, const char *text, int64_t *out)
{
    static const struct {
        const char *suffix;
        int shift;
    } units[] = {{"", 0},   {"K", 10},   {"KiB", 10}, {"M", 20},  {"MiB", 20},
                 {"G", 30}, {"GiB", 30}, {"T", 40},   {"TiB", 40}};
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    size_t unit = 0;
    while (o->kind == BYTES && unit < ZS_COUNT(units) - 1 && strcmp(end, units[unit].suffix))
        unit++;
    if (end == text || strcmp(end, units[unit].suffix) || isspace((unsigned char)*text))
        return zs_fail(ZS_ERR_ARG, "--%s '%s' is not a whole number%s", o->name, text,
                       o->kind == BYTES ? " of bytes (with K, M, G, T or KiB and so on)" : "");
    double scaled = ldexp((double)value, units[unit].shift);
    if (errno == ERANGE || !(scaled >= o->min && scaled <= o->max))
        return fail_range(o, text);
    *out = (int64_t)value << units[unit].shift;
    return ZS_OK;
}

static zs_status parse_choice(const option *o, const char *text, int *out)
{
    size_t length = strlen(text);
    const char *word = o->words;
    for (int i = 0;; i++) {
        size_t n = strcspn(word, "|");
        if (n == length && !strncmp(word, text, n)) {
            *out = i;
            return ZS_OK;
        }
        if (!word[n])
            return zs_fail(ZS_ERR_ARG, "--%s '%s' is none of %s", o->name, text, o->words);
        word += n + 1;
    }
}

static zs_status replace_text(char **out, const char *text)
{
    char *copy = strdup(text);
    if (!copy)
        return zs_fail(ZS_ERR_NOMEM, "no memory for an option's text");
    free(*out);
    *out = copy;
    return ZS_OK;
}

static zs_status parse_place(const option *o, const char *text, zs_place *out)
{
    if (!strncmp(text, "nvme:", 5) && text[5]) {
        out->tier = ZS_TIER_NVME;
        return replace_text(&out->dir, text + 5);
    }
    if (!strncmp(text, "nvme", 4))
        return zs_fail(ZS_ERR_ARG, "--%s '%s' names no directory: write nvme:DIR", o->name, text);
    if (strcmp(text, "none") && strcmp(text, "host"))
        return zs_fail(ZS_ERR_ARG, "--%s '%s' is none of %s", o->name, text, o->words);
    free(out->dir);
    out->dir = NULL;
    out->tier = !strcmp(text, "host") ? ZS_TIER_HOST : ZS_TIER_DEVICE;
    return ZS_OK;
}

static zs_status parse_commits(const option *o, const char *text, int64_t *out)
{
    static const char every[] = "every=";
    if (!strcmp(text, "step") || !strcmp(text, "exit")) {
        *out = !strcmp(text, "step");
        return ZS_OK;
    }
    if (strncmp(text, every, sizeof(every) - 1))
        return zs_fail(ZS_ERR_ARG, "--%s '%s' is none of %s", o->name, text, o->words);
    return parse_integer(o, text + sizeof(every) - 1, out);
}

static zs_status set(zs_options *options, const option *o, const char *text)
{
    void *to = field(options, o);
    int64_t value;
    switch (o->kind) {
    case FLAG:
        if (strcmp(text, "true") && strcmp(text, "false"))
            return zs_fail(ZS_ERR_ARG, "--%s is true or false, not '%s'", o->name, text);
        *(int *)to = !strcmp(text, "true");
        return ZS_OK;
    case INT:
        ZS_CHECK(parse_integer(o, text, &value));
        *(int *)to = (int)value;
        return ZS_OK;
    case COUNT:
    case BYTES:
        return parse_integer(o, text, to);
    case REAL:
        return parse_real(o, text, to);
    case CHOICE:
        return parse_choice(o, text, to);
    case PATH:
        if (!*text)
            return zs_fail(ZS_ERR_ARG, "--%s is empty: give a path", o->name);
        return replace_text(to, text);
    case PLACE:
        return parse_place(o, text, to);
    case COMMITS:
        return parse_commits(o, text, to);
    }
    return zs_fail(ZS_ERR_INTERNAL, "option %s has no kind", o->name);
}

static zs_status set_once(parser *p, const option *o, const char *text, source from)
{
    size_t i = (size_t)(o - table);
    if (p->from[i] > from)
        return ZS_OK;
    p->from[i] = from;
    return set(p->options, o, text);
}

static zs_status parse_line(parser *p, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        char name[64];
        const char *word = argv[i];
        if (!strcmp(word, "-h"))
            word = "--help";
        if (strncmp(word, "--", 2) || !word[2])
            return zs_fail(ZS_ERR_ARG, "argument '%s' is not an option: options start with --",
                           argv[i]);
        const char *equals = strchr(word, '=');
        size_t length = equals ? (size_t)(equals - word - 2) : strlen(word + 2);
        snprintf(name, sizeof(name), "%.*s", (int)ZS_MIN(length, sizeof(name) - 1), word + 2);
        const option *o = find(name);
        if (!o)
            return fail_unknown("--", name);
        const char *text = equals ? equals + 1 : NULL;
        if (o->kind == FLAG && !text)
            text = "true";
        else if (!text && ++i < argc)
            text = argv[i];
        if (!text)
            return zs_fail(ZS_ERR_ARG, "--%s needs a value: %s", o->name, o->words);
        ZS_CHECK(set_once(p, o, text, FROM_LINE));
    }
    return ZS_OK;
}

static zs_status set_from_json(parser *p, const char *key, const json_t *value)
{
    char text[32];
    const option *o = find(key);
    if (!o)
        return fail_unknown("", key);
    if (o->offset == AT(config) || o->offset == AT(help))
        return zs_fail(ZS_ERR_ARG, "'%s' belongs on the command line", key);
    if (p->from[o - table] == FROM_FILE)
        return zs_fail(ZS_ERR_ARG, "'%s' is there twice, with dash and underscore", key);
    switch (json_typeof(value)) {
    case JSON_STRING:
        return set_once(p, o, json_string_value(value), FROM_FILE);
    case JSON_INTEGER:
        snprintf(text, sizeof(text), "%lld", (long long)json_integer_value(value));
        break;
    case JSON_REAL:
        snprintf(text, sizeof(text), "%.17g", json_real_value(value));
        break;
    case JSON_TRUE:
    case JSON_FALSE:
        if (o->kind == CHOICE && !strcmp(o->words, "off|on"))
            snprintf(text, sizeof(text), json_is_true(value) ? "on" : "off");
        else
            snprintf(text, sizeof(text), json_is_true(value) ? "true" : "false");
        break;
    default:
        return zs_fail(ZS_ERR_ARG, "'%s' must be a number, a string, true or false", key);
    }
    return set_once(p, o, text, FROM_FILE);
}

static zs_status parse_file(parser *p, const char *path)
{
    const char *key;
    json_t *root, *value;
    zs_status status = zs_json_load(path, CONFIG_BYTES_MAX, &root);
    if (status != ZS_OK)
        return zs_fail_prefix(status == ZS_ERR_NOMEM ? status : ZS_ERR_ARG, "--config: ");
    json_object_foreach(root, key, value)
    {
        status = set_from_json(p, key, value);
        if (status != ZS_OK) {
            zs_fail_prefix(status, "--config %s: ", path);
            break;
        }
    }
    json_decref(root);
    return status;
}

static int is_set(const parser *p, const char *name)
{
    return p->from[find(name) - table] != UNSET;
}

static zs_status choose_commits(const parser *p)
{
    zs_options *o = p->options;
    if (is_set(p, "save-every")) {
        if (is_set(p, "durability"))
            return zs_fail(ZS_ERR_ARG, "--durability and --save-every contradict each other: give "
                                       "one");
        o->commit_every = o->save_every;
    } else if (!is_set(p, "durability")) {
        /* States that are on disk already cost a flush; others are written first. */
        o->commit_every = o->optimizer.tier == ZS_TIER_NVME;
    }
    if (o->slots == 1 && o->commit_every)
        return zs_fail(ZS_ERR_ARG, "--slots 1 needs --durability exit: with one copy each commit "
                                   "puts the last one at risk");
    if (o->slots == 1 && o->keep > 0)
        return zs_fail(ZS_ERR_ARG, "--keep %d needs --slots 2: with one copy nothing older is left",
                       o->keep);
    if (o->resume_commit && !o->resume)
        return zs_fail(ZS_ERR_ARG, "--resume-commit needs --resume");
    return ZS_OK;
}

static zs_status check_evaluation(const zs_options *o)
{
    if (!o->eval_data)
        return zs_fail(ZS_ERR_ARG, "--steps 0 only evaluates: give --eval-data too");
    if (o->resume)
        return zs_fail(ZS_ERR_ARG, "--steps 0 takes no --resume: evaluate the model that the run "
                                   "wrote (--model)");
    return ZS_OK;
}

static zs_status check_together(const parser *p)
{
    zs_options *o = p->options;
    if (o->model && o->init)
        return zs_fail(ZS_ERR_ARG, "--model and --init contradict each other: give one");
    if (!o->model && !o->init)
        return zs_fail(ZS_ERR_ARG, "no model: give --model DIR, or --init CONFIG for a new one");
    if (o->steps >= 0 && o->epochs >= 0)
        return zs_fail(ZS_ERR_ARG, "--steps and --epochs contradict each other: give one");
    if (o->params.tier != ZS_TIER_DEVICE && o->zero_stage < 3)
        return zs_fail(ZS_ERR_ARG, "--offload-params needs --zero-stage 3, not %d", o->zero_stage);
    if (o->max_live_params && o->zero_stage < 3)
        return zs_fail(ZS_ERR_ARG, "--max-live-params needs --zero-stage 3, not %d", o->zero_stage);
    if (o->reduce == ZS_REDUCE_BOUNDARY && o->zero_stage >= 2)
        return zs_fail(ZS_ERR_ARG,
                       "--reduce boundary needs --zero-stage 0 or 1, not %d: sharded gradients are "
                       "reduced each micro-batch",
                       o->zero_stage);
    if (o->steps >= 0 && o->warmup > o->steps)
        return zs_fail(ZS_ERR_ARG, "--warmup %lld is longer than --steps %lld",
                       (long long)o->warmup, (long long)o->steps);
    ZS_CHECK(choose_commits(p));
    if (o->eval_every && !o->eval_data)
        return zs_fail(ZS_ERR_ARG, "--eval-every needs --eval-data");
    if (o->steps == 0)
        return check_evaluation(o);
    if (!o->data)
        return zs_fail(ZS_ERR_ARG, "no data: give --data FILE");
    if (!o->out)
        return zs_fail(ZS_ERR_ARG, "nowhere to write to: give --out DIR");
    if (o->epochs < 0 && o->steps < 0)
        o->epochs = 1;
    return ZS_OK;
}

zs_status zs_options_parse(int argc, char **argv, zs_options *out)
{
    parser p = {.options = out};
    zs_status status = ZS_OK;
    memset(out, 0, sizeof(*out));
    out->steps = out->epochs = -1;
    out->keep = -1;
    for (size_t i = 0; i < ZS_COUNT(table); i++)
        if (table[i].initial)
            ZS_TRY(set(out, &table[i], table[i].initial));
    ZS_TRY(parse_line(&p, argc, argv));
    if (out->help)
        return ZS_OK;
    if (out->config)
        ZS_TRY(parse_file(&p, out->config));
    ZS_TRY(check_together(&p));
    return ZS_OK;
fail:
    zs_options_free(out);
    return status;
}

void zs_options_free(zs_options *options)
{
    for (size_t i = 0; i < ZS_COUNT(table); i++) {
        char **text = NULL;
        if (table[i].kind == PATH)
            text = field(options, &table[i]);
        else if (table[i].kind == PLACE)
            text = &((zs_place *)field(options, &table[i]))->dir;
        if (text) {
            free(*text);
            *text = NULL;
        }
    }
}

void zs_options_help(FILE *stream)
{
    fprintf(stream, "usage: zspill train --model DIR|--init CONFIG --data FILE --out DIR ...\n"
                    "       zspill train --model DIR --steps 0 --eval-data FILE\n");
    for (size_t i = 0; i < ZS_COUNT(table); i++) {
        const option *o = &table[i];
        char left[64];
        if (o->section)
            fprintf(stream, "\n%s:\n", o->section);
        snprintf(left, sizeof(left), "--%s %s", o->name, o->words ? o->words : "");
        fprintf(stream, "  %s\n      %s", left, o->help);
        if (o->initial)
            fprintf(stream, " (default: %s)", o->initial);
        fputc('\n', stream);
    }
    fputs("\nRows: step k takes the next ranks x micro-batch x grad-accum rows; within it each\n"
          "micro-batch takes ranks x micro-batch of them, rank 0's first. At the end of the data\n"
          "the next epoch's rows follow in the same step. Text is cut into rows of --seq-len\n"
          "bytes; a last part that fills no row is left out.\n"
          "SIGINT and SIGTERM finish the step, save the state and exit with 0; the same command\n"
          "with --resume goes on. Exit codes: 0 done, 1 failed, 2 wrong usage.\n",
          stream);
}
