/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's insides, shared by the zero/ sources. One engine belongs to one rank and is used by
 * one thread at a time.
 *
 * A unit is the caller's group of parameters. Inside it, parameters of one dtype that are all
 * trained, or all frozen, share a flat buffer: that is what is cut into shards, reduced, gathered
 * and stepped. */
#ifndef ZS_ZERO_ENGINE_H
#define ZS_ZERO_ENGINE_H

#include <stdatomic.h>
#include <sys/types.h>

#include "base/ledger.h"
#include "base/log.h"
#include "base/status.h"
#include "device/mark.h"
#include "io/io.h"
#include "kernels/math.h"
#include "offload/param_file.h"
#include "offload/states.h"
#include "offload/store.h"
#include "zero/bulk.h"
#include "zero/comm.h"
#include "zero/layout.h"
#include "zero/manifest.h"
#include "zspill.h"

typedef struct zs_flat {
    zs_dtype dtype;
    int trainable;
    size_t unit;
    size_t count;
    zs_param *params; /* [count], in registration order */
    zs_layout layout;

    zs_mem working;     /* stages 0-2: all; stage 3: the shard, unless it lives on NVMe */
    size_t param_shard; /* its number in the parameter file */
    uint64_t gather_at; /* stage 3: byte offset in the unit's gathered buffer */

    /* trainable only */
    uint64_t bucket_at; /* byte offset in the unit's gradient bucket */
    zs_mem grad_full;   /* stages 0 and 1: local gradients, then the reduced ones */
    zs_mem grad_shard;  /* stages 2 and 3, and 0 and 1 when micro-batches accumulate: the reduced
                           shard */
    size_t state_shard; /* its number in zs_states */
    zs_adam_run *runs;  /* [count]: scratch of a step */
} zs_flat;

/* What followed a unit, given what came before it: learned from the order of acquires. */
typedef struct zs_successor {
    int32_t before, after;
} zs_successor;
enum { ZS_SUCCESSORS = 4, ZS_UNIT_FLATS = 2 * ZS_DTYPES };

typedef enum zs_unit_state {
    ZS_UNIT_AWAY,    /* stage 3: only the shards are here */
    ZS_UNIT_READING, /* this rank's shards are on their way from NVMe */
    ZS_UNIT_LIVE     /* gathered */
} zs_unit_state;

typedef struct zs_buffer {
    zs_mem mem;
    zs_mark used; /* its last user is done with it */
} zs_buffer;

typedef struct zs_unit_info {
    char *name;
    size_t count;
    zs_param *params;
    size_t flat_begin, flat_end; /* into engine->flats */
    uint64_t numel;              /* padded elements, all flats */

    /* stage 3 */
    zs_unit_state state;
    int acquired;
    uint64_t last_use;
    uint64_t gather_bytes;
    zs_buffer *gathered; /* from engine->gather_cache */
    zs_buffer *staging;  /* this rank's shards as read from NVMe, from engine->staging_cache */
    zs_io_req read;
    zs_successor successors[ZS_SUCCESSORS];
    int successor_at;

    /* gradients of the micro-batch in progress */
    uint64_t bucket_bytes;
    zs_buffer *bucket; /* stages 2 and 3: from engine->bucket_cache */
    size_t missing;    /* trainable parameters whose gradient is not complete */
    int reduced;

    zs_mark weights;  /* the weights that acquire gives are there (on engine->work) */
    zs_mark grads;    /* what was read of the full gradient buffers was read (on engine->work) */
    int grads_joined; /* in this micro-batch, the caller's stream has waited for grads */
} zs_unit_info;

typedef struct zs_param_info {
    char *name;
    int ndim;
    int64_t shape[ZS_MAX_DIMS];
    uint64_t numel;
    zs_dtype dtype;
    zs_group group;
    int frozen;
    int grad_uses;
    int32_t unit;    /* -1: none yet */
    size_t flat;     /* into engine->flats */
    size_t at;       /* index in the flat */
    uint64_t steps;  /* Adam's count */
    int uses;        /* contributions in this micro-batch */
    int contributed; /* the local gradient buffer holds something */
    int got_grad;    /* any rank had a gradient in this step */
} zs_param_info;

/* In the device's memory: this rank's sum of squares, that of all (at most 64), and what follows.
 */
typedef struct zs_decision {
    double own, all[64];
    zs_clip clip;
} zs_decision;

/* Buffers that come and go in the same few sizes. */
typedef struct zs_cache {
    zs_device *device;
    zs_ledger *ledger;
    zs_tier tier;
    const char *purpose;
    zs_buffer **idle;
    size_t idle_count, idle_capacity;
} zs_cache;

