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

zs_status zs_cache_get(zs_cache *cache, size_t bytes, zs_mem **out)
{
    for (size_t i = 0; i < cache->idle_count; i++) {
        if (cache->idle[i]->bytes != bytes)
            continue;
        *out = cache->idle[i];
        cache->idle[i] = cache->idle[--cache->idle_count];
        return ZS_OK;
    }
    /* Other sizes would only pile up beside this one. */
    zs_cache_trim(cache);
    zs_mem *mem = calloc(1, sizeof *mem);
    if (!mem)
        return zs_fail(ZS_ERR_NOMEM, "no memory for a record of %s", cache->purpose);
    zs_status status =
        zs_mem_alloc(cache->device, cache->ledger, cache->tier, cache->purpose, bytes, mem);
    if (status != ZS_OK) {
        free(mem);
        return status;
    }
    *out = mem;
    return ZS_OK;
}

static void discard(zs_mem *mem)
{
    zs_mem_free(mem);
    free(mem);
}

void zs_cache_put(zs_cache *cache, zs_mem *mem)
{
    if (cache->idle_count == cache->idle_capacity) {
        size_t capacity = cache->idle_capacity ? 2 * cache->idle_capacity : 8;
        zs_mem **bigger = realloc(cache->idle, capacity * sizeof *bigger);
        if (!bigger) {
            discard(mem); /* not kept, but nothing is lost */
            return;
        }
        cache->idle = bigger;
        cache->idle_capacity = capacity;
    }
    cache->idle[cache->idle_count++] = mem;
}

void zs_cache_trim(zs_cache *cache)
{
    while (cache->idle_count)
        discard(cache->idle[--cache->idle_count]);
}

void zs_cache_free(zs_cache *cache)
{
    zs_cache_trim(cache);
    free(cache->idle);
    cache->idle = NULL;
    cache->idle_capacity = 0;
}
