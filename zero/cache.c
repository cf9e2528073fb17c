/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers that come and go in the same few sizes: blocks of a model are alike, so what one gives
 * back the next can take without a new mapping. */
#include <stdlib.h>

#include "zero/engine.h"

void zs_cache_init(zs_cache *cache, zs_device *device, zs_ledger *ledger, zs_tier tier,
                   const char *purpose)
{
    *cache = (zs_cache){.device = device, .ledger = ledger, .tier = tier, .purpose = purpose};
}

/* The idle buffer to use, or idle_count. On an accelerator a larger one does, too: allocation there
 * waits for the device, and has no place in a step. */
static size_t find(const zs_cache *cache, size_t bytes)
{
    size_t best = cache->idle_count;
    for (size_t i = 0; i < cache->idle_count; i++) {
        const size_t have = cache->idle[i]->mem.bytes;
        if (have == bytes)
            return i;
        if (!cache->device->host_access && have > bytes &&
            (best == cache->idle_count || have < cache->idle[best]->mem.bytes))
            best = i;
    }
    return best;
}

static zs_status allocate(zs_cache *cache, size_t bytes, zs_mem *out)
{
    /* On the host, other sizes would only pile up beside this one. */
    if (cache->device->host_access)
        zs_cache_trim(cache);
    zs_status status =
        zs_mem_alloc(cache->device, cache->ledger, cache->tier, cache->purpose, bytes, out);
    if (status != ZS_ERR_NOMEM || !cache->idle_count)
        return status;
    zs_cache_trim(cache);
    return zs_mem_alloc(cache->device, cache->ledger, cache->tier, cache->purpose, bytes, out);
}

static zs_status take(zs_cache *cache, size_t bytes, zs_buffer **out)
{
    const size_t at = find(cache, bytes);
    if (at < cache->idle_count) {
        *out = cache->idle[at];
        cache->idle[at] = cache->idle[--cache->idle_count];
        return ZS_OK;
    }
    zs_buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a record of %s", cache->purpose);
    zs_status status = allocate(cache, bytes, &buffer->mem);
    if (status != ZS_OK) {
        free(buffer);
        return status;
    }
    *out = buffer;
    return ZS_OK;
}

zs_status zs_cache_get(zs_cache *cache, size_t bytes, zs_stream *stream, zs_buffer **out)
{
    zs_buffer *buffer;
    ZS_CHECK(take(cache, bytes, &buffer));
    *out = buffer;
    return zs_mark_wait(cache->device, &buffer->used, stream);
}

zs_status zs_cache_get_host(zs_cache *cache, size_t bytes, zs_buffer **out)
{
    zs_buffer *buffer;
    ZS_CHECK(take(cache, bytes, &buffer));
    *out = buffer;
    return zs_mark_sync(cache->device, &buffer->used);
}

/* Freeing device memory waits for the device. */
static void discard(zs_cache *cache, zs_buffer *buffer)
{
    zs_mark_close(cache->device, &buffer->used);
    zs_mem_free(&buffer->mem);
    free(buffer);
}

void zs_cache_put(zs_cache *cache, zs_buffer *buffer)
{
    if (cache->idle_count == cache->idle_capacity) {
        size_t capacity = cache->idle_capacity ? 2 * cache->idle_capacity : 8;
        zs_buffer **bigger = realloc(cache->idle, capacity * sizeof *bigger);
        if (!bigger) {
            discard(cache, buffer); /* not kept, but nothing is lost */
            return;
        }
        cache->idle = bigger;
        cache->idle_capacity = capacity;
    }
    cache->idle[cache->idle_count++] = buffer;
}

void zs_cache_trim(zs_cache *cache)
{
    while (cache->idle_count)
        discard(cache, cache->idle[--cache->idle_count]);
}

void zs_cache_free(zs_cache *cache)
{
    zs_cache_trim(cache);
    free(cache->idle);
    cache->idle = NULL;
    cache->idle_capacity = 0;
}
