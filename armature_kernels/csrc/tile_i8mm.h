/* A tile times a panel with SMMLA: 2 rows x 8 inputs times 2 outputs x 8 inputs, summed exactly in int32: four sums
 * of eight products.
 *
 * Sums stay in the instruction's layout, (row 0, output 0), (row 0, output 1), (row 1, output 0), (row 1, output 1),
 * through all groups of a panel, and scales have the same layout; only the final sums are reordered into rows. Tiles
 * have an even number of rows. The last row may be padding with any values, since rows do not mix and padding is not
 * stored. Codes 0 to 15 fit signed bytes: the group's sum of activations corrects their zero point 8. int8 needs no
 * correction.
 *
 * The loop at 12 rows, per 8 inputs and 8 outputs, as GCC 12 compiles it: 24 SMMLA, 8 loads, 4 to unpack, 2
 * prefetches in a fourth of the iterations, no spills; int8 10 loads. SVE would do the same work: it is 128 bits wide
 * on all but Neoverse V1, which has half as many pipes for its 256 bits. */
#ifndef ARMATURE_TILE_I8MM_H
#define ARMATURE_TILE_I8MM_H

#include "tile_arm.h"

#define PAIRS (PANEL_OUTPUTS / 2)

/* A bf16 number for each of two outputs, twice. */
INLINE float32x4_t widen_pair(const uint8_t *p) {
    uint32_t two;
    memcpy(&two, p, 4);
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u32(vdup_n_u32(two)), 16));
}

/* A group's scales of two outputs from `output` on, twice. */
INLINE float32x4_t pair_scales(int header, const uint8_t *scales, int output) {
    if (header != DOUBLE_QUANTIZED) return widen_pair(scales + output * 2);
    uint16_t two;
    memcpy(&two, scales + output, 2);
    const float32x4_t c = vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u16(vdup_n_u16(two))))));
    return vmulq_f32(c, vabsq_f32(c));
}

/* One number for each of two rows: first, first, second, second. */
INLINE float32x4_t spread_pair(const float *p) {
    const float32x2_t two = vld1_f32(p);
    return vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1));
}

INLINE int32x4_t spread_pair_int(const int32_t *p) {
    const int32x2_t two = vld1_s32(p);
    return vcombine_s32(vdup_lane_s32(two, 0), vdup_lane_s32(two, 1));
}

/* The pair of outputs in the i-th unpacked register from quad `first` on: 16 bytes of int4 hold one pair in the low
 * halves, and the one 8 outputs later. */
INLINE int pair_of(int bits, int first, int i) {
    const int piece = first + i / 2;
    return bits == 8 ? first * 2 + i : piece / 4 * 8 + piece % 4 + i % 2 * 4;
}

/* 8 inputs of one quad, the i-th: two pairs of outputs. */
INLINE void unpack(int bits, const uint8_t *codes, int i, int8x16_t *weights) {
    const uint8x16_t line = vld1q_u8(codes + i * (bits == 4 ? 16 : 32));
    weights[0] = bits == 4 ? low_codes(line) : vreinterpretq_s8_u8(line);
    weights[1] = bits == 4 ? high_codes(line) : vreinterpretq_s8_u8(vld1q_u8(codes + i * 32 + 16));
}

/* vmmlaq_s32 in assembly: with the intrinsic, GCC copies sums between registers. `volatile` keeps the order that
 * needs few of them. */
INLINE void matrix(int32x4_t *sum, int8x16_t x, int8x16_t weights) { __asm__ volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(*sum) : "w"(x), "w"(weights)); }

