/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/fork.h"
#include "base/status.h"
#include "base/util.h"
#include "offload/store_internal.h"

/* The label, the first page: docs/format.md. */
enum {
    LABEL_FIXED = 64,
    LABEL_SUPER_BYTES = 16,
    LABEL_MORE_AREAS = 20,
    LABEL_FILE_BYTES = 24,
    LABEL_CRC = 32,
    AREAS_LEAST = 2,
    SUPER_MOST = 1 << 30 /* more than any geometry makes: a label beyond it is damaged */
};
static const char label_magic[16] = "zspill states 1\n";

static uint64_t area_offset(uint64_t superblock_bytes, int area)
{
    return ZS_PAGE + (uint64_t)area * superblock_bytes;
}

static void put_bytes(unsigned char *at, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        at[i] = (unsigned char)(value >> (8 * i));
}

static uint64_t get_bytes(const unsigned char *at, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; i--)
        value = value << 8 | at[i];
    return value;
}

static void label_make(unsigned char label[LABEL_FIXED], uint64_t superblock_bytes, int area_count,
                       uint64_t file_bytes)
{
    memset(label, 0, LABEL_FIXED);
    memcpy(label, label_magic, sizeof label_magic);
    put_bytes(label + LABEL_SUPER_BYTES, superblock_bytes, 4);
    put_bytes(label + LABEL_MORE_AREAS, (uint64_t)(area_count - AREAS_LEAST), 4);
    put_bytes(label + LABEL_FILE_BYTES, file_bytes, 8);
    put_bytes(label + LABEL_CRC, zs_crc32c(0, label, LABEL_CRC), 4);
}

static int all_zero(const unsigned char *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (data[i])
            return 0;
    return 1;
}

/* Fills super, whole and damaged of one area. */
static zs_status read_area(zs_store *store, uint64_t superblock_bytes, int area)
{
    unsigned char *data = malloc(superblock_bytes);
    if (!data)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a superblock of %llu bytes",
                       (unsigned long long)superblock_bytes);
    ssize_t got = zs_store_read_at(store->lock_fd, data, superblock_bytes,
                                   area_offset(superblock_bytes, area));
    zs_status status = ZS_OK;
    if (got < 0) {
        status = zs_fail(ZS_ERR_IO, "store '%s': reading superblock %c: %s", store->path,
                         'A' + area, strerror(errno));
        goto done;
    }
    if (all_zero(data, (size_t)ZS_MIN(got, (ssize_t)ZS_PAGE)))
        goto done;
    status = zs_superblock_decode(data, (uint64_t)got, &store->super[area]);
    const int slots = status == ZS_OK ? store->super[area].slot_count : 0;
    if (status == ZS_OK && ZS_MAX(slots, AREAS_LEAST) != store->area_count) {
        zs_superblock_free(&store->super[area]);
        status = zs_fail(ZS_ERR_CORRUPT,
                         "it has %d slots for each chunk, its file room for %d superblocks", slots,
                         store->area_count);
    }
    store->whole[area] = status == ZS_OK;
    store->damaged[area] = status == ZS_ERR_CORRUPT;
    if (status == ZS_ERR_CORRUPT) {
        zs_log_print(store->log, ZS_LOG_WARN, "store '%s': superblock %c is not whole: %s",
                     store->path, 'A' + area, zs_last_error());
        status = ZS_OK;
    }
done:
    free(data);
    return status;
}

static zs_status fail_foreign(const zs_store *store)
{
    return zs_fail(ZS_ERR_CORRUPT,
                   "'%s' is not a zspill store and will not be overwritten: move it away, or use "
                   "another directory",
                   store->path);
}

/* The newest that is whole is in force, until the ranks agree on another. */
static zs_status choose_newest(zs_store *store)
{
    int last_damaged = -1;
    for (int i = 0; i < store->area_count; i++) {
        if (store->whole[i] && (store->committed < 0 ||
                                store->super[i].sequence > store->super[store->committed].sequence))
            store->committed = i;
        if (store->damaged[i])
            last_damaged = i;
    }
    store->exists = store->committed >= 0;
    if (!store->exists && last_damaged >= 0)
        return zs_fail_prefix(ZS_ERR_CORRUPT,
                              "store '%s': no superblock is whole: restore the file from a copy, "
                              "or move it away and start afresh: superblock %c: ",
                              store->path, 'A' + last_damaged);
    for (int i = 0; i < store->area_count; i++)
        if (store->damaged[i])
            zs_log_print(store->log, ZS_LOG_WARN,
                         "store '%s': superblock %c was damaged, or was being written when its "
                         "process ended: step %llu of superblock %c is what is left",
                         store->path, 'A' + i,
                         (unsigned long long)store->super[store->committed].step,
                         'A' + store->committed);
    return ZS_OK;
}

