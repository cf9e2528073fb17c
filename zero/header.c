/* SPDX-License-Identifier: Apache-2.0 */
#include "zero/header.h"

#include <string.h>

#include "base/status.h"

enum { HEADER_MAGIC = 0x32524448 /* "HDR2" */ };

typedef struct cursor {
    unsigned char *data;
    size_t at, size;
    int overflow;
} cursor;

static void put_u64(cursor *c, uint64_t value)
{
    if (c->size - c->at < 8) {
        c->overflow = 1;
        return;
    }
    for (int i = 0; i < 8; i++)
        c->data[c->at++] = (unsigned char)(value >> 8 * i);
}

static uint64_t get_u64(cursor *c)
{
    uint64_t value = 0;
    if (c->size - c->at < 8) {
        c->overflow = 1;
        return 0;
    }
    for (int i = 0; i < 8; i++)
        value |= (uint64_t)c->data[c->at++] << 8 * i;
    return value;
}

static size_t same_steps(const zs_header *h, size_t begin)
{
    size_t end = begin + 1;
    while (end < h->param_count && h->steps[end] == h->steps[begin])
        end++;
    return end - begin;
}

zs_status zs_header_encode(const zs_header *h, void *out, size_t *bytes)
{
    cursor writer = {.data = out, .size = *bytes}, *c = &writer;
    uint64_t runs = 0, scale;
    memcpy(&scale, &h->loss_scale, sizeof scale);
    for (size_t i = 0; i < h->param_count; i += same_steps(h, i))
        runs++;
    put_u64(c, HEADER_MAGIC);
    put_u64(c, h->commit);
    put_u64(c, h->step);
    put_u64(c, scale);
    put_u64(c, (uint64_t)h->good_steps);
    put_u64(c, runs);
    for (size_t i = 0; i < h->param_count; i += same_steps(h, i)) {
        put_u64(c, same_steps(h, i));
        put_u64(c, h->steps[i]);
    }
    put_u64(c, h->user_bytes);
    if (c->overflow || c->size - c->at < h->user_bytes)
        return zs_fail(ZS_ERR_ARG,
                       "zs_state_commit: %llu runs of parameters with different step counts and "
                       "%zu user bytes do not fit into a header of %zu bytes",
                       (unsigned long long)runs, h->user_bytes, c->size);
    if (h->user_bytes)
        memcpy(c->data + c->at, h->user, h->user_bytes);
    *bytes = c->at + h->user_bytes;
    return ZS_OK;
}

zs_status zs_header_decode(const void *data, size_t bytes, zs_header *h)
{
    /* Only read from here on. */
    cursor reader = {.data = (unsigned char *)data, .size = bytes}, *c = &reader;
    const uint64_t magic = get_u64(c);
    h->commit = get_u64(c);
    h->step = get_u64(c);
    const uint64_t scale = get_u64(c);
    memcpy(&h->loss_scale, &scale, sizeof scale);
    h->good_steps = (int)get_u64(c);
    uint64_t runs = get_u64(c);
    size_t at = 0;
    if (magic != HEADER_MAGIC)
        return zs_fail(ZS_ERR_CORRUPT, "the store's engine header begins with %llx, not %x",
                       (unsigned long long)magic, HEADER_MAGIC);
    while (runs-- && !c->overflow) {
        uint64_t n = get_u64(c);
        const uint64_t steps = get_u64(c);
        while (h->steps && n-- && at < h->param_count)
            h->steps[at++] = steps;
    }
    h->user_bytes = get_u64(c);
    h->user = c->data + c->at;
    if (c->overflow || (h->steps && at != h->param_count) || h->user_bytes > c->size - c->at)
        return zs_fail(ZS_ERR_CORRUPT,
                       "the store's engine header of %zu bytes describes %zu "
                       "parameters where there are %zu",
                       c->size, at, h->param_count);
    return ZS_OK;
}
