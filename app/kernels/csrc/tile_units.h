/* Products of attention over whole texts, for any vector width: a few rows of units of four bytes times a panel of
 * PANEL_UNITS columns. A unit is one fp32 or, if the level multiplies them, a pair of bf16. */
#ifndef ARMATURE_TILE_UNITS_H
#define ARMATURE_TILE_UNITS_H

#include "decode_lanes.h"

#define PANEL_UNITS (2 * LANES)
#define UNIT_ROWS (LANES == 8 ? 6 : 12) /* times two accumulators: leaves four of 16 registers, or eight of 32 */

enum { UNIT_FP32, UNIT_PAIRS };

INLINE vf multiply_add(int kind, vf sum, vf weights, uint32_t x) {
#if BF16_UNITS
    if (kind == UNIT_PAIRS) return add_pairs(sum, weights, (vf)vi_all((int32_t)x));
#endif
    float number;
    memcpy(&number, &x, 4);
    return sum + weights * number;
}

/* out [rows, PANEL_UNITS] (row stride in floats) = tile [rows, units] times panel [units, PANEL_UNITS]; `add`: +=.
 * The units of all rows of a tile are interleaved, or (`stride` > 0) each row's are contiguous, `stride` apart. */
INLINE void multiply_rows(int rows, int kind, int add, const uint32_t *tile, int64_t stride, const uint32_t *panel, int64_t units, float *out,
                          int64_t out_stride) {
    vf sums[UNIT_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) sums[r][i] = add ? vf_load(out + r * out_stride + i * LANES) : vf_all(0);
    for (int64_t u = 0; u < units; u++, panel += PANEL_UNITS, tile += stride ? 1 : rows) {
        const vf low = vf_load((const float *)panel), high = vf_load((const float *)panel + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const uint32_t x = tile[stride ? r * stride : r];
            sums[r][0] = multiply_add(kind, sums[r][0], low, x);
            sums[r][1] = multiply_add(kind, sums[r][1], high, x);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) vf_store(out + r * out_stride + i * LANES, sums[r][i]);
}

#define ROWS_CASE(ROWS) case ROWS: multiply_rows(ROWS <= UNIT_ROWS ? ROWS : 1, kind, add, tile, stride, panel, units, out, out_stride); break;

/* `kind`, `add` and `stride` are compile-time constants at every call. */
INLINE void multiply_units(int kind, int rows, int add, const uint32_t *tile, int64_t stride, const uint32_t *panel, int64_t units, float *out,
                           int64_t out_stride) {
    switch (rows) {
        ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
        ROWS_CASE(7) ROWS_CASE(8) ROWS_CASE(9) ROWS_CASE(10) ROWS_CASE(11) ROWS_CASE(12)
    }
}

/* LANES elements of two rows of bf16 to pairs. The rows have `left` elements left; a NULL row is zeros. */
INLINE void join_pairs(const uint16_t *even, const uint16_t *odd, int64_t left, uint32_t *to) {
    const vu first = (vu)bf16_load_part(even, left) >> 16, second = odd ? (vu)bf16_load_part(odd, left) : (vu){0};
    const vu pairs = first | second;
    memcpy(to, &pairs, sizeof pairs);
}

/* Weights of LANES positions from p on as units. */
INLINE void store_weights(int kind, uint32_t *weights, int64_t p, vf x) {
#if BF16_UNITS
    if (kind == UNIT_PAIRS) {
#ifdef __AVX512BF16__
        _mm256_storeu_si256((__m256i *)((uint16_t *)weights + p), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
        bf16_store((uint16_t *)weights + p, x);
#endif
        return;
    }
#endif
    vf_store((float *)weights + p, x);
}

#endif
