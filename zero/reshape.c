/* SPDX-License-Identifier: Apache-2.0 */
/* Taking over state that another world, stage, dtype or chunk length left: parameters are found by
 * name in what was saved, and each rank reads the chunks that hold its own parts. */
#include <string.h>

#include "base/util.h"
#include "zero/engine.h"
#include "zero/saved.h"

/* Elements [first, first + count) of a parameter, of all three arrays, to `to` of a shard. */
static zs_status move(zs_engine *e, zs_saved *saved, zs_saved_param param, uint64_t first,
                      uint64_t count, size_t shard, uint64_t to)
{
    while (count) {
        const uint64_t n = zs_saved_span(saved, param, first, ZS_MIN(count, (uint64_t)ZS_SCRATCH));
        for (zs_array a = ZS_MASTER; a <= ZS_EXP_AVG_SQ; a++) {
            ZS_CHECK(zs_saved_read(saved, param, a, first, n, e->scratch));
            ZS_CHECK(zs_states_write(e->states, shard, a, to, n, e->scratch));
        }
        first += n;
        to += n;
        count -= n;
    }
    return ZS_OK;
}

static zs_status move_all(zs_engine *e, zs_saved *saved)
{
    for (size_t i = 0; i < e->flat_count; i++) {
        const zs_flat *f = &e->flats[i];
        for (size_t j = 0; f->trainable && j < f->count; j++) {
            const zs_param_info *p = &e->params[f->params[j]];
            uint64_t first, count, held_at;
            zs_saved_param param;
            ZS_CHECK(zs_saved_find(saved, p->name, p->numel, &param));
            zs_flat_locate(f, j, zs_flat_held_begin(e, f), zs_flat_held_numel(e, f), &first, &count,
                           &held_at);
            ZS_CHECK(move(e, saved, param, first, count, f->state_shard, held_at));
        }
    }
    return zs_states_flush(e->states);
}

static zs_status open_saved(const zs_engine *e, zs_saved **out)
{
    return zs_saved_open(e->config.state_dir, e->manifest, 0, &e->log, e->config.resume_commit,
                         out);
}

zs_status zs_reshape_header(const zs_engine *e, void *header, size_t *header_bytes)
{
    zs_status status;
    zs_saved *saved = NULL;
    const void *kept;
    size_t bytes;
    ZS_TRY(open_saved(e, &saved));
    ZS_TRY(zs_saved_header(saved, &kept, &bytes));
    memcpy(header, kept, ZS_MIN(*header_bytes, bytes));
    *header_bytes = bytes;
fail:
    zs_saved_close(&saved);
    return status;
}

zs_status zs_reshape_load(zs_engine *e, void *user, size_t *user_bytes)
{
    zs_status status;
    zs_saved *saved = NULL;
    const void *header;
    size_t bytes;
    ZS_TRY(open_saved(e, &saved));
    ZS_TRY(move_all(e, saved));
    ZS_TRY(zs_saved_header(saved, &header, &bytes));
    ZS_TRY(zs_state_decode(e, header, bytes, user, user_bytes));
    /* Numbers go on above all that were given. */
    int count;
    e->commit = zs_saved_kept(saved, &count)->commit;
    status = zs_weights_from_masters(e);
fail:
    zs_saved_close(&saved);
    return status;
}
