/* SPDX-License-Identifier: Apache-2.0
 *
 * zspill: ZeRO-sharded, offloaded, streaming optimizer steps.
 *
 * The one installed header. Rules that hold for every call:
 *  - Functions return zs_status; ZS_OK is 0. After any other value zs_last_error() of the same
 * thread tells which object, which number and what to do.
 *  - Handles are opaque. open gives ownership to the caller; close takes the handle's address, sets
 * it to NULL and accepts NULL handles. On failure open leaves *out NULL and owns nothing.
 *  - Config structs start with `size`; use the ZS_*_INIT initializers. Strings and arrays passed in
 * are copied unless noted.
 *  - Nothing is global: many engines may live in one process. The library never exits, never
 * prints, installs no signal handler.
 *  - Counts are elements unless a name says bytes. Times are seconds.
 *  - "Collective" calls must be made by all ranks of the communicator, in the same order; a rank
 * that disagrees or stays away makes the others fail with an error that names the unit, within the
 * communicator's time-out.
 *  - A refused argument or a call out of order changes nothing. A failure inside a collective, a
 * step or a commit ends the engine: nobody knows how far the other ranks came. All later calls
 * say so; close it, open another, resume the last commit.
 *  - After fork() what was opened before belongs to the parent: in the child its calls return
 * ZS_ERR_FORKED, and closing it there only forgets it. A child may open handles of its own.
 */
#ifndef ZSPILL_H
#define ZSPILL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ZS_API __attribute__((visibility("default")))
#else
#define ZS_API
#endif

/* ---- status ---- */

typedef enum zs_status {
    ZS_OK = 0,
    ZS_ERR_ARG = 1,     /* an argument or option is out of range or contradicts another */
    ZS_ERR_MISUSE = 2,  /* a call out of order: step before all gradients, release before acquire */
    ZS_ERR_NOMEM = 3,   /* memory of some tier could not be had */
    ZS_ERR_IO = 4,      /* the kernel refused or failed an I/O operation */
    ZS_ERR_NOSPACE = 5, /* the disk is too small for what was asked */
    ZS_ERR_CORRUPT = 6, /* a file does not hold what its format demands */
    ZS_ERR_LOCKED = 7,  /* another process or engine holds the store */
    ZS_ERR_EXISTS = 8,  /* state is there and resume was not asked for */
    ZS_ERR_MISMATCH = 9,     /* ranks, or a store and a configuration, disagree */
    ZS_ERR_COMM = 10,        /* another rank failed, or a transport did */
    ZS_ERR_TIMEOUT = 11,     /* another rank did not arrive in time */
    ZS_ERR_UNSUPPORTED = 12, /* not supported by this version, build or machine */
    ZS_ERR_NONFINITE = 13,   /* too many steps in a row with NaN or Inf gradients */
    ZS_ERR_CANCELED = 14,    /* zs_engine_cancel() was called */
    ZS_ERR_FORKED = 15,      /* called in the child of a fork() */
    ZS_ERR_INTERNAL = 16,    /* a bug in zspill */
    ZS_ERR_DEVICE = 17       /* an accelerator or its driver failed */
} zs_status;

/* Message of the last failed call of this thread; "" before any. Valid until this thread's next
 * failing zs_ call. */
ZS_API const char *zs_last_error(void);
/* "ZS_ERR_NOSPACE" and so on; "ZS_ERR_?" for unknown values. Static. */
ZS_API const char *zs_status_name(zs_status status);
/* "0.1.0". Static. */
ZS_API const char *zs_version(void);

/* ---- words ---- */

typedef enum zs_dtype { ZS_FP32 = 0, ZS_BF16 = 1, ZS_FP16 = 2 } zs_dtype;

/* Where bytes live. On a machine without accelerator, device and host are both RAM; the ledger
 * still tells them apart. */
typedef enum zs_tier { ZS_TIER_DEVICE = 0, ZS_TIER_HOST = 1, ZS_TIER_NVME = 2 } zs_tier;
enum { ZS_TIERS = 3 };

typedef enum zs_log_level {
    ZS_LOG_ERROR = 0,
    ZS_LOG_WARN = 1,
    ZS_LOG_INFO = 2,
    ZS_LOG_DEBUG = 3
} zs_log_level;
/* Called only on a thread that is inside a zs_ call. text has no newline and is valid during the
 * call. */
typedef void (*zs_log_fn)(void *cookie, zs_log_level level, const char *text);

