/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL on the CPU. Ranks' operations meet when their streams come to them. Sums are made in the
 * order of ranks, 16-bit types in fp32. Ranks that call different things end the process with a
 * message, which on a GPU would hang or give garbage. */
#include <cstdio>
#include <cstring>
#include <ctime>
#include <unistd.h>
#include <vector>

#include <nccl.h>

#include "kernels/element.h"
#include "tests/emu/emu.h"
#include "tests/emu/nccl_world.h"

enum Kind { REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE, BROADCAST, SEND, RECV };
static const char *const kind_names[] = {"reduce_scatter", "all_gather", "all_reduce",
                                         "broadcast",      "send",       "recv"};

struct ncclComm {
    emu_nccl_world *world;
    int rank, device;
    bool blocking;
    std::atomic<bool> aborted;
    std::atomic<int> error; /* asynchronous */
};

enum Fate { RUNS, NEVER_ENDS, NEVER_BEGINS };

struct Operation {
    emu_nccl_call call;
    const char *send;
    char *recv;
    int peer;
    Fate fate;
    ncclComm *comm;
    cudaStream_t stream;
};

static thread_local char last_error[256];

static ncclResult_t failed(ncclResult_t result, const char *what)
{
    snprintf(last_error, sizeof last_error, "%s", what);
    return result;
}

static size_t type_bytes(int type)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return 1;
    case ncclFloat16:
    case ncclBfloat16:
        return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
        return 8;
    default:
        return 4;
    }
}

/* ---- reduction ---- */

template <class T> static void combine(T *sum, T value, int op)
{
    switch (op) {
    case ncclProd:
        *sum = *sum * value;
        break;
    case ncclMax:
        *sum = *sum < value ? value : *sum;
        break;
    case ncclMin:
        *sum = value < *sum ? value : *sum;
        break;
    default:
        *sum = *sum + value;
    }
}

/* load and store of Array and T are given, so that 16-bit types can be made of fp32. */
template <class T, class Load, class Store>
static void reduce_as(ncclComm *comm, size_t skip, size_t count, int op, char *out, Load load,
                      Store store)
{
    const int ranks = comm->world->ranks.load();
    for (size_t i = 0; i < count; i++) {
        T sum = load(comm->world->slot(0).data, skip + i);
        for (int r = 1; r < ranks; r++)
            combine(&sum, (T)load(comm->world->slot(r).data, skip + i), op);
        store(out, i, op == ncclAvg ? (T)(sum / (T)ranks) : sum);
    }
}

template <class T> static T load_plain(const void *array, size_t i)
{
    T value;
    memcpy(&value, static_cast<const char *>(array) + i * sizeof value, sizeof value);
    return value;
}

template <class T> static void store_plain(void *array, size_t i, T value)
{
    memcpy(static_cast<char *>(array) + i * sizeof value, &value, sizeof value);
}

template <class T>
static void reduce_plain(ncclComm *comm, size_t skip, size_t count, int op, char *out)
{
    reduce_as<T>(comm, skip, count, op, out, load_plain<T>, store_plain<T>);
}

/* Elements skip to skip + count of what all ranks show, to out. */
static void reduce(ncclComm *comm, size_t skip, size_t count, int type, int op, char *out)
{
    switch (type) {
    case ncclFloat32:
        return reduce_plain<float>(comm, skip, count, op, out);
    case ncclBfloat16:
        return reduce_as<float>(comm, skip, count, op, out, zs_load_bf16, zs_store_bf16);
    case ncclFloat16:
        return reduce_as<float>(comm, skip, count, op, out, zs_load_fp16, zs_store_fp16);
    case ncclFloat64:
        return reduce_plain<double>(comm, skip, count, op, out);
    case ncclInt8:
        return reduce_plain<int8_t>(comm, skip, count, op, out);
    case ncclUint8:
        return reduce_plain<uint8_t>(comm, skip, count, op, out);
    case ncclInt32:
        return reduce_plain<int32_t>(comm, skip, count, op, out);
    case ncclUint32:
        return reduce_plain<uint32_t>(comm, skip, count, op, out);
    case ncclInt64:
        return reduce_plain<int64_t>(comm, skip, count, op, out);
    default:
        return reduce_plain<uint64_t>(comm, skip, count, op, out);
    }
}

