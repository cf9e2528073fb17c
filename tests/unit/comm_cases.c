/* SPDX-License-Identifier: Apache-2.0 */
#include "comm_cases.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"

const comm_case comm_cases[] = {case_moves, case_all_reduce, case_agree, case_same, case_mismatch};
const char *const comm_case_names[] = {"moves", "all_reduce", "agree", "same", "mismatch"};

const char *wrong(const char *format, ...)
{
    static _Thread_local char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return text;
}

static uint32_t mix(uint64_t a, uint64_t b)
{
    uint64_t x = a * UINT64_C(0x9e3779b97f4a7c15) ^ (b + UINT64_C(0xd1b54a32d192ed03));
    x = (x ^ (x >> 31)) * UINT64_C(0xbf58476d1ce4e5b9);
    return (uint32_t)(x >> 29);
}

/* Of so different sizes that another order of addition gives other bits. */
static float value_of(int rank, uint64_t i)
{
    uint32_t bits = mix((uint64_t)rank + 1, i);
    return ldexpf((float)(bits & 0xffff) - 32768.0f, (int)(bits >> 16) % 24 - 16);
}

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float from_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

static void fill(void *out, zs_dtype dtype, int rank, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        float x = value_of(rank, i);
        if (dtype == ZS_FP32)
            ((float *)out)[i] = x;
        else
            ((uint16_t *)out)[i] = to_bf16(x);
    }
}

/* Element i of the sum over ranks, in rank order. */
static void expected_sum(void *out, zs_dtype dtype, int world, uint64_t i)
{
    float sum = 0;
    for (int r = 0; r < world; r++) {
        float x = value_of(r, i);
        if (dtype == ZS_BF16)
            x = from_bf16(to_bf16(x));
        sum = r ? sum + x : x;
    }
    if (dtype == ZS_FP32) {
        memcpy(out, &sum, 4);
    } else {
        uint16_t rounded = to_bf16(sum);
        memcpy(out, &rounded, 2);
    }
}

static const char *gather_once(zs_comm *comm, size_t bytes, int in_place)
{
    int rank = zs_comm_rank(comm), world = zs_comm_world(comm);
    unsigned char *recv = calloc((size_t)world * bytes + 1, 1), *own = malloc(bytes + 1);
    unsigned char *send = in_place ? recv + (size_t)rank * bytes : own;
    for (size_t i = 0; i < bytes; i++)
        send[i] = (unsigned char)mix((uint64_t)rank, i);
    zs_status status = zs_comm_all_gather(comm, "unit 'a'", send, recv, bytes);
    const char *bad = status ? wrong("all-gather: %s", zs_last_error()) : NULL;
    for (int r = 0; r < world && !bad; r++)
        for (size_t i = 0; i < bytes && !bad; i++)
            if (recv[(size_t)r * bytes + i] != (unsigned char)mix((uint64_t)r, i))
                bad = wrong("all-gather of %zu bytes, in place %d: byte %zu of rank %d", bytes,
                            in_place, i, r);
    free(recv);
    free(own);
    return bad;
}

static const char *scatter_once(zs_comm *comm, zs_math *math, uint64_t count, zs_dtype dtype,
                                int in_place)
{
    int rank = zs_comm_rank(comm), world = zs_comm_world(comm);
    size_t size = zs_dtype_size(dtype);
    uint64_t total = count * (uint64_t)world;
    char *send = malloc(total * size + 1), *kept = malloc(total * size + 1),
         *own = malloc(count * size + 1);
    char *recv = in_place ? send + (size_t)rank * count * size : own;
    fill(send, dtype, rank, total);
    memcpy(kept, send, total * size);
    zs_status status = zs_comm_reduce_scatter(comm, math, "unit 'b'", send, recv, count, dtype);
    const char *bad = status ? wrong("reduce-scatter: %s", zs_last_error()) : NULL;
    for (uint64_t i = 0; i < count && !bad; i++) {
        char expected[4];
        expected_sum(expected, dtype, world, (uint64_t)rank * count + i);
        if (memcmp(expected, recv + i * size, size))
            bad = wrong("reduce-scatter of %llu %s, in place %d, rank %d: element %llu",
                        (unsigned long long)count, zs_dtype_name(dtype), in_place, rank,
                        (unsigned long long)i);
    }
    if (in_place)
        memcpy(recv, kept + (size_t)rank * count * size, count * size);
    if (!bad && memcmp(send, kept, total * size))
        bad = wrong("reduce-scatter wrote to send outside of recv");
    free(send);
    free(kept);
    free(own);
    return bad;
}

