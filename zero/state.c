/* SPDX-License-Identifier: Apache-2.0 */
/* Commit and resume: what the engine keeps beside the states, the manifest, and the agreement of
 * all ranks. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fork.h"
#include "base/util.h"
#include "zero/engine.h"
#include "zero/header.h"

/* The counts of Adam's steps, gathered for a header or spread from one. */
static zs_status counts(const zs_engine *e, uint64_t **out)
{
    *out = calloc(e->param_count + 1, sizeof **out);
    return *out ? ZS_OK : zs_fail(ZS_ERR_NOMEM, "no memory for %zu step counts", e->param_count);
}

static zs_status encode(const zs_engine *e, const void *user, size_t user_bytes, void *out,
                        size_t *bytes)
{
    zs_header header = {
        .commit = e->commit + 1,
        .step = e->step,
        .loss_scale = e->loss_scale,
        .good_steps = e->good_steps,
        .param_count = e->param_count,
        .user = user,
        .user_bytes = user_bytes,
    };
    ZS_CHECK(counts(e, &header.steps));
    for (size_t i = 0; i < e->param_count; i++)
        header.steps[i] = e->params[i].steps;
    const zs_status status = zs_header_encode(&header, out, bytes);
    free(header.steps);
    return status;
}

static void give_user(const zs_header *header, void *user, size_t *user_bytes)
{
    if (user && *user_bytes)
        memcpy(user, header->user, ZS_MIN(*user_bytes, header->user_bytes));
    *user_bytes = header->user_bytes;
}

zs_status zs_state_decode(zs_engine *e, const void *data, size_t bytes, void *user,
                          size_t *user_bytes)
{
    zs_header header = {.param_count = e->param_count};
    ZS_CHECK(counts(e, &header.steps));
    const zs_status status = zs_header_decode(data, bytes, &header);
    if (status == ZS_OK) {
        e->commit = header.commit;
        e->step = header.step;
        e->good_steps = header.good_steps;
        /* A fixed scale is the configuration's, a dynamic one goes on where it was. */
        if (e->config.loss_scale == 0)
            e->loss_scale = header.loss_scale;
        for (size_t i = 0; i < e->param_count; i++)
            e->params[i].steps = header.steps[i];
        give_user(&header, user, user_bytes);
    }
    free(header.steps);
    return status;
}

/* ---- manifest ---- */

static zs_status describe(const zs_engine *e, zs_manifest **out)
{
    zs_manifest *m = calloc(1, sizeof *m);
    *out = m;
    if (!m || !(m->flats = calloc(e->flat_count + 1, sizeof *m->flats)))
        return zs_fail(ZS_ERR_NOMEM, "no memory for the manifest of '%s'", e->config.state_dir);
    m->fingerprint = e->config.fingerprint;
    m->run = e->run;
    m->slots = e->config.slots == 1 ? 1 : 2 + e->config.keep;
    m->generation = 1;
    m->world = e->world;
    m->replicated = e->config.zero_stage == 0;
    m->chunk_numel = e->config.chunk_numel;
    for (size_t i = 0; i < e->flat_count; i++) {
        const zs_flat *f = &e->flats[i];
        if (!f->trainable)
            continue;
        zs_manifest_flat *to = &m->flats[m->flat_count++];
        to->dtype = f->dtype;
        to->names = calloc(f->count + 1, sizeof *to->names);
        to->numels = calloc(f->count + 1, sizeof *to->numels);
        if (!to->names || !to->numels)
            return zs_fail(ZS_ERR_NOMEM, "no memory for the manifest of '%s'", e->config.state_dir);
        for (; to->count < f->count; to->count++) {
            const zs_param_info *p = &e->params[f->params[to->count]];
            to->numels[to->count] = p->numel;
            to->names[to->count] = strdup(p->name);
            if (!to->names[to->count])
                return zs_fail(ZS_ERR_NOMEM, "no memory for the manifest of '%s'",
                               e->config.state_dir);
        }
    }
    return ZS_OK;
}

