/* A tile times a panel in plain C: two products fit an int16 (2 * 128 * 127), and sixteen for 4-bit weights (16 * 15
 * * 127), so the compiler's vectors of int16 work on any processor. */
#ifndef ARMATURE_TILE_PORTABLE_H
#define ARMATURE_TILE_PORTABLE_H

#include "linear_int.h"

#define WIDTH 4 /* vectors of LANES outputs that are summed together */

typedef int16_t vs __attribute__((vector_size(LANES * 4)));
typedef uint16_t vus __attribute__((vector_size(LANES * 4)));

/* Each int32 lane holds four bytes, so each int16 lane an even and an odd one; here sign-extended. */
INLINE vs even(vs x) { return (x << 8) >> 8; }
INLINE vs odd(vs x) { return x >> 8; }

INLINE vs broadcast4(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return (vs)vi_all(four);
}

/* The sum of both halves of each int32 lane. */
INLINE vi pair_sums(vs x) { return (((vi)x << 16) >> 16) + ((vi)x >> 16); }

/* The first (part 0) or last (part 1) four of 8 inputs, for outputs from LANES * vector on. */
INLINE void codes_of(int bits, const uint8_t *at, int part, int vector, vs *evens, vs *odds) {
    vs line;
    memcpy(&line, at + (bits == 8 ? part * 128 : 0) + vector * LANES * 4, sizeof line);
    if (bits == 8) *evens = even(line), *odds = odd(line);
    else *evens = (vs)((vus)line >> (part * 4)) & 15, *odds = (vs)((vus)line >> (8 + part * 4)) & 15;
}

/* Up to 32 inputs of int4 weights, or 4 of int8, fit an int16. */
INLINE void sum_some(int rows, int bits, int64_t begin, int64_t end, const uint8_t *codes, const int8_t *x, vi (*acc)[WIDTH]) {
    vs pairs[TILE_ROWS][WIDTH] = {0};
    for (int64_t k = begin; k < end; k += 4) {
        vs evens[WIDTH], odds[WIDTH];
        for (int v = 0; v < WIDTH; v++) codes_of(bits, codes + k / 8 * (bits == 4 ? 128 : 256), k / 4 % 2, v, evens + v, odds + v);
        for (int r = 0; r < rows; r++) {
            const vs four = broadcast4(x + k * rows + r * 4);
            for (int v = 0; v < WIDTH; v++) pairs[r][v] += evens[v] * even(four) + odds[v] * odd(four);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < WIDTH; v++) acc[r][v] += pair_sums(pairs[r][v]);
}

/* A group's scales of LANES outputs from `output` on. */
INLINE vf group_scales(int header, const uint8_t *scales, int output) {
    if (header != DOUBLE_QUANTIZED) return bf16_load((const uint16_t *)scales + output);
    vf c;
    for (int i = 0; i < LANES; i++) c[i] = (float)(int8_t)scales[output + i];
    return c * (vf)((vi)c & 0x7fffffff);
}

/* Add one group's exact sums of WIDTH * LANES outputs, times both scales, to `sums`. These outputs begin
 * with `first`. */
INLINE void take_group(int rows, int header, int first, const uint8_t *weight_scales, const float *scales, const int32_t *negated, vi (*acc)[WIDTH], float *sums) {
    for (int v = 0; v < WIDTH; v++) {
        const vf scale = group_scales(header, weight_scales, first + v * LANES);
        for (int r = 0; r < rows; r++) {
            float *at = sums + r * PANEL_OUTPUTS + first + v * LANES;
            vf y = vf_load(at) + __builtin_convertvector(acc[r][v], vf) * (scale * scales[r]);
            if (header == SCALES_AND_MINIMUMS) y -= bf16_load((const uint16_t *)(weight_scales + 64) + first + v * LANES) * (scales[r] * (float)negated[r]);
            vf_store(at, y);
        }
    }
}

/* `rows`, `bits` and `header` are compile-time constants at every call. */
INLINE void multiply(int rows, int bits, int header, const linear_int_arguments *a, const uint8_t *panel, int64_t row, const uint8_t *ahead, float *sums) {
    const int64_t groups = a->padded / a->group, some = bits == 4 ? 32 : 4;
    const panel_layout layout = layout_of(bits, header, a->group, groups);
    const uint8_t *weight_scales = panel + layout.scales, *codes = panel + layout.codes;
    for (int i = 0; i < rows * PANEL_OUTPUTS; i++) sums[i] = 0;
    for (int64_t g = 0; g < groups; g++, weight_scales += layout.next_scales, codes += layout.next_codes) {
        const int8_t *x = a->tiles + row * a->padded + g * a->group * rows;
        const float *scales = a->scales + row * groups + g * rows;
        const int32_t *negated = a->sums + row * groups + g * rows;
        if (ahead)
            for (const uint8_t *end = ahead + asked_header(header, g) + layout.group_codes; ahead < end; ahead += 64) __builtin_prefetch(ahead);
        for (int first = 0; first < PANEL_OUTPUTS; first += WIDTH * LANES) {
            vi acc[TILE_ROWS][WIDTH];
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < WIDTH; v++) acc[r][v] = vi_all(bits == 4 && header != SCALES_AND_MINIMUMS ? negated[r] * 8 : 0);
            for (int64_t k = 0; k < a->group; k += some)
                sum_some(rows, bits, k, k + some < a->group ? k + some : a->group, codes + first * 4, x, acc);
            take_group(rows, header, first, weight_scales, scales, negated, acc, sums);
        }
    }
}

#ifdef PART_INTEGERS
void multiply_tile(const linear_int_arguments *a, const uint8_t *panel, int64_t row, int count, const uint8_t *ahead, float *sums) {
    switch (count) {
        CASE(1) CASE(2) CASE(3) CASE(4)
    }
}
#endif

#endif
