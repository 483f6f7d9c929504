/* The fp32 product: a tile of a few rows times some outputs of a panel, for any vector width. A *panel* holds 32 outputs:
 * fp32, for each input the 32 outputs, or bf16 in pairs of inputs (tile_bf16.h), which are widened in registers. A *tile*
 * holds rows that are interleaved input by input. Every output is one chain of additions in the order of inputs, so a
 * row's result does not depend on the number of rows. */
#ifndef ARMATURE_TILE_FP32_H
#define ARMATURE_TILE_FP32_H

#include "simd.h"

#define WIDE_OUTPUTS (2 * LANES) /* of a panel that are multiplied together */

/* Rows times two accumulators leave three of 16 registers, or seven of 32. */
#if LANES == 8
#define WIDE_ROWS 6
#elif LANES == 16 || defined(__aarch64__)
#define WIDE_ROWS 12
#else
#define WIDE_ROWS 4
#endif

/* Of the pairs (k, k + 1) of LANES outputs, the weights of k or of k + 1. */
INLINE vf widen_even(const uint8_t *p) {
    vu pairs;
    memcpy(&pairs, p, sizeof pairs);
    return (vf)(pairs << 16);
}

INLINE vf widen_odd(const uint8_t *p) {
    vu pairs;
    memcpy(&pairs, p, sizeof pairs);
#if LANES == 8 /* not a mask, which would take one of 16 registers: then one of multiply_wide's sums is spilled */
    pairs >>= 16;
    __asm__("" : "+x"(pairs));
    return (vf)(pairs << 16);
#else
    return (vf)(pairs & 0xffff0000u);
#endif
}

/* acc[r] += x[r] times the weights of one input. */
INLINE void add_input(int rows, vf (*acc)[2], vf low, vf high, const float *x) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        acc[r][0] += low * x[r];
        acc[r][1] += high * x[r];
    }
}

/* sums[r * 32 + i] for `rows` rows and WIDE_OUTPUTS outputs: += tile times `inputs` inputs of a panel, from `panel` on; set
 * if `begins`. With `narrow`, inputs are even. If `ahead` is given, `step` bytes from there are prefetched to the second
 * cache with each line of the panel. `rows` and `narrow` are compile-time constants at every call. */
INLINE void multiply_wide(int rows, int narrow, int begins, const float *tile, const uint8_t *panel, int64_t inputs, const uint8_t *ahead, ptrdiff_t step, float *sums) {
    vf acc[WIDE_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) acc[r][i] = begins ? vf_all(0) : vf_load(sums + r * 32 + i * LANES);
    for (int64_t k = 0; k < inputs; k += narrow ? 2 : 1, panel += 128, tile += narrow ? 2 * rows : rows) {
        if (ahead) {
            __builtin_prefetch(ahead, 0, 2), __builtin_prefetch(ahead + step / 2, 0, 2);
            ahead += step;
        }
        if (!narrow) {
            add_input(rows, acc, vf_load((const float *)panel), vf_load((const float *)panel + LANES), tile);
            continue;
        }
        add_input(rows, acc, widen_even(panel), widen_even(panel + 4 * LANES), tile);
        /* Forget what was loaded: with the weights of both inputs, 16 registers do not hold the sums. */
        if (LANES == 8) __asm__ volatile("" : "+r"(panel));
        add_input(rows, acc, widen_odd(panel), widen_odd(panel + 4 * LANES), tile + rows);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) vf_store(sums + r * 32 + i * LANES, acc[r][i]);
}

#define WIDE_CASE(ROWS) case ROWS: multiply_wide(ROWS <= WIDE_ROWS ? ROWS : 1, narrow, begins, tile, panel, inputs, ahead, step, sums); break;

INLINE void multiply_wide_tile(int rows, int narrow, int begins, const float *tile, const uint8_t *panel, int64_t inputs, const uint8_t *ahead, ptrdiff_t step, float *sums) {
    switch (rows) {
        WIDE_CASE(1) WIDE_CASE(2) WIDE_CASE(3) WIDE_CASE(4) WIDE_CASE(5) WIDE_CASE(6)
        WIDE_CASE(7) WIDE_CASE(8) WIDE_CASE(9) WIDE_CASE(10) WIDE_CASE(11) WIDE_CASE(12)
    }
}

/* Inputs [from, to) of one row times all 32 outputs of a panel, whose lines from `from` on are at `panel`: it is bound by
 * memory, which delivers in order. The lines `distance` bytes ahead are prefetched. x is fp32, or bf16 if `narrow_x`; with
 * `narrow`, both ends are even. */
INLINE void add_one_row(int narrow, int narrow_x, const void *x, const uint8_t *panel, int64_t from, int64_t to, ptrdiff_t distance, float *sums) {
    vf acc[32 / LANES];
    for (int i = 0; i < 32 / LANES; i++) acc[i] = vf_load(sums + i * LANES);
    for (int64_t k = from; k < to; k += narrow ? 2 : 1, panel += 128) {
        float one[2] = {0};
        for (int j = 0; j < (narrow ? 2 : 1); j++) {
            if (!narrow_x) one[j] = ((const float *)x)[k + j];
            else {
                const uint32_t bits = (uint32_t)((const uint16_t *)x)[k + j] << 16;
                memcpy(&one[j], &bits, 4);
            }
        }
        __builtin_prefetch(panel + distance), __builtin_prefetch(panel + distance + 64);
#pragma GCC unroll 8
        for (int i = 0; i < 32 / LANES; i++) {
            acc[i] += (narrow ? widen_even(panel + i * 4 * LANES) : vf_load((const float *)panel + i * LANES)) * one[0];
            if (narrow) acc[i] += widen_odd(panel + i * 4 * LANES) * one[1];
        }
    }
    for (int i = 0; i < 32 / LANES; i++) vf_store(sums + i * LANES, acc[i]);
}

/* One row times `count` panels that are `bytes` apart: sums [count, 32]. Of each panel `turn` lines at a time are multiplied. */
INLINE void multiply_one_row(int narrow, int narrow_x, const void *x, const uint8_t *panels, int count, ptrdiff_t bytes, int64_t turn, int64_t inputs,
                             ptrdiff_t distance, float *sums) {
    const int step = narrow ? 2 : 1;
    memset(sums, 0, (size_t)count * 32 * sizeof *sums);
    for (int64_t from = 0; from < inputs; from += turn * step) {
        const int64_t to = from + turn * step < inputs ? from + turn * step : inputs;
        for (int p = 0; p < count; p++) add_one_row(narrow, narrow_x, x, panels + p * bytes + from / step * 128, from, to, distance, sums + p * 32);
    }
}

#endif
