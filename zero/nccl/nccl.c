/* SPDX-License-Identifier: Apache-2.0 */
#include "zero/nccl/nccl.h"

#include <dlfcn.h>
#include <nccl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda/cuda.h"
#include "zero/bulk.h"

_Static_assert(ZS_NCCL_ID_BYTES == NCCL_UNIQUE_ID_BYTES, "ids are NCCL's");

struct zs_nccl {
    zs_device *device;
    ncclComm_t comm; /* NULL: aborted */
    int rank, world;
};

/* ---- the library ---- */

#define ZS_NCCL_CALLS(X)                                                                           \
    X(ncclGetUniqueId)                                                                             \
    X(ncclCommInitRank)                                                                            \
    X(ncclCommDestroy)                                                                             \
    X(ncclCommAbort)                                                                               \
    X(ncclCommGetAsyncError)                                                                       \
    X(ncclGetErrorString)                                                                          \
    X(ncclGetLastError)                                                                            \
    X(ncclReduceScatter)                                                                           \
    X(ncclAllGather)                                                                               \
    X(ncclGroupStart)                                                                              \
    X(ncclGroupEnd)

static struct {
#define ZS_NCCL_FIELD(name) __typeof__(&(name)) name;
    ZS_NCCL_CALLS(ZS_NCCL_FIELD)
} api;

#ifdef ZS_NCCL_LINKED
static zs_status load(void)
{
#define ZS_NCCL_TAKE(name) api.name = name;
    ZS_NCCL_CALLS(ZS_NCCL_TAKE)
    return ZS_OK;
}
#else
static zs_status load(void)
{
    /* One rank needs none of it, and many machines with one GPU have none. */
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "several ranks on CUDA devices need NCCL, which cannot be loaded (%s): "
                       "install libnccl2, or add its folder to LD_LIBRARY_PATH",
                       dlerror());
#define ZS_NCCL_TAKE(name)                                                                         \
    *(void **)&api.name = dlsym(library, #name);                                                   \
    if (!api.name)                                                                                 \
        return zs_fail(ZS_ERR_UNSUPPORTED, "libnccl.so.2 has no " #name ": it is too old");
    ZS_NCCL_CALLS(ZS_NCCL_TAKE)
    return ZS_OK;
}
#endif

static zs_status open_library(void)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static int loaded;
    zs_status status = ZS_OK;
    pthread_mutex_lock(&lock);
    if (!loaded)
        status = load();
    loaded = status == ZS_OK;
    pthread_mutex_unlock(&lock);
    return status;
}

/* ---- errors ---- */

static zs_status judge(const zs_nccl *nccl, ncclResult_t result, const char *what)
{
    if (result == ncclSuccess)
        return ZS_OK;
    const char *more = api.ncclGetLastError(nccl ? nccl->comm : NULL);
    return zs_fail(result == ncclRemoteError ? ZS_ERR_COMM : ZS_ERR_DEVICE, "NCCL, %s: %s%s%s",
                   what, api.ncclGetErrorString(result), more && *more ? ": " : "",
                   more ? more : "");
}

static zs_status need_comm(const zs_nccl *nccl)
{
    return nccl->comm ? zs_cuda_enter(nccl->device)
                      : zs_fail(ZS_ERR_COMM, "the communicator of the devices was aborted");
}

/* ---- open and close ---- */

zs_status zs_nccl_id(unsigned char out[ZS_NCCL_ID_BYTES])
{
    ncclUniqueId id;
    ZS_CHECK(open_library());
    ZS_CHECK(judge(NULL, api.ncclGetUniqueId(&id), "making the id of a communicator"));
    memcpy(out, id.internal, sizeof id.internal);
    return ZS_OK;
}

zs_status zs_nccl_open(zs_device *device, int rank, int world,
                       const unsigned char bytes[ZS_NCCL_ID_BYTES], zs_nccl **out)
{
    ncclUniqueId id;
    *out = NULL;
    ZS_CHECK(open_library());
    ZS_CHECK(zs_cuda_enter(device));
    memcpy(id.internal, bytes, sizeof id.internal);
    zs_nccl *nccl = calloc(1, sizeof *nccl);
    if (!nccl)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the communicator of the devices");
    *nccl = (zs_nccl){.device = device, .rank = rank, .world = world};
    zs_status status = judge(NULL, api.ncclCommInitRank(&nccl->comm, world, id, rank),
                             "joining the ranks' devices (each needs a device of its own)");
    if (status == ZS_OK)
        *out = nccl;
    else
        free(nccl);
    return status;
}

zs_status zs_nccl_check(zs_nccl *nccl)
{
    ncclResult_t error = ncclSuccess;
    ZS_CHECK(need_comm(nccl));
    ZS_CHECK(judge(nccl, api.ncclCommGetAsyncError(nccl->comm, &error), "asking for errors"));
    return judge(nccl, error, "a collective between devices");
}

void zs_nccl_abort(zs_nccl *nccl)
{
    if (nccl->comm && zs_cuda_enter(nccl->device) == ZS_OK)
        (void)api.ncclCommAbort(nccl->comm);
    nccl->comm = NULL;
}

void zs_nccl_close(zs_nccl *nccl)
{
    if (nccl->comm && zs_cuda_enter(nccl->device) == ZS_OK)
        (void)api.ncclCommDestroy(nccl->comm);
    free(nccl);
}

/* ---- collectives ---- */

static ncclDataType_t type_of(zs_dtype dtype)
{
    return dtype == ZS_FP32 ? ncclFloat32 : dtype == ZS_BF16 ? ncclBfloat16 : ncclFloat16;
}

/* One group, so that its pieces share launches. dtype NULL: an all-gather of bytes. */
static zs_status run(zs_nccl *nccl, const zs_piece *pieces, size_t count, const zs_dtype *dtype,
                     zs_stream *stream)
{
    ZS_CHECK(need_comm(nccl));
    const cudaStream_t native = nccl->device->ops->stream_native(nccl->device, stream);
    ncclResult_t first = api.ncclGroupStart();
    for (size_t i = 0; i < count && first == ncclSuccess; i++) {
        const zs_piece *p = &pieces[i];
        if (p->count)
            first = dtype ? api.ncclReduceScatter(p->send, p->recv, p->count, type_of(*dtype),
                                                  ncclSum, nccl->comm, native)
                          : api.ncclAllGather(p->send, p->recv, p->count, ncclUint8, nccl->comm,
                                              native);
    }
    const ncclResult_t last = api.ncclGroupEnd();
    return judge(nccl, first != ncclSuccess ? first : last,
                 dtype ? "queueing a reduce-scatter" : "queueing an all-gather");
}

zs_status zs_nccl_all_gather(zs_nccl *nccl, const zs_piece *pieces, size_t count, zs_stream *stream)
{
    return run(nccl, pieces, count, NULL, stream);
}

zs_status zs_nccl_reduce_scatter(zs_nccl *nccl, const zs_piece *pieces, size_t count,
                                 zs_dtype dtype, zs_stream *stream)
{
    return run(nccl, pieces, count, &dtype, stream);
}
