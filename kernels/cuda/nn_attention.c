/* SPDX-License-Identifier: Apache-2.0 */
/* Attention in tiles of queries and keys, so that memory does not grow with the square of the
 * sequence: forward keeps a running maximum and denominator (online softmax), backward makes the
 * scores again from their logarithm. Pairs of a row and a kv head are the products' batch. */
#include <math.h>

#include "kernels/cuda/nn.h"
#include "kernels/nn_rooms.h"

typedef struct pass {
    zs_nn_device *nn;
    const zs_nn_attention *a;
    cudaStream_t stream;
    zs_dtype dtype;
    zs_nn_rooms rooms;
    zs_cuda_tile tile;
    int edge;      /* of a tile */
    int narrow_ld; /* elements of a row of narrow scores */
    size_t size;   /* bytes of a narrow element */
    float scale;   /* of scores */
    float *scores[2];
    float *sums, *max, *denominator;
} pass;

static zs_status pass_open(pass *p, zs_nn_device *nn, const zs_nn_attention *a)
{
    *p = (pass){.nn = nn, .a = a};
    ZS_CHECK(zs_cuda_nn_enter(nn, &p->stream, &p->dtype));
    if (a->tile < 1 || a->tile > ZS_NN_TILE_MOST)
        return zs_fail(ZS_ERR_INTERNAL, "attention in tiles of %d; 1 to %d", a->tile,
                       (int)ZS_NN_TILE_MOST);
    zs_nn_rooms_make(a->rows, a->seq, a->heads, a->kv_heads, a->dim, a->tile, &p->rooms);
    p->edge = ZS_MIN(a->tile, a->seq);
    p->size = zs_dtype_size(p->dtype);
    p->narrow_ld = p->edge * (int)(sizeof(float) / p->size);
    p->scale = 1.0f / sqrtf((float)a->dim);
    p->tile = (zs_cuda_tile){.seq = a->seq,
                             .group = p->rooms.group,
                             .kv_heads = a->kv_heads,
                             .dim = a->dim,
                             .ld = p->edge};
    for (int i = 0; i < 2; i++)
        p->scores[i] = a->room + p->rooms.scores[i];
    p->sums = a->room + p->rooms.sums;
    p->max = a->room + p->rooms.max;
    p->denominator = a->room + p->rooms.denominator;
    return ZS_OK;
}

/* Elements before the tile's first query, and key, of its first pair. */
static size_t query_at(const pass *p)
{
    const zs_cuda_tile *t = &p->tile;
    return ((size_t)t->pair * (size_t)t->seq + (size_t)t->query) * (size_t)(t->group * t->dim);
}

static size_t key_at(const pass *p)
{
    const zs_cuda_tile *t = &p->tile;
    return ((size_t)t->pair * (size_t)t->seq + (size_t)t->key) * (size_t)t->dim;
}

static const void *narrow(const pass *p, const void *array, size_t at)
{
    return (const char *)array + at * p->size;
}

/* What the products of a tile have in common. Queries are rows of all heads of the group. */
typedef struct sizes {
    int queries, keys, dim;
    int64_t query_stride, key_stride, score_stride, narrow_stride, sums_stride;
} sizes;

static sizes sizes_of(const pass *p)
{
    const zs_cuda_tile *t = &p->tile;
    const int queries = t->queries * t->group;
    return (sizes){.queries = queries,
                   .keys = t->keys,
                   .dim = t->dim,
                   .query_stride = (int64_t)t->seq * t->group * t->dim,
                   .key_stride = (int64_t)t->seq * t->dim,
                   .score_stride = (int64_t)queries * p->edge,
                   .narrow_stride = (int64_t)queries * p->narrow_ld,
                   .sums_stride = (int64_t)queries * t->dim};
}

/* out = scale * queries keys^T */
static zs_status products(const pass *p, const void *queries, const void *keys, float scale,
                          float *out)
{
    const sizes s = sizes_of(p);
    const zs_gemm g = {.m = s.queries,
                       .n = s.keys,
                       .k = s.dim,
                       .transpose_b = 1,
                       .a = narrow(p, queries, query_at(p)),
                       .b = narrow(p, keys, key_at(p)),
                       .dtype = p->dtype,
                       .lda = s.dim,
                       .ldb = s.dim,
                       .c = out,
                       .c_dtype = ZS_FP32,
                       .ldc = p->edge,
                       .alpha = scale,
                       .batch = p->tile.pairs,
                       .stride_a = s.query_stride,
                       .stride_b = s.key_stride,
                       .stride_c = s.score_stride};
    return zs_cuda_nn_gemm(p->nn, &g);
}

/* out (+)= scale * weights keys: a row for each query; out: [pair][queries][dim] with that stride.
 */
static zs_status over_keys(const pass *p, const float *weights, const void *keys, float scale,
                           float *out, int64_t stride)
{
    const sizes s = sizes_of(p);
    const zs_gemm g = {.m = s.queries,
                       .n = s.dim,
                       .k = s.keys,
                       .a = weights,
                       .b = narrow(p, keys, key_at(p)),
                       .dtype = p->dtype,
                       .lda = p->narrow_ld,
                       .ldb = s.dim,
                       .c = out,
                       .c_dtype = ZS_FP32,
                       .ldc = s.dim,
                       .alpha = scale,
                       .beta = p->tile.first ? 0.0f : 1.0f,
                       .batch = p->tile.pairs,
                       .stride_a = s.narrow_stride,
                       .stride_b = s.key_stride,
                       .stride_c = stride};
    return zs_cuda_nn_gemm(p->nn, &g);
}

