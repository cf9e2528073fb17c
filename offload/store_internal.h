/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the store share: store_file.c (the file), store_lock.c (who may use it). */
#ifndef ZS_OFFLOAD_STORE_INTERNAL_H
#define ZS_OFFLOAD_STORE_INTERNAL_H

#include <sys/types.h>

#include "offload/store.h"

/* ---- store_lock.c ---- */

/* All of bytes, fewer only at the end of the file; -1 with errno. */
ssize_t zs_store_read_at(int fd, void *out, size_t bytes, uint64_t offset);
/* Opens and locks the file at store->path, made when it is not there. No write of an earlier holder
 * arrives in it any more. */
zs_status zs_store_open_locked(zs_store *store);
/* As long as a write through store->file is under way, that waits, also when this process has ended
 * before. */
zs_status zs_store_lock_writes(const zs_store *store);
/* Names this process as the holder in the file, or nobody. */
zs_status zs_store_set_holder(const zs_store *store, int held);

#endif