/* ---- collectives, on the stream's thread ---- */

static void check_calls(ncclComm *comm)
{
    const emu_nccl_call &mine = comm->world->slot(comm->rank).call;
    for (int r = 0; r < comm->world->ranks.load(); r++) {
        const emu_nccl_call &other = comm->world->slot(r).call;
        if (other.kind != mine.kind || other.count != mine.count || other.type != mine.type ||
            other.op != mine.op || other.root != mine.root)
            emu_die("NCCL: rank %d calls %s of %zu elements (type %d, op %d, root %d), rank %d "
                    "%s of %zu (type %d, op %d, root %d): a GPU hangs",
                    comm->rank, kind_names[mine.kind], mine.count, mine.type, mine.op, mine.root, r,
                    kind_names[other.kind], other.count, other.type, other.op, other.root);
    }
}

/* Shows a part of the send buffer, and takes what this rank needs of what the others show: elements
 * first to first + count of each portion. */
static void show(const Operation &o, size_t first, size_t count, size_t stride)
{
    const size_t size = type_bytes(o.call.type);
    char *data = o.comm->world->slot(o.comm->rank).data;
    if (o.call.kind == REDUCE_SCATTER)
        for (int r = 0; r < o.comm->world->ranks.load(); r++)
            memcpy(data + (size_t)r * stride * size,
                   o.send + ((size_t)r * o.call.count + first) * size, count * size);
    else if (o.call.kind != BROADCAST || o.comm->rank == o.call.root)
        memcpy(data, o.send + first * size, count * size);
}

static void take(const Operation &o, size_t first, size_t count, size_t stride)
{
    const size_t size = type_bytes(o.call.type);
    emu_nccl_world *world = o.comm->world;
    char *to = o.recv + first * size;
    switch (o.call.kind) {
    case REDUCE_SCATTER:
        reduce(o.comm, (size_t)o.comm->rank * stride, count, o.call.type, o.call.op, to);
        break;
    case ALL_REDUCE:
        reduce(o.comm, 0, count, o.call.type, o.call.op, to);
        break;
    case ALL_GATHER:
        for (int r = 0; r < world->ranks.load(); r++)
            memcpy(to + (size_t)r * o.call.count * size, world->slot(r).data, count * size);
        break;
    default:
        memcpy(to, world->slot(o.call.root).data, count * size);
    }
}

static void run_collective(const Operation &o)
{
    emu_nccl_world *world = o.comm->world;
    world->slot(o.comm->rank).call = o.call;
    const size_t portions = o.call.kind == REDUCE_SCATTER ? (size_t)world->ranks.load() : 1;
    const size_t stride = EMU_SLOT_BYTES / type_bytes(o.call.type) / portions;
    for (size_t first = 0; first < o.call.count || !first; first += stride) {
        const size_t count = std::min(stride, o.call.count - first);
        show(o, first, count, stride);
        if (!world->meet(&o.comm->aborted))
            return;
        check_calls(o.comm);
        take(o, first, count, stride);
        if (!world->meet(&o.comm->aborted))
            return;
    }
}

/* ---- sends and receives of a group: all at once ---- */

struct Transfer {
    const Operation *operation;
    size_t done, bytes;
};

static bool move_on(Transfer *t)
{
    const Operation &o = *t->operation;
    const bool sends = o.call.kind == SEND;
    emu_nccl_pipe &pipe = sends ? o.comm->world->pipe(o.comm->rank, o.peer)
                                : o.comm->world->pipe(o.peer, o.comm->rank);
    if ((pipe.full.load(std::memory_order_acquire) != 0) == sends)
        return false;
    const size_t part = std::min(EMU_PIPE_BYTES, t->bytes - t->done);
    if (sends) {
        pipe.bytes = part;
        memcpy(pipe.data, o.send + t->done, part);
    } else {
        if (pipe.bytes != part)
            emu_die("NCCL: rank %d receives %zu bytes of rank %d, which sends another number",
                    o.comm->rank, t->bytes, o.peer);
        memcpy(o.recv + t->done, pipe.data, part);
    }
    pipe.full.store(sends, std::memory_order_release);
    t->done += part;
    return true;
}

