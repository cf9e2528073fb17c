/* SPDX-License-Identifier: Apache-2.0 */
#include <stdint.h>
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
        if (status != ZS_OK)
            return zs_fail_prefix(
                status,
                "%s: %s (%zu bytes) of %s memory cannot be had; use more ranks, a higher "
                "ZeRO stage or a slower tier: ",
                purpose, zs_format_bytes(bytes, human), bytes, zs_tier_name(tier));
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
