/* SPDX-License-Identifier: Apache-2.0 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "device/device.h"

static void give_back(zs_device *device, zs_tier tier, void *ptr, size_t bytes)
{
    if (tier == ZS_TIER_DEVICE)
        device->ops->free(device, ptr, bytes);
    else
        device->ops->host_free(device, ptr, bytes);
}

/* What the ledger has of the tier, largest first, as far as there is room. */
static void describe(const zs_ledger *ledger, zs_tier tier, char *text, size_t bytes)
{
    zs_memory_row rows[64];
    size_t count = 0, used = 0;
    char human[16];
    zs_ledger_rows(ledger, rows, ZS_COUNT(rows), &count);
    count = ZS_MIN(count, ZS_COUNT(rows));
    snprintf(text, bytes, "nothing");
    for (;;) {
        zs_memory_row *most = NULL;
        for (size_t i = 0; i < count; i++)
            if (rows[i].tier == tier && rows[i].bytes && (!most || rows[i].bytes > most->bytes))
                most = &rows[i];
        if (!most || used + sizeof most->purpose + sizeof human + 4 > bytes)
            return;
        used += (size_t)snprintf(text + used, bytes - used, "%s%s %s", used ? ", " : "",
                                 most->purpose, zs_format_bytes(most->bytes, human));
        most->bytes = 0;
    }
}

zs_status zs_mem_alloc(zs_device *device, zs_ledger *ledger, zs_tier tier, const char *purpose,
                       size_t bytes, zs_mem *out)
{
    void *ptr = NULL;
    zs_status status;
    char human[16];

    memset(out, 0, sizeof *out);
    if (tier != ZS_TIER_DEVICE && tier != ZS_TIER_HOST)
        return zs_fail(ZS_ERR_ARG, "%s: memory of tier %s cannot be allocated", purpose,
                       zs_tier_name(tier));
    if (bytes > INT64_MAX)
        return zs_fail(ZS_ERR_NOMEM, "%s: %zu bytes of %s memory are more than any machine has",
                       purpose, bytes, zs_tier_name(tier));
    if (bytes) {
        status = tier == ZS_TIER_DEVICE ? device->ops->alloc(device, bytes, &ptr)
                                        : device->ops->host_alloc(device, bytes, &ptr);
        if (status != ZS_OK) {
            char held[256];
            describe(ledger, tier, held, sizeof held);
            return zs_fail_prefix(
                status,
                "%s: %s (%zu bytes) of %s memory cannot be had beside what is held (%s); use more "
                "ranks, a higher ZeRO stage, a slower tier for states or parameters, or a smaller "
                "batch: ",
                purpose, zs_format_bytes(bytes, human), bytes, zs_tier_name(tier), held);
        }
        status = zs_ledger_add(ledger, tier, purpose, (int64_t)bytes);
        if (status != ZS_OK) {
            give_back(device, tier, ptr, bytes);
            return status;
        }
    }
    out->ptr = ptr;
    out->bytes = bytes;
    out->tier = tier;
    memcpy(out->purpose, purpose, strnlen(purpose, sizeof out->purpose - 1));
    out->device = device;
    out->ledger = ledger;
    return ZS_OK;
}

void zs_mem_free(zs_mem *mem)
{
    if (mem->ptr) {
        give_back(mem->device, mem->tier, mem->ptr, mem->bytes);
        (void)zs_ledger_add(mem->ledger, mem->tier, mem->purpose, -(int64_t)mem->bytes);
    }
    memset(mem, 0, sizeof *mem);
}