const char *case_moves(zs_comm *comm, zs_math *math)
{
    /* The last ones pass through bounce buffers in pieces. */
    static const uint64_t counts[] = {0, 1, 7, 32, 1000, 4097, 350003};
    static const size_t sizes[] = {0, 1, 63, 4096, 100003, 5000011};
    for (int in_place = 0; in_place < 2; in_place++) {
        for (size_t i = 0; i < ZS_COUNT(sizes); i++) {
            const char *bad = gather_once(comm, sizes[i], in_place);
            EXPECT(!bad, "%s", bad);
        }
        for (size_t i = 0; i < ZS_COUNT(counts); i++)
            for (int dtype = 0; dtype < 2; dtype++) {
                const char *bad = scatter_once(comm, math, counts[i], (zs_dtype)dtype, in_place);
                EXPECT(!bad, "%s", bad);
            }
    }
    return NULL;
}

const char *case_all_reduce(zs_comm *comm, zs_math *math)
{
    static const size_t counts[] = {0, 1, 63, 64, 65, 4096};
    int rank = zs_comm_rank(comm), world = zs_comm_world(comm);
    double values[4096];
    for (size_t c = 0; c < ZS_COUNT(counts); c++)
        for (int op = ZS_OP_SUM; op <= ZS_OP_MIN; op++) {
            for (size_t i = 0; i < counts[c]; i++)
                values[i] = value_of(rank, i) * 1e-3;
            zs_status status =
                zs_comm_all_reduce(comm, "norm", (zs_reduce_op)op, values, counts[c]);
            EXPECT(!status, "all-reduce: %s", zs_last_error());
            for (size_t i = 0; i < counts[c]; i++) {
                double expected = value_of(0, i) * 1e-3;
                for (int r = 1; r < world; r++) {
                    double x = value_of(r, i) * 1e-3;
                    expected = op == ZS_OP_SUM   ? expected + x
                               : op == ZS_OP_MAX ? fmax(expected, x)
                                                 : fmin(expected, x);
                }
                EXPECT(values[i] == expected, "all-reduce %d of %zu: value %zu is %.17g not %.17g",
                       op, counts[c], i, values[i], expected);
            }
        }
    for (int op = ZS_OP_SUM; op <= ZS_OP_MIN; op++) {
        double x = rank == world - 1 ? (double)NAN : 1;
        EXPECT(!zs_comm_all_reduce(comm, "nan", (zs_reduce_op)op, &x, 1), "%s", zs_last_error());
        EXPECT(isnan(x), "operation %d lost a NaN: %g", op, x);
    }
    return NULL;
}

const char *case_agree(zs_comm *comm, zs_math *math)
{
    int rank = zs_comm_rank(comm), world = zs_comm_world(comm);
    EXPECT(!zs_comm_agree(comm, "load", ZS_OK), "agree: %s", zs_last_error());
    int bad_rank = world - 1;
    zs_status local = rank == bad_rank ? zs_fail(ZS_ERR_NOSPACE, "disk '/x' is full") : ZS_OK;
    zs_status status = zs_comm_agree(comm, "load", local);
    if (rank == bad_rank) {
        EXPECT(status == ZS_ERR_NOSPACE, "own status became %d", status);
        EXPECT(!strcmp(zs_last_error(), "disk '/x' is full"), "own message: %s", zs_last_error());
    } else {
        char expected[128];
        snprintf(expected, sizeof expected, "load: rank %d failed: disk '/x' is full", bad_rank);
        EXPECT(status == ZS_ERR_COMM, "others got %d", status);
        EXPECT(!strcmp(zs_last_error(), expected), "message: %s", zs_last_error());
    }
    EXPECT(!zs_comm_barrier(comm, "after"), "barrier after agree: %s", zs_last_error());
    return NULL;
}

