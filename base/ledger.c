/* SPDX-License-Identifier: Apache-2.0 */
#include "base/ledger.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

struct zs_ledger {
    pthread_mutex_t lock;
    zs_memory_row *rows;
    size_t count, capacity;
};

zs_status zs_ledger_open(zs_ledger **out)
{
    zs_ledger *ledger = calloc(1, sizeof *ledger);

    *out = NULL;
    if (!ledger)
        return zs_fail(ZS_ERR_NOMEM, "memory ledger: out of memory");
    pthread_mutex_init(&ledger->lock, NULL);
    *out = ledger;
    return ZS_OK;
}

void zs_ledger_close(zs_ledger **ledger)
{
    if (!*ledger)
        return;
    pthread_mutex_destroy(&(*ledger)->lock);
    free((*ledger)->rows);
    free(*ledger);
    *ledger = NULL;
}

static zs_memory_row *find_row(zs_ledger *ledger, zs_tier tier, const char *purpose)
{
    for (size_t i = 0; i < ledger->count; i++) {
        zs_memory_row *row = &ledger->rows[i];
        /* A longer purpose was cut when its row was made. */
        if (row->tier == tier && !strncmp(row->purpose, purpose, sizeof row->purpose - 1))
            return row;
    }
    return NULL;
}

static zs_memory_row *append_row(zs_ledger *ledger, zs_tier tier, const char *purpose)
{
    zs_memory_row *row;

    if (ledger->count == ledger->capacity) {
        size_t capacity = ledger->capacity ? 2 * ledger->capacity : 16;
        zs_memory_row *rows = realloc(ledger->rows, capacity * sizeof *rows);
        if (!rows)
            return NULL;
        ledger->rows = rows;
        ledger->capacity = capacity;
    }
    row = &ledger->rows[ledger->count++];
    memset(row, 0, sizeof *row);
    row->tier = tier;
    memcpy(row->purpose, purpose, strnlen(purpose, sizeof row->purpose - 1));
    return row;
}

static zs_status add(zs_ledger *ledger, zs_tier tier, const char *purpose, int64_t delta)
{
    zs_memory_row *row = find_row(ledger, tier, purpose);
    uint64_t now = row ? row->bytes : 0;

    if (delta < 0 && now < 0 - (uint64_t)delta)
        return zs_fail(ZS_ERR_MISUSE,
                       "memory ledger: '%s' in tier %s holds %llu bytes, %llu cannot be taken off",
                       purpose, zs_tier_name(tier), (unsigned long long)now,
                       (unsigned long long)(0 - (uint64_t)delta));
    if (!row && !(row = append_row(ledger, tier, purpose)))
        return zs_fail(ZS_ERR_NOMEM, "memory ledger: no memory for a row for '%s'", purpose);
    row->bytes = now + (uint64_t)delta;
    row->peak = ZS_MAX(row->peak, row->bytes);
    return ZS_OK;
}

zs_status zs_ledger_add(zs_ledger *ledger, zs_tier tier, const char *purpose, int64_t delta)
{
    zs_status status;

    if ((unsigned)tier >= ZS_TIERS)
        return zs_fail(ZS_ERR_ARG, "memory ledger: tier %d for '%s': use 0 to %d", (int)tier,
                       purpose, ZS_TIERS - 1);
    pthread_mutex_lock(&ledger->lock);
    status = add(ledger, tier, purpose, delta);
    pthread_mutex_unlock(&ledger->lock);
    return status;
}

void zs_ledger_rows(const zs_ledger *ledger, zs_memory_row *rows, size_t capacity, size_t *count)
{
    pthread_mutex_t *lock = (pthread_mutex_t *)&ledger->lock;

    pthread_mutex_lock(lock);
    if (rows && capacity && ledger->count)
        memcpy(rows, ledger->rows, ZS_MIN(capacity, ledger->count) * sizeof *rows);
    *count = ledger->count;
    pthread_mutex_unlock(lock);
}