/* ---- thread pool ---- */

typedef struct zs_pool zs_pool;

/* threads: 1..64, the calling thread included (1 starts none); 0: the CPUs this process may run on.
 * first_core: pool thread i is bound to the (first_core + i)-th allowed CPU; -1: no binding. The
 * caller is never bound. */
ZS_API zs_status zs_pool_open(int threads, int first_core, zs_pool **out);
/* No engine may use the pool any more. */
ZS_API void zs_pool_close(zs_pool **pool);

/* ---- devices ---- */

/* Where parameters, gradients and the caller's computing are. Used by one thread at a time. */
typedef struct zs_device zs_device;

/* name: "host"; "cuda" or "cuda:N", device N (0 without it) of those that the process sees, through
 * the plug-in libzspill-cuda.so (ZSPILL_CUDA_LIB overrides where it is looked for):
 * ZS_ERR_UNSUPPORTED where there is none. */
ZS_API zs_status zs_device_open(const char *name, zs_device **out);
/* No engine may use the device any more. */
ZS_API void zs_device_close(zs_device **device);

/* ---- trace ---- */

typedef struct zs_trace zs_trace;

/* A Chrome/Perfetto JSON trace, written to path at close (path is created at open, to fail early).
 * Thread-safe; may be shared by the engines of all ranks of a process. Keeps at most max_events (0:
 * 1 million), then drops and counts. */
ZS_API zs_status zs_trace_open(const char *path, size_t max_events, zs_trace **out);
ZS_API zs_status zs_trace_close(zs_trace **trace);
/* Monotonic nanoseconds, for zs_trace_span. */
ZS_API uint64_t zs_trace_now(void);
/* A span [begin_ns, end_ns) on the track (rank, track). name and track must be string literals or
 * outlive the trace. */
ZS_API void zs_trace_span(zs_trace *trace, int rank, const char *track, const char *name,
                          uint64_t begin_ns, uint64_t end_ns);

/* ---- communicators ---- */

typedef struct zs_comm zs_comm;

/* A world of one. */
ZS_API zs_status zs_comm_open_self(zs_comm **out);

/* world (1..64) ranks as threads of this process: out[r] is rank r's handle, to be used by one
 * thread at a time. timeout_s > 0: how long a rank waits for another in a collective. */
ZS_API zs_status zs_comm_open_threads(int world, double timeout_s, zs_comm **out);

/* Ranks as processes of an MPI job, through the plug-in libzspill-mpi.so (ZSPILL_MPI_LIB overrides
 * where it is looked for). Initializes MPI (MPI_THREAD_FUNNELED or better) when the process has
 * not, and then finalizes it at close. */
ZS_API zs_status zs_comm_open_mpi(double timeout_s, zs_comm **out);

/* The caller's own collectives (torch.distributed and the like). Each waits for all ranks and
 * returns 0, or non-zero for failure; each runs on a thread that is inside a zs_ call. Buffers do
 * not overlap. Time-outs are the callbacks' own. */
typedef struct zs_comm_callbacks {
    size_t size; /* sizeof(zs_comm_callbacks) */
    void *cookie;
    /* recv[r * bytes .. (r + 1) * bytes) = rank r's send[0 .. bytes) */
    int (*all_gather)(void *cookie, const void *send, void *recv, size_t bytes);
    /* recv[r * bytes ..] = rank r's send[me * bytes ..]; bytes is per pair of ranks */
    int (*all_to_all)(void *cookie, const void *send, void *recv, size_t bytes);
    int (*barrier)(void *cookie);
    /* optional: text of the last failure, or NULL */
    const char *(*error)(void *cookie);
    /* optional: called once at zs_comm_close */
    void (*close)(void *cookie);
} zs_comm_callbacks;
ZS_API zs_status zs_comm_open_callbacks(const zs_comm_callbacks *callbacks, int rank, int world,
                                        zs_comm **out);

ZS_API void zs_comm_close(zs_comm **comm);
ZS_API int zs_comm_rank(const zs_comm *comm);
ZS_API int zs_comm_world(const zs_comm *comm);
/* Ranks that share this machine's CPUs, as far as known: those of this process, over MPI those of
 * this machine. */
ZS_API int zs_comm_local_ranks(const zs_comm *comm);
/* Makes every present and later collective of all ranks fail with ZS_ERR_COMM and this message
 * (ranks as threads), or of this rank (processes; the others run into their time-out). Any thread
 * may call. */