static void run_transfers(std::vector<Transfer> transfers)
{
    while (!transfers.empty()) {
        bool moved = false;
        for (size_t i = 0; i < transfers.size(); i++) {
            /* Those of one pair go one after the other. */
            bool first_of_pair = true;
            for (size_t j = 0; j < i; j++)
                first_of_pair &=
                    transfers[j].operation->peer != transfers[i].operation->peer ||
                    transfers[j].operation->call.kind != transfers[i].operation->call.kind;
            moved |= first_of_pair && move_on(&transfers[i]);
        }
        for (size_t i = transfers.size(); i-- > 0;)
            if (transfers[i].done == transfers[i].bytes)
                transfers.erase(transfers.begin() + (long)i);
        if (!transfers.empty() &&
            transfers[0].operation->comm->aborted.load(std::memory_order_relaxed))
            return;
        if (!moved)
            usleep(50);
    }
}

static void run_group(const std::vector<Operation> &operations)
{
    std::vector<Transfer> transfers;
    for (const Operation &o : operations) {
        if (o.fate == NEVER_ENDS)
            o.comm->error.store(ncclRemoteError, std::memory_order_relaxed);
        while (o.fate != RUNS && !o.comm->aborted.load(std::memory_order_relaxed))
            usleep(1000);
        if (o.comm->aborted.load(std::memory_order_relaxed))
            return;
        if (o.call.kind == SEND || o.call.kind == RECV) {
            if (o.call.count)
                transfers.push_back({&o, 0, o.call.count * type_bytes(o.call.type)});
        } else {
            run_collective(o);
        }
    }
    run_transfers(std::move(transfers));
}

/* ---- groups, on the host's thread ---- */

static thread_local int group_depth;
static thread_local std::vector<Operation> group_operations;
static thread_local std::vector<ncclComm *> group_comms; /* that join */

static void wait_for_all(ncclComm *comm)
{
    while (comm->world->joined.load() < comm->world->ranks.load())
        usleep(200);
}

static void launch(const std::vector<Operation> &operations)
{
    const Operation &first = operations[0];
    emu_enqueue(first.stream, {"group", emu_fields("\"operations\":%zu", operations.size())},
                [operations] { run_group(operations); });
}

extern "C" ncclResult_t ncclGroupStart(void)
{
    group_depth++;
    return ncclSuccess;
}

extern "C" ncclResult_t ncclGroupEnd(void)
{
    if (!group_depth)
        return failed(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group_depth)
        return ncclSuccess;
    std::vector<Operation> all;
    all.swap(group_operations);
    while (!all.empty()) {
        std::vector<Operation> of_comm, rest;
        for (const Operation &o : all)
            (o.comm == all[0].comm ? of_comm : rest).push_back(o);
        launch(of_comm);
        all.swap(rest);
    }
    for (ncclComm *comm : group_comms)
        wait_for_all(comm);
    group_comms.clear();
    return ncclSuccess;
}

static void *device_range(const void *ptr, size_t bytes)
{
    if (bytes && !emu_is_device(ptr))
        emu_die("NCCL got host memory");
    return bytes ? emu_range(ptr, bytes, "NCCL") : nullptr;
}