/* Whether state of another shape can be taken over: known before any file is made for that. */
static zs_status check_params(const zs_engine *e)
{
    size_t flat, at, there = 0, here = 0;
    for (size_t i = 0; i < e->manifest->flat_count; i++)
        there += e->manifest->flats[i].count;
    for (size_t i = 0; i < e->own->flat_count; i++) {
        const zs_manifest_flat *f = &e->own->flats[i];
        here += f->count;
        for (size_t j = 0; j < f->count; j++)
            ZS_CHECK(zs_manifest_find(e->manifest, e->config.state_dir, f->names[j], f->numels[j],
                                      &flat, &at));
    }
    if (here != there)
        return zs_fail(ZS_ERR_MISMATCH,
                       "the state in '%s' has %zu trained parameters, this engine has %zu: train "
                       "those that it was made with",
                       e->config.state_dir, there, here);
    return ZS_OK;
}

static zs_status read_manifest(zs_engine *e)
{
    const char *dir = e->config.state_dir;
    ZS_CHECK(zs_manifest_load(dir, &e->manifest));
    const zs_manifest *m = e->manifest;
    if (e->config.keep < 0)
        e->config.keep = m && m->slots > 2 && e->config.slots > 1 ? m->slots - 2 : 0;
    ZS_CHECK(describe(e, &e->own));
    if (!m)
        return ZS_OK;
    if (!e->config.resume)
        return zs_fail(ZS_ERR_EXISTS,
                       "'%s' holds the state of an earlier run: resume it, or use "
                       "another directory",
                       dir);
    if (m->fingerprint != e->config.fingerprint)
        return zs_fail(ZS_ERR_MISMATCH,
                       "cannot resume from '%s': its run has fingerprint %016llx, this one has "
                       "%016llx: resume with the model, data and options it was made with, or use "
                       "another directory",
                       dir, (unsigned long long)m->fingerprint,
                       (unsigned long long)e->config.fingerprint);
    e->run = e->own->run = m->run;
    /* Chunks of any length will do when none is asked for. */
    if (!e->own->chunk_numel)
        e->own->chunk_numel = m->chunk_numel;
    const int same = zs_manifest_same_shape(m, e->own);
    e->own->generation = m->generation + !same;
    return same ? ZS_OK : check_params(e);
}

zs_status zs_state_draw(zs_engine *e)
{
    uint64_t bits = 0;
    if (e->rank == 0 && getrandom(&bits, sizeof bits, 0) != (ssize_t)sizeof bits)
        bits = zs_trace_now();
    /* As many as a double carries exactly, and never 0. */
    double run = e->rank == 0 ? (double)(bits >> 12 | 1) : 0;
    ZS_CHECK(zs_comm_all_reduce(e->comm, "zs_engine_commit", ZS_OP_MAX, &run, 1));
    e->run = (uint64_t)run;
    return ZS_OK;
}

/* Names the holder, where one of its files does. */
static zs_status fail_held(const zs_engine *e)
{
    zs_manifest *m = NULL;
    const char *dir = e->config.state_dir;
    const uint64_t first = zs_manifest_load(dir, &m) == ZS_OK && m ? m->generation : 1;
    zs_manifest_free(&m);
    for (uint64_t g = first; g <= first + 1; g++) {
        int fd = -1;
        char *path = zs_store_path(dir, g, 0);
        const zs_status status = path ? zs_store_share(path, &fd) : ZS_ERR_NOMEM;
        free(path);
        if (fd >= 0)
            close(fd);
        if (status == ZS_ERR_LOCKED)
            return status;
    }
    return zs_fail(ZS_ERR_LOCKED,
                   "state directory '%s' is held by another process: end it, or use another "
                   "directory",
                   dir);
}

