/* A tile times a panel with SDOT: 4 outputs x 4 inputs of weight codes times 4 inputs of one row, summed exactly in
 * int32.
 *
 * One register holds the inputs of four rows, and the instruction selects the row by lane. Codes 0 to 15 fit signed
 * bytes: the group's sum of activations corrects their zero point 8. int8 needs no correction.
 *
 * The loop at 12 rows, per 8 inputs and 8 outputs, as GCC 12 compiles it: 48 SDOT, 8 loads, 4 to unpack (6 with
 * constants), no spills. */
#ifndef ARMATURE_TILE_DOTPROD_H
#define ARMATURE_TILE_DOTPROD_H

#include "tile_rows4.h"

/* vdotq_laneq_s32 in assembly: with the intrinsic, GCC copies sums between registers (10 moves for 48 products).
 * `volatile` keeps the order that needs few of them. */
#define SDOT(LANE) __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #LANE "]" : "+w"(sum) : "w"(weights), "w"(x))

INLINE int32x4_t dot_lane(int32x4_t sum, int8x16_t weights, int8x16_t x, int lane) {
    switch (lane) {
    case 0: SDOT(0); break;
    case 1: SDOT(1); break;
    case 2: SDOT(2); break;
    default: SDOT(3);
    }
    return sum;
}

/* 4 inputs of one quad for every row; row r of half h is 32-bit element h * rows + r of x. */
INLINE void dot_rows(int rows, int8x16_t weights, const int8x16_t *x, int half, int quad, int32x4_t (*acc)[QUADS]) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r][quad] = dot_lane(acc[r][quad], weights, x[(half * rows + r) / 4], (half * rows + r) % 4);
}

/* 8 inputs of the rows: rows * 8 bytes. */
INLINE void load_inputs(int rows, const int8_t *x, int8x16_t *words) {
#pragma GCC unroll 16
    for (int i = 0; i < rows / 2; i++) words[i] = vld1q_s8(x + i * 16);
    if (rows % 2) words[rows / 2] = vcombine_s8(vld1_s8(x + rows / 2 * 16), vdup_n_s8(0));
}

INLINE void multiply_group(int rows, int quads, int bits, int header, const group_of *g, int first, float *sums) {
    const uint8_t *codes = g->codes + first * 16, *ahead = g->ahead;
    const int8_t *x = g->x;
    const int step = bits == 4 ? 128 : 256;
    int32x4_t acc[TILE_ROWS][QUADS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int q = 0; q < quads; q++) acc[r][q] = begin(bits, header, g->negated[r]);
    for (int64_t k = 0; k < g->inputs; k += 8, codes += step, x += rows * 8) {
        int8x16_t words[(TILE_ROWS + 1) / 2];
        if (ahead) ask(ahead, step), ahead += step;
        load_inputs(rows, x, words);
#pragma GCC unroll 16
        for (int q = 0; q < quads; q++) {
            const uint8x16_t line = vld1q_u8(codes + q * 16);
            dot_rows(rows, bits == 4 ? low_codes(line) : vreinterpretq_s8_u8(line), words, 0, q, acc);
            dot_rows(rows, bits == 4 ? high_codes(line) : vreinterpretq_s8_u8(vld1q_u8(codes + q * 16 + 128)), words, 1, q, acc);
        }
    }
#pragma GCC unroll 16
    for (int q = 0; q < quads; q++)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) take_quad(g, r, first + q, header, acc[r][q], sums);
}

#ifdef PART_INTEGERS
void multiply_tile(const linear_int_arguments *a, const uint8_t *panel, int64_t row, int count, const uint8_t *ahead, float *sums) {
    switch (count) {
        CASE(1, 8) CASE(2, 8) CASE(3, 8) CASE(4, 4) CASE(5, 4) CASE(6, 4) CASE(7, 2) CASE(8, 2) CASE(9, 2) CASE(10, 2) CASE(11, 2) CASE(12, 2)
    }
}
#endif

#endif
