/* SPDX-License-Identifier: Apache-2.0 */
/* io_uring, two rungs: with registered files and, as far as RLIMIT_MEMLOCK allows, registered
 * buffers; and plain.
 *
 * IORING_SETUP_SINGLE_ISSUER and DEFER_TASKRUN are left off: they tie a ring to one thread, and
 * what is in flight can then be taken back by no other, while a caller's backward pass may well run
 * on another thread than the step that queued its prefetches. Beginning with them, and going back
 * to a shared ring when another thread comes, would need the first thread to drain it, which may be
 * gone. Nor do they help: requests are large, so few. Over eight pairs of passes of 512 MiB, turn
 * and turn about, they were at 1.06 (read), 0.90 (write) and 1.01 (both) of COOP_TASKRUN's speed,
 * within its spread, with the same CPU time (0.069, 0.046, 0.064 s a GB against 0.069, 0.045,
 * 0.066). */
#include <errno.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "base/fork.h"
#include "base/status.h"
#include "base/util.h"
#include "io/backend.h"

enum {
    FILE_SLOTS = 64,
    BUFFER_SLOTS = 256,
    /* The kernel answers EFAULT to anything larger. */
    SLICE_BYTES = 1 << 30,
    /* Milliseconds of ENOMEM or EAGAIN from the ring itself before giving up. */
    PATIENCE = 5000
};

typedef struct slice {
    unsigned char *base;
    size_t bytes; /* 0: the slot is free */
    void *parent; /* what was given to zs_io_register */
} slice;

typedef struct uring_backend {
    zs_io_backend base;
    struct io_uring ring;
    unsigned depth;
    int registers; /* the upper of the two rungs: the kernel took tables of files and buffers */
    int warned;
    int files[FILE_SLOTS]; /* 1: taken */
    slice slices[BUFFER_SLOTS];
    int slice_count; /* slots up to here may be taken */
    zs_io_op **live; /* by index: what the ring owes */
} uring_backend;

static void describe(uring_backend *uring)
{
    int buffers = 0;

    for (int i = 0; i < uring->slice_count; i++)
        buffers |= uring->slices[i].bytes != 0;
    snprintf(uring->base.description, sizeof uring->base.description, "io_uring (%s, %s)",
             buffers ? "registered buffers" : "plain buffers",
             uring->registers ? "registered files" : "plain files");
}

/* ---- requests ---- */

static int find_slice(const uring_backend *uring, const unsigned char *buf, size_t bytes)
{
    for (int i = 0; i < uring->slice_count; i++) {
        const slice *s = &uring->slices[i];
        if (s->bytes && buf >= s->base && bytes <= s->bytes &&
            (size_t)(buf - s->base) <= s->bytes - bytes)
            return i;
    }
    return -1; /* also for the few that straddle two slices */
}

static void uring_submit(zs_io_backend *backend, zs_io_op *op)
{
    uring_backend *uring = (uring_backend *)backend;
    /* Never NULL: the ring has depth entries. */
    struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);
    int index = find_slice(uring, op->buf, op->bytes);
    int fd = op->file->slot >= 0 ? op->file->slot : op->file->fd;

    if (index >= 0 && op->write)
        io_uring_prep_write_fixed(sqe, fd, op->buf, op->bytes, op->offset, index);
    else if (index >= 0)
        io_uring_prep_read_fixed(sqe, fd, op->buf, op->bytes, op->offset, index);
    else if (op->write)
        io_uring_prep_write(sqe, fd, op->buf, op->bytes, op->offset);
    else
        io_uring_prep_read(sqe, fd, op->buf, op->bytes, op->offset);
    if (op->file->slot >= 0)
        sqe->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data(sqe, op);
    uring->live[op->index] = op;
}

static void uring_flush(zs_io_backend *backend)
{
    uring_backend *uring = (uring_backend *)backend;

    /* What a short-of-memory kernel does not take now, reap submits again. */
    if (io_uring_sq_ready(&uring->ring))
        (void)io_uring_submit(&uring->ring);
}