ZS_API void zs_comm_abort(zs_comm *comm, const char *message);

typedef enum zs_reduce_op { ZS_OP_SUM = 0, ZS_OP_MAX = 1, ZS_OP_MIN = 2 } zs_reduce_op;
/* Collective. values[i] = op over the ranks, in rank order. n <= 4096. what names the call in
 * errors. */
ZS_API zs_status zs_comm_all_reduce(zs_comm *comm, const char *what, zs_reduce_op op,
                                    double *values, size_t n);

/* ---- engine ---- */

typedef struct zs_engine zs_engine;
typedef int32_t zs_param; /* 0, 1, ... in the order of zs_param_add */
typedef int32_t zs_unit;  /* 0, 1, ... in the order of zs_unit_add */
typedef int32_t zs_group; /* 0, 1, ... in the order of zs_group_add */

typedef enum zs_io_engine {
    ZS_IO_AUTO = 0,
    ZS_IO_URING = 1,
    ZS_IO_POSIX = 2,
    ZS_IO_LIBAIO = 3,
    ZS_IO_URING_PLAIN = 4 /* io_uring without registered buffers and files */
} zs_io_engine;

/* Where Adam runs over states on tiers host and nvme that a CUDA device's parameters belong to; the
 * bits are the same. Each chunk may go to the side that is done first; all through the device, in
 * copies that are staged in its memory; all on the host, by the pool; or all on the device, which
 * reads and writes host memory over the bus in place. States on tier device, and all on the host
 * device, are worked on where they are: there what was asked for by name and does not fit is an
 * error. */
typedef enum zs_adam_side {
    ZS_ADAM_AUTO = 0,
    ZS_ADAM_DEVICE = 1,
    ZS_ADAM_HOST = 2,
    ZS_ADAM_ZERO_COPY = 3
} zs_adam_side;

/* When gradients of several micro-batches are summed over the ranks: each micro-batch (the same
 * bits at every stage), or once a step (stages 0 and 1 only: less traffic, other bits). */
typedef enum zs_reduce { ZS_REDUCE_MICRO = 0, ZS_REDUCE_BOUNDARY = 1 } zs_reduce;

/* What zs_grad_finish does about a trainable parameter that no gradient came for: fail; take zero
 * (moments decay, weight decay applies); or leave the parameter alone (no rank may have had one).
 */
typedef enum zs_missing_grad {
    ZS_MISSING_ERROR = 0,
    ZS_MISSING_ZERO = 1,
    ZS_MISSING_SKIP = 2
} zs_missing_grad;