/* 8 inputs. Rows or outputs, whichever are fewer, stay in registers. */
INLINE void eight(int rows, int quads, int bits, const uint8_t *codes, const int8_t *x, int32x4_t (*acc)[PAIRS]) {
    int8x16_t weights[PAIRS], two[TILE_ROWS / 2];
    if (rows / 2 > quads) {
#pragma GCC unroll 16
        for (int q = 0; q < quads; q++) unpack(bits, codes, q, weights + q * 2);
#pragma GCC unroll 16
        for (int r = 0; r < rows / 2; r++)
#pragma GCC unroll 16
            for (int i = 0; i < quads * 2; i++) matrix(&acc[r][i], vld1q_s8(x + r * 16), weights[i]);
        return;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows / 2; r++) two[r] = vld1q_s8(x + r * 16);
#pragma GCC unroll 16
    for (int q = 0; q < quads; q++) {
        unpack(bits, codes, q, weights);
#pragma GCC unroll 16
        for (int r = 0; r < rows / 2; r++) {
            matrix(&acc[r][q * 2], two[r], weights[0]);
            matrix(&acc[r][q * 2 + 1], two[r], weights[1]);
        }
    }
}

/* Add one group's exact sums, times both scales, to `sums`: [row pair][output pair][4]. */
INLINE void take_group(int rows, int quads, int bits, int header, const group_of *g, int first, int32x4_t (*acc)[PAIRS], float *sums) {
#pragma GCC unroll 16
    for (int r = 0; r < rows / 2; r++) {
        const float32x4_t own = spread_pair(g->scales + r * 2);
        const float32x4_t total = vmulq_f32(own, vcvtq_f32_s32(spread_pair_int(g->negated + r * 2)));
#pragma GCC unroll 16
        for (int i = 0; i < quads * 2; i++) {
            const int pair = pair_of(bits, first, i);
            float *at = sums + (r * PAIRS + pair) * 4;
            float32x4_t y = vfmaq_f32(vld1q_f32(at), vcvtq_f32_s32(acc[r][i]), vmulq_f32(pair_scales(header, g->weight_scales, pair * 2), own));
            if (header == SCALES_AND_MINIMUMS) y = vfmsq_f32(y, total, widen_pair(g->weight_scales + 64 + pair * 4));
            vst1q_f32(at, y);
        }
    }
}

INLINE void multiply_group(int rows, int quads, int bits, int header, const group_of *g, int first, float *sums) {
    const uint8_t *codes = g->codes + first * (bits == 4 ? 16 : 32), *ahead = g->ahead;
    const int8_t *x = g->x;
    const int step = bits == 4 ? 128 : 256;
    int32x4_t acc[TILE_ROWS / 2][PAIRS];
#pragma GCC unroll 16
    for (int r = 0; r < rows / 2; r++) {
        const int32x4_t start = bits == 4 && header != SCALES_AND_MINIMUMS ? vshlq_n_s32(spread_pair_int(g->negated + r * 2), 3) : vdupq_n_s32(0);
#pragma GCC unroll 16
        for (int i = 0; i < quads * 2; i++) acc[r][i] = start;
    }
    for (int64_t k = 0; k < g->inputs; k += 8, codes += step, x += rows * 8) {
        if (ahead) ask(ahead, step), ahead += step;
        eight(rows, quads, bits, codes, x, acc);
    }
    take_group(rows, quads, bits, header, g, first, acc, sums);
}

/* [row pair][output pair][4] to rows. */
INLINE void bring_into_rows(const float *sums, int count, float *out) {
    for (int r = 0; r < count; r++)
        for (int pair = 0; pair < PAIRS; pair++) memcpy(out + r * PANEL_OUTPUTS + pair * 2, sums + (r / 2 * PAIRS + pair) * 4 + r % 2 * 2, 8);
}

#ifdef PART_INTEGERS
void multiply_tile(const linear_int_arguments *a, const uint8_t *panel, int64_t row, int count, const uint8_t *ahead, float *out) {
    float sums[TILE_ROWS * PANEL_OUTPUTS] __attribute__((aligned(64)));
    switch ((count + 1) / 2 * 2) {
        CASE(2, 8) CASE(4, 4) CASE(6, 4) CASE(8, 2) CASE(10, 2) CASE(12, 2)
    }
    bring_into_rows(sums, count, out);
}
#endif

#endif