typedef enum zs_phase {
    ZS_PHASE_OPEN,  /* registering */
    ZS_PHASE_IDLE,  /* no gradients */
    ZS_PHASE_MICRO, /* inside a micro-batch */
    ZS_PHASE_MORE,  /* between micro-batches of a step */
    ZS_PHASE_READY  /* all gradients there */
} zs_phase;

struct zs_engine {
    zs_engine_config config; /* strings point into the two below */
    char *state_dir, *param_dir;
    zs_comm *comm;
    int rank, world;
    pid_t pid;
    atomic_int canceled;
    zs_status broken; /* a collective or a step failed: nothing may be relied on */
    char *broken_why;
    int all_know; /* of the failure at hand: no rank waits for this one */
    zs_phase phase;

    zs_log log;
    zs_ledger *ledger;
    zs_pool *pool;
    int own_pool;
    zs_device *device;
    int own_device;
    zs_math *math;      /* of the device */
    zs_math *host_math; /* for host memory; the same where the host is the device */
    /* The caller's stream, and the one that all of the engine's own work is queued on, in its
     * order: reductions, gathers, Adam, conversions. Both NULL on the host. */
    zs_stream *compute, *work;
    zs_mark joined; /* on compute: what was queued there when the engine last took over */

    zs_bulk *bulk;
    zs_io *io;
    zs_param_file *param_file;
    zs_states *states;

    zs_group_config *groups;
    size_t group_count;
    zs_param_info *params;
    size_t param_count;
    zs_unit_info *units;
    size_t unit_count;
    zs_flat *flats;
    size_t flat_count;

    /* stage 3 */
    zs_cache gather_cache, staging_cache;
    uint64_t live_numel, live_budget;
    uint64_t clock;
    int32_t last_unit, before_last_unit;

    /* gradients */
    zs_cache bucket_cache;
    int last_micro;
    int micro_index;
    int32_t next_reduce; /* fixed order of reductions when gradients may be missing */

    /* state: what the directory's manifest says, and what ours will say. Their generations differ
     * until our first commit. */
    zs_manifest *manifest;  /* NULL: there is none */
    zs_manifest *own;       /* NULL: no state_dir */
    uint64_t run;           /* this run's lot, or that of the one it goes on with */
    int dir_lock, made_dir; /* rank 0: descriptor of state_dir, or -1; whether we made it */

    /* step */
    uint64_t step;
    uint64_t commit;   /* greatest number that any rank gave to a commit */
    uint64_t in_force; /* number of the commit that was found */
    double loss_scale;
    int good_steps, skipped_in_row;
    zs_states_input *inputs;
    zs_adam_coef *coefs; /* [param_count]: scratch of a step */

    /* One parameter-file extent in memory, for element-wise access (zero/weights.c). */
    zs_mem window;
    zs_flat *window_flat;
    int window_dirty;
    float *scratch; /* ZS_SCRATCH elements, for conversions; memory that the device reaches */
    zs_mem scratch_mem;
    double *sums; /* [flat_count]: sums of squares of the reduced gradients, likewise */
    zs_mem sums_mem;
    /* Clipping that the device decides (zero/step.c): its numbers, and what the host sees of them.
     */
    zs_mem decision, verdict;
    zs_mark decided;
};

enum { ZS_SCRATCH = 65536 };

/* Every public call starts with this: handle, fork, cancellation, earlier failure. what: for
 * messages. */
zs_status zs_engine_enter(const zs_engine *engine, const char *what);
/* As above, and parameter or unit must exist. */
zs_status zs_engine_enter_param(const zs_engine *engine, zs_param param, const char *what);
zs_status zs_engine_enter_unit(const zs_engine *engine, zs_unit unit, const char *what);
/* A failure after which the ranks are no longer in step: remembers it, tells the other ranks,
 * returns status. */
zs_status zs_engine_break(zs_engine *engine, zs_status status);
/* zs_comm_agree, and remembers that all ranks know of the failure. */
zs_status zs_engine_agree(zs_engine *engine, const char *what, zs_status local);
/* The engine must be in one of the phases of mask (1 << ZS_PHASE_...). */
zs_status zs_engine_expect(const zs_engine *engine, unsigned mask, const char *what);

/* The part of the flat buffer whose states (and, in stage 3, weights) this rank holds: all at stage
 * 0, else its shard. */
static inline uint64_t zs_flat_held_begin(const zs_engine *e, const zs_flat *flat)
{
    return e->config.zero_stage == 0 ? 0 : (uint64_t)e->rank * flat->layout.shard;
}

static inline uint64_t zs_flat_held_numel(const zs_engine *e, const zs_flat *flat)
{
    return e->config.zero_stage == 0 ? flat->layout.padded : flat->layout.shard;
}

/* [*first, + *count) of the parameter lies in [begin, begin + numel) of its flat buffer; *at: where
 * there, from begin. */
