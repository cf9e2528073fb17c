/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/data.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/status.h"
#include "base/util.h"
#include "cli/hash.h"
#include "model/safetensors.h"

enum { TEXT_SEQ = 512, TEXT_VOCAB = 256, SAMPLES = 64, SAMPLE_BYTES = 4096, SCAN_TOKENS = 1 << 18 };

struct zs_data {
    char *path;
    const char *option;
    int fd;
    uint64_t bytes, rows;
    int seq, vocab, max_positions;
    zs_st *st; /* NULL: text */
    const zs_st_tensor *ids, *labels, *positions;
};

static zs_status read_bytes(const zs_data *data, uint64_t offset, void *dst, size_t bytes)
{
    char *to = dst;
    while (bytes) {
        ssize_t got = pread(data->fd, to, bytes, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return zs_fail(ZS_ERR_IO, "%s %s: reading at byte %llu failed: %s", data->option,
                           data->path, (unsigned long long)offset,
                           got ? strerror(errno) : "the file became shorter");
        to += got;
        offset += (uint64_t)got;
        bytes -= (size_t)got;
    }
    return ZS_OK;
}

/* By contents, so that a token file under another name is not trained on as text; by name too, so
 * that a damaged one is called that. */
static zs_status is_token_file(const zs_data *data, int *out)
{
    size_t length = strlen(data->path);
    unsigned char head[9] = {0};
    uint64_t header = 0;
    *out = length > 12 && !strcmp(data->path + length - 12, ".safetensors");
    if (*out || data->bytes < sizeof(head))
        return ZS_OK;
    ZS_CHECK(read_bytes(data, 0, head, sizeof(head)));
    for (int i = 7; i >= 0; i--)
        header = header << 8 | head[i];
    *out = header <= data->bytes - 8 && head[8] == '{';
    return ZS_OK;
}

static zs_status check_tensor(const zs_data *data, const zs_st_tensor *t)
{
    if (t->dtype != ZS_ST_I32)
        return zs_fail(ZS_ERR_CORRUPT, "%s %s: tensor '%s' is %s: token files hold I32",
                       data->option, data->path, t->name, zs_st_dtype_name(t->dtype));
    if (t->ndim != 2)
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s %s: tensor '%s' has %d dimensions: it must be [rows, "
                       "seq]",
                       data->option, data->path, t->name, t->ndim);
    if (data->ids && (t->shape[0] != data->ids->shape[0] || t->shape[1] != data->ids->shape[1]))
        return zs_fail(
            ZS_ERR_CORRUPT, "%s %s: tensor '%s' is [%lld, %lld] but input_ids is [%lld, %lld]",
            data->option, data->path, t->name, (long long)t->shape[0], (long long)t->shape[1],
            (long long)data->ids->shape[0], (long long)data->ids->shape[1]);
    return ZS_OK;
}

static zs_status open_tokens(zs_data *data, const zs_data_options *options)
{
    zs_status status = zs_st_open(data->path, &data->st);
    if (status != ZS_OK)
        return zs_fail_prefix(status, "%s: ", data->option);
    data->ids = zs_st_find(data->st, "input_ids");
    if (!data->ids)
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s %s has no tensor 'input_ids': make token files with `python -m "
                       "zspill.prepare`",
                       data->option, data->path);
    for (size_t i = 0; i < zs_st_count(data->st); i++) {
        const zs_st_tensor *t = zs_st_at(data->st, i);
        if (!strcmp(t->name, "labels"))
            data->labels = t;
        else if (!strcmp(t->name, "position_ids"))
            data->positions = t;
        else if (t != data->ids)
            return zs_fail(ZS_ERR_UNSUPPORTED,
                           "%s %s: tensor '%s' is not known in token files (input_ids, labels, "
                           "position_ids are)",
                           data->option, data->path, t->name);
        ZS_CHECK(check_tensor(data, t));
    }
    if (data->ids->numel == 0)
        return zs_fail(ZS_ERR_CORRUPT, "%s %s is empty: input_ids is [%lld, %lld]", data->option,
                       data->path, (long long)data->ids->shape[0], (long long)data->ids->shape[1]);
    if (options->seq_len && data->ids->shape[1] != options->seq_len)
        return zs_fail(ZS_ERR_ARG,
                       "%s %s has rows of %lld tokens, not --seq-len %d: leave the option out, or "
                       "prepare the data for it",
                       data->option, data->path, (long long)data->ids->shape[1], options->seq_len);
    if (data->ids->shape[1] > data->max_positions)
        return zs_fail(ZS_ERR_ARG,
                       "%s %s has rows of %lld tokens but the model has %d positions: prepare the "
                       "data with shorter rows",
                       data->option, data->path, (long long)data->ids->shape[1],
                       data->max_positions);
    data->rows = (uint64_t)data->ids->shape[0];
    data->seq = (int)data->ids->shape[1];
    return ZS_OK;
}

