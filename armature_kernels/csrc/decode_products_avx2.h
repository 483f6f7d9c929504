/* Products of decode attention with 16 registers of eight floats, as decode_products.h with more. Four queries times three
 * keys, or times three vectors of a value, have twelve sums in registers: FMA takes five cycles and two begin per cycle
 * (Zen 2), so fewer sums would wait for each other. A mask of odd bf16 elements has no register; they are shifted down
 * and up. On Zen 2, 8 x 4,000 tokens take 0.69 of the time of two queries times four keys with a head's lines prefetched before
 * the next head's: 4.1 instead of 6.1 ms a layer (`armature bench kernels`). */
#ifndef ARMATURE_DECODE_PRODUCTS_AVX2_H
#define ARMATURE_DECODE_PRODUCTS_AVX2_H

#include "decode_lanes.h"

#define SHARING 4 /* queries that share a loaded key or value */
#define KEYS 3    /* keys that are multiplied at a time, and vectors of a value */

/* ---- prefetching ---- */

#define SOON 6 /* tokens between the prefetch of a key to the first cache and its use; 3 to 18 are equally fast */

/* The next block is prefetched to the second cache, in the order of memory: on Zen 2, 20 GB/s are read if lines of one head
 * are prefetched after the other, and 25 in the order of memory. The lines are asked for in small numbers all the time,
 * since a core has few buffers for them. Shortly before their use, lines are prefetched from there to the first cache. */
typedef struct {
    const task_rows *all;
    const uint8_t *line, *end; /* the next line of the next block, and the end of its token's keys or values */
    const uint8_t *values;     /* of the head, whose tokens from `value_at` on are still to be prefetched */
    const int64_t *next, *value_at; /* `next`: the token of `line` */
    int in_values;                  /* whether `line` is of values */
} kv_ahead;

INLINE void begin_block(kv_ahead *ahead, const task_rows *all) {
    ahead->all = all, ahead->next = all->at + DECODE_BLOCK, ahead->in_values = 0;
    ahead->line = all->keys + *ahead->next, ahead->end = ahead->line + all->heads * all->bytes;
}

INLINE void begin_head(kv_ahead *ahead, int64_t head) { ahead->values = ahead->all->values + head * ahead->all->bytes, ahead->value_at = ahead->all->at; }

/* Prefetch `count` lines of the next block, in fours. */
INLINE void ask_for_lines(kv_ahead *ahead, int64_t count) {
    const uint8_t *line = ahead->line;
    do { /* loops of one round are predicted */
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) __builtin_prefetch(line + 64 * i, 0, 2);
        line += 4 * 64, count -= 4;
    } while (count > 0);
    ahead->line = line;
    if (ahead->line < ahead->end) return;
    const task_rows *all = ahead->all;
    if (ahead->in_values && ahead->next + 1 < all->at + 2 * DECODE_BLOCK) ahead->next++;
    ahead->in_values ^= 1;
    ahead->line = (ahead->in_values ? all->values : all->keys) + *ahead->next, ahead->end = ahead->line + all->heads * all->bytes;
}

/* Prefetch to the first cache. */
INLINE void ask_soon(const uint8_t *p, int64_t bytes) {
    __builtin_prefetch(p, 0, 3);
    for (int64_t i = 64; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 3);
}

/* A block has 64 lines of keys and values for each head and each 64 bytes of it. While the head is computed, a third of
 * so many is asked for while its keys are multiplied, a quarter here, before the softmax of its queries, and the rest
 * while its values are. `tokens`: the number of values to prefetch to the first cache. */
INLINE void ask_for_values(kv_ahead *ahead, int tokens) {
    const int64_t bytes = ahead->all->bytes;
    ask_for_lines(ahead, (tokens * bytes + 127) / 128);
    for (const int64_t *end = ahead->value_at + tokens; ahead->value_at < end; ahead->value_at++) ask_soon(ahead->values + *ahead->value_at, bytes);
}

/* ---- products ---- */

/* Vector v of the elements at p: of bf16 the even and the odd ones (decode_lanes.h). */
INLINE vf widen_one(int kind, int v, const uint8_t *p) {
    if (kind == FROM_FP32) return vf_load((const float *)p + v * LANES);
    if (kind == FROM_INT8) return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + v * LANES))));
    __m256i both = _mm256_loadu_si256((const __m256i *)p);
    if (v) {
        both = _mm256_srli_epi32(both, 16);
        __asm__("" : "+x"(both)); /* the compiler would make a mask of both shifts */
    }
    return (vf)_mm256_slli_epi32(both, 16);
}

/* The last elements of a head, a multiple of eight, followed by zeros. */
INLINE const uint8_t *copy_tail(int kind, const uint8_t *p, int64_t left, uint8_t *copy) {
    memset(copy, 0, 4 * STEP);
    for (int64_t i = 0; i < left * bytes_of(kind); i += 8) memcpy(copy + i, p + i, 8);
    return copy;
}