void zs_flat_locate(const zs_flat *flat, size_t at, uint64_t begin, uint64_t numel, uint64_t *first,
                    uint64_t *count, uint64_t *held_at);

/* Working copies of the held part, in memory; NULL when they live on NVMe. */
void *zs_flat_working_held(const zs_engine *e, const zs_flat *flat);
/* Where this rank's reduced gradient shard is accumulated. */
void *zs_flat_grad_shard(const zs_engine *e, const zs_flat *flat);

/* Whether that is the master, too: an fp32 working copy that stays on the side where the states
 * are. A second one would only cost its bytes. */
int zs_flat_is_master(const zs_engine *e, const zs_flat *flat);

/* The engine's stream as kernels take it. */
static inline void *zs_engine_native(const zs_engine *e)
{
    return e->device->ops->stream_native(e->device, e->work);
}

/* Whether the device decides on clipping and skipping, and Adam is queued before the host knows:
 * where all of Adam's memory is in the device's reach. */
static inline int zs_engine_defers(const zs_engine *e)
{
    return !e->device->host_access && e->config.optimizer_tier == ZS_TIER_DEVICE && !e->param_file;
}

/* Work queued from here on comes after all that the caller has queued by now. */
zs_status zs_engine_join(zs_engine *e);
/* Waits for the engine's work. Not on the path of a step. */
zs_status zs_engine_settle(zs_engine *e);

/* mem is memory that only copies, and kernels over the bus, reach from the device. */
static inline int zs_mem_is_far(const zs_engine *e, const zs_mem *mem)
{
    return !e->device->host_access && mem->tier == ZS_TIER_HOST;
}

/* "unit 'layers.3'" into buf */
const char *zs_unit_label(const zs_engine *e, size_t unit, char buf[96]);

/* zero/commit.c */
void zs_engine_free_layout(zs_engine *e);

/* zero/cache.c */
void zs_cache_init(zs_cache *cache, zs_device *device, zs_ledger *ledger, zs_tier tier,
                   const char *purpose);
/* stream goes on when the buffer's last user is done. */
zs_status zs_cache_get(zs_cache *cache, size_t bytes, zs_stream *stream, zs_buffer **out);
/* For the host to fill: waits for the last user. */
zs_status zs_cache_get_host(zs_cache *cache, size_t bytes, zs_buffer **out);
/* Its mark, used, is behind its last use. */
void zs_cache_put(zs_cache *cache, zs_buffer *buffer);
/* Frees idle buffers. */
void zs_cache_trim(zs_cache *cache);
void zs_cache_free(zs_cache *cache);

/* zero/gather.c. Forgets gathered copies, because the weights changed. ZS_ERR_MISUSE names a unit
 * still acquired. */
zs_status zs_gather_invalidate(zs_engine *e);
/* Starts reading what is likely to be acquired next. */
zs_status zs_gather_prefetch(zs_engine *e);
void zs_gather_close(zs_engine *e);

/* zero/state.c. Collective: draws the lot by which this run's files are known. */
zs_status zs_state_draw(zs_engine *e);
/* Before any rank looks at the manifest: rank 0 keeps other runs out of state_dir, and makes
 * durable what it is to find there. */
zs_status zs_state_lock(zs_engine *e);
void zs_state_unlock(zs_engine *e);
/* Collective: the newest commit that all ranks have is in force from here on, so that nothing
 * written before a resume, or without one, harms it. */
zs_status zs_state_settle(zs_engine *e);
/* Reads the manifest and decides which generation of store files this engine uses: the same on all
 * ranks, which see the same manifest. */
zs_status zs_state_open(zs_engine *e);
/* Takes over what a commit's header says; *user_bytes as in zs_state_resume. */
zs_status zs_state_decode(zs_engine *e, const void *header, size_t header_bytes, void *user,
                          size_t *user_bytes);

/* zero/reshape.c. Takes over the newest commit of another shape, which e->manifest describes, into
 * masters, moments and working copies of the held part. Not collective. */
zs_status zs_reshape_load(zs_engine *e, void *user, size_t *user_bytes);
/* What the engine keeps beside that commit (zero/header.h), at most *header_bytes of it;
 * *header_bytes becomes the number stored. */
zs_status zs_reshape_header(const zs_engine *e, void *header, size_t *header_bytes);

/* zero/weights.c. Brings working copies of the held part to where the tier keeps them and, at
 * stages 1 and 2, to all ranks. */
zs_status zs_weights_spread(zs_engine *e);
/* Working copies of the held part from the masters. */
zs_status zs_weights_from_masters(zs_engine *e);
zs_status zs_window_flush(zs_engine *e);
/* Forgets the window: the file changed behind it. */
void zs_window_drop(zs_engine *e);

#endif