typedef struct zs_engine_config {
    size_t size;            /* sizeof(zs_engine_config) */
    int zero_stage;         /* 0..3. Default 0: everything replicated */
    zs_tier optimizer_tier; /* where master weights and moments live. Default device */
    zs_tier
        param_tier; /* stage 3 only: where the working shard lives between uses. Default device */
    const char *state_dir; /* directory of this run's store, made if its parent is there. Needed for
                              optimizer_tier nvme and for zs_state_commit; NULL: no store */
    const char *
        param_dir; /* directory of the parameter spill file, likewise. Needed for param_tier nvme */
    zs_io_engine
        io_engine;       /* default auto: the best that works here; by name: that one or an error */
    zs_dtype grad_dtype; /* fp32 (default) or bf16: in which gradients are staged, reduced and
                            accumulated */
    zs_reduce reduce;    /* default micro */
    int grad_accum_steps;         /* >= 1, default 1: the most micro-batches of a step */
    zs_missing_grad missing_grad; /* default error */
    int threads; /* 0..64, for a pool of the engine's own when pool is NULL; 0: allowed CPUs / ranks
                    here */
    zs_pool *pool;         /* shared pool, not owned; NULL: own one */
    uint64_t buffer_bytes; /* host bytes for the streaming ring; 0: chosen (at most 1/8 of the
                              states, 12..256 MiB) */
    uint64_t chunk_numel;  /* elements of a chunk, a multiple of 4096; 0: chosen (1 Mi, smaller when
                              the shard is). For tests */
    uint64_t
        max_live_params; /* stage 3: gathered elements kept at once; 0: the two largest units. Below
                            what one acquire needs is an error that says how much it takes */
    double loss_scale;   /* 1 (default): none; > 0: fixed; 0: dynamic, for fp16 */
    double initial_loss_scale; /* dynamic: default 65536 */
    int loss_scale_window;     /* dynamic: steps without overflow before doubling. Default 1000 */
    double min_loss_scale;     /* dynamic: default 1 */
    int max_skipped_steps; /* this many non-finite steps in a row (dynamic: at min_loss_scale) are
                              an error. Default 5 */
    int resume; /* 0 (default): state that exists in state_dir is an error; 1: it may be resumed */
    int slots;  /* of each chunk in the store: 2 (default), or 1: half the space on disk, but a
                   process that ends between the first write after a commit and the next commit
                   leaves no state; for those that commit only at the end */
    /* Older commits that stay resumable beside the newest: 0..14, or -1 (default): as many as the
     * state that is resumed has, 0 for a new one. Each takes as much disk as the states (12 bytes
     * an element). Needs slots 2. A change of it is a change of shape: one commit is taken over,
     * the others go. */
    int keep;
    /* Number of the commit that zs_state_resume takes up, one of those kept (zspill inspect lists
     * them); 0 (default): the newest. Nothing changes on disk until the next zs_state_commit, which
     * then is the newest; what was newer than this one counts as older from then on. */
    uint64_t resume_commit;
    uint64_t fingerprint; /* of model and run, chosen by the caller: kept in the store, checked at
                             resume */
    zs_log_fn log;        /* NULL: silent */
    void *log_cookie;
    zs_log_level log_level; /* default info */
    zs_trace *trace;        /* NULL: none; not owned */
    zs_device *device; /* where device memory is; not owned, must outlive the engine; NULL: host.
                          On another device zs_param_data and zs_grad_buffer give its pointers and
                          zs_grad_ready takes such; all else takes host memory of any kind */
    void *stream; /* CUDA: the caller's cudaStream_t, on which it queues what uses units and makes
                     gradients; NULL: the device's first one, never CUDA's default stream. The
                     engine's work is ordered with it by events: zs_unit_acquire makes it wait for
                     the unit, zs_unit_release and zs_grad_ready cover what is queued on it by then.
                     The caller never has to wait on the host */
    zs_adam_side adam; /* default auto */
} zs_engine_config;

/* Fills in the defaults above. */
ZS_API void zs_engine_config_init(zs_engine_config *config);

/* comm is borrowed and must outlive the engine. Registers nothing yet. Not collective. */
ZS_API zs_status zs_engine_open(const zs_engine_config *config, zs_comm *comm, zs_engine **out);
/* Waits for I/O in flight, frees everything. Does not commit. */
ZS_API void zs_engine_close(zs_engine **engine);
/* Async-signal-safe, any thread: all later calls of this engine return ZS_ERR_CANCELED. The one
 * that is running ends as it would have; zs_comm_abort wakes one that waits for another rank. */
ZS_API void zs_engine_cancel(zs_engine *engine);

/* Hyper-parameters of torch.optim.AdamW (decoupled = 1) or Adam with L2 decay (decoupled = 0). */
typedef struct zs_group_config {
    size_t size;
    double lr;           /* >= 0, default 1e-3 */
    double beta1, beta2; /* [0, 1), default 0.9, 0.999 */
    double eps;          /* >= 0, default 1e-8 */
    double weight_decay; /* >= 0, default 0.01 */
    int decoupled;       /* default 1 */
} zs_group_config;
ZS_API void zs_group_config_init(zs_group_config *config);
ZS_API zs_status zs_group_add(zs_engine *engine, const zs_group_config *config, zs_group *out);
/* Any time between steps; used from the next step on. All ranks must set the same. */
ZS_API zs_status zs_group_set(zs_engine *engine, zs_group group, const zs_group_config *config);

enum { ZS_MAX_DIMS = 8 };
typedef struct zs_param_config {
    size_t size;
    const char *name;     /* unique in the engine */
    int ndim;             /* 0..ZS_MAX_DIMS */
    const int64_t *shape; /* each >= 0; a parameter without elements is allowed */
    zs_dtype dtype;       /* of the working copy that forward and backward see */
    zs_group group;       /* ignored when frozen */
    int frozen;           /* 1: no master, no moments, no gradient */
    int grad_uses; /* gradient contributions in each micro-batch before the gradient is complete.
                      Default 1; 2 for an embedding tied to the head */
} zs_param_config;
ZS_API void zs_param_config_init(zs_param_config *config);
/* Before zs_engine_commit. */
ZS_API zs_status zs_param_add(zs_engine *engine, const zs_param_config *config, zs_param *out);
/* The parameters gathered together. Each parameter belongs to one unit; those in none at commit are
 * an error. */
