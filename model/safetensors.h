/* SPDX-License-Identifier: Apache-2.0 */
/* Safetensors files: reading of single files and sharded directories, and writing by several ranks
 * at once. Every field of a header is checked before use: a malformed file is ZS_ERR_CORRUPT with
 * the tensor's name, never a crash. */
#ifndef ZS_MODEL_SAFETENSORS_H
#define ZS_MODEL_SAFETENSORS_H

#include "zspill.h"

typedef enum zs_st_dtype {
    ZS_ST_BOOL,
    ZS_ST_U8,
    ZS_ST_I8,
    ZS_ST_F8_E4M3,
    ZS_ST_F8_E5M2,
    ZS_ST_I16,
    ZS_ST_U16,
    ZS_ST_F16,
    ZS_ST_BF16,
    ZS_ST_I32,
    ZS_ST_U32,
    ZS_ST_F32,
    ZS_ST_F64,
    ZS_ST_I64,
    ZS_ST_U64,
    ZS_ST_F8_E8M0,
    ZS_ST_C64,
    ZS_ST_DTYPES
} zs_st_dtype;
size_t zs_st_dtype_size(zs_st_dtype dtype);
const char *zs_st_dtype_name(zs_st_dtype dtype); /* "BF16" */

typedef struct zs_st_tensor {
    char *name;
    zs_st_dtype dtype;
    int ndim;
    int64_t shape[ZS_MAX_DIMS];
    uint64_t numel, bytes;
    uint64_t offset; /* in its file */
    int file;
} zs_st_tensor;

typedef struct zs_st zs_st;

/* path: one .safetensors file, an index (.json) with its shards beside it, or a directory with
 * model.safetensors or model.safetensors.index.json (where both are, the former, as in
 * transformers). */
zs_status zs_st_open(const char *path, zs_st **out);
void zs_st_close(zs_st **st);
size_t zs_st_count(const zs_st *st);
const zs_st_tensor *zs_st_at(const zs_st *st, size_t i);           /* in file, then offset order */
const zs_st_tensor *zs_st_find(const zs_st *st, const char *name); /* NULL: not there */
/* Name of the file that zs_st_tensor.file counts, and its whole size; NULL past the last one. */
const char *zs_st_file(const zs_st *st, int file, uint64_t *bytes);
/* The i-th __metadata__ key (of the first file) and its value, or NULL past the last one. */
const char *zs_st_metadata_at(const zs_st *st, size_t i, const char **value);
/* The value of a __metadata__ key, or NULL. */
const char *zs_st_metadata(const zs_st *st, const char *key);
/* Bytes of elements [first, first + count) of t, as stored. */
zs_status zs_st_read(const zs_st *st, const zs_st_tensor *t, uint64_t first, uint64_t count,
                     void *dst);

/* Writing: rank 0 plans (makes path + ".tmp", whole size, header in place), then each rank opens
 * that plan and writes its ranges, then rank 0 finishes (flush, rename to path). tensors: name,
 * dtype, ndim and shape are read; offset, bytes and numel are filled in. Tensors are laid out in
 * the order given; metadata {"format": "pt"}. */
typedef struct zs_st_writer zs_st_writer;
zs_status zs_st_plan(const char *path, zs_st_tensor *tensors, size_t count, int create,
                     zs_st_writer **out); /* create: 1 on rank 0, 0 on the others, after rank 0 */
/* With these entries in __metadata__, too. */
typedef struct zs_st_entry {
    char *key, *value;
} zs_st_entry;
zs_status zs_st_plan_with(const char *path, const zs_st_entry *metadata, size_t entries,
                          zs_st_tensor *tensors, size_t count, int create, zs_st_writer **out);
zs_status zs_st_write(zs_st_writer *writer, const zs_st_tensor *t, uint64_t first, uint64_t count,
                      const void *src);
/* commit: 1 on rank 0 once all have written; 0: flush and close. Closes on failure too, and then
 * commit removes the unfinished file. */
zs_status zs_st_finish(zs_st_writer **writer, int commit);
/* Closes and removes the unfinished file. */
void zs_st_discard(zs_st_writer **writer);

#endif