static zs_status read_existing(zs_store *store)
{
    unsigned char head[2 * ZS_PAGE], want[LABEL_FIXED];
    struct stat st;
    ssize_t got = zs_store_read_at(store->lock_fd, head, sizeof head, 0);
    if (got < 0 || fstat(store->lock_fd, &st) < 0)
        return zs_fail(ZS_ERR_IO, "store '%s': reading its label: %s", store->path,
                       strerror(errno));
    /* The label is written once the file is allocated: without one, and without anything where the
     * first superblock goes, its process ended before that. */
    if (all_zero(head, (size_t)got))
        return ZS_OK;
    if (got < LABEL_FIXED || memcmp(head, label_magic, sizeof label_magic) != 0)
        return fail_foreign(store);
    uint64_t superblock_bytes = get_bytes(head + LABEL_SUPER_BYTES, 4);
    uint64_t more_areas = get_bytes(head + LABEL_MORE_AREAS, 4);
    uint64_t file_bytes = get_bytes(head + LABEL_FILE_BYTES, 8);
    /* Not the store's before it is known to be in range: closing goes by that. */
    const int area_count = AREAS_LEAST + (int)ZS_MIN(more_areas, (uint64_t)ZS_STORE_SLOTS_MOST);
    label_make(want, superblock_bytes, area_count, file_bytes);
    if (memcmp(head, want, sizeof want) != 0 || superblock_bytes % ZS_PAGE ||
        superblock_bytes == 0 || superblock_bytes > SUPER_MOST ||
        area_count > ZS_STORE_SLOTS_MOST || file_bytes < area_offset(superblock_bytes, area_count))
        return zs_fail(ZS_ERR_CORRUPT,
                       "store '%s': its label (the first %d bytes) is damaged: restore the file "
                       "from a copy, or use another directory",
                       store->path, LABEL_FIXED);
    if ((uint64_t)st.st_size < file_bytes)
        return zs_fail(ZS_ERR_CORRUPT,
                       "store '%s' has %llu bytes where its label says %llu: it was truncated: "
                       "restore the file from a copy, or use another directory",
                       store->path, (unsigned long long)st.st_size, (unsigned long long)file_bytes);
    store->area_count = area_count;
    for (int area = 0; area < store->area_count; area++)
        ZS_CHECK(read_area(store, superblock_bytes, area));
    return choose_newest(store);
}

char *zs_store_path(const char *dir, uint64_t generation, int rank)
{
    char *path = NULL;
    int length = generation > 1 ? asprintf(&path, "%s/zspill-rank%05d.g%llu.state", dir, rank,
                                           (unsigned long long)generation)
                                : asprintf(&path, "%s/zspill-rank%05d.state", dir, rank);
    return length < 0 ? NULL : path;
}

zs_status zs_store_lock(const char *dir, uint64_t generation, int rank, const zs_log *log,
                        zs_store *out)
{
    zs_status status;
    *out = (zs_store){.lock_fd = -1, .committed = -1, .rank = rank, .log = log};
    out->dir = strdup(dir);
    out->path = zs_store_path(dir, generation, rank);
    if (!out->dir || !out->path) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory for the store's path");
        goto fail;
    }
    if (mkdir(dir, 0777) == 0) {
        out->made_dir = 1;
    } else if (errno != EEXIST) {
        status =
            zs_fail(ZS_ERR_IO, "state directory '%s' cannot be made: %s", dir, strerror(errno));
        goto fail;
    }
    ZS_TRY(zs_store_open_locked(out));
    ZS_TRY(read_existing(out));
    return ZS_OK;
fail:
    zs_store_close(out);
    return status;
}