static zs_status open_text(zs_data *data, const zs_data_options *options)
{
    if (data->vocab < TEXT_VOCAB)
        return zs_fail(
            ZS_ERR_ARG,
            "%s %s is text, taken as bytes: that needs a vocabulary of %d, the model has "
            "%d",
            data->option, data->path, TEXT_VOCAB, data->vocab);
    if (options->seq_len > data->max_positions)
        return zs_fail(ZS_ERR_ARG, "--seq-len %d is longer than the model's %d positions",
                       options->seq_len, data->max_positions);
    data->seq = options->seq_len ? options->seq_len : options->text_seq;
    if (!data->seq)
        data->seq = ZS_MIN(TEXT_SEQ, data->max_positions);
    data->rows = data->bytes / (uint64_t)data->seq;
    if (!data->rows)
        return zs_fail(
            ZS_ERR_ARG,
            "%s %s has %llu bytes, fewer than one row of %d: give more text or a smaller "
            "--seq-len",
            data->option, data->path, (unsigned long long)data->bytes, data->seq);
    return ZS_OK;
}

/* Every position but a document's first can be predicted. */
static int counts(const zs_data *data, const int32_t *labels, const int32_t *positions,
                  size_t tokens)
{
    for (size_t i = 0; i < tokens; i++)
        if (labels[i] != ZS_LABEL_NONE && i % (size_t)data->seq && positions[i])
            return 1;
    return 0;
}

static zs_status scan(const zs_data *data)
{
    uint64_t block = ZS_MAX(1, SCAN_TOKENS / (uint64_t)data->seq);
    block = ZS_MIN(block, data->rows);
    size_t tokens = block * (size_t)data->seq;
    int32_t *memory = malloc(3 * tokens * sizeof(*memory));
    zs_status status = ZS_OK;
    int any = 0;
    if (!memory)
        return zs_fail(ZS_ERR_NOMEM, "%s %s: no memory for %zu tokens", data->option, data->path,
                       3 * tokens);
    for (uint64_t row = 0; status == ZS_OK && row < data->rows; row += block) {
        uint64_t rows = ZS_MIN(block, data->rows - row);
        status = zs_data_read(data, row, rows, memory, memory + tokens, memory + 2 * tokens);
        any = any || (status == ZS_OK &&
                      counts(data, memory + tokens, memory + 2 * tokens, rows * (size_t)data->seq));
    }
    free(memory);
    if (status == ZS_OK && !any)
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s %s has no counted token: every label is %d or the first of its "
                       "document: prepare it with targets",
                       data->option, data->path, ZS_LABEL_NONE);
    return status;
}

