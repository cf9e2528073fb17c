/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of tokens to train on or evaluate: a token file (safetensors with input_ids I32 [rows, seq],
 * optional labels and position_ids of the same shape) or any other file as text, whose bytes are
 * the ids. Rows are read by range and checked as they are read; an open zs_data may be read by
 * several threads. */
#ifndef ZS_CLI_DATA_H
#define ZS_CLI_DATA_H

#include "zspill.h"

enum { ZS_LABEL_NONE = -100 };

typedef struct zs_data zs_data;

typedef struct zs_data_options {
    const char *path;
    const char *option;       /* that named it, for messages; must outlive the data */
    int seq_len;              /* 0: the token file's own, text_seq for text */
    int text_seq;             /* 0: 512, or max_positions when that is fewer */
    int vocab, max_positions; /* of the model */
    int scan;                 /* 1: read and check all of it at open */
} zs_data_options;

zs_status zs_data_open(const zs_data_options *options, zs_data **out);
void zs_data_close(zs_data **data);
uint64_t zs_data_rows(const zs_data *data);
int zs_data_seq(const zs_data *data);
/* 0: position_ids are 0, 1, ... in every row. */
int zs_data_has_positions(const zs_data *data);
/* Hash of size, shape and samples of the contents; the path does not count. */
zs_status zs_data_identity(const zs_data *data, uint64_t *out);
/* count rows from row first on, each array count x seq; labels are the ids where the file has none;
 * positions may be NULL. An id, label or position out of range is ZS_ERR_CORRUPT with its place. */
zs_status zs_data_read(const zs_data *data, uint64_t first, uint64_t count, int32_t *ids,
                       int32_t *labels, int32_t *positions);

/* Which of `rows` rows stands at `place` of the endless sequence of epochs: file order, or a
 * permutation of each epoch that depends on seed and epoch only. */
uint64_t zs_data_order(uint64_t rows, int shuffle, uint64_t seed, uint64_t place);

#endif
