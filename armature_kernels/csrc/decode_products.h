/* Products of decode attention: dot products of a few queries with a few tokens, and weighted sums of values. Levels with
 * 16 registers of eight lanes have their own (decode_products_avx2.h). */
#ifndef ARMATURE_DECODE_PRODUCTS_H
#define ARMATURE_DECODE_PRODUCTS_H

#include "decode_lanes.h"

/* Queries that share a loaded key or value: as many as leave registers for four tokens or four vectors of each. */
#if LANES == 16 || defined(__aarch64__)
#define SHARING 4
#else
#define SHARING 2
#endif

INLINE vf add_product(int kind, vf sum, vf key, vf query) {
#if BF16_UNITS
    if (kind == FROM_PAIRS) return add_pairs(sum, key, query);
#endif
    return sum + key * query;
}

/* Where keys and values are prefetched to: __builtin_prefetch's locality, here L2. A first cache of 32 KB loses lines
 * before they are used, and a prefetch past the caches leaves them nowhere else: on two Zen 4 cores 8 x 4,000 tokens take
 * 2.7 ms a layer instead of 6.4, on a Sapphire Rapids, which has few buffers for lines on their way to L1, 3.6 instead of
 * 9.8. On Zen 5, with 48 KB, a prefetch past the caches was 8% faster. Not faster for int8: dot products with 16-bit
 * queries (VPDPWSSD). Slower for bf16: prefetching a whole block in memory order. Slower on Zen 5: weights and values in
 * pairs by VDPBF16PS. Huge pages change nothing. Values are prefetched as far as they are used, so that memory is read all
 * the time: 8,000 tokens of two heads of 256 take 0.61 ms in place of 0.80 (Zen 4). Keys spread so took 0.66. */
#define KV_PREFETCH 2

INLINE void ask_for(const uint8_t *p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, KV_PREFETCH);
}

#define DISTANCE 1 /* heads of a block between the prefetch of bytes and their use; 2 takes 1.02 to 1.1 times as long (Zen 4) */

/* What is prefetched: the same tokens of another head, or of the next block's first head. */
typedef struct {
    const task_rows *all;
    const uint8_t *keys, *values;
    const int64_t *at;
} kv_ahead;

INLINE void begin_block(kv_ahead *ahead, const task_rows *all) { ahead->all = all; }

INLINE void begin_head(kv_ahead *ahead, int64_t head) {
    const task_rows *all = ahead->all;
    const int64_t distance = DISTANCE < all->heads ? DISTANCE : all->heads, wraps = head + distance >= all->heads;
    const int64_t offset = (head + distance - (wraps ? all->heads : 0)) * all->bytes;
    ahead->keys = all->keys + offset, ahead->values = all->values + offset, ahead->at = all->at + (wraps ? DECODE_BLOCK : 0);
}

/* Between products, for a number of tokens: nothing. */
INLINE void ask_for_values(kv_ahead *ahead, int tokens) { (void)ahead, (void)tokens; }

/* ---- products ---- */

/* sums[r][i] += products of one step of query r, from float `query` on, with key i. */
INLINE void add_products(int kind, int rows, vf (*sums)[4], vf (*keys)[2], const float (*queries)[MAX_HEAD_DIM], int64_t query) {
    for (int v = 0; v < vectors_of(kind); v++)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const vf x = vf_load(queries[r] + query + v * LANES);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) sums[r][i] = add_product(kind, sums[r][i], keys[i][v], x);
        }
}

/* scores[r][t] = query r times key t for `rows` (1 to SHARING) queries, tokens [from, to) and the other tokens of the
 * same vector. `ahead`: NULL if an earlier call has prefetched. */
INLINE void score(int kind, int rows, kv_ahead *ahead, const block_rows *keys, const float (*queries)[MAX_HEAD_DIM], int from, int to,
                  float (*scores)[DECODE_BLOCK]) {
    for (int t0 = from / LANES * LANES; t0 < to; t0 += LANES) {
        vf fours[SHARING][LANES / 4];
        for (int part = 0; part < LANES / 4; part++) {
            const uint8_t *key[4];
            vf sums[SHARING][4], x[4][2];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const int t = t0 + part * 4 + i;
                key[i] = keys->base + keys->at[t];
                if (ahead) ask_for(ahead->keys + ahead->at[t], keys->bytes);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) sums[r][i] = vf_all(0);
            }
            int64_t d = 0, query = 0;
            for (; d + STEP <= keys->head_dim; d += STEP, query += vectors_of(kind) * LANES) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) widen(kind, key[i] + d * bytes_of(kind), x[i]);
                add_products(kind, rows, sums, x, queries, query);
            }
            if (d < keys->head_dim) {
                for (int i = 0; i < 4; i++) widen_tail(kind, key[i] + d * bytes_of(kind), keys->head_dim - d, x[i]);
                add_products(kind, rows, sums, x, queries, query);
            }
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) fours[r][part] = sum_fours(sums[r]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) vf_store(scores[r] + t0, sum_lanes(fours[r]));
    }
}

/* sums[r][d ...] += weights[r][t] * value t for tokens [from, to): `steps` (1 or 2) steps of elements from d on, or
 * the head's tail. */
INLINE void add_values(int kind, int rows, int steps, int tail, kv_ahead *ahead, const block_rows *values, int64_t d, const float (*weights)[DECODE_BLOCK],
                       int from, int to, float (*sums)[MAX_HEAD_DIM]) {
    vf acc[SHARING][4], x[4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * steps; v++) acc[r][v] = vf_load(sums[r] + d + v * LANES);
    for (int t = from; t < to; t++) {
        const uint8_t *value = values->base + values->at[t] + d * bytes_of(kind);
        if (ahead) ask_for(ahead->values + ahead->at[t] + d * bytes_of(kind), (tail ? STEP : steps * STEP) * bytes_of(kind));
        for (int i = 0; i < steps; i++)
            if (tail) widen_tail(kind, value, values->head_dim - d, x);
            else widen(kind, value + i * STEP * bytes_of(kind), x + 2 * i);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const vf weight = vf_all(weights[r][t]);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * steps; v++) acc[r][v] += weight * x[v];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * steps; v++) vf_store(sums[r] + d + v * LANES, acc[r][v]);
}

/* The same for all elements. */
INLINE void add_head(int kind, int rows, kv_ahead *ahead, const block_rows *values, const float (*weights)[DECODE_BLOCK], int from, int to,
                     float (*sums)[MAX_HEAD_DIM]) {
    int64_t d = 0;
    for (; d + 2 * STEP <= values->head_dim; d += 2 * STEP) add_values(kind, rows, 2, 0, ahead, values, d, weights, from, to, sums);
    for (; d + STEP <= values->head_dim; d += STEP) add_values(kind, rows, 1, 0, ahead, values, d, weights, from, to, sums);
    if (d < values->head_dim) add_values(kind, rows, 1, 1, ahead, values, d, weights, from, to, sums);
}

#endif
