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

/* 4 inputs of 32 outputs for every row. The rows' codes are broadcast by the multiplication itself: a register less, and
 * on Zen 4 up to 3% faster than a broadcast for both halves. */
INLINE void dot_rows(int rows, __m512i weights0, __m512i weights1, const int8_t *x, __m512i (*acc)[2]) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        const int32_t *four = (const int32_t *)(x + r * 4);
        __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc[r][0]) : "v"(weights0), "m"(*four));
        __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc[r][1]) : "v"(weights1), "m"(*four));
    }
}

/* The next 4 inputs. GCC would compute an address for each row otherwise, and has too few registers for them. */
INLINE const int8_t *next_four(const int8_t *x, ptrdiff_t step) {
    x += step;
    __asm__("" : "+r"(x));
    return x;
}

/* `step`: bytes of 4 inputs of all rows of the tile. */
INLINE const int8_t *eight_int4(int rows, const uint8_t *codes, const int8_t *x, ptrdiff_t step, __m512i (*acc)[2]) {
    const __m512i mask = _mm512_set1_epi8(15);
    const __m512i line0 = _mm512_loadu_si512(codes), line1 = _mm512_loadu_si512(codes + 64);
    dot_rows(rows, _mm512_and_si512(line0, mask), _mm512_and_si512(line1, mask), x, acc);
    const __m512i high0 = _mm512_and_si512(_mm512_srli_epi16(line0, 4), mask), high1 = _mm512_and_si512(_mm512_srli_epi16(line1, 4), mask);
    x = next_four(x, step);
    dot_rows(rows, high0, high1, x, acc);
    return next_four(x, step);
}

INLINE const int8_t *eight_int8(int rows, const uint8_t *codes, const int8_t *x, ptrdiff_t step, __m512i (*acc)[2]) {
    const __m512i offset = _mm512_set1_epi8((char)0x80);
    for (int half = 0; half < 2; half++) {
        const __m512i line0 = _mm512_xor_si512(_mm512_loadu_si512(codes + half * 128), offset);
        const __m512i line1 = _mm512_xor_si512(_mm512_loadu_si512(codes + half * 128 + 64), offset);
        dot_rows(rows, line0, line1, x, acc);
        x = next_four(x, step);
    }
    return x;
}

#define HELD_ROWS 6 /* rows whose sums over groups fit the registers beside exact sums; those of more rows are in the first cache */

/* Some groups of inputs of a panel, times some rows of a tile of `count` rows. Of each 8 inputs, part `part` of the tile
 * prefetches `asked` bytes, so that requests do not come in bursts. */
typedef struct {
    const uint8_t *weight_scales, *codes, *ahead;
    const int8_t *x;
    const float *scales;
    const int32_t *negated;
    float *sums; /* [rows, 32] */
    ptrdiff_t next_scales, next_codes;
    int64_t first, last, count, group, shared, part, asked;
} groups_of_rows;

/* Add one group's exact sums, times the weights' scales and, if `own`, the rows', to `held` or to `sums` [rows, 32]; `first`:
 * overwrite those in memory. */
INLINE void take_group(int rows, int header, int own, int first, const uint8_t *weight_scales, const float *scales, const int32_t *negated,
                       __m512i (*acc)[2], __m512 (*held)[2], float *sums) {
    const __m512 scale[2] = {group_scales(header, weight_scales, 0), group_scales(header, weight_scales, 1)};
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        const __m512 row = _mm512_set1_ps(scales[r]), total = _mm512_set1_ps(own ? scales[r] * (float)negated[r] : (float)negated[r]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            float *at = sums + r * PANEL_OUTPUTS + v * 16;
            const __m512 before = rows <= HELD_ROWS ? held[r][v] : first ? _mm512_setzero_ps() : _mm512_load_ps(at);
            __m512 y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][v]), own ? _mm512_mul_ps(scale[v], row) : scale[v], before);
            if (header == SCALES_AND_MINIMUMS) y = _mm512_fnmadd_ps(total, scales16(weight_scales + 64 + v * 32), y);
            if (rows <= HELD_ROWS) held[r][v] = y;
            else _mm512_store_ps(at, y);
        }
    }
}

/* Prefetch `bytes`, and return the address `next` bytes on. */
INLINE const uint8_t *ask(const uint8_t *p, ptrdiff_t bytes, ptrdiff_t next) {
    for (ptrdiff_t i = 0; i < bytes; i += 64) _mm_prefetch((const char *)p + i, PREFETCH_TO);
    return p + next;
}

/* `rows` and, if it is 32, `group` are compile-time constants at every call, so that all sums stay in registers. `own`: each
 * group of a row has its own scale. Otherwise sums over `shared` groups are multiplied by their scale: of 18 instructions
 * for a group of a row and 32 outputs, 2 multiply no codes, instead of 4. */
