/* SPDX-License-Identifier: Apache-2.0 */
/* Small files that appear whole or not at all. */
#ifndef ZS_MODEL_FILES_H
#define ZS_MODEL_FILES_H

#include "zspill.h"

/* Makes path and its parents, those that are not there yet. */
zs_status zs_dir_make(const char *path);
/* from becomes to, durably; from must be flushed already. On failure from is still there. */
zs_status zs_file_rename(const char *from, const char *to);
/* Removes path durably; that it is not there is no error. */
zs_status zs_file_remove(const char *path);
/* Writes by way of path.tmp, flush and rename. */
zs_status zs_file_write(const char *path, const void *data, size_t bytes);
/* Copies a regular file by way of to.tmp. */
zs_status zs_file_copy(const char *from, const char *to);

#endif