static zs_io_op *take_completions(uring_backend *uring)
{
    struct io_uring_cqe *cqe;
    zs_io_op *done = NULL;

    while (!io_uring_peek_cqe(&uring->ring, &cqe)) {
        zs_io_op *op = io_uring_cqe_get_data(cqe);
        op->result = cqe->res;
        uring->live[op->index] = NULL;
        op->next = done;
        done = op;
        io_uring_cqe_seen(&uring->ring, cqe);
    }
    return done;
}

/* The ring itself is broken: everything it owes has failed. */
static zs_io_op *fail_all(uring_backend *uring, int error)
{
    zs_io_op *done = NULL;

    for (unsigned i = 0; i < uring->depth; i++) {
        zs_io_op *op = uring->live[i];
        if (!op)
            continue;
        uring->live[i] = NULL;
        op->result = error;
        op->next = done;
        done = op;
    }
    return done;
}

static zs_io_op *uring_reap(zs_io_backend *backend, int wait)
{
    uring_backend *uring = (uring_backend *)backend;
    zs_io_op *done = take_completions(uring);

    for (int tries = 0; !done && wait;) {
        int rc = io_uring_submit_and_wait(&uring->ring, 1);
        if (rc == -EAGAIN || rc == -EBUSY || rc == -ENOMEM) {
            if (++tries > PATIENCE)
                return fail_all(uring, rc == -ENOMEM ? rc : -EIO);
            nanosleep(&(struct timespec){0, 1000000}, NULL);
        } else if (rc < 0 && rc != -EINTR) {
            return fail_all(uring, rc);
        }
        done = take_completions(uring);
    }
    return done;
}

/* ---- registering ---- */

static int set_slot(uring_backend *uring, int slot, void *base, size_t bytes)
{
    struct iovec iov = {base, bytes};
    __u64 tag = 0;
    int rc = io_uring_register_buffers_update_tag(&uring->ring, (unsigned)slot, &iov, &tag, 1);

    return rc < 0 ? rc : 0;
}

static int free_slot(const uring_backend *uring)
{
    for (int i = 0; i < BUFFER_SLOTS; i++)
        if (!uring->slices[i].bytes)
            return i;
    return -1;
}

static void uring_buffer_remove(zs_io_backend *backend, void *base)
{
    uring_backend *uring = (uring_backend *)backend;

    for (int i = 0; i < uring->slice_count; i++) {
        slice *s = &uring->slices[i];
        if (!s->bytes || s->parent != base)
            continue;
        (void)set_slot(uring, i, NULL, 0);
        memset(s, 0, sizeof *s);
    }
    describe(uring);
}

static void log_unpinned(const zs_log *log, zs_log_level level, size_t bytes, int error)
{
    char human[16], limit[24];
    struct rlimit rl = {RLIM_INFINITY, RLIM_INFINITY};

    zs_format_bytes(bytes, human);
    getrlimit(RLIMIT_MEMLOCK, &rl);
    if (error == -ENOMEM && rl.rlim_cur != RLIM_INFINITY) {
        zs_format_bytes(rl.rlim_cur, limit);
        zs_log_print(log, level,
                     "io_uring: %s of buffers stay unregistered (slower): RLIMIT_MEMLOCK allows %s "
                     "of locked memory; raise it: ulimit -l unlimited, LimitMEMLOCK=infinity for "
                     "systemd, --ulimit memlock=-1 for docker",
                     human, limit);
    } else {
        zs_log_print(log, level, "io_uring: %s of buffers stay unregistered (slower): %s", human,
                     strerror(-error));
    }
}

