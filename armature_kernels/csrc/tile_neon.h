/* A tile times a panel on any 64-bit Arm: SMLAL multiplies eight bytes with eight bytes and sums in int16, which is
 * widened before it can overflow.
 *
 * int4: a code is at most 15, so sixteen products (64 inputs in blocks of four) stay below 2^15: 16 * 15 * 127 =
 * 30480. int8: two do: 2 * 128 * 127 = 32512. A register of int16 holds four partial sums of one output and four of
 * the next.
 *
 * The loop at 6 rows, per 8 inputs and 8 outputs, as GCC 12 compiles it: int4 48 SMLAL, 14 loads, 15 others; int8 24
 * SMULL, 24 SMLAL, 24 SADALP. */
#ifndef ARMATURE_TILE_NEON_H
#define ARMATURE_TILE_NEON_H

#include "tile_rows4.h"

#define NARROW 64 /* int4 inputs whose products fit an int16 */

/* The 4 inputs of one row, four times. */
INLINE int8x16_t inputs4(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

/* vmlal_s8 and similar: products of the lower ("8b") or upper ("16b") eight bytes. In assembly: with the intrinsics,
 * GCC copies sums between registers. `volatile` keeps the order that needs few of them. */
#define LONG(NAME, HOW, SUM, A, B, BYTES) __asm__ volatile(NAME " %0.8h, %1." BYTES ", %2." BYTES : HOW(SUM) : "w"(A), "w"(B))

/* 8 inputs of a quad: 4 in each register. */
INLINE void unpack(int bits, const uint8_t *codes, int8x16_t *weights) {
    const uint8x16_t line = vld1q_u8(codes);
    weights[0] = bits == 4 ? low_codes(line) : vreinterpretq_s8_u8(line);
    weights[1] = bits == 4 ? high_codes(line) : vreinterpretq_s8_u8(vld1q_u8(codes + 128));
}

INLINE void narrow4(int16x8_t *part, const int8x16_t *weights, int8x16_t x0, int8x16_t x1) {
    LONG("smlal", "+w", part[0], weights[0], x0, "8b");
    LONG("smlal2", "+w", part[1], weights[0], x0, "16b");
    LONG("smlal", "+w", part[0], weights[1], x1, "8b");
    LONG("smlal2", "+w", part[1], weights[1], x1, "16b");
}

INLINE void whole8(int32x4_t *part, const int8x16_t *weights, int8x16_t x0, int8x16_t x1) {
    int16x8_t products[2];
    LONG("smull", "=w", products[0], weights[0], x0, "8b");
    LONG("smull2", "=w", products[1], weights[0], x0, "16b");
    LONG("smlal", "+w", products[0], weights[1], x1, "8b");
    LONG("smlal2", "+w", products[1], weights[1], x1, "16b");
    __asm__ volatile("sadalp %0.4s, %1.8h" : "+w"(part[0]) : "w"(products[0]));
    __asm__ volatile("sadalp %0.4s, %1.8h" : "+w"(part[1]) : "w"(products[1]));
}

/* 8 inputs. Rows or outputs, whichever are fewer, stay in registers. */
#define EACH_ROW_AND_QUAD(STEP, BITS)                                                                                                    \
    int8x16_t weights[QUADS][2];                                                                                                         \
    if (rows > quads) {                                                                                                                  \
        _Pragma("GCC unroll 16") for (int q = 0; q < quads; q++) unpack(BITS, codes + q * 16, weights[q]);                               \
        _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++) {                                                                        \
            const int8x16_t x0 = inputs4(x + r * 4), x1 = inputs4(x + (rows + r) * 4);                                                   \
            _Pragma("GCC unroll 16") for (int q = 0; q < quads; q++) STEP(part[r][q], weights[q], x0, x1);                               \
        }                                                                                                                                \
    } else                                                                                                                               \
        _Pragma("GCC unroll 16") for (int q = 0; q < quads; q++) {                                                                       \
            unpack(BITS, codes + q * 16, weights[0]);                                                                                    \
            _Pragma("GCC unroll 16") for (int r = 0; r < rows; r++)                                                                      \
                STEP(part[r][q], weights[0], inputs4(x + r * 4), inputs4(x + (rows + r) * 4));                                           \
        }

/* At most NARROW inputs of int4. */
INLINE void narrow_int4(int rows, int quads, int inputs, const uint8_t *codes, const uint8_t *ahead, const int8_t *x, int32x4_t (*acc)[QUADS]) {
    int16x8_t part[TILE_ROWS][QUADS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int q = 0; q < quads; q++) part[r][q][0] = part[r][q][1] = vdupq_n_s16(0);
    for (int k = 0; k < inputs; k += 8, codes += 128, x += rows * 8) {
        if (ahead) ask(ahead + k * 16, 128);
        EACH_ROW_AND_QUAD(narrow4, 4)
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int q = 0; q < quads; q++)
            acc[r][q] = vaddq_s32(acc[r][q], vpaddq_s32(vpaddlq_s16(part[r][q][0]), vpaddlq_s16(part[r][q][1])));
}

INLINE void whole_int8(int rows, int quads, int64_t inputs, const uint8_t *codes, const uint8_t *ahead, const int8_t *x, int32x4_t (*acc)[QUADS]) {
    int32x4_t part[TILE_ROWS][QUADS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int q = 0; q < quads; q++) part[r][q][0] = part[r][q][1] = vdupq_n_s32(0);
    for (int64_t k = 0; k < inputs; k += 8, codes += 256, x += rows * 8) {
        if (ahead) ask(ahead + k * 32, 256);
        EACH_ROW_AND_QUAD(whole8, 8)
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int q = 0; q < quads; q++) acc[r][q] = vpaddq_s32(part[r][q][0], part[r][q][1]);
}

INLINE void multiply_group(int rows, int quads, int bits, int header, const group_of *g, int first, float *sums) {
    int32x4_t acc[TILE_ROWS][QUADS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int q = 0; q < quads; q++) acc[r][q] = begin(bits, header, g->negated[r]);
    if (bits == 8) whole_int8(rows, quads, g->inputs, g->codes + first * 16, g->ahead, g->x, acc);
    else
        for (int64_t k = 0; k < g->inputs; k += NARROW) {
            const int inputs = (int)(g->inputs - k < NARROW ? g->inputs - k : NARROW);
            narrow_int4(rows, quads, inputs, g->codes + first * 16 + k * 16, g->ahead ? g->ahead + k * 16 : NULL, g->x + k * rows, acc);
        }
#pragma GCC unroll 16
    for (int q = 0; q < quads; q++)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) take_quad(g, r, first + q, header, acc[r][q], sums);
}

#ifdef PART_INTEGERS
void multiply_tile(const linear_int_arguments *a, const uint8_t *panel, int64_t row, int count, const uint8_t *ahead, float *sums) {
    switch (count) {
        CASE(1, 4) CASE(2, 4) CASE(3, 4) CASE(4, 2) CASE(5, 2) CASE(6, 2)
    }
}
#endif

#endif