const char *case_same(zs_comm *comm, zs_math *math)
{
    int rank = zs_comm_rank(comm), world = zs_comm_world(comm);
    EXPECT(!zs_comm_same(comm, "seed", UINT64_MAX), "same: %s", zs_last_error());
    if (world < 2)
        return NULL;
    zs_status status = zs_comm_same(comm, "seed", rank == 1 ? 0xab : 0x12);
    EXPECT(status == ZS_ERR_MISMATCH, "same gave %d", status);
    EXPECT(!strcmp(zs_last_error(),
                   "seed of rank 0 and rank 1 differ (12 and ab): all ranks must use the same"),
           "message: %s", zs_last_error());
    return NULL;
}

const char *case_mismatch(zs_comm *comm, zs_math *math)
{
    int rank = zs_comm_rank(comm), world = zs_comm_world(comm);
    if (world < 2)
        return NULL;
    char *buffer = calloc(2 * (size_t)world, 4096);
    char *other = calloc(1, 8192);
    const char *bad = NULL;
    static const char *const expected[] = {
        "rank 0 is at reduce-scatter of unit 'layers.3' (4096 bytes fp32), rank 1 at all-gather of "
        "unit 'layers.2' (8192 bytes): all ranks must visit units in the same order, with the same "
        "configuration",
        "rank 0 is at reduce-scatter of unit 'layers.3' (4096 bytes fp32), rank 1 at "
        "reduce-scatter "
        "of unit 'layers.3' (4096 bytes bf16): all ranks must visit",
        "rank 0 is at all-gather of unit 'x' (8 bytes), rank 1 at all-gather of unit 'x' (16 "
        "bytes)",
        "rank 0 is at barrier at start, rank 1 at barrier at end",
        "rank 0 is at agreement on load, rank 1 at comparison of load",
        "rank 0 is at all-reduce of norm (sum of 1 values), rank 1 at all-reduce of norm (max of 1 "
        "values)",
    };
    for (size_t i = 0; i < ZS_COUNT(expected) && !bad; i++) {
        zs_status status = ZS_OK;
        double one = 1;
        switch (i) {
        case 0:
            status = rank == 1 ? zs_comm_all_gather(comm, "unit 'layers.2'", other, buffer, 8192)
                               : zs_comm_reduce_scatter(comm, math, "unit 'layers.3'", buffer,
                                                        other, 1024, ZS_FP32);
            break;
        case 1:
            status = zs_comm_reduce_scatter(comm, math, "unit 'layers.3'", buffer, other,
                                            rank == 1 ? 2048 : 1024, rank == 1 ? ZS_BF16 : ZS_FP32);
            break;
        case 2:
            status = zs_comm_all_gather(comm, "unit 'x'", other, buffer, rank == 1 ? 16 : 8);
            break;
        case 3:
            status = zs_comm_barrier(comm, rank == 1 ? "end" : "start");
            break;
        case 4:
            status = rank == 1 ? zs_comm_same(comm, "load", 1) : zs_comm_agree(comm, "load", ZS_OK);
            break;
        default:
            status = zs_comm_all_reduce(comm, "norm", rank == 1 ? ZS_OP_MAX : ZS_OP_SUM, &one, 1);
        }
        if (status != ZS_ERR_MISMATCH)
            bad = wrong("mismatch %zu gave %d (%s)", i, status, zs_last_error());
        else if (strncmp(zs_last_error(), expected[i], strlen(expected[i])))
            bad = wrong("mismatch %zu says: %s", i, zs_last_error());
    }
    free(buffer);
    free(other);
    EXPECT(!bad, "%s", bad);
    /* Nobody lost step. */
    EXPECT(!zs_comm_barrier(comm, "after"), "barrier after mismatches: %s", zs_last_error());
    return NULL;
}