static void uring_buffer_add(zs_io_backend *backend, const zs_log *log, void *base, size_t bytes)
{
    uring_backend *uring = (uring_backend *)backend;
    size_t done = 0;
    int error = 0;

    if (!uring->registers)
        return;
    while (done < bytes && !error) {
        size_t part = ZS_MIN(bytes - done, (size_t)SLICE_BYTES);
        unsigned char *start = (unsigned char *)base + done;
        int slot = free_slot(uring);
        error = slot < 0 ? -ENOSPC : set_slot(uring, slot, start, part);
        if (error)
            break;
        uring->slices[slot] = (slice){start, part, base};
        uring->slice_count = ZS_MAX(uring->slice_count, slot + 1);
        done += part;
    }
    if (error) {
        log_unpinned(log, uring->warned ? ZS_LOG_DEBUG : ZS_LOG_WARN, bytes - done, error);
        uring->warned = 1;
    }
    describe(uring);
}

static void uring_file_add(zs_io_backend *backend, zs_file *file)
{
    uring_backend *uring = (uring_backend *)backend;

    for (int i = 0; uring->registers && i < FILE_SLOTS; i++) {
        if (uring->files[i])
            continue;
        if (io_uring_register_files_update(&uring->ring, (unsigned)i, &file->fd, 1) == 1) {
            uring->files[i] = 1;
            file->slot = i;
        }
        return;
    }
}

static void uring_file_remove(zs_io_backend *backend, zs_file *file)
{
    uring_backend *uring = (uring_backend *)backend;
    int none = -1;

    if (file->slot < 0)
        return;
    (void)io_uring_register_files_update(&uring->ring, (unsigned)file->slot, &none, 1);
    uring->files[file->slot] = 0;
    file->slot = -1;
}

/* ---- opening ---- */

static void uring_close(zs_io_backend *backend)
{
    uring_backend *uring = (uring_backend *)backend;

    zs_fork_unguard_fd(uring->ring.ring_fd);
    io_uring_queue_exit(&uring->ring);
    free(uring->live);
    free(uring);
}

static const zs_io_backend_ops uring_ops = {
    .submit = uring_submit,
    .flush = uring_flush,
    .reap = uring_reap,
    .buffer_add = uring_buffer_add,
    .buffer_remove = uring_buffer_remove,
    .file_add = uring_file_add,
    .file_remove = uring_file_remove,
    .close = uring_close,
};

/* The value of kernel.io_uring_disabled; -1 when the kernel has no such switch. */
static int io_uring_disabled(void)
{
    FILE *file = fopen("/proc/sys/kernel/io_uring_disabled", "re");
    int value = -1;

    if (file) {
        if (fscanf(file, "%d", &value) != 1)
            value = -1;
        fclose(file);
    }
    return value;
}

static void explain(int error, char *reason, size_t bytes)
{
    struct rlimit rl = {0, 0};
    int disabled;

    switch (-error) {
    case ENOSYS:
        snprintf(
            reason, bytes,
            "io_uring is not in this kernel or hidden by a seccomp profile (ENOSYS); use Linux "
            "5.6 or later, in docker with --security-opt seccomp=unconfined");
        break;
    case EPERM:
    case EACCES:
        disabled = io_uring_disabled();
        if (disabled > 0)
            snprintf(reason, bytes,
                     "io_uring is switched off for %s (kernel.io_uring_disabled is %d); as root: "
                     "sysctl kernel.io_uring_disabled=0",
                     disabled == 1 ? "users outside kernel.io_uring_group" : "everybody", disabled);
        else
            snprintf(reason, bytes,
                     "io_uring is forbidden, most likely by a seccomp profile (%s); allow "
                     "io_uring_setup, io_uring_enter and io_uring_register, in docker with "
                     "--security-opt seccomp=unconfined",
                     error == -EPERM ? "EPERM" : "EACCES");
        break;
    case ENOMEM:
        getrlimit(RLIMIT_MEMLOCK, &rl);
        snprintf(reason, bytes,
                 "io_uring finds no memory for its ring (RLIMIT_MEMLOCK is %llu bytes); raise it "
                 "with ulimit -l",
                 (unsigned long long)rl.rlim_cur);
        break;
    case EMFILE:
    case ENFILE:
        snprintf(reason, bytes, "io_uring gets no descriptor (%s); raise the limit with ulimit -n",
                 strerror(-error));
        break;
    default:
        snprintf(reason, bytes, "io_uring cannot be set up: %s", strerror(-error));
    }
}

