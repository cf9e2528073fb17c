/* SPDX-License-Identifier: Apache-2.0 */
/* The store file: where each byte of it lives (docs/format.md) and the file itself: lock,
 * allocation, superblocks. Knows chunks and slots, not what is done with them. */
#ifndef ZS_OFFLOAD_STORE_H
#define ZS_OFFLOAD_STORE_H

#include "base/ledger.h"
#include "base/log.h"
#include "device/device.h"
#include "io/io.h"
#include "zspill.h"

enum {
    ZS_STORE_ARRAYS = 3, /* master, exp_avg, exp_avg_sq */
    ZS_STORE_VERSION = 2,
    ZS_STORE_HEADER_MAX = 8192,
    ZS_STORE_NO_SLOT = -1,
    ZS_STORE_SLOTS_MOST = 2 + ZS_KEEP_MOST /* of a chunk; as many superblocks */
};

typedef struct zs_store_shard {
    uint64_t numel;
    zs_dtype dtype; /* of the working copy */
} zs_store_shard;

typedef struct zs_store_chunk {
    size_t shard;
    uint64_t first, numel; /* elements of the shard */
    uint64_t stride;       /* bytes of one array in a slot */
    uint64_t offset;       /* of slot 0 in the file; the others follow */
} zs_store_chunk;

typedef struct zs_store_geometry {
    int rank, world;
    int slot_count; /* of each chunk: 2, and one more for each older commit that is kept; or 1:
                       changed in place, and the superblock says so */
    int area_count; /* places for a superblock: as many, but 2 at least */
    uint64_t chunk_numel;
    zs_store_shard *shards;
    size_t shard_count;
    zs_store_chunk *chunks;
    size_t chunk_count;
    uint64_t superblock_bytes; /* of each area */
    uint64_t file_bytes;
} zs_store_geometry;

/* What a superblock says of one chunk. */
typedef struct zs_store_slot {
    int slot; /* below slot_count */
    uint32_t crc[ZS_STORE_ARRAYS];
} zs_store_slot;

typedef struct zs_superblock {
    uint64_t fingerprint, sequence, step, chunk_numel;
    uint64_t lineage; /* commits that follow from each other; another one began without resuming */
    uint64_t commit;  /* the engine's number of it, the same on all ranks */
    uint64_t run; /* drawn by lot when the run's first state was made; its manifest has it, too */
    int rank, world;
    int slot_count; /* as above; 0 is taken as 2 */
    int dirty;      /* one slot: what this commit named has been written over since */
    zs_store_shard *shards;
    size_t shard_count;
    zs_store_slot *slots; /* one a chunk */
    size_t chunk_count;
    unsigned char *header;
    size_t header_bytes;
} zs_superblock;

/* ---- geometry and encoding: pure ---- */

/* slot_count: 1 to ZS_STORE_SLOTS_MOST. */
zs_status zs_store_geometry_make(int rank, int world, int slot_count, uint64_t chunk_numel,
                                 const zs_store_shard *shards, size_t shard_count,
                                 zs_store_geometry *out);
void zs_store_geometry_free(zs_store_geometry *geometry);
/* Where array 0 of a slot starts. */
uint64_t zs_store_slot_offset(const zs_store_chunk *chunk, int slot);

/* Bytes that the encoding takes. */
uint64_t zs_superblock_bytes(const zs_superblock *super);
/* out holds zs_superblock_bytes. */
void zs_superblock_encode(const zs_superblock *super, unsigned char *out);
/* Copies out of data; ZS_ERR_CORRUPT when it is not whole. Nothing is owned after failure. */
zs_status zs_superblock_decode(const unsigned char *data, uint64_t bytes, zs_superblock *out);
void zs_superblock_free(zs_superblock *super);
/* ZS_ERR_MISMATCH, naming both values, when the store at path was not made for this geometry. */
zs_status zs_superblock_check(const zs_superblock *super, const zs_store_geometry *geometry,
                              const char *path);

/* ---- the file ---- */