static ncclResult_t check_usage(const ncclComm *comm, cudaStream_t stream, int peer)
{
    if (!comm || peer < 0 || peer >= comm->world->ranks.load())
        return failed(ncclInvalidArgument, "no communicator, or no such rank");
    if (comm->aborted.load(std::memory_order_relaxed) ||
        comm->world->joined.load() < comm->world->ranks.load())
        return failed(ncclInvalidUsage, "the communicator is not ready or was aborted");
    if (emu_stream_device(stream) != comm->device)
        return failed(ncclInvalidUsage, "the stream is another device's than the communicator");
    if (emu_sticky(comm->device) != cudaSuccess)
        return failed(ncclUnhandledCudaError, cudaGetErrorString(emu_sticky(comm->device)));
    if (emu_fails(EMU_NCCL, comm->device))
        return failed(ncclSystemError, "a failure that was asked for (ZS_EMU_FAIL)");
    return ncclSuccess;
}

/* send_count, recv_count: elements of the whole buffers here. */
static ncclResult_t add(Kind kind, const void *send, size_t send_count, void *recv,
                        size_t recv_count, size_t count, int type, int op, int root, ncclComm *comm,
                        cudaStream_t stream)
{
    const ncclResult_t usage = check_usage(comm, stream, root);
    if (usage != ncclSuccess)
        return usage;
    const size_t size = type_bytes(type), bytes = std::max(send_count, recv_count) * size;
    Operation o = {};
    o.call = {kind, type, op, root, count};
    o.send = static_cast<const char *>(device_range(send, send_count * size));
    o.recv = static_cast<char *>(device_range(recv, recv_count * size));
    o.peer = root;
    o.comm = comm;
    o.stream = stream;
    if (emu_fails(EMU_NCCL_ASYNC, comm->device))
        o.fate = NEVER_ENDS;
    if (emu_fails(EMU_NCCL_HANG, comm->device))
        o.fate = NEVER_BEGINS;
    /* In place is allowed where each rank's part lies where it is in the whole. */
    const size_t mine = count * size * (size_t)comm->rank;
    const char *expected = kind == REDUCE_SCATTER ? o.send + mine
                           : kind == ALL_GATHER   ? o.send - mine
                                                  : o.send;
    if (o.send && o.recv && o.recv != expected && o.recv < o.send + send_count * size &&
        o.send < o.recv + recv_count * size)
        emu_die("NCCL: the buffers of %s overlap and it is not in place", kind_names[kind]);
    emu_count_bytes(EMU_COMMUNICATED, bytes);
    if (emu_recording())
        emu_write_record(comm->device, emu_stream_number(stream),
                         {"nccl", emu_fields("\"kind\":\"%s\",\"bytes\":%zu,\"ranks\":%d",
                                             kind_names[kind], bytes, comm->world->ranks.load())});
    if (!group_depth) {
        launch({o});
        return ncclSuccess;
    }
    for (const Operation &other : group_operations)
        if (other.comm == comm && other.stream != stream)
            emu_die("NCCL: one group uses a communicator on two streams");
    group_operations.push_back(o);
    return ncclSuccess;
}

extern "C" ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t recv_count,
                                          ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                          cudaStream_t stream)
{
    const size_t ranks = comm ? (size_t)comm->world->ranks.load() : 0;
    return add(REDUCE_SCATTER, send, recv_count * ranks, recv, recv_count, recv_count, type, op, 0,
               comm, stream);
}

extern "C" ncclResult_t ncclAllGather(const void *send, void *recv, size_t send_count,
                                      ncclDataType_t type, ncclComm_t comm, cudaStream_t stream)
{
    const size_t ranks = comm ? (size_t)comm->world->ranks.load() : 0;
    return add(ALL_GATHER, send, send_count, recv, send_count * ranks, send_count, type, 0, 0, comm,
               stream);
}

extern "C" ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count,
                                      ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                      cudaStream_t stream)
{
    return add(ALL_REDUCE, send, count, recv, count, count, type, op, 0, comm, stream);
}

extern "C" ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count,
                                      ncclDataType_t type, int root, ncclComm_t comm,
                                      cudaStream_t stream)
{
    const bool sends = comm && comm->rank == root;
    return add(BROADCAST, sends ? send : nullptr, sends ? count : 0, recv, count, count, type, 0,
               root, comm, stream);
}

