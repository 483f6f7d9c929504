/* Vector operations of decode attention: dot products of a few queries with a few tokens, and weighted sums of
 * values, for any vector width. */
#ifndef ARMATURE_DECODE_LANES_H
#define ARMATURE_DECODE_LANES_H

#include "attention.h"
#include "simd.h"

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

#define DECODE_BLOCK 32 /* tokens whose scores are computed at a time */

/* Queries that share a loaded key or value: as many as leave registers for four tokens or four vectors of each. */
#if LANES == 16 || defined(__aarch64__)
#define SHARING 4
#else
#define SHARING 2
#endif

/* A head is processed in steps of STEP elements, as two vectors: for bf16 the even and the odd elements (widened by a
 * shift and a mask), for int8 the first and the second half. Queries have the same layout, and sums of values are
 * reordered at the end. fp32 is read as it is. With VDPBF16PS or BFDOT, keys stay pairs of bf16 in one vector. */
enum { FROM_BF16, FROM_INT8, FROM_PAIRS, FROM_FP32 };

#define STEP (2 * LANES)

INLINE int64_t bytes_of(int kind) { return kind == FROM_INT8 ? 1 : kind == FROM_FP32 ? 4 : 2; }
INLINE int vectors_of(int kind) { return kind == FROM_PAIRS ? 1 : 2; }

/* ---- sums across lanes, four or LANES at once ---- */

#if LANES == 16
#define EVEN 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define ODD 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#elif LANES == 8
#define EVEN 0, 2, 8, 10, 4, 6, 12, 14
#define ODD 1, 3, 9, 11, 5, 7, 13, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif

INLINE vf add_neighbours(vf a, vf b) { return SHUFFLE(a, b, EVEN) + SHUFFLE(a, b, ODD); }

/* Each group of four lanes has the sums of those lanes of the four vectors. */
INLINE vf sum_fours(const vf *x) { return add_neighbours(add_neighbours(x[0], x[1]), add_neighbours(x[2], x[3])); }

/* From LANES / 4 of those, the sums of all LANES vectors in order. */
INLINE vf sum_lanes(const vf *x) {
#if LANES == 16
#define EVEN_FOURS 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define ODD_FOURS 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
    vf low = SHUFFLE(x[0], x[1], EVEN_FOURS) + SHUFFLE(x[0], x[1], ODD_FOURS), high = SHUFFLE(x[2], x[3], EVEN_FOURS) + SHUFFLE(x[2], x[3], ODD_FOURS);
    return SHUFFLE(low, high, EVEN_FOURS) + SHUFFLE(low, high, ODD_FOURS);
#elif LANES == 8
    return SHUFFLE(x[0], x[1], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(x[0], x[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
    return x[0];
#endif
}

/* ---- softmax ---- */

/* e^x for x below SLACK, as vf_exp: 0 below -87; NaN stays NaN. */
INLINE vf exp_below(vf x) {
    const vf magic = vf_all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    const vf shifted = unfused(x * 1.44269504088896341f) + magic, n = shifted - magic;
    const vf result = exp_rest(x, n) * (vf)(((vi)shifted - (vi)magic + 127) << 23);
    return (vf)((vi)result & ~(vi)(x < -87.0f));
}

/* ---- loads ---- */

/* Load STEP elements as two vectors, or as one vector of pairs. */
INLINE void widen(int kind, const uint8_t *p, vf *x) {
    if (kind == FROM_INT8) {
        bytes_load(p, x);
        return;
    }
    if (kind == FROM_FP32) {
        x[0] = vf_load((const float *)p), x[1] = vf_load((const float *)p + LANES); /* memcpy of both goes through memory */
        return;
    }
    vu both;
    memcpy(&both, p, sizeof both);
    if (kind == FROM_PAIRS) {
        x[0] = (vf)both;
        return;
    }
    x[0] = (vf)(both << 16), x[1] = (vf)(both & 0xffff0000u);
}

/* Load the last `left` elements of a head, a multiple of eight, followed by zeros. */
INLINE void widen_tail(int kind, const uint8_t *p, int64_t left, vf *x) {
    uint8_t part[4 * STEP] = {0};
    for (int64_t i = 0; i < left * bytes_of(kind); i += 8) memcpy(part + i, p + i, 8);
    widen(kind, part, x);
}

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
 * pairs by VDPBF16PS. Huge pages change nothing. */
#define KV_PREFETCH 2

INLINE void ask_for(const uint8_t *p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, KV_PREFETCH);
}

/* ---- products ---- */

/* One head's keys or values of a block: token t is at base + at[t]. `ahead + ahead_at[t]` is prefetched. */
typedef struct {
    const uint8_t *base, *ahead;
    const int64_t *at, *ahead_at;
    int64_t head_dim, bytes; /* elements of a head; bytes of a head in a row */
} block_rows;

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
 * same vector. */
INLINE void score(int kind, int rows, int first, const block_rows *keys, const float (*queries)[MAX_HEAD_DIM], int from, int to,
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
                if (first) ask_for(keys->ahead + keys->ahead_at[t], keys->bytes);
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
INLINE void add_values(int kind, int rows, int steps, int tail, int first, const block_rows *values, int64_t d, const float (*weights)[DECODE_BLOCK],
                       int from, int to, float (*sums)[MAX_HEAD_DIM]) {
    vf acc[SHARING][4], x[4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * steps; v++) acc[r][v] = vf_load(sums[r] + d + v * LANES);
    for (int t = from; t < to; t++) {
        const uint8_t *value = values->base + values->at[t] + d * bytes_of(kind);
        if (first && d == 0) ask_for(values->ahead + values->ahead_at[t], values->bytes);
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

#endif