static zs_status open_file(zs_data *data)
{
    struct stat info;
    /* O_NONBLOCK: a FIFO by that name must not hang the open. */
    data->fd = open(data->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (data->fd < 0 || fstat(data->fd, &info))
        return zs_fail(ZS_ERR_IO, "%s %s cannot be opened: %s", data->option, data->path,
                       strerror(errno));
    if (!S_ISREG(info.st_mode))
        return zs_fail(ZS_ERR_ARG, "%s %s is not a file: give a token file or a text file",
                       data->option, data->path);
    if (!info.st_size)
        return zs_fail(ZS_ERR_ARG, "%s %s is empty", data->option, data->path);
    data->bytes = (uint64_t)info.st_size;
    return ZS_OK;
}

zs_status zs_data_open(const zs_data_options *options, zs_data **out)
{
    zs_status status;
    int tokens;
    zs_data *data = calloc(1, sizeof(*data));
    *out = NULL;
    if (!data || !(data->path = strdup(options->path))) {
        free(data);
        return zs_fail(ZS_ERR_NOMEM, "no memory for %s", options->option);
    }
    data->fd = -1;
    data->option = options->option;
    data->vocab = options->vocab;
    data->max_positions = options->max_positions;
    ZS_TRY(open_file(data));
    ZS_TRY(is_token_file(data, &tokens));
    ZS_TRY(tokens ? open_tokens(data, options) : open_text(data, options));
    if (data->seq < 2) {
        status =
            zs_fail(ZS_ERR_ARG, "%s %s: rows of %d token leave nothing to predict: %s of 2 or more",
                    data->option, data->path, data->seq,
                    tokens ? "prepare it with rows" : "give a --seq-len");
        goto fail;
    }
    if (options->scan && tokens)
        ZS_TRY(scan(data));
    *out = data;
    return ZS_OK;
fail:
    zs_data_close(&data);
    return status;
}

void zs_data_close(zs_data **data)
{
    zs_data *d = *data;
    *data = NULL;
    if (!d)
        return;
    zs_st_close(&d->st);
    if (d->fd >= 0)
        close(d->fd);
    free(d->path);
    free(d);
}

uint64_t zs_data_rows(const zs_data *data)
{
    return data->rows;
}

int zs_data_seq(const zs_data *data)
{
    return data->seq;
}

int zs_data_has_positions(const zs_data *data)
{
    return data->positions != NULL;
}

zs_status zs_data_identity(const zs_data *data, uint64_t *out)
{
    unsigned char sample[SAMPLE_BYTES];
    uint32_t crc = 0;
    uint64_t length = ZS_MIN(data->bytes, SAMPLE_BYTES);
    for (uint64_t i = 0; i < SAMPLES; i++) {
        /* The product fits: both factors are file sizes over 64. */
        uint64_t offset = (data->bytes - length) / (SAMPLES - 1) * i;
        ZS_CHECK(read_bytes(data, offset, sample, (size_t)length));
        crc = zs_crc32c(crc, sample, (size_t)length);
    }
    *out = zs_hash(zs_hash(zs_hash(zs_hash(0, data->bytes), data->rows), (uint64_t)data->seq), crc);
    return ZS_OK;
}

static zs_status check_rows(const zs_data *data, uint64_t first, size_t tokens,
                            const int32_t *values, const char *what)
{
    int positions = !strcmp(what, "position"), labels = !strcmp(what, "label");
    int limit = positions ? data->max_positions : data->vocab;
    size_t seq = (size_t)data->seq;
    for (size_t i = 0; i < tokens; i++) {
        if ((values[i] >= 0 && values[i] < limit) || (labels && values[i] == ZS_LABEL_NONE))
            continue;
        return zs_fail(ZS_ERR_CORRUPT,
                       "%s %s: %s %d in row %llu, column %zu is outside the model's %s of %d%s",
                       data->option, data->path, what, values[i],
                       (unsigned long long)(first + i / seq), i % seq,
                       positions ? "positions" : "vocabulary", limit,
                       positions ? "" : ": was the data prepared for another tokenizer?");
    }
    return ZS_OK;
}

static zs_status read_tensor(const zs_data *data, const zs_st_tensor *t, uint64_t first,
                             uint64_t count, int32_t *dst)
{
    zs_status status =
        zs_st_read(data->st, t, first * (uint64_t)data->seq, count * (uint64_t)data->seq, dst);
    return status == ZS_OK ? status : zs_fail_prefix(status, "%s: ", data->option);
}

static zs_status read_text(const zs_data *data, uint64_t first, size_t tokens, int32_t *ids)
{
    /* Into the last quarter of ids, which widening from the front reaches only after having read
     * it. */
    unsigned char *text = (unsigned char *)ids + 3 * tokens;
    ZS_CHECK(read_bytes(data, first * (uint64_t)data->seq, text, tokens));
    for (size_t i = 0; i < tokens; i++)
        ids[i] = text[i];
    return ZS_OK;
}

zs_status zs_data_read(const zs_data *data, uint64_t first, uint64_t count, int32_t *ids,
                       int32_t *labels, int32_t *positions)
{
    size_t tokens = (size_t)count * (size_t)data->seq;
    if (data->st) {
        ZS_CHECK(read_tensor(data, data->ids, first, count, ids));
        ZS_CHECK(check_rows(data, first, tokens, ids, "id"));
    } else {
        ZS_CHECK(read_text(data, first, tokens, ids));
    }
    if (data->labels) {
        ZS_CHECK(read_tensor(data, data->labels, first, count, labels));
        ZS_CHECK(check_rows(data, first, tokens, labels, "label"));
    } else {
        memcpy(labels, ids, tokens * sizeof(*labels));
    }
    if (!positions)
        return ZS_OK;
    if (data->positions) {
        ZS_CHECK(read_tensor(data, data->positions, first, count, positions));
        return check_rows(data, first, tokens, positions, "position");
    }
    for (size_t i = 0; i < tokens; i++)
        positions[i] = (int32_t)(i % (size_t)data->seq);
    return ZS_OK;
}

/* A Feistel network over the smallest square of a power of two that holds all rows, walked until it
 * lands on a row: a permutation, without a table of rows. */
static uint64_t permute(uint64_t rows, uint64_t key, uint64_t x)
{
    enum { ROUNDS = 6 };
    int half = 1;
    while (half < 32 && (rows - 1) >> (2 * half))
        half++;
    uint64_t mask = (UINT64_C(1) << half) - 1;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < ROUNDS; round++) {
            uint64_t mixed = left ^ (zs_hash(zs_hash(key, round), right) & mask);
            left = right;
            right = mixed;
        }
        x = left << half | right;
    } while (x >= rows);
    return x;
}

uint64_t zs_data_order(uint64_t rows, int shuffle, uint64_t seed, uint64_t place)
{
    uint64_t epoch = place / rows;
    return shuffle ? permute(rows, zs_hash(zs_hash(0, seed), epoch), place % rows) : place % rows;
}
