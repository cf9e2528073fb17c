/* SPDX-License-Identifier: Apache-2.0 */
#include "zero/bulk.h"

#include <stdlib.h>

#include "base/status.h"
#include "base/util.h"

struct zs_bulk {
    zs_comm *comm;
    zs_device *device;
    zs_math *math;
    int world;
};

zs_status zs_bulk_open(zs_comm *comm, zs_device *device, zs_math *math, zs_bulk **out)
{
    *out = NULL;
    const int world = zs_comm_world(comm);
    if (!device->host_access && world > 1)
        return zs_fail(ZS_ERR_UNSUPPORTED,
                       "%d ranks with a %s device each: this version has no collectives between "
                       "devices; use one rank, or the host",
                       world, device->ops->name);
    zs_bulk *bulk = calloc(1, sizeof *bulk);
    if (!bulk)
        return zs_fail(ZS_ERR_NOMEM, "no memory for the communicator of weights and gradients");
    *bulk = (zs_bulk){comm, device, math, world};
    *out = bulk;
    return ZS_OK;
}

void zs_bulk_close(zs_bulk **bulk)
{
    free(*bulk);
    *bulk = NULL;
}

static uint64_t total(const zs_piece *pieces, size_t count)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += pieces[i].count;
    return sum;
}

/* Of one rank: what is there is what is wanted. */
static zs_status copy_alone(zs_bulk *bulk, const zs_piece *pieces, size_t count, size_t size,
                            zs_stream *stream)
{
    for (size_t i = 0; i < count; i++)
        ZS_CHECK(bulk->device->ops->copy(bulk->device, pieces[i].recv, pieces[i].send,
                                         pieces[i].count * size, stream));
    return ZS_OK;
}

zs_status zs_bulk_all_gather(zs_bulk *bulk, const char *what, const zs_piece *pieces, size_t count,
                             zs_stream *stream)
{
    if (bulk->device->host_access) {
        for (size_t i = 0; i < count; i++)
            ZS_CHECK(zs_comm_all_gather(bulk->comm, what, pieces[i].send, pieces[i].recv,
                                        pieces[i].count));
        return ZS_OK;
    }
    ZS_CHECK(zs_comm_meet(bulk->comm, what, 0, total(pieces, count), ZS_FP32));
    return copy_alone(bulk, pieces, count, 1, stream);
}

zs_status zs_bulk_reduce_scatter(zs_bulk *bulk, const char *what, const zs_piece *pieces,
                                 size_t count, zs_dtype dtype, zs_stream *stream)
{
    if (bulk->device->host_access) {
        for (size_t i = 0; i < count; i++)
            ZS_CHECK(zs_comm_reduce_scatter(bulk->comm, bulk->math, what, pieces[i].send,
                                            pieces[i].recv, pieces[i].count, dtype));
        return ZS_OK;
    }
    const size_t size = zs_dtype_size(dtype);
    ZS_CHECK(zs_comm_meet(bulk->comm, what, 1, total(pieces, count) * size, dtype));
    return copy_alone(bulk, pieces, count, size, stream);
}