ZS_API zs_status zs_unit_add(zs_engine *engine, const char *name, const zs_param *params,
                             size_t count, zs_unit *out);
/* Collective. Lays out, checks that all ranks agree, checks space on disk and allocates everything.
 */
ZS_API zs_status zs_engine_commit(zs_engine *engine);

/* ---- weights in and out ---- */

typedef enum zs_array {
    ZS_WEIGHT = 0, /* the working copy */
    ZS_MASTER = 1, /* fp32 (frozen parameters: the working copy) */
    ZS_EXP_AVG = 2,
    ZS_EXP_AVG_SQ = 3,
    ZS_GRAD = 4 /* reduced, unscaled and unclipped, between zs_grad_finish and zs_step */
} zs_array;

/* Elements [first, first + count) of the flattened parameter that this rank writes at load: at
 * stage 0 all, else its shard's part. count may be 0. */
ZS_API zs_status zs_param_local(const zs_engine *engine, zs_param param, uint64_t *first,
                                uint64_t *count);
/* The part this rank answers for when something is written once by all ranks together (a model
 * file): its shard's part at every stage. */
ZS_API zs_status zs_param_owned(const zs_engine *engine, zs_param param, uint64_t *first,
                                uint64_t *count);
/* Sets master and working copy in [first, first + count), which must lie in zs_param_local's range.
 * src holds count elements of dtype. Cheapest in increasing order of parameter and element. */
ZS_API zs_status zs_param_write(zs_engine *engine, zs_param param, uint64_t first, uint64_t count,
                                zs_dtype dtype, const void *src);
/* Sets a moment (ZS_EXP_AVG, ZS_EXP_AVG_SQ) in the same way: for states that come from elsewhere.
 */
ZS_API zs_status zs_param_write_moment(zs_engine *engine, zs_param param, zs_array array,
                                       uint64_t first, uint64_t count, const float *src);
/* How many updates the parameter has had, for Adam's bias correction. All ranks must set the same,
 * between steps. */
ZS_API zs_status zs_param_set_steps(zs_engine *engine, zs_param param, uint64_t steps);
ZS_API zs_status zs_param_get_steps(const zs_engine *engine, zs_param param, uint64_t *out);
/* Collective. Makes what zs_param_write left on each rank visible to all: call once after loading.
 */
ZS_API zs_status zs_params_publish(zs_engine *engine);
/* Reads within zs_param_local's range, converted to dtype. */
ZS_API zs_status zs_param_read(zs_engine *engine, zs_param param, zs_array array, uint64_t first,
                               uint64_t count, zs_dtype dtype, void *dst);

/* Collective. Gathers the unit's parameters (stages 0-2: they are there already). Nests: counted.
 * In stage 3 the order of units is learned and what comes next is prefetched. */
ZS_API zs_status zs_unit_acquire(zs_engine *engine, zs_unit unit);
/* As many as acquires. The memory may be reused after the last one. */
ZS_API zs_status zs_unit_release(zs_engine *engine, zs_unit unit);
/* The whole parameter, in its dtype and shape, while its unit is acquired. 64-byte aligned. */
ZS_API zs_status zs_param_data(zs_engine *engine, zs_param param, void **out);

/* ---- gradients ---- */

/* Starts a micro-batch. last: zs_step follows it. */
ZS_API zs_status zs_grad_begin(zs_engine *engine, int last);
/* Where zspill keeps the parameter's local gradient of this micro-batch, in grad_dtype: write it
 * there and save a copy. *accumulate is 1 when something was already contributed (add to it), 0
 * when the contents are undefined (overwrite all of it). Valid until the zs_grad_ready that
 * completes the parameter. */
ZS_API zs_status zs_grad_buffer(zs_engine *engine, zs_param param, void **out, int *accumulate);
/* One contribution is there: grad holds all elements in dtype, or is the pointer of zs_grad_buffer
 * (then dtype must be grad_dtype). The sum over ranks of loss gradients is used: scale the loss by
 * what should be divided by. Collective once the last parameter of a unit is complete: its
 * gradients are then reduced. */
