/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/record.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/hash.h"
#include "model/json.h"
#include "model/safetensors.h"

enum { SAMPLE_ELEMENTS = 512, ELEMENT_BYTES_MAX = 8 };

static uint64_t hash_real(uint64_t state, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return zs_hash(state, bits);
}

static uint64_t hash_text(uint64_t state, const char *text)
{
    return zs_hash(zs_hash(state, strlen(text)), zs_crc32c(0, text, strlen(text)));
}

static uint64_t hash_config(const zs_model_config *c)
{
    const int counts[] = {c->vocab,          c->hidden,
                          c->intermediate,   c->layers,
                          c->heads,          c->kv_heads,
                          c->head_dim,       c->max_positions,
                          (int)c->rope_type, c->rope_original_positions,
                          c->tied,           c->qkv_bias,
                          c->o_bias,         c->mlp_bias,
                          c->qk_norm,        c->sliding_window};
    const double reals[] = {c->rms_eps, c->rope_theta, c->rope_factor, c->rope_low_freq,
                            c->rope_high_freq};
    uint64_t hash = hash_text(0, c->model_type);
    for (size_t i = 0; i < ZS_COUNT(counts); i++)
        hash = zs_hash(hash, (uint64_t)(int64_t)counts[i]);
    for (size_t i = 0; i < ZS_COUNT(reals); i++)
        hash = hash_real(hash, reals[i]);
    return hash;
}

/* Names, shapes and the first elements of every tensor. */
static zs_status hash_weights(const char *dir, uint64_t *out)
{
    unsigned char sample[SAMPLE_ELEMENTS * ELEMENT_BYTES_MAX];
    zs_st *st = NULL;
    zs_status status = ZS_OK;
    uint64_t hash = 0;
    ZS_CHECK(zs_st_open(dir, &st));
    for (size_t i = 0; i < zs_st_count(st); i++) {
        const zs_st_tensor *t = zs_st_at(st, i);
        uint64_t count = ZS_MIN(t->numel, SAMPLE_ELEMENTS);
        hash = zs_hash(hash_text(hash, t->name), (uint64_t)t->dtype);
        for (int d = 0; d < t->ndim; d++)
            hash = zs_hash(hash, (uint64_t)t->shape[d]);
        if (count)
            ZS_TRY(zs_st_read(st, t, 0, count, sample));
        hash = zs_hash(hash, zs_crc32c(0, sample, (size_t)count * zs_st_dtype_size(t->dtype)));
    }
    *out = hash;
fail:
    zs_st_close(&st);
    return status;
}

zs_status zs_record_init(zs_record *record, const zs_options *options,
                         const zs_model_config *config, const zs_data *data, int world)
{
    memset(record, 0, sizeof(*record));
    record->config = hash_config(config);
    record->weights = hash_real(zs_hash(1, (uint64_t)options->seed), config->init_range);
    if (options->model)
        ZS_CHECK(hash_weights(options->model, &record->weights));
    ZS_CHECK(zs_data_identity(data, &record->data));
    record->seed = (uint64_t)options->seed;
    record->global_batch =
        (uint64_t)world * (uint64_t)options->micro_batch * (uint64_t)options->grad_accum;
    record->seq = (uint64_t)zs_data_seq(data);
    record->shuffle = options->shuffle;
    return ZS_OK;
}

/* The fields as they are stored: hashes as text, since JSON numbers are not 64 bits everywhere. */
static const struct field {
    const char *key;
    size_t offset;
    const char *option; /* that differs when the field does; NULL: progress, not compared */
    int hash;
} fields[] = {
    {"config", offsetof(zs_record, config), "--model or --init (the model's shape)", 1},
    {"seed", offsetof(zs_record, seed), "--seed", 0},
    {"weights", offsetof(zs_record, weights), "--model or --init (the weights started from)", 1},
    {"seq", offsetof(zs_record, seq), "--seq-len", 0},
    {"data", offsetof(zs_record, data), "--data", 1},
    {"global_batch", offsetof(zs_record, global_batch),
     "the global batch (ranks x micro-batch x grad-accum)", 0},
    {"step", offsetof(zs_record, step), NULL, 0},
    {"updates", offsetof(zs_record, updates), NULL, 0},
};