/* out += scale * weights^T queries: a row for each key. */
static zs_status over_queries(const pass *p, const float *weights, const void *queries, float scale,
                              float *out)
{
    const sizes s = sizes_of(p);
    const zs_gemm g = {.m = s.keys,
                       .n = s.dim,
                       .k = s.queries,
                       .transpose_a = 1,
                       .a = weights,
                       .b = narrow(p, queries, query_at(p)),
                       .dtype = p->dtype,
                       .lda = p->narrow_ld,
                       .ldb = s.dim,
                       .c = out + key_at(p),
                       .c_dtype = ZS_FP32,
                       .ldc = s.dim,
                       .alpha = scale,
                       .beta = 1.0f,
                       .batch = p->tile.pairs,
                       .stride_a = s.narrow_stride,
                       .stride_b = s.query_stride,
                       .stride_c = s.key_stride};
    return zs_cuda_nn_gemm(p->nn, &g);
}

static zs_status forward_tile(const pass *p)
{
    const zs_nn_attention *a = p->a;
    ZS_CHECK(products(p, a->q, a->k, p->scale, p->scores[0]));
    ZS_CHECK(zs_cuda_nn_softmax(p->stream, p->dtype, &p->tile, a->starts, p->scores[0], p->sums,
                                p->max, p->denominator));
    return over_keys(p, p->scores[0], a->v, 1.0f, p->sums, sizes_of(p).sums_stride);
}

static zs_status backward_tile(const pass *p)
{
    const zs_nn_attention *a = p->a;
    ZS_CHECK(products(p, a->q, a->k, p->scale, p->scores[0]));
    ZS_CHECK(products(p, a->dout_heads, a->v, 1.0f, p->scores[1]));
    ZS_CHECK(zs_cuda_nn_softmax_grad(p->stream, p->dtype, &p->tile, a->starts, p->scores[0],
                                     p->scores[1], a->lse, a->delta));
    ZS_CHECK(over_queries(p, p->scores[0], a->dout_heads, 1.0f, a->dv));
    ZS_CHECK(over_queries(p, p->scores[1], a->q, p->scale, a->dk));
    return over_keys(p, p->scores[1], a->k, p->scale, a->dq + query_at(p),
                     sizes_of(p).query_stride);
}

/* The first key that a query of the tile sees, in any row of its pairs: starts ascend. */
static int first_key(const pass *p)
{
    const zs_nn_attention *a = p->a;
    const zs_cuda_tile *t = &p->tile;
    int first = t->query;
    for (int row = t->pair / t->kv_heads; row <= (t->pair + t->pairs - 1) / t->kv_heads; row++)
        first = ZS_MIN(first, a->host_starts[(size_t)row * (size_t)a->seq + (size_t)t->query]);
    return first;
}

/* Calls each(p) for the tiles of keys that the tile of queries sees, upwards. */
static zs_status each_key_tile(pass *p, zs_status (*each)(const pass *))
{
    zs_cuda_tile *t = &p->tile;
    t->first = 1;
    for (t->key = first_key(p) / p->edge * p->edge; t->key < t->query + t->queries;
         t->key += p->edge, t->first = 0) {
        t->keys = ZS_MIN(p->edge, t->seq - t->key);
        ZS_CHECK(each(p));
    }
    return ZS_OK;
}

zs_status zs_cuda_nn_attention(zs_nn_device *nn, const zs_nn_attention *a)
{
    pass p;
    ZS_CHECK(pass_open(&p, nn, a));
    zs_cuda_tile *t = &p.tile;
    for (t->pair = 0; t->pair < a->rows * a->kv_heads; t->pair += t->pairs) {
        t->pairs = ZS_MIN(p.rooms.pairs, a->rows * a->kv_heads - t->pair);
        for (t->query = 0; t->query < a->seq; t->query += t->queries) {
            t->queries = ZS_MIN(p.edge, a->seq - t->query);
            ZS_CHECK(each_key_tile(&p, forward_tile));
            ZS_CHECK(zs_cuda_nn_attention_out(p.stream, p.dtype, t, p.sums, p.max, p.denominator,
                                              a->out, a->lse));
        }
    }
    return ZS_OK;
}

zs_status zs_cuda_nn_attention_grad(zs_nn_device *nn, const zs_nn_attention *a)
{
    pass p;
    ZS_CHECK(pass_open(&p, nn, a));
    zs_cuda_tile *t = &p.tile;
    const size_t bytes =
        (size_t)a->rows * (size_t)a->seq * (size_t)(a->kv_heads * a->dim) * sizeof(float);
    ZS_CHECK(zs_cuda_status(cudaMemsetAsync(a->dk, 0, bytes, p.stream), "attention"));
    ZS_CHECK(zs_cuda_status(cudaMemsetAsync(a->dv, 0, bytes, p.stream), "attention"));
    ZS_CHECK(zs_cuda_nn_attention_delta(p.stream, p.dtype, a));
    for (t->pair = 0; t->pair < a->rows * a->kv_heads; t->pair += t->pairs) {
        t->pairs = ZS_MIN(p.rooms.pairs, a->rows * a->kv_heads - t->pair);
        for (t->query = 0; t->query < a->seq; t->query += t->queries) {
            t->queries = ZS_MIN(p.edge, a->seq - t->query);
            ZS_CHECK(each_key_tile(&p, backward_tile));
        }
    }
    return ZS_OK;
}