void zs_store_abandon(zs_store *store)
{
    for (int i = 0; i < store->area_count; i++) {
        zs_superblock_free(&store->super[i]);
        store->super[i] = (zs_superblock){0};
        store->whole[i] = store->damaged[i] = 0;
    }
    store->exists = 0;
    store->committed = -1;
    store->area_count = 0;
}

/* The generation of a store file by its name; 0: not such a name. */
static uint64_t generation_of(const char *name)
{
    int rank, end = 0;
    unsigned long long generation = 1;
    if (sscanf(name, "zspill-rank%5d.state%n", &rank, &end) == 1 && end && !name[end])
        return 1;
    end = 0;
    if (sscanf(name, "zspill-rank%5d.g%llu.state%n", &rank, &generation, &end) == 2 && end &&
        !name[end])
        return generation;
    return 0;
}

void zs_store_sweep(const char *dir, const uint64_t keep[2])
{
    DIR *entries = opendir(dir);
    for (struct dirent *entry; entries && (entry = readdir(entries));) {
        const uint64_t generation = generation_of(entry->d_name);
        unsigned char magic[sizeof label_magic];
        if (!generation || generation == keep[0] || generation == keep[1])
            continue;
        const int fd = openat(dirfd(entries), entry->d_name, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        if (flock(fd, LOCK_EX | LOCK_NB) == 0 &&
            zs_store_read_at(fd, magic, sizeof magic, 0) == (ssize_t)sizeof magic &&
            memcmp(magic, label_magic, sizeof magic) == 0)
            (void)unlinkat(dirfd(entries), entry->d_name, 0);
        close(fd);
    }
    if (entries)
        closedir(entries);
}

zs_status zs_store_peek(const char *path, const zs_log *log, zs_store *out)
{
    zs_status status;
    *out = (zs_store){.lock_fd = -1, .committed = -1, .log = log, .path = strdup(path)};
    if (!out->path)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the store's path");
    out->lock_fd = open(path, O_RDONLY | O_CLOEXEC);
    if (out->lock_fd < 0)
        status = zs_fail(ZS_ERR_IO, "store '%s' cannot be opened: %s", path, strerror(errno));
    else
        status = read_existing(out);
    if (out->lock_fd >= 0)
        close(out->lock_fd);
    out->lock_fd = -1;
    if (status != ZS_OK)
        zs_store_close(out);
    return status;
}

static zs_status put(zs_store *store, uint64_t offset, const void *data, uint64_t bytes)
{
    zs_io_req req = {0};
    zs_status status = zs_io_write(store->io, store->file, offset, data, bytes, &req);
    zs_status waited = zs_io_wait(store->io, &req);
    ZS_CHECK(status);
    ZS_CHECK(waited);
    return zs_file_sync(store->io, store->file);
}

static zs_status allocate_file(zs_store *store)
{
    const zs_store_geometry *geometry = store->geometry;
    unsigned char *label = store->buffer.ptr;
    /* From here on it is ours to remove; what it may hold, a process that ended before its first
     * commit left behind. */
    store->made_file = 1;
    const zs_status status =
        zs_file_open(store->io, store->path, ZS_FILE_CREATE, geometry->file_bytes, &store->file);
    if (status == ZS_ERR_NOSPACE && geometry->area_count > AREAS_LEAST)
        return zs_fail(status, "%s, or keep fewer than %d older commits", zs_last_error(),
                       geometry->area_count - AREAS_LEAST);
    ZS_CHECK(status);
    ZS_CHECK(zs_file_sync(store->io, store->file));
    memset(label, 0, ZS_PAGE);
    label_make(label, geometry->superblock_bytes, geometry->area_count, geometry->file_bytes);
    ZS_CHECK(put(store, 0, label, ZS_PAGE));
    /* The name must outlive a power cut, too. */
    return zs_io_sync_dir(store->io, store->dir);
}

zs_status zs_store_allocate(zs_store *store, const zs_store_geometry *geometry, zs_io *io,
                            zs_device *device, zs_ledger *ledger)
{
    store->geometry = geometry;
    store->io = io;
    ZS_CHECK(zs_mem_alloc(device, ledger, ZS_TIER_HOST, "store", geometry->superblock_bytes,
                          &store->buffer));
    if (store->exists) {
        ZS_CHECK(zs_superblock_check(&store->super[store->committed], geometry, store->path));
        for (int i = 0; i < store->area_count; i++)
            if (store->whole[i] &&
                zs_superblock_check(&store->super[i], geometry, store->path) != ZS_OK) {
                zs_superblock_free(&store->super[i]);
                store->whole[i] = 0;
            }
        ZS_CHECK(zs_file_open(io, store->path, 0, 0, &store->file));
    } else {
        store->area_count = geometry->area_count;
        ZS_CHECK(allocate_file(store));
    }
    ZS_CHECK(zs_store_lock_writes(store));
    return zs_store_set_holder(store, 1);
}

zs_status zs_store_publish(zs_store *store, zs_superblock *super)
{
    zs_status status;
    int area = zs_store_next_area(store);
    uint64_t area_bytes = store->geometry->superblock_bytes;
    uint64_t offset = area_offset(area_bytes, area);
    unsigned char *data = store->buffer.ptr;
    memset(data, 0, area_bytes);
    zs_superblock_encode(super, data);
    uint64_t bytes = zs_round_up(zs_superblock_bytes(super), ZS_PAGE);
    /* The first superblock of a file has no older one to fall back on. Its first page, which alone
     * says that there is one, goes last: half a superblock then never looks like a damaged one. */
    if (store->committed < 0 && bytes > ZS_PAGE)
        ZS_TRY(put(store, offset + ZS_PAGE, data + ZS_PAGE, bytes - ZS_PAGE));
    ZS_TRY(put(store, offset, data, store->committed < 0 ? (uint64_t)ZS_PAGE : bytes));
    zs_superblock_free(&store->super[area]);
    store->super[area] = *super;
    *super = (zs_superblock){0};
    store->whole[area] = 1;
    store->damaged[area] = 0;
    store->committed = area;
    return ZS_OK;
fail:
    zs_superblock_free(super);
    return status;
}

static void *copy_of(const void *data, size_t bytes)
{
    void *copy = malloc(bytes + 1);
    if (copy && bytes)
        memcpy(copy, data, bytes);
    return copy;
}

static int changed_in_place(const zs_store *store)
{
    return store->committed >= 0 && store->super[store->committed].slot_count == 1;
}

zs_status zs_store_mark(zs_store *store)
{
    zs_status status = ZS_OK;
    if (!changed_in_place(store) || store->super[store->committed].dirty)
        return ZS_OK;
    zs_superblock super = store->super[store->committed];
    super.dirty = 1;
    super.sequence++;
    super.shards = copy_of(super.shards, super.shard_count * sizeof *super.shards);
    super.slots = copy_of(super.slots, super.chunk_count * sizeof *super.slots);
    super.header = copy_of(super.header, super.header_bytes);
    if (!super.shards || !super.slots || !super.header) {
        status = zs_fail(ZS_ERR_NOMEM, "no memory for a superblock of store '%s'", store->path);
        zs_superblock_free(&super);
        return status;
    }
    return zs_store_publish(store, &super);
}

zs_status zs_store_check_clean(const zs_store *store)
{
    if (!changed_in_place(store) || !store->super[store->committed].dirty)
        return ZS_OK;
    return zs_fail(ZS_ERR_CORRUPT,
                   "store '%s' has one slot for each chunk, and its process ended after it had "
                   "begun to write over step %llu: neither that step nor a later one is whole: "
                   "restore all files from one copy, or start afresh in an empty directory (with "
                   "two slots this cannot happen)",
                   store->path, (unsigned long long)store->super[store->committed].step);
}

void zs_store_close(zs_store *store)
{
    zs_file_close(&store->file);
    zs_mem_free(&store->buffer);
    if (store->lock_fd >= 0) {
        /* While the lock is still held, so that nobody else's new file goes. */
        if (store->made_file && store->committed < 0)
            (void)unlink(store->path);
        else if (store->file || store->geometry)
            (void)zs_store_set_holder(store, 0);
        zs_fork_unguard_fd(store->lock_fd);
        /* Closing alone would leave it to a child that is being forked right now. */
        (void)flock(store->lock_fd, LOCK_UN);
        close(store->lock_fd);
    }
    if (store->made_dir && store->committed < 0)
        (void)rmdir(store->dir);
    for (int i = 0; i < store->area_count; i++)
        zs_superblock_free(&store->super[i]);
    free(store->dir);
    free(store->path);
    *store = (zs_store){.lock_fd = -1, .committed = -1};
}