extern "C" ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                                 ncclComm_t comm, cudaStream_t stream)
{
    return add(SEND, send, count, nullptr, 0, count, type, 0, peer, comm, stream);
}

extern "C" ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer,
                                 ncclComm_t comm, cudaStream_t stream)
{
    return add(RECV, nullptr, 0, recv, count, count, type, 0, peer, comm, stream);
}

/* ---- communicators ---- */

extern "C" ncclResult_t ncclGetVersion(int *version)
{
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

extern "C" ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%s", emu_nccl_new_name().c_str());
    return ncclSuccess;
}

static ncclResult_t init(ncclComm_t *out, int count, const std::string &name, int rank, int device,
                         bool blocking)
{
    *out = nullptr;
    if (count < 1 || count > EMU_MAX_RANKS || rank < 0 || rank >= count)
        return failed(ncclInvalidArgument, "no such rank, or too many");
    if (emu_fails(EMU_NCCL, device))
        return failed(ncclSystemError, "a failure that was asked for (ZS_EMU_FAIL)");
    ncclComm *comm = new ncclComm();
    comm->world = emu_nccl_join(name, count, rank);
    comm->rank = rank;
    comm->device = device;
    comm->blocking = blocking;
    emu_object_count(EMU_COMMS, 1);
    *out = comm;
    return ncclSuccess;
}

extern "C" ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *devices)
{
    const std::string name = emu_nccl_new_name();
    for (int r = 0; r < count; r++) {
        const ncclResult_t result = init(&comms[r], count, name, r, devices ? devices[r] : r, true);
        if (result != ncclSuccess) {
            while (r-- > 0)
                ncclCommAbort(comms[r]);
            return result;
        }
    }
    return ncclSuccess;
}

extern "C" ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int count, ncclUniqueId id,
                                               int rank, ncclConfig_t *config)
{
    const bool blocking = !config || config->blocking != 0;
    const ncclResult_t result = init(comm, count, id.internal, rank, emu_device(), blocking);
    if (result != ncclSuccess || !blocking)
        return result == ncclSuccess ? ncclInProgress : result;
    if (!group_depth) {
        wait_for_all(*comm);
        return ncclSuccess;
    }
    group_comms.push_back(*comm);
    return ncclSuccess;
}

extern "C" ncclResult_t ncclCommInitRank(ncclComm_t *comm, int count, ncclUniqueId id, int rank)
{
    return ncclCommInitRankConfig(comm, count, id, rank, nullptr);
}

extern "C" ncclResult_t ncclCommFinalize(ncclComm_t)
{
    return ncclSuccess;
}

extern "C" ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (!comm)
        return ncclSuccess;
    emu_synchronize(comm->device);
    emu_nccl_leave(comm->world);
    delete comm;
    emu_object_count(EMU_COMMS, -1);
    return ncclSuccess;
}

/* Its operations end without having done anything; the caller still waits for its streams. */
extern "C" ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    if (!comm)
        return ncclSuccess;
    comm->aborted.store(true, std::memory_order_relaxed);
    return ncclCommDestroy(comm);
}

extern "C" ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    *error = (ncclResult_t)comm->error.load(std::memory_order_relaxed);
    if (*error == ncclSuccess && comm->world->joined.load() < comm->world->ranks.load())
        *error = ncclInProgress;
    return ncclSuccess;
}

extern "C" ncclResult_t ncclCommCount(const ncclComm_t comm, int *count)
{
    *count = comm->world->ranks.load();
    return ncclSuccess;
}

extern "C" ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    *rank = comm->rank;
    return ncclSuccess;
}

extern "C" const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[] = {
        "no error",
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "internal error - please report this issue to the NCCL developers",
        "invalid argument (run with NCCL_DEBUG=WARN for details)",
        "invalid usage (run with NCCL_DEBUG=WARN for details)",
        "remote process exited or there was a network error",
        "NCCL operation in progress",
    };
    return (size_t)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}

extern "C" const char *ncclGetLastError(ncclComm_t)
{
    return last_error;
}
