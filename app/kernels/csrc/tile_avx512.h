/* A tile times a panel with AVX512-VNNI: VPDPBUSD multiplies 16 x 4 unsigned weight codes with 4 signed activation
 * codes and sums exactly in int32.
 *
 * Weights are unsigned: int4 codes without change (the group's sum of activations corrects their zero point 8), int8
 * with 128 added. */
#ifndef ARMATURE_TILE_AVX512_H
#define ARMATURE_TILE_AVX512_H

#include <immintrin.h>

#include "linear_int.h"

#ifndef PREFETCH_TO
#define PREFETCH_TO _MM_HINT_T0
#endif

INLINE __m512 scales16(const uint8_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

/* A group's scales of outputs 16 * half to 16 * half + 15. */
INLINE __m512 group_scales(int header, const uint8_t *scales, int half) {
    if (header != DOUBLE_QUANTIZED) return scales16(scales + half * 32);
    const __m512 c = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(scales + half * 16))));
    return _mm512_mul_ps(c, _mm512_abs_ps(c));
}

INLINE __m512i broadcast4(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}

/* 4 inputs of 32 outputs for every row. */
INLINE void dot(int rows, __m512i weights0, __m512i weights1, const int8_t *x, __m512i (*acc)[2]) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        const __m512i codes = broadcast4(x + r * 4);
        __asm__("vpdpbusd %2, %1, %0" : "+v"(acc[r][0]) : "v"(weights0), "v"(codes));
        __asm__("vpdpbusd %2, %1, %0" : "+v"(acc[r][1]) : "v"(weights1), "v"(codes));
    }
}

INLINE void eight_int4(int rows, const uint8_t *codes, const int8_t *x, __m512i (*acc)[2]) {
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i line0 = _mm512_loadu_si512(codes), line1 = _mm512_loadu_si512(codes + 64);
    const __m512i low0 = _mm512_and_si512(line0, mask), low1 = _mm512_and_si512(line1, mask);
    dot(rows, low0, low1, x, acc);
    const __m512i high0 = _mm512_and_si512(_mm512_srli_epi16(line0, 4), mask), high1 = _mm512_and_si512(_mm512_srli_epi16(line1, 4), mask);
    dot(rows, high0, high1, x + rows * 4, acc);
}

INLINE void eight_int8(int rows, const uint8_t *codes, const int8_t *x, __m512i (*acc)[2]) {
    const __m512i offset = _mm512_set1_epi8((char)0x80);
    for (int half = 0; half < 2; half++) {
        const __m512i line0 = _mm512_xor_si512(_mm512_loadu_si512(codes + half * 128), offset);
        const __m512i line1 = _mm512_xor_si512(_mm512_loadu_si512(codes + half * 128 + 64), offset);
        dot(rows, line0, line1, x + half * rows * 4, acc);
    }
}

/* Rows whose sums over groups stay in registers too. Those of more rows are in L1. */
#define HELD_ROWS 6

/* Add one group's exact sums, times both scales, to `held` or to `sums` [rows, 32]; `first`: overwrite those in memory. */
INLINE void take_group(int rows, int header, int first, const uint8_t *weight_scales, const float *scales, const int32_t *negated, __m512i (*acc)[2],
                       __m512 (*held)[2], float *sums) {
    const __m512 scale[2] = {group_scales(header, weight_scales, 0), group_scales(header, weight_scales, 1)};
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        const __m512 own = _mm512_set1_ps(scales[r]), total = _mm512_set1_ps(scales[r] * (float)negated[r]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            float *at = sums + r * PANEL_OUTPUTS + v * 16;
            const __m512 before = rows <= HELD_ROWS ? held[r][v] : first ? _mm512_setzero_ps() : _mm512_load_ps(at);
            __m512 y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][v]), _mm512_mul_ps(scale[v], own), before);
            if (header == SCALES_AND_MINIMUMS) y = _mm512_fnmadd_ps(total, scales16(weight_scales + 64 + v * 32), y);
            if (rows <= HELD_ROWS) held[r][v] = y;
            else _mm512_store_ps(at, y);
        }
    }
}

/* `rows` and, if it is 32, `group` are compile-time constants at every call, so that all exact sums stay in registers. */
INLINE void multiply_groups(int rows, int bits, int header, int64_t group, const linear_int_arguments *a, const uint8_t *panel, int64_t row,
                            const uint8_t *ahead, float *sums) {
    const int64_t groups = a->padded / a->group;
    const panel_layout layout = layout_of(bits, header, group, groups);
    const ptrdiff_t step = bits == 4 ? 128 : 256;
    const uint8_t *weight_scales = panel + layout.scales, *codes = panel + layout.codes;
    const int8_t *x = a->tiles + row * a->padded;
    const float *scales = a->scales + row * groups;
    const int32_t *negated = a->sums + row * groups;
    __m512 held[HELD_ROWS][2] = {{_mm512_setzero_ps()}};
    for (int64_t g = 0; g < groups; g++) {
        __m512i acc[TILE_ROWS][2];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const __m512i start = header == SCALES_AND_MINIMUMS ? _mm512_setzero_si512() : _mm512_slli_epi32(_mm512_set1_epi32(negated[r]), bits == 4 ? 3 : 7);
            acc[r][0] = acc[r][1] = start;
        }
        const uint8_t *at = codes;
        if (ahead)
            for (const uint8_t *end = ahead + asked_header(header, g); ahead < end; ahead += 64) _mm_prefetch((const char *)ahead, PREFETCH_TO);
#pragma GCC unroll 4
        for (int64_t k = 0; k < group; k += 8, at += step, x += rows * 8) {
            if (ahead)
                for (const uint8_t *end = ahead + step; ahead < end; ahead += 64) _mm_prefetch((const char *)ahead, PREFETCH_TO);
            if (bits == 4) eight_int4(rows, at, x, acc);
            else eight_int8(rows, at, x, acc);
        }
        take_group(rows, header, g == 0, weight_scales, scales, negated, acc, held, sums);
        weight_scales += layout.next_scales, codes += layout.next_codes, scales += rows, negated += rows;
    }
    for (int i = 0; i < 2 * rows && rows <= HELD_ROWS; i++) _mm512_store_ps(sums + i * 16, held[i / 2][i % 2]);
}

INLINE void multiply(int rows, int bits, int header, const linear_int_arguments *a, const uint8_t *panel, int64_t row, const uint8_t *ahead, float *sums) {
    if (a->group == 32) multiply_groups(rows, bits, header, 32, a, panel, row, ahead, sums);
    else multiply_groups(rows, bits, header, a->group, a, panel, row, ahead, sums);
}

static void multiply_tile(const linear_int_arguments *a, const uint8_t *panel, int64_t row, int count, const uint8_t *ahead, float *sums) {
    switch (count) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#if TILE_ROWS > 8
        CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

#endif
