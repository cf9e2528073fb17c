/* SPDX-License-Identifier: Apache-2.0 */
/* Commit and resume: what the engine keeps beside the states, the manifest, and the agreement of
 * all ranks. */
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "zero/engine.h"

/* The header, little-endian 64-bit words: magic, number of the commit, step, bits of the loss
 * scale, good steps, number of runs, then for each run of parameters with equal step counts
 * {parameters, steps}, number of user bytes, user bytes. */
enum { HEADER_MAGIC = 0x32524448 /* "HDR2" */ };

typedef struct cursor {
    unsigned char *data;
    size_t at, size;
    int overflow;
} cursor;

static void put_u64(cursor *c, uint64_t value)
{
    if (c->size - c->at < 8) {
        c->overflow = 1;
        return;
    }
    for (int i = 0; i < 8; i++)
        c->data[c->at++] = (unsigned char)(value >> 8 * i);
}

static uint64_t get_u64(cursor *c)
{
    uint64_t value = 0;
    if (c->size - c->at < 8) {
        c->overflow = 1;
        return 0;
    }
    for (int i = 0; i < 8; i++)
        value |= (uint64_t)c->data[c->at++] << 8 * i;
    return value;
}

static uint64_t double_bits(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static double bits_double(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static size_t same_steps(const zs_engine *e, size_t begin)
{
    size_t end = begin + 1;
    while (end < e->param_count && e->params[end].steps == e->params[begin].steps)
        end++;
    return end - begin;
}

static zs_status encode(const zs_engine *e, const void *user, size_t user_bytes, cursor *c)
{
    uint64_t runs = 0;
    for (size_t i = 0; i < e->param_count; i += same_steps(e, i))
        runs++;
    put_u64(c, HEADER_MAGIC);
    put_u64(c, e->commit + 1);
    put_u64(c, e->step);
    put_u64(c, double_bits(e->loss_scale));
    put_u64(c, (uint64_t)e->good_steps);
    put_u64(c, runs);
    for (size_t i = 0; i < e->param_count; i += same_steps(e, i)) {
        put_u64(c, same_steps(e, i));
        put_u64(c, e->params[i].steps);
    }
    put_u64(c, user_bytes);
    if (c->overflow || c->size - c->at < user_bytes)
        return zs_fail(ZS_ERR_ARG,
                       "zs_state_commit: %llu runs of parameters with different step counts and "
                       "%zu user bytes do not fit into a header of %zu bytes",
                       (unsigned long long)runs, user_bytes, c->size);
    if (user_bytes)
        memcpy(c->data + c->at, user, user_bytes);
    c->at += user_bytes;
    return ZS_OK;
}

zs_status zs_state_decode(zs_engine *e, const void *header, size_t header_bytes, void *user,
                          size_t *user_bytes)
{
    /* Only read from here on. */
    cursor reader = {.data = (unsigned char *)header, .size = header_bytes}, *c = &reader;
    const uint64_t magic = get_u64(c);
    e->commit = get_u64(c);
    e->step = get_u64(c);
    const double scale = bits_double(get_u64(c));
    e->good_steps = (int)get_u64(c);
    uint64_t runs = get_u64(c);
    size_t at = 0;
    if (magic != HEADER_MAGIC)
        return zs_fail(ZS_ERR_CORRUPT, "the store's engine header begins with %llx, not %x",
                       (unsigned long long)magic, HEADER_MAGIC);
    while (runs-- && !c->overflow) {
        uint64_t n = get_u64(c);
        const uint64_t steps = get_u64(c);
        while (n-- && at < e->param_count)
            e->params[at++].steps = steps;
    }
    const uint64_t stored = get_u64(c);
    if (c->overflow || at != e->param_count || stored > c->size - c->at)
        return zs_fail(ZS_ERR_CORRUPT,
                       "the store's engine header of %zu bytes describes %zu "
                       "parameters where there are %zu",
                       c->size, at, e->param_count);
    /* A fixed scale is the configuration's, a dynamic one goes on where it was. */
    if (e->config.loss_scale == 0)
        e->loss_scale = scale;
    if (user && *user_bytes)
        memcpy(user, c->data + c->at, ZS_MIN(*user_bytes, stored));
    *user_bytes = stored;
    return ZS_OK;
}

/* ---- manifest ---- */

static zs_status describe(const zs_engine *e, zs_manifest **out)
{
    zs_manifest *m = calloc(1, sizeof *m);
    *out = m;
    if (!m || !(m->flats = calloc(e->flat_count + 1, sizeof *m->flats)))
        return zs_fail(ZS_ERR_NOMEM, "no memory for a manifest");
    m->fingerprint = e->config.fingerprint;
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
            return zs_fail(ZS_ERR_NOMEM, "no memory for a manifest");
        for (; to->count < f->count; to->count++) {
            const zs_param_info *p = &e->params[f->params[to->count]];
            to->numels[to->count] = p->numel;
            to->names[to->count] = strdup(p->name);
            if (!to->names[to->count])
                return zs_fail(ZS_ERR_NOMEM, "no memory for a manifest");
        }
    }
    return ZS_OK;
}

static zs_status read_manifest(zs_engine *e)
{
    const char *dir = e->config.state_dir;
    ZS_CHECK(describe(e, &e->own));
    ZS_CHECK(zs_manifest_load(dir, &e->manifest));
    const zs_manifest *m = e->manifest;
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
    /* Chunks of any length will do when none is asked for. */
    if (!e->own->chunk_numel)
        e->own->chunk_numel = m->chunk_numel;
    e->own->generation = m->generation + !zs_manifest_same_shape(m, e->own);
    return ZS_OK;
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
    zs_status status = ZS_OK;
    if (e->manifest && e->manifest->generation == e->own->generation)
        return ZS_OK;
    if (e->rank == 0)
        status = zs_manifest_save(e->config.state_dir, e->io, e->own);
    ZS_CHECK(zs_engine_agree(e, "zs_state_commit: the manifest", status));
    zs_manifest_free(&e->manifest);
    ZS_CHECK(describe(e, &e->manifest));
    e->manifest->generation = e->own->generation;
    e->manifest->chunk_numel = e->own->chunk_numel;
    if (e->rank == 0)
        zs_store_sweep(e->config.state_dir,
                       (const uint64_t[2]){e->own->generation, e->own->generation});
    return ZS_OK;
}

/* ---- commit ---- */

static zs_status commit(zs_engine *e, const void *user, size_t user_bytes)
{
    unsigned char data[ZS_STATES_HEADER_MAX];
    cursor c = {.data = data, .size = sizeof data};
    zs_status status = encode(e, user, user_bytes, &c);
    if (status == ZS_OK)
        status = zs_states_commit_prepare(e->states);
    /* Only when the data of all ranks is on disk may any rank's superblock name it. */
    ZS_CHECK(zs_engine_agree(e, "zs_state_commit: writing", status));
    status = zs_states_commit_publish(e->states, e->commit + 1, e->step, data, c.at);
    /* Only when all superblocks are may any slot be written again. */
    ZS_CHECK(zs_engine_agree(e, "zs_state_commit: publishing", status));
    e->commit++;
    return switch_manifest(e);
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

/* The newest commit that every rank has. */
static zs_status choose_commit(zs_engine *e, uint64_t *chosen)
{
    uint64_t mine[2] = {0, 0};
    int count = 0;
    zs_status status = zs_states_committed(e->states, mine, &count);
    if (status == ZS_OK && !count)
        status = zs_fail(ZS_ERR_CORRUPT,
                         "the manifest in '%s' names a store of rank %d that holds no commit: "
                         "restore the file from a copy, or start afresh in an empty directory",
                         e->config.state_dir, e->rank);
    ZS_CHECK(zs_engine_agree(e, "zs_state_resume: looking for state", status));
    /* A crash in the middle of a commit leaves some ranks one commit ahead; each keeps two. */
    double newest = (double)mine[0];
    ZS_CHECK(zs_comm_all_reduce(e->comm, "zs_state_resume", ZS_OP_MIN, &newest, 1));
    *chosen = (uint64_t)newest;
    if (mine[0] != *chosen && !(count > 1 && mine[1] == *chosen))
        status = zs_fail(ZS_ERR_CORRUPT,
                         "another rank's newest commit in '%s' is number %llu, which rank %d's "
                         "store does not hold (its newest is %llu): restore the files of all ranks "
                         "from one copy",
                         e->config.state_dir, (unsigned long long)*chosen, e->rank,
                         (unsigned long long)mine[0]);
    return zs_engine_agree(e, "zs_state_resume", status);
}

static zs_status load(zs_engine *e, uint64_t number, void *user, size_t *user_bytes)
{
    unsigned char data[ZS_STATES_HEADER_MAX];
    size_t bytes = sizeof data;
    ZS_CHECK(zs_states_resume(e->states, number, data, &bytes));
    ZS_CHECK(zs_state_decode(e, data, ZS_MIN(bytes, sizeof data), user, user_bytes));
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
    uint64_t number = 0;
    if (e->manifest->generation != e->own->generation)
        ZS_CHECK(reshape(e, user, user_bytes));
    else {
        ZS_CHECK(choose_commit(e, &number));
        ZS_CHECK(zs_engine_agree(e, "zs_state_resume: loading", load(e, number, user, user_bytes)));
    }
    return zs_weights_spread(e);
}

zs_status zs_state_resume(zs_engine *e, int *found, void *user, size_t *user_bytes)
{
    size_t none = 0;
    ZS_CHECK(need_store(e, "zs_state_resume"));
    if (!found)
        return zs_fail(ZS_ERR_ARG, "zs_state_resume: found is NULL");
    if (!user_bytes)
        user_bytes = &none;
    *found = e->manifest != NULL;
    if (*found)
        return zs_engine_break(e, resume(e, user, user_bytes));
    *user_bytes = 0;
    return ZS_OK;
}