typedef struct zs_store {
    char *dir, *path;
    int rank;
    int lock_fd;   /* -1: closed */
    int made_dir;  /* at this open */
    int made_file; /* at this open: to be removed when nothing is committed */
    int exists;    /* superblocks were found at this open */
    int committed; /* which superblock is in force, -1: none */
    int area_count;
    zs_superblock super[ZS_STORE_SLOTS_MOST];
    int whole[ZS_STORE_SLOTS_MOST];   /* super[i] was read or written whole */
    int damaged[ZS_STORE_SLOTS_MOST]; /* there is something in area i, but not a whole superblock */
    const zs_store_geometry *geometry; /* borrowed, set by allocate */
    zs_io *io;
    zs_file *file;
    zs_mem buffer; /* for one superblock */
    const zs_log *log;
} zs_store;

/* Path of a rank's store file; to be freed. Generations (1, 2, ...) are the files that a change of
 * shape at resume leaves behind: zspill-rank00000.state, zspill-rank00000.g2.state, ... */
char *zs_store_path(const char *dir, uint64_t generation, int rank);
/* Makes the directory (its last component), opens and locks the file of this rank, and reads what
 * superblocks there are. A file that is not a store is an error; so is one whose superblocks are
 * all damaged. */
zs_status zs_store_lock(const char *dir, uint64_t generation, int rank, const zs_log *log,
                        zs_store *out);
/* What the file holds is not in force any more: it will be laid out afresh, and is removed at close
 * if nothing is committed to it then. */
void zs_store_abandon(zs_store *store);
/* Removes the store files in dir that belong to none of the generations keep[2]; those that are no
 * stores, or that somebody holds, stay. */
void zs_store_sweep(const char *dir, const uint64_t keep[2]);
/* Reads what superblocks the file at path has, without locking or changing anything; also while
 * another process trains with it (a superblock that is being written may then look damaged). For
 * zs_store_close only. */
zs_status zs_store_peek(const char *path, const zs_log *log, zs_store *out);
/* Opens the file at path and keeps every process from training with it, while others may do the
 * same, until *fd is closed. ZS_ERR_LOCKED when one trains. */
zs_status zs_store_share(const char *path, int *fd);
/* Lays the file out on disk (a new one) or checks it against geometry (one that exists), and opens
 * it for I/O. */
zs_status zs_store_allocate(zs_store *store, const zs_store_geometry *geometry, zs_io *io,
                            zs_device *device, zs_ledger *ledger);
/* ZS_ERR_IO when the file was removed meanwhile: what is committed to it is lost at close. */
zs_status zs_store_check_present(const zs_store *store);
/* Where the next superblock goes: over one that is abandoned (newer than the one in force), else
 * into an area that holds none, else over the oldest. */
int zs_store_next_area(const zs_store *store);
/* What the superblock there names must not be written over: it is the one in force, or an older one
 * that the next commit leaves in place. */
int zs_store_guards(const zs_store *store, int area);
/* The numbers of the commits that could be in force, newest first: to be compared with those of
 * other ranks. Returns how many. */
int zs_store_commits(const zs_store *store, uint64_t commits[ZS_STORE_SLOTS_MOST]);
/* Of the commits that are guarded, newest first: the one in force and the older ones kept. */
int zs_store_kept(const zs_store *store, uint64_t commits[ZS_STORE_SLOTS_MOST]);
/* ZS_ERR_ARG: what is asked for is not among those kept at path. */
zs_status zs_store_fail_not_kept(const char *path, uint64_t commit, const uint64_t *kept,
                                 int count);
/* Which superblock is that of commit; -1: none. */
int zs_store_find(const zs_store *store, uint64_t commit);
/* Writes and flushes super into zs_store_next_area; it then is in force. Takes over what super
 * owns, also on failure. */
zs_status zs_store_publish(zs_store *store, zs_superblock *super);
/* One slot: says durably that what the superblock in force names is about to be written over. Does
 * nothing where that is said already, nothing is committed, or there are two slots. */
zs_status zs_store_mark(zs_store *store);
/* ZS_ERR_CORRUPT when the superblock in force says that. */
zs_status zs_store_check_clean(const zs_store *store);
/* Removes a file that nothing was ever committed to. */
void zs_store_close(zs_store *store);

#endif