/* sums[r][i] += products of one step of query r, from float `query` on, with the elements at key i. */
INLINE void add_products(int kind, int rows, vf (*sums)[KEYS], const uint8_t **key, int64_t offset, const float (*queries)[MAX_HEAD_DIM], int64_t query) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
        vf x[KEYS];
#pragma GCC unroll 3
        for (int i = 0; i < KEYS; i++) x[i] = widen_one(kind, v, key[i] + offset);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const vf q = vf_load(queries[r] + query + v * LANES);
#pragma GCC unroll 3
            for (int i = 0; i < KEYS; i++) sums[r][i] += x[i] * q;
        }
    }
}

/* scores[r][t] = query r times key t for `rows` (1 to SHARING) queries, tokens [from, to) and the other tokens of the
 * same vector. `ahead`: NULL if an earlier call has prefetched. Sums across lanes are computed at the end: between the
 * products they would keep the processor from reaching the next ones. */
INLINE void score(int kind, int rows, kv_ahead *ahead, const block_rows *keys, const float (*queries)[MAX_HEAD_DIM], int from, int to,
                  float (*scores)[DECODE_BLOCK]) {
    const int64_t size = keys->head_dim;
    const int first = from / LANES * LANES, end = (to + LANES - 1) / LANES * LANES;
    vf products[SHARING][DECODE_BLOCK + KEYS];
    for (int t = first; t < end; t += KEYS) { /* up to two of the next block are multiplied in vain */
        const uint8_t *key[KEYS];
        vf sums[SHARING][KEYS];
#pragma GCC unroll 3
        for (int i = 0; i < KEYS; i++) {
            key[i] = keys->base + keys->at[t + i];
            __asm__("" : "+r"(key[i])); /* the compiler would add them in a vector register */
            if (ahead) ask_soon(keys->base + keys->at[t + i + SOON], keys->bytes);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r][i] = vf_all(0);
        }
        if (ahead) ask_for_lines(ahead, keys->bytes / 32);
        int64_t d = 0;
        for (; d + STEP <= size; d += STEP) add_products(kind, rows, sums, key, d * bytes_of(kind), queries, d);
        if (d < size) {
            uint8_t copies[KEYS][4 * STEP];
            const uint8_t *tail[KEYS];
            for (int i = 0; i < KEYS; i++) tail[i] = copy_tail(kind, key[i] + d * bytes_of(kind), size - d, copies[i]);
            add_products(kind, rows, sums, tail, 0, queries, d);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
            for (int i = 0; i < KEYS; i++) products[r][t + i] = sums[r][i];
    }
    for (int r = 0; r < rows; r++)
        for (int t = first; t < end; t += LANES) {
            const vf fours[2] = {sum_fours(products[r] + t), sum_fours(products[r] + t + 4)};
            vf_store(scores[r] + t, sum_lanes(fours));
        }
}

/* sums[r] += weights[r][t] * value t for tokens [from, to): `vectors` (1 to 3) vectors from vector `first` on, which is
 * odd if `odd`, or both of the head's tail. */
INLINE void add_values(int kind, int rows, int odd, int vectors, int tail, kv_ahead *ahead, const block_rows *values, int64_t first,
                       const float (*weights)[DECODE_BLOCK], int from, int to, float (*sums)[MAX_HEAD_DIM]) {
    const int64_t d = (first - odd) * LANES;
    const uint8_t *base = values->base + d * bytes_of(kind);
    vf acc[SHARING][KEYS];
    if (ahead) ask_for_lines(ahead, 10 * bytes_of(kind));
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) acc[r][v] = vf_load(sums[r] + (first + v) * LANES);
    for (int t = from; t < to; t++) {
        const uint8_t *value = base + values->at[t];
        uint8_t copy[4 * STEP];
        vf x[KEYS];
        if (tail) value = copy_tail(kind, value, values->head_dim - d, copy);
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) x[v] = widen_one(kind, (odd + v) % 2, value + (odd + v) / 2 * STEP * bytes_of(kind));
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const vf weight = vf_all(weights[r][t]);
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) acc[r][v] += weight * x[v];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) vf_store(sums[r] + (first + v) * LANES, acc[r][v]);
}

/* The same for all elements. */
INLINE void add_head(int kind, int rows, kv_ahead *ahead, const block_rows *values, const float (*weights)[DECODE_BLOCK], int from, int to,
                     float (*sums)[MAX_HEAD_DIM]) {
    const int64_t vectors = values->head_dim / STEP * 2;
    int64_t i = 0;
    for (; i + 6 <= vectors; i += 6) {
        add_values(kind, rows, 0, 3, 0, ahead, values, i, weights, from, to, sums);
        add_values(kind, rows, 1, 3, 0, ahead, values, i + 3, weights, from, to, sums);
    }
    for (; i < vectors; i += 2) add_values(kind, rows, 0, 2, 0, ahead, values, i, weights, from, to, sums);
    if (values->head_dim % STEP) add_values(kind, rows, 0, 2, 1, ahead, values, i, weights, from, to, sums);
}

#endif