INLINE void multiply_groups(int rows, int bits, int header, int own, int64_t group, const groups_of_rows *a) {
    const ptrdiff_t step = bits == 4 ? 128 : 256;
    const uint8_t *weight_scales = a->weight_scales, *codes = a->codes, *ahead = a->ahead;
    const int8_t *x = a->x;
    const float *scales = a->scales;
    const int32_t *negated = a->negated;
    for (int64_t g = a->first; g < a->last;) {
        const int64_t end = own || a->last - g < a->shared ? a->last : g + a->shared;
        __m512 held[HELD_ROWS][2];
#pragma GCC unroll 16
        for (int i = 0; i < 2 * HELD_ROWS; i++) held[i / 2][i % 2] = _mm512_setzero_ps();
        const int begins = g == 0;
        for (; g < end; g++) {
            __m512i acc[TILE_ROWS][2];
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                const __m512i start = header == SCALES_AND_MINIMUMS ? _mm512_setzero_si512() : _mm512_slli_epi32(_mm512_set1_epi32(negated[r]), bits == 4 ? 3 : 7);
                acc[r][0] = acc[r][1] = start;
            }
            const uint8_t *at = codes;
            if (ahead) ahead = ask(ahead, a->part == 0 ? asked_header(header, g) : 0, asked_header(header, g));
#pragma GCC unroll 4
            for (int64_t k = 0; k < group; k += 8, at += step) {
                if (ahead) ahead = ask(ahead + a->part * a->asked, a->asked, step - a->part * a->asked);
                x = bits == 4 ? eight_int4(rows, at, x, 4 * a->count, acc) : eight_int8(rows, at, x, 4 * a->count, acc);
            }
            take_group(rows, header, own, g == 0, weight_scales, scales, negated, acc, held, a->sums);
            weight_scales += a->next_scales, codes += a->next_codes, negated += a->count;
            if (own) scales += a->count;
        }
#pragma GCC unroll 16
        for (int i = 0; i < 2 * HELD_ROWS; i++) {
            if (rows > HELD_ROWS || i >= 2 * rows) continue;
            __m512 sum = held[i / 2][i % 2];
            if (!own) sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(scales[i / 2]), begins ? _mm512_setzero_ps() : _mm512_load_ps(a->sums + i * 16));
            _mm512_store_ps(a->sums + i * 16, sum);
        }
        if (!own) scales += a->count * a->shared;
    }
}

#define GROUPS_CASE(ROWS)                                                                                                           \
    case ROWS:                                                                                                                      \
        if (a->group == 32 && ROWS <= HELD_ROWS && a->shared > 1) multiply_groups(ROWS <= HELD_ROWS ? ROWS : 1, bits, header, 0, 32, a); \
        else if (a->group == 32) multiply_groups(ROWS, bits, header, 1, 32, a);                                                     \
        else multiply_groups(ROWS, bits, header, 1, a->group, a);                                                                   \
        break;

#define GROUPS_FUNCTION(NAME, BITS, HEADER)                                             \
    static __attribute__((noinline)) void NAME(int rows, const groups_of_rows *a) {     \
        const int bits = BITS, header = HEADER;                                         \
        switch (rows) {                                                                 \
            GROUPS_CASE(1) GROUPS_CASE(2) GROUPS_CASE(3) GROUPS_CASE(4) GROUPS_CASE(5) GROUPS_CASE(6)       \
            GROUPS_CASE(7) GROUPS_CASE(8) GROUPS_CASE(9) GROUPS_CASE(10) GROUPS_CASE(11) GROUPS_CASE(12)    \
        }                                                                               \
    }
GROUPS_FUNCTION(multiply_int8, 8, SCALES)
GROUPS_FUNCTION(multiply_int4, 4, SCALES)
GROUPS_FUNCTION(multiply_minimums, 4, SCALES_AND_MINIMUMS)
GROUPS_FUNCTION(multiply_double, 4, DOUBLE_QUANTIZED)

/* Rows with shared scales are multiplied up to HELD_ROWS at a time, with the groups that share one, whose codes stay in the
 * first cache meanwhile. */
#ifdef PART_INTEGERS
void multiply_tile(const linear_int_arguments *a, const uint8_t *panel, int64_t row, int count, const uint8_t *ahead, float *sums) {
    void (*const multiply)(int, const groups_of_rows *) = a->bits == 8                       ? multiply_int8
                                                          : a->header == DOUBLE_QUANTIZED    ? multiply_double
                                                          : a->header == SCALES_AND_MINIMUMS ? multiply_minimums
                                                                                             : multiply_int4;
    const int64_t groups = a->padded / a->group;
    const panel_layout layout = layout_of(a->bits, a->header, a->group, groups);
    const int most = a->shared > 1 ? HELD_ROWS : TILE_ROWS, parts = (count + most - 1) / most, rows = (count + parts - 1) / parts;
    const int64_t together = parts == 1 ? groups : a->shared;
    for (int64_t g = 0; g < groups; g += together) {
        const int64_t last = g + together < groups ? g + together : groups;
        for (int part = 0, r = 0; r < count; part++, r += rows) {
            const groups_of_rows some = {
                .weight_scales = panel + layout.scales + g * layout.next_scales, .codes = panel + layout.codes + g * layout.next_codes,
                .ahead = ahead, .x = a->tiles + row * a->padded + g * a->group * count + r * 4, .scales = a->scales + row * groups + g * count + r,
                .negated = a->sums + row * groups + g * count + r, .sums = sums + r * PANEL_OUTPUTS, .next_scales = layout.next_scales,
                .next_codes = layout.next_codes, .first = g, .last = last, .count = count, .group = a->group, .shared = a->shared, .part = part,
                .asked = (a->bits == 4 ? 128 : 256) / parts,
            };
            multiply(count - r < rows ? count - r : rows, &some);
        }
        if (ahead)
            for (int64_t i = g; i < last; i++) ahead += asked_header(a->header, i) + a->group * (a->bits == 4 ? 16 : 32);
    }
}
#endif

#endif
