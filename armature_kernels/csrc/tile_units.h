/* Products of attention over whole texts, for any vector width: a few rows of units of four bytes times a panel of
 * PANEL_UNITS columns. A unit is one fp32 or, if the level multiplies them, a pair of bf16. */
#ifndef ARMATURE_TILE_UNITS_H
#define ARMATURE_TILE_UNITS_H

#include "decode_lanes.h"

#ifndef AMX_TILES
#define AMX_TILES 0
#endif
#if AMX_TILES
#include "tile_amx.h"
#endif

#define PANEL_UNITS (2 * LANES)
#define UNIT_ROWS (LANES == 8 ? 6 : 12) /* times two accumulators: leaves four of 16 registers, or eight of 32 */

/* UNIT_TILES: pairs of bf16, multiplied by AMX's tile registers, 16 rows at a time. */
enum { UNIT_FP32, UNIT_PAIRS, UNIT_TILES };

#define TILE_UNITS 16   /* pairs of a register's row */
#define MOST_UNIT_ROWS 16

INLINE int64_t unit_rows(int kind) { return kind == UNIT_TILES ? MOST_UNIT_ROWS : UNIT_ROWS; }

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

#if AMX_TILES
/* Two panels of PANEL_UNITS columns, or one if `second` is NULL, times 16 rows that are `stride` units apart. `units` is a
 * multiple of TILE_UNITS. */
INLINE void multiply_tiles(int add, const uint32_t *rows, int64_t stride, const uint32_t *first, const uint32_t *second, int64_t units, float *out, int64_t out_stride) {
    if (!add) {
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
    } else {
        tile_load(0, out, out_stride * 4);
        tile_load(1, out + LANES, out_stride * 4);
        if (second) {
            tile_load(2, out + PANEL_UNITS, out_stride * 4);
            tile_load(3, out + PANEL_UNITS + LANES, out_stride * 4);
        }
    }
    for (int64_t u = 0; u < units; u += TILE_UNITS) {
        tile_load(4, rows + u, stride * 4);
        tile_load(6, first + u * PANEL_UNITS, PANEL_UNITS * 4);
        tile_multiply_bf16(0, 4, 6);
        tile_load(7, first + u * PANEL_UNITS + LANES, PANEL_UNITS * 4);
        tile_multiply_bf16(1, 4, 7);
        if (second) {
            tile_load(6, second + u * PANEL_UNITS, PANEL_UNITS * 4);
            tile_multiply_bf16(2, 4, 6);
            tile_load(7, second + u * PANEL_UNITS + LANES, PANEL_UNITS * 4);
            tile_multiply_bf16(3, 4, 7);
        }
    }
    tile_store(0, out, out_stride * 4);
    tile_store(1, out + LANES, out_stride * 4);
    if (second) {
        tile_store(2, out + PANEL_UNITS, out_stride * 4);
        tile_store(3, out + PANEL_UNITS + LANES, out_stride * 4);
    }
}
#endif

#define ROWS_CASE(ROWS) case ROWS: multiply_rows(ROWS <= UNIT_ROWS ? ROWS : 1, kind, add, tile, stride, panel, units, out, out_stride); break;

/* `kind`, `add` and `stride` are compile-time constants at every call. */
INLINE void multiply_units(int kind, int rows, int add, const uint32_t *tile, int64_t stride, const uint32_t *panel, int64_t units, float *out,
                           int64_t out_stride) {
    switch (rows) {
        ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
        ROWS_CASE(7) ROWS_CASE(8) ROWS_CASE(9) ROWS_CASE(10) ROWS_CASE(11) ROWS_CASE(12)
    }
}

/* `count` columns, from panels of PANEL_UNITS columns, each of `panel_units` units; the other arguments as above. */
INLINE void multiply_panels(int kind, int rows, int add, const uint32_t *tile, int64_t stride, const uint32_t *panels, int64_t panel_units, int64_t units,
                            int64_t count, float *out, int64_t out_stride) {
#if AMX_TILES
    if (kind == UNIT_TILES) {
        for (int64_t n = 0; n < count; n += 2 * PANEL_UNITS) {
            const uint32_t *second = n + PANEL_UNITS < count ? panels + (n + PANEL_UNITS) * panel_units : NULL;
            multiply_tiles(add, tile, stride, panels + n * panel_units, second, units, out + n, out_stride);
        }
        return;
    }
#endif
    for (int64_t n = 0; n < count; n += PANEL_UNITS) multiply_units(kind, rows, add, tile, stride, panels + n * panel_units, units, out + n, out_stride);
}

/* LANES elements of two rows of bf16 to pairs. The rows have `left` elements left; a NULL row is zeros. */
INLINE void join_pairs(const uint16_t *even, const uint16_t *odd, int64_t left, uint32_t *to) {
    const vu first = even ? (vu)bf16_load_part(even, left) >> 16 : (vu){0}, second = odd ? (vu)bf16_load_part(odd, left) : (vu){0};
    const vu pairs = first | second;
    memcpy(to, &pairs, sizeof pairs);
}

/* Weights of LANES positions from p on as units. */
INLINE void store_weights(int kind, uint32_t *weights, int64_t p, vf x) {
#if BF16_UNITS
    if (kind != UNIT_FP32) {
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
