/* SPDX-License-Identifier: Apache-2.0 */
#include "zero/layout.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

/* Elements of a flat buffer: its bytes, at 4 each, and the padding of 64 shards fit in int64_t. */
static const uint64_t max_elements = UINT64_C(1) << 60;

zs_status zs_layout_init(zs_layout *layout, const uint64_t *numel, size_t count, int world)
{
    memset(layout, 0, sizeof *layout);
    if (world < 1 || world > 64)
        return zs_fail(ZS_ERR_ARG, "layout: world %d is not in 1..64", world);

    uint64_t *offset = calloc(count ? count : 1, sizeof *offset);
    uint64_t *copy = calloc(count ? count : 1, sizeof *copy);
    zs_status status = ZS_OK;
    if (!offset || !copy) {
        status = zs_fail(ZS_ERR_NOMEM, "layout: no memory for %zu parameters", count);
        goto fail;
    }
    uint64_t end = 0, used = 0;
    for (size_t p = 0; p < count; p++) {
        uint64_t start = zs_round_up(end, ZS_LAYOUT_ALIGN);
        if (numel[p] > max_elements || start + numel[p] > max_elements) {
            status = zs_fail(ZS_ERR_ARG,
                             "layout: parameter %zu with %" PRIu64 " elements brings the flat "
                             "buffer over %" PRIu64 " elements: cut the unit into smaller ones",
                             p, numel[p], max_elements);
            goto fail;
        }
        offset[p] = start;
        copy[p] = numel[p];
        /* A parameter without elements does not push the next one to a new boundary. */
        if (numel[p])
            end = start + numel[p];
        used += numel[p];
    }
    layout->world = world;
    layout->count = count;
    layout->offset = offset;
    layout->numel = copy;
    layout->shard = zs_round_up(zs_div_up(end, (uint64_t)world), ZS_LAYOUT_ALIGN);
    layout->padded = layout->shard * (uint64_t)world;
    layout->used = used;
    return ZS_OK;

fail:
    free(offset);
    free(copy);
    return status;
}

void zs_layout_free(zs_layout *layout)
{
    free(layout->offset);
    free(layout->numel);
    memset(layout, 0, sizeof *layout);
}

static uint64_t clamp(uint64_t value, uint64_t low, uint64_t high)
{
    return ZS_MIN(ZS_MAX(value, low), high);
}

zs_layout_part zs_layout_locate(const zs_layout *layout, size_t p, int rank)
{
    uint64_t low = layout->shard * (uint64_t)rank, high = low + layout->shard;
    uint64_t start = layout->offset[p], end = start + layout->numel[p];
    uint64_t from = clamp(start, low, high);
    /* Clamped for empty parts too: callers may add first and shard_offset to pointers. */
    zs_layout_part part = {
        .first = clamp(from, start, end) - start,
        .count = clamp(end, low, high) - from,
        .shard_offset = from - low,
    };
    return part;
}