zs_status zs_state_lock(zs_engine *e)
{
    const char *dir = e->config.state_dir;
    if (e->rank != 0)
        return ZS_OK;
    if (mkdir(dir, 0777) == 0)
        e->made_dir = 1;
    else if (errno != EEXIST)
        return zs_fail(ZS_ERR_IO, "state directory '%s' cannot be made: %s", dir, strerror(errno));
    const int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return ZS_OK; /* the stores' own files will say why */
    /* Where directories have no locks, those of the files are left. */
    if (flock(fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK) {
        close(fd);
        return fail_held(e);
    }
    e->dir_lock = fd;
    ZS_CHECK(zs_fork_guard_fd(fd));
    /* What is named here may have been put in place by a process that ended before it flushed. */
    if (fsync(fd) && errno != EINVAL && errno != EROFS)
        return zs_fail(ZS_ERR_IO, "state directory '%s' cannot be flushed: %s", dir,
                       strerror(errno));
    return ZS_OK;
}

void zs_state_unlock(zs_engine *e)
{
    if (e->dir_lock >= 0) {
        zs_fork_unguard_fd(e->dir_lock);
        (void)flock(e->dir_lock, LOCK_UN);
        close(e->dir_lock);
        e->dir_lock = -1;
    }
    if (e->made_dir)
        (void)rmdir(e->config.state_dir); /* only when nothing is in it */
}

zs_status zs_state_open(zs_engine *e)
{
    ZS_CHECK(read_manifest(e));
    const uint64_t old = e->manifest ? e->manifest->generation : 0;
    if (e->manifest && e->own->generation == old)
        e->config.chunk_numel = e->manifest->chunk_numel;
    /* What a change of shape that did not get to its end, or did not get to clean up, left behind.
     */
    if (e->rank == 0)
        zs_store_sweep(e->config.state_dir, (const uint64_t[2]){old, e->own->generation});
    return ZS_OK;
}

/* After a commit in files that the manifest does not name yet: from now on it does, and what it
 * named goes. */
static zs_status switch_manifest(zs_engine *e)
{
    zs_manifest *named = NULL;
    if (e->manifest && e->manifest->generation == e->own->generation)
        return ZS_OK;
    zs_status status = describe(e, &named);
    if (status == ZS_OK && e->rank == 0)
        status = zs_manifest_save(e->config.state_dir, e->io, e->own);
    status = zs_engine_agree(e, "zs_state_commit: the manifest", status);
    if (status != ZS_OK) {
        zs_manifest_free(&named);
        return status;
    }
    named->generation = e->own->generation;
    named->chunk_numel = e->own->chunk_numel;
    zs_manifest_free(&e->manifest);
    e->manifest = named;
    if (e->rank == 0)
        zs_store_sweep(e->config.state_dir,
                       (const uint64_t[2]){e->own->generation, e->own->generation});
    return ZS_OK;
}

/* ---- commit ---- */

static zs_status commit(zs_engine *e, const void *user, size_t user_bytes)
{
    unsigned char data[ZS_STATES_HEADER_MAX];
    size_t bytes = sizeof data;
    zs_status status = encode(e, user, user_bytes, data, &bytes);
    if (status == ZS_OK)
        status = zs_states_commit_prepare(e->states);
    /* Only when the data of all ranks is on disk may any rank's superblock name it. */
    ZS_CHECK(zs_engine_agree(e, "zs_state_commit: writing", status));
    status = zs_states_commit_publish(e->states, e->commit + 1, e->step, data, bytes);
    /* Only when all superblocks are may any slot be written again. */
    ZS_CHECK(zs_engine_agree(e, "zs_state_commit: publishing", status));
    e->commit++;
    ZS_CHECK(switch_manifest(e));
    zs_log_print(&e->log, ZS_LOG_DEBUG, "commit %llu of step %llu is durable in '%s'",
                 (unsigned long long)e->commit, (unsigned long long)e->step, e->config.state_dir);
    return ZS_OK;
}

static zs_status need_store(const zs_engine *e, const char *what)
{
    ZS_CHECK(zs_engine_enter(e, what));
    ZS_CHECK(zs_engine_expect(e, 1u << ZS_PHASE_IDLE, what));
    if (!e->config.state_dir)
        return zs_fail(ZS_ERR_MISUSE, "%s: this engine has no store; set state_dir", what);
    return ZS_OK;
}

zs_status zs_state_commit(zs_engine *e, const void *user, size_t user_bytes)
{
    ZS_CHECK(need_store(e, "zs_state_commit"));
    if (user_bytes > ZS_USER_BYTES_MAX || (user_bytes && !user))
        return zs_fail(ZS_ERR_ARG, "zs_state_commit: %zu user bytes; at most %d are kept",
                       user_bytes, ZS_USER_BYTES_MAX);
    return zs_engine_break(e, commit(e, user, user_bytes));
}

/* ---- resume ---- */

/* The greatest of mine that is at most limit, 0: none. */
static double at_most(const uint64_t *mine, int count, double limit)
{
    for (int i = 0; i < count; i++)
        if ((double)mine[i] <= limit)
            return (double)mine[i];
    return 0;
}

/* The newest commit that every rank has, and the greatest number that any rank has. */
static zs_status choose_commit(zs_engine *e, uint64_t *chosen, uint64_t *greatest)
{
    uint64_t mine[ZS_STATES_COMMITS_MOST] = {0};
    int count = 0;
    zs_status status = zs_states_committed(e->states, mine, &count);
    if (status == ZS_OK && !count)
        status = zs_fail(ZS_ERR_CORRUPT,
                         "the manifest in '%s' names a store of rank %d that holds no commit: "
                         "restore the file from a copy, or start afresh in an empty directory",
                         e->config.state_dir, e->rank);
    ZS_CHECK(zs_engine_agree(e, "zs_state_resume: looking for state", status));
    double most = (double)mine[0], first = most, wanted, common;
    ZS_CHECK(zs_comm_all_reduce(e->comm, "zs_state_resume", ZS_OP_MAX, &most, 1));
    ZS_CHECK(zs_comm_all_reduce(e->comm, "zs_state_resume", ZS_OP_MIN, &first, 1));
    /* A crash in the middle of a commit leaves some ranks one commit ahead, and perhaps others with
     * one that was abandoned before; each keeps what it had before that. */
    for (common = first, wanted = 0; common && common != wanted;) {
        wanted = common;
        common = at_most(mine, count, wanted);
        ZS_CHECK(zs_comm_all_reduce(e->comm, "zs_state_resume", ZS_OP_MIN, &common, 1));
    }
    *chosen = (uint64_t)common;
    *greatest = (uint64_t)most;
    if (!common && at_most(mine, count, first) != first)
        status = zs_fail(ZS_ERR_CORRUPT,
                         "another rank's newest commit in '%s' is number %llu, which rank %d's "
                         "store does not hold (its newest is %llu): restore the files of all ranks "
                         "from one copy",
                         e->config.state_dir, (unsigned long long)first, e->rank,
                         (unsigned long long)mine[0]);
    return zs_engine_agree(e, "zs_state_resume", status);
}

zs_status zs_state_settle(zs_engine *e)
{
    if (!e->manifest || e->manifest->generation != e->own->generation)
        return ZS_OK;
    ZS_CHECK(choose_commit(e, &e->in_force, &e->commit));
    /* Before all have flushed what they found, nobody may write a slot: a power cut could bring
     * back what was in force before. */
    return zs_engine_agree(e, "zs_state_resume: going back",
                           zs_states_adopt(e->states, e->in_force));
}

static uint64_t wanted_commit(const zs_engine *e)
{
    return e->config.resume_commit ? e->config.resume_commit : e->in_force;
}

static zs_status load(zs_engine *e, void *user, size_t *user_bytes)
{
    unsigned char data[ZS_STATES_HEADER_MAX];
    size_t bytes = sizeof data;
    const uint64_t greatest = e->commit;
    ZS_CHECK(zs_states_resume(e->states, wanted_commit(e), data, &bytes));
    ZS_CHECK(zs_state_decode(e, data, ZS_MIN(bytes, sizeof data), user, user_bytes));
    /* A number that a rank gave to a commit which is abandoned now is not given again. */
    e->commit = greatest;
    return zs_weights_from_masters(e);
}

/* The same state in another shape: read, commit it in files of our own, only then let go of the old
 * ones. */
static zs_status reshape(zs_engine *e, void *user, size_t *user_bytes)
{
    unsigned char kept[ZS_USER_BYTES_MAX];
    size_t kept_bytes = sizeof kept;
    zs_store old = {.lock_fd = -1};
    zs_status status = ZS_OK;
    /* Nobody may go on writing what is being read. */
    if (e->rank == 0)
        status = zs_store_lock(e->config.state_dir, e->manifest->generation, 0, &e->log, &old);
    status = zs_engine_agree(e, "zs_state_resume: locking", status);
    if (status == ZS_OK)
        status = zs_engine_agree(e, "zs_state_resume: taking over",
                                 zs_reshape_load(e, kept, &kept_bytes));
    if (status == ZS_OK) {
        zs_log_print(&e->log, ZS_LOG_INFO,
                     "state in '%s': step %llu of %d rank(s) taken over by %d", e->config.state_dir,
                     (unsigned long long)e->step, e->manifest->world, e->world);
        if (user && *user_bytes)
            memcpy(user, kept, ZS_MIN(*user_bytes, kept_bytes));
        *user_bytes = kept_bytes;
        status = commit(e, kept, kept_bytes);
    }
    if (e->rank == 0 && old.path)
        zs_store_close(&old);
    /* The old rank 0's file was ours to hold until now. */
    if (status == ZS_OK && e->rank == 0)
        zs_store_sweep(e->config.state_dir,
                       (const uint64_t[2]){e->own->generation, e->own->generation});
    return status;
}

static zs_status resume(zs_engine *e, void *user, size_t *user_bytes)
{
    if (e->manifest->generation != e->own->generation)
        ZS_CHECK(reshape(e, user, user_bytes));
    else {
        ZS_CHECK(zs_state_settle(e));
        ZS_CHECK(zs_engine_agree(e, "zs_state_resume: loading", load(e, user, user_bytes)));
    }
    return zs_weights_spread(e);
}

/* Whether there is state; *user_bytes is made one that can be written. */
static zs_status look(zs_engine *e, const char *what, int *found, size_t **user_bytes, size_t *none)
{
    ZS_CHECK(need_store(e, what));
    if (!found)
        return zs_fail(ZS_ERR_ARG, "%s: found is NULL", what);
    if (!*user_bytes)
        *user_bytes = none;
    *found = e->manifest != NULL;
    if (!*found && e->config.resume_commit)
        return zs_fail(ZS_ERR_ARG, "'%s' holds no state to take commit %llu from",
                       e->config.state_dir, (unsigned long long)e->config.resume_commit);
    if (!*found)
        **user_bytes = 0;
    return ZS_OK;
}

zs_status zs_state_peek(zs_engine *e, int *found, void *user, size_t *user_bytes)
{
    unsigned char data[ZS_STATES_HEADER_MAX];
    size_t bytes = sizeof data, none = 0;
    zs_header header = {0};
    ZS_CHECK(look(e, "zs_state_peek", found, &user_bytes, &none));
    if (!*found)
        return ZS_OK;
    if (e->manifest->generation != e->own->generation)
        ZS_CHECK(zs_reshape_header(e, data, &bytes));
    else
        ZS_CHECK(zs_states_header(e->states, wanted_commit(e), data, &bytes));
    header.param_count = e->param_count;
    ZS_CHECK(counts(e, &header.steps));
    const zs_status status = zs_header_decode(data, ZS_MIN(bytes, sizeof data), &header);
    if (status == ZS_OK)
        give_user(&header, user, user_bytes);
    free(header.steps);
    return status;
}

zs_status zs_state_resume(zs_engine *e, int *found, void *user, size_t *user_bytes)
{
    size_t none = 0;
    ZS_CHECK(look(e, "zs_state_resume", found, &user_bytes, &none));
    return *found ? zs_engine_break(e, resume(e, user, user_bytes)) : ZS_OK;
}