static int init_ring(unsigned depth, struct io_uring *ring)
{
    /* Best first; older kernels say EINVAL. */
    static const unsigned flags[] = {IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG, 0};
    int rc = -EINVAL;

    for (size_t i = 0; i < ZS_COUNT(flags) && rc == -EINVAL; i++)
        rc = io_uring_queue_init(depth, ring, flags[i]);
    if (rc)
        return rc;
    /* Came with plain read and write, in Linux 5.6. */
    if (!(ring->features & IORING_FEAT_RW_CUR_POS)) {
        io_uring_queue_exit(ring);
        return -ENOSYS;
    }
    return 0;
}

/* Tables of files and buffers, and one page for trial: where nothing may be locked the tables alone
 * are of no use. */
static int register_tables(uring_backend *uring)
{
    int none[FILE_SLOTS], rc;
    void *page;

    for (int i = 0; i < FILE_SLOTS; i++)
        none[i] = -1;
    rc = io_uring_register_files(&uring->ring, none, FILE_SLOTS);
    if (!rc)
        rc = io_uring_register_buffers_sparse(&uring->ring, BUFFER_SLOTS);
    if (rc)
        return rc;
    page = aligned_alloc(ZS_PAGE, ZS_PAGE);
    if (!page)
        return -ENOMEM;
    rc = set_slot(uring, 0, page, ZS_PAGE);
    if (!rc)
        rc = set_slot(uring, 0, NULL, 0);
    free(page);
    return rc;
}

static zs_status explain_tables(int error)
{
    struct rlimit rl = {0, 0};

    getrlimit(RLIMIT_MEMLOCK, &rl);
    if (error == -ENOMEM)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "io_uring cannot register buffers: RLIMIT_MEMLOCK allows %llu bytes of "
                       "locked memory; raise it: ulimit -l unlimited, LimitMEMLOCK=infinity for "
                       "systemd, --ulimit memlock=-1 for docker; or use io_uring_plain",
                       (unsigned long long)rl.rlim_cur);
    return zs_fail(ZS_ERR_UNSUPPORTED,
                   "io_uring cannot register buffers and files: %s; use Linux 5.19 or later, or "
                   "io_uring_plain",
                   strerror(-error));
}

static zs_status open_ring(unsigned depth, int registers, zs_io_backend **out)
{
    uring_backend *uring = calloc(1, sizeof *uring);
    zs_status status;
    char reason[256];
    int rc;

    *out = NULL;
    if (!uring || !(uring->live = calloc(depth, sizeof *uring->live))) {
        free(uring);
        return zs_fail(ZS_ERR_NOMEM, "I/O engine io_uring: out of memory");
    }
    uring->base.ops = &uring_ops;
    uring->depth = depth;
    uring->registers = registers;
    rc = init_ring(depth, &uring->ring);
    if (rc) {
        explain(rc, reason, sizeof reason);
        status = zs_fail(ZS_ERR_UNSUPPORTED, "%s", reason);
        goto fail;
    }
    (void)io_uring_ring_dontfork(&uring->ring);
    status = zs_fork_guard_fd(uring->ring.ring_fd);
    if (status != ZS_OK) {
        io_uring_queue_exit(&uring->ring);
        goto fail;
    }
    rc = registers ? register_tables(uring) : 0;
    if (rc) {
        uring_close(&uring->base);
        return explain_tables(rc);
    }
    describe(uring);
    *out = &uring->base;
    return ZS_OK;

fail:
    free(uring->live);
    free(uring);
    return status;
}

zs_status zs_io_uring_open(unsigned depth, zs_io_backend **out)
{
    return open_ring(depth, 1, out);
}

zs_status zs_io_uring_plain_open(unsigned depth, zs_io_backend **out)
{
    return open_ring(depth, 0, out);
}