ZS_API zs_status zs_grad_ready(zs_engine *engine, zs_param param, const void *grad, zs_dtype dtype);
/* Collective. Ends the micro-batch; parameters without a gradient are treated as configured. */
ZS_API zs_status zs_grad_finish(zs_engine *engine);
/* Collective. Forgets the gradients of this step, the micro-batch in progress included. */
ZS_API zs_status zs_grad_discard(zs_engine *engine);
/* Collective, after the last zs_grad_finish. L2 norm over all parameters, unscaled by the loss
 * scale and grad_scale. */
ZS_API zs_status zs_grad_norm(zs_engine *engine, double grad_scale, double *out);

/* ---- step ---- */

typedef struct zs_step_config {
    size_t size;
    double grad_scale;  /* gradients are multiplied by this first (1 / world for a mean over ranks).
                           Default 1 */
    double max_norm;    /* clip to this L2 norm by max_norm / (norm + 1e-6), as
                           torch.nn.utils.clip_grad_norm_; 0 (default): none */
    double clip_factor; /* > 0: use this factor in place of max_norm's; 0 (default): none given */
    int found_inf;      /* 1: the caller saw an overflow: skip */
} zs_step_config;
ZS_API void zs_step_config_init(zs_step_config *config);

typedef struct zs_tier_traffic {
    uint64_t read_bytes, written_bytes; /* by the step, this rank */
    double seconds;                     /* the step waited this long for the tier */
} zs_tier_traffic;

typedef struct zs_step_info {
    size_t size;
    uint64_t step;      /* optimizer steps taken so far, this one included if not skipped */
    int skipped;        /* 1: the norm was not finite; nothing changed but the loss scale */
    double grad_norm;   /* before clipping */
    double clip_factor; /* applied; <= 1 unless given in zs_step_config */
    double loss_scale;  /* for the next step */
    double seconds;     /* of zs_step */
    double adam_seconds;
    zs_tier_traffic tier[ZS_TIERS];
} zs_step_info;

/* Collective. Norm, clip, Adam over this rank's shard wherever it lives, new weights to all ranks.
 * All units must be released: one that is not ends the engine, as ranks would go on without this
 * one. config NULL: defaults. info may be NULL, else its size must be set. */
ZS_API zs_status zs_step(zs_engine *engine, const zs_step_config *config, zs_step_info *info);
/* What the loss (or its gradient) must be multiplied by before backward; 1 unless fp16 scaling is
 * on. */
ZS_API double zs_loss_scale(const zs_engine *engine);

/* ---- state ---- */

enum { ZS_USER_BYTES_MAX = 4096, ZS_KEEP_MOST = 14 };
/* Collective. Makes the present state (master, moments, step counts, loss scale and the caller's
 * user bytes, at most ZS_USER_BYTES_MAX) durable in state_dir on all ranks, or leaves the previous
 * one in force. Parameters whose step counts differ from their neighbours' (ZS_MISSING_SKIP) take
 * 16 bytes each of a header of 8 KiB that holds the user bytes, too: more than fit is an error that
 * says so. */
ZS_API zs_status zs_state_commit(zs_engine *engine, const void *user, size_t user_bytes);
/* Collective, after zs_engine_commit in place of loading weights. *found 0: no state there, nothing
 * changed. user gets up to *user_bytes bytes; *user_bytes becomes the number stored. Ends with the
 * weights published. */
ZS_API zs_status zs_state_resume(zs_engine *engine, int *found, void *user, size_t *user_bytes);
/* What zs_state_resume would give as found and user, and nothing else: no weight and no file
 * changes. For callers that must agree with what they wrote there before the state is taken up: a
 * resume in another shape (world, stage, tier, dtype, chunk_numel) rewrites the files. Not
 * collective. */
ZS_API zs_status zs_state_peek(zs_engine *engine, int *found, void *user, size_t *user_bytes);

/* ---- ledger ---- */

typedef struct zs_memory_row {
    zs_tier tier;
    char purpose[40]; /* "parameters", "gradients", "optimizer states", ... : docs/architecture.md
                         lists them */
    uint64_t bytes;   /* now */
    uint64_t peak;
} zs_memory_row;
/* Fills up to capacity rows, sets *count to the number there are. rows may be NULL with capacity 0.
 */
ZS_API zs_status zs_memory_report(const zs_engine *engine, zs_memory_row *rows, size_t capacity,
                                  size_t *count);
/* Books memory of the caller's own (activations) under this engine: delta bytes more or less. */
ZS_API zs_status zs_memory_note(zs_engine *engine, zs_tier tier, const char *purpose,
                                int64_t delta);

#ifdef __cplusplus
}
#endif
#endif
