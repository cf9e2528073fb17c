/* SPDX-License-Identifier: Apache-2.0 */
/* Commit and resume: what the engine keeps beside the states, and the agreement of all ranks. */
#include <string.h>

#include "base/util.h"
#include "zero/engine.h"

/* The header, little-endian 64-bit words: magic, step, bits of the loss scale, good steps, number
 * of runs, then for each run of parameters with equal step counts {parameters, steps}, number of
 * user bytes, user bytes. */
enum { HEADER_MAGIC = 0x31524448 /* "HDR1" */ };

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

static zs_status decode(zs_engine *e, cursor *c, void *user, size_t *user_bytes)
{
    const uint64_t magic = get_u64(c);
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
    unsigned char data[ZS_STATES_HEADER_MAX];
    cursor c = {.data = data, .size = sizeof data};
    ZS_CHECK(need_store(e, "zs_state_commit"));
    if (user_bytes > ZS_USER_BYTES_MAX || (user_bytes && !user))
        return zs_fail(ZS_ERR_ARG, "zs_state_commit: %zu user bytes; at most %d are kept",
                       user_bytes, ZS_USER_BYTES_MAX);
    zs_status status = encode(e, user, user_bytes, &c);
    if (status == ZS_OK)
        status = zs_states_commit_prepare(e->states);
    /* Only when the data of all ranks is on disk may any rank's superblock name it. */
    status = zs_engine_agree(e, "zs_state_commit: writing", status);
    if (status == ZS_OK)
        status = zs_engine_agree(e, "zs_state_commit: publishing",
                                 zs_states_commit_publish(e->states, e->step, data, c.at));
    return zs_engine_break(e, status);
}

/* The newest step that every rank has. *found 0: no rank has any. */
static zs_status choose_step(zs_engine *e, uint64_t *step, int *found)
{
    uint64_t mine[2] = {0, 0};
    int count = 0;
    ZS_CHECK(zs_engine_agree(e, "zs_state_resume: looking for state",
                             zs_states_committed(e->states, mine, &count)));
    double counts[2] = {count > 0, -(count > 0)};
    ZS_CHECK(zs_comm_all_reduce(e->comm, "zs_state_resume", ZS_OP_MAX, counts, 2));
    *found = counts[0] > 0;
    if (!*found)
        return ZS_OK;
    if (counts[1] == 0) /* some rank has none */
        return zs_fail(ZS_ERR_MISMATCH,
                       "zs_state_resume: some ranks have state in '%s' and others have none%s: "
                       "restore the missing files, or start afresh in an empty directory",
                       e->config.state_dir, count ? "" : " (this one among them)");
    /* A crash in the middle of a commit leaves some ranks one commit ahead; each keeps two. */
    double newest = (double)mine[0];
    ZS_CHECK(zs_comm_all_reduce(e->comm, "zs_state_resume", ZS_OP_MIN, &newest, 1));
    *step = (uint64_t)newest;
    zs_status status = ZS_OK;
    if (mine[0] != *step && !(count > 1 && mine[1] == *step))
        status =
            zs_fail(ZS_ERR_CORRUPT,
                    "zs_state_resume: another rank's newest state is of step %llu, which this "
                    "rank's store in '%s' does not hold (it has step %llu)",
                    (unsigned long long)*step, e->config.state_dir, (unsigned long long)mine[0]);
    return zs_engine_agree(e, "zs_state_resume", status);
}

static zs_status load(zs_engine *e, uint64_t step, void *user, size_t *user_bytes)
{
    unsigned char data[ZS_STATES_HEADER_MAX];
    size_t bytes = sizeof data;
    ZS_CHECK(zs_states_resume(e->states, step, data, &bytes));
    cursor c = {.data = data, .size = ZS_MIN(bytes, sizeof data)};
    ZS_CHECK(decode(e, &c, user, user_bytes));
    return zs_weights_from_masters(e);
}

static zs_status resume(zs_engine *e, int *found, void *user, size_t *user_bytes)
{
    uint64_t step = 0;
    ZS_CHECK(choose_step(e, &step, found));
    if (!*found)
        return ZS_OK;
    ZS_CHECK(zs_engine_agree(e, "zs_state_resume: loading", load(e, step, user, user_bytes)));
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
    *found = 0;
    zs_status status = resume(e, found, user, user_bytes);
    if (status == ZS_OK && !*found)
        *user_bytes = 0;
    return zs_engine_break(e, status);
}