static uint64_t *at(const zs_record *record, const struct field *f)
{
    return (uint64_t *)((char *)record + f->offset);
}

zs_status zs_record_pack(const zs_record *record, char *text, size_t *bytes)
{
    char hex[20];
    zs_json_watch();
    json_t *root = json_object();
    for (size_t i = 0; i < ZS_COUNT(fields); i++) {
        uint64_t value = *at(record, &fields[i]);
        snprintf(hex, sizeof(hex), "%016llx", (unsigned long long)value);
        json_object_set_new(root, fields[i].key,
                            fields[i].hash ? json_string(hex) : json_integer((json_int_t)value));
    }
    json_object_set_new(root, "shuffle", json_boolean(record->shuffle));
    size_t length = json_dumpb(root, text, ZS_USER_BYTES_MAX - 1, JSON_COMPACT);
    const int lacks_memory = zs_json_lacks_memory();
    json_decref(root);
    /* A record without one of its fields could never be resumed. */
    if (lacks_memory)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the run's record");
    if (!length || length >= ZS_USER_BYTES_MAX)
        return zs_fail(ZS_ERR_INTERNAL, "the run's record takes %zu bytes", length);
    text[length] = '\0';
    *bytes = length + 1;
    return ZS_OK;
}

static zs_status read_field(const json_t *root, const struct field *f, uint64_t *out)
{
    const json_t *value = json_object_get(root, f->key);
    char *end = NULL;
    if (f->hash && json_is_string(value)) {
        *out = strtoull(json_string_value(value), &end, 16);
        if (*end == '\0')
            return ZS_OK;
    } else if (!f->hash && json_is_integer(value) && json_integer_value(value) >= 0) {
        *out = (uint64_t)json_integer_value(value);
        return ZS_OK;
    }
    return zs_fail(ZS_ERR_CORRUPT, "the run's record has no valid '%s'", f->key);
}

static zs_status compare(const zs_record *stored, const zs_record *mine)
{
    for (size_t i = 0; i < ZS_COUNT(fields); i++) {
        const struct field *f = &fields[i];
        uint64_t then = *at(stored, f), now = *at(mine, f);
        if (!f->option || then == now)
            continue;
        if (f->hash)
            return zs_fail(ZS_ERR_MISMATCH,
                           "%s differs from that of the run: resume with the same "
                           "one, or start anew with another --out",
                           f->option);
        return zs_fail(ZS_ERR_MISMATCH,
                       "%s was %llu, now %llu: resume with the same, or start anew with another "
                       "--out",
                       f->option, (unsigned long long)then, (unsigned long long)now);
    }
    if (stored->shuffle != mine->shuffle)
        return zs_fail(ZS_ERR_MISMATCH, "--shuffle was %s: resume with the same",
                       stored->shuffle ? "on" : "off");
    return ZS_OK;
}

zs_status zs_record_unpack(const char *text, size_t bytes, const zs_record *mine, uint64_t steps,
                           zs_record *out)
{
    zs_status status = ZS_OK;
    json_t *root = NULL;
    memset(out, 0, sizeof(*out));
    if (bytes)
        status = zs_json_parse(text, bytes - 1, "the run's record", &root);
    if (!root && status != ZS_ERR_NOMEM)
        status = zs_fail(ZS_ERR_CORRUPT, "the run's record is missing: another program wrote this "
                                         "state");
    for (size_t i = 0; status == ZS_OK && i < ZS_COUNT(fields); i++)
        status = read_field(root, &fields[i], at(out, &fields[i]));
    if (status == ZS_OK) {
        out->shuffle = json_is_true(json_object_get(root, "shuffle"));
        status = compare(out, mine);
    }
    if (status == ZS_OK && out->step > steps)
        status = zs_fail(ZS_ERR_MISMATCH,
                         "it is at step %llu, and --steps is %llu: give at least as many, or "
                         "--resume-commit with an older commit, if one was kept (zspill inspect)",
                         (unsigned long long)out->step, (unsigned long long)steps);
    json_decref(root);
    return status;
}
