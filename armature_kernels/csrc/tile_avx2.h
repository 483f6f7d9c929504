/* A tile times a panel with AVX2: 8 outputs x 4 inputs per register, unsigned weight codes, signed activation codes.
 * With AVX-VNNI, VPDPBUSD sums four products in int32. Without it VPMADDUBSW sums two in int16, where eight such sums
 * of int4 codes fit (8 * 2 * 15 * 127 < 2^15).
 *
 * The order of the float operations is that of tile_avx512.h, so that the three levels give the same bits. */
#ifndef ARMATURE_TILE_AVX2_H
#define ARMATURE_TILE_AVX2_H

#include <immintrin.h>

#include "linear_int.h"

#define PANEL_REGISTERS 4 /* registers of outputs: a whole panel */

INLINE __m256 scales8(const uint8_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

/* A group's scales of 8 outputs from `output` on. */
INLINE __m256 group_scales(int header, const uint8_t *scales, int output) {
    if (header != DOUBLE_QUANTIZED) return scales8(scales + output * 2);
    const __m256 c = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(scales + output))));
    return _mm256_mul_ps(c, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), c));
}

INLINE __m256i broadcast4(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

/* The first (part 0) or last (part 1) four of 8 inputs, for outputs 8 * vector to 8 * vector + 7. */
INLINE __m256i codes_of(int bits, const uint8_t *at, int part, int vector) {
    if (bits == 8) return _mm256_loadu_si256((const __m256i *)(at + part * 128 + vector * 32));
    const __m256i line = _mm256_loadu_si256((const __m256i *)(at + vector * 32));
    return _mm256_and_si256(part ? _mm256_srli_epi16(line, 4) : line, _mm256_set1_epi8(15));
}

INLINE void ask(const uint8_t *at, ptrdiff_t step) {
    for (ptrdiff_t line = 0; line < step; line += 64) _mm_prefetch((const char *)at + line, _MM_HINT_T0);
}

#ifdef __AVXVNNI__

#define OFFSET8 7 /* int8 weights have 128 added */

/* Add the products of 4 inputs. */
INLINE void sum_four(int rows, int width, int bits, int part, const uint8_t *at, const int8_t *x, __m256i (*acc)[PANEL_REGISTERS]) {
    __m256i weights[PANEL_REGISTERS];
#pragma GCC unroll 4
    for (int v = 0; v < width; v++) {
        weights[v] = codes_of(bits, at, part, v);
        if (bits == 8) weights[v] = _mm256_xor_si256(weights[v], _mm256_set1_epi8((char)0x80));
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const __m256i codes = broadcast4(x + r * 4);
#pragma GCC unroll 4
        for (int v = 0; v < width; v++) acc[r][v] = _mm256_dpbusd_avx_epi32(acc[r][v], weights[v], codes);
    }
}

/* Add the products of 32 inputs and `width` registers of outputs to `acc`. `jump`: distance from a byte to the one to
 * prefetch, 0 for none. */
INLINE void sum_32(int rows, int width, int bits, const uint8_t *at, const int8_t *x, ptrdiff_t jump, __m256i (*acc)[PANEL_REGISTERS]) {
    const ptrdiff_t step = bits == 4 ? 128 : 256;
#pragma GCC unroll 4
    for (int eight = 0; eight < 4; eight++, at += step, x += rows * 8) {
        if (jump) ask(at + jump, step);
        sum_four(rows, width, bits, 0, at, x, acc);
        sum_four(rows, width, bits, 1, at, x + rows * 4, acc);
    }
}

#else

#define OFFSET8 -1 /* int8 weights are multiplied without an offset */

/* Keep the value in its register: the compiler would otherwise first add products to each other and need more
 * registers than there are. */
INLINE __m256i kept(__m256i x) {
    __asm__("" : "+x"(x));
    return x;
}

/* int4: the sums of pairs of 4 inputs, in int16. */
INLINE void pair_four(int rows, int width, int part, const uint8_t *at, const int8_t *x, __m256i (*pairs)[PANEL_REGISTERS]) {
    __m256i weights[PANEL_REGISTERS];
#pragma GCC unroll 4
    for (int v = 0; v < width; v++) weights[v] = codes_of(4, at, part, v);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const __m256i codes = broadcast4(x + r * 4);
#pragma GCC unroll 4
        for (int v = 0; v < width; v++) pairs[r][v] = kept(_mm256_add_epi16(pairs[r][v], _mm256_maddubs_epi16(weights[v], codes)));
    }
}

/* int4: the sums of pairs of 32 inputs. */
INLINE void pair_32(int rows, int width, const uint8_t *at, const int8_t *x, ptrdiff_t jump, __m256i (*pairs)[PANEL_REGISTERS]) {
#pragma GCC unroll 4
    for (int eight = 0; eight < 4; eight++, at += 128, x += rows * 8) {
        if (jump) ask(at + jump, 128);
        pair_four(rows, width, 0, at, x, pairs);
        pair_four(rows, width, 1, at, x + rows * 4, pairs);
    }
}

INLINE void sum_32_int4(int rows, int width, const uint8_t *at, const int8_t *x, ptrdiff_t jump, __m256i (*acc)[PANEL_REGISTERS]) {
    __m256i pairs[TILE_ROWS][PANEL_REGISTERS] = {{_mm256_setzero_si256()}};
    pair_32(rows, width, at, x, jump, pairs);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < width; v++) acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(pairs[r][v], _mm256_set1_epi16(1)));
}

/* Four times an int32 that fits 14 bits, in all 16 words: its low half is read directly. */
INLINE __m256i times_four(const int32_t *x) {
    int16_t low;
    memcpy(&low, x, sizeof low);
    return _mm256_slli_epi16(_mm256_set1_epi16(low), 2);
}

/* The exact sums of a whole int4 group of 32 inputs. Both int16 halves of an output begin with -4 times the sum of
 * the group's activations, together the correction of the zero point 8. They stay below 2^15: 16 inputs times a code
 * of at most 15 - 4, and 4 times the sum of the other 16, are at most (16 * 11 + 16 * 4) * 127 = 30480. */
INLINE void sum_int4_group(int rows, int width, const uint8_t *at, const int8_t *x, const int32_t *negated, ptrdiff_t jump, __m256i (*acc)[PANEL_REGISTERS]) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < width; v++) acc[r][v] = times_four(negated + r);
    pair_32(rows, width, at, x, jump, acc);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < width; v++) acc[r][v] = _mm256_madd_epi16(acc[r][v], _mm256_set1_epi16(1));
}

/* int8: the weight's sign moves to the activation, since two products with unsigned codes up to 255 would overflow; 2
 * * 128 * 127 fits. */
INLINE void sum_four_int8(int rows, int width, int part, const uint8_t *at, const int8_t *x, __m256i (*acc)[PANEL_REGISTERS]) {
    __m256i weights[PANEL_REGISTERS], sizes[PANEL_REGISTERS];
#pragma GCC unroll 4
    for (int v = 0; v < width; v++) weights[v] = codes_of(8, at, part, v), sizes[v] = _mm256_abs_epi8(weights[v]);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const __m256i codes = broadcast4(x + r * 4);
#pragma GCC unroll 4
        for (int v = 0; v < width; v++) {
            const __m256i pairs = _mm256_maddubs_epi16(sizes[v], _mm256_sign_epi8(codes, weights[v]));
            acc[r][v] = kept(_mm256_add_epi32(acc[r][v], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
        }
    }
}

/* Add the products of 32 inputs and `width` registers of outputs to `acc`. `jump`: distance from a byte to the one to
 * prefetch, 0 for none. */
INLINE void sum_32(int rows, int width, int bits, const uint8_t *at, const int8_t *x, ptrdiff_t jump, __m256i (*acc)[PANEL_REGISTERS]) {
    if (bits == 4) {
        sum_32_int4(rows, width, at, x, jump, acc);
        return;
    }
    for (int eight = 0; eight < 4; eight++, at += 256, x += rows * 8) {
        if (jump) ask(at + jump, 256);
        sum_four_int8(rows, width, 0, at, x, acc);
        sum_four_int8(rows, width, 1, at, x + rows * 4, acc);
    }
}

#endif

/* Add one group's exact sums of 8 * width outputs, times both scales, to `sums`. These outputs begin with
 * `first`. */
INLINE void take_group(int rows, int width, int header, int first, const uint8_t *weight_scales, const float *scales, const int32_t *negated, __m256i (*acc)[PANEL_REGISTERS], float *sums) {
    __m256 scale[PANEL_REGISTERS];
#pragma GCC unroll 4
    for (int v = 0; v < width; v++) scale[v] = group_scales(header, weight_scales, first + v * 8);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const __m256 own = _mm256_set1_ps(scales[r]), total = _mm256_set1_ps(scales[r] * (float)negated[r]);
#pragma GCC unroll 4
        for (int v = 0; v < width; v++) {
            float *at = sums + r * PANEL_OUTPUTS + first + v * 8;
            __m256 y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][v]), _mm256_mul_ps(scale[v], own), _mm256_load_ps(at));
            if (header == SCALES_AND_MINIMUMS) y = _mm256_fnmadd_ps(total, scales8(weight_scales + 64 + (first + v * 8) * 2), y);
            _mm256_store_ps(at, y);
        }
    }
}

/* The exact sums of one group's inputs and `width` registers of outputs. */
INLINE void sum_group(int rows, int width, int bits, int header, int64_t group, const uint8_t *codes, const int8_t *x, const int32_t *negated, ptrdiff_t jump,
                      __m256i (*acc)[PANEL_REGISTERS]) {
#ifndef __AVXVNNI__
    if (bits == 4 && group == 32 && header != SCALES_AND_MINIMUMS) {
        sum_int4_group(rows, width, codes, x, negated, jump, acc);
        return;
    }
#endif
    const int shift = header == SCALES_AND_MINIMUMS ? -1 : bits == 4 ? 3 : OFFSET8; /* factor of the sum of activations that corrects the weights' zero point */
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < width; v++) acc[r][v] = shift < 0 ? _mm256_setzero_si256() : _mm256_slli_epi32(_mm256_set1_epi32(negated[r]), shift);
    for (int64_t k = 0; k < group; k += 32) sum_32(rows, width, bits, codes + k * (bits == 4 ? 16 : 32), x + k * rows, jump, acc);
}

#define STREAM_STARTS 512 /* bytes of codes that are prefetched before a stream's next panel begins */

/* `panels`, `rows`, `width` and, if it is 32, `group` are compile-time constants at every call, so that sums stay in
 * registers: few rows use a whole panel at once, more rows its halves one after the other, while the group is in L1. Of
 * several panels a group each is multiplied in turns. */
INLINE void multiply_groups(int panels, int rows, int width, int bits, int header, int64_t group, const linear_int_arguments *a, const uint8_t *panel, int64_t row,
                            const uint8_t *ahead, float *sums) {
    const int64_t groups = a->padded / a->group;
    const panel_layout layout = layout_of(bits, header, group, groups);
    const uint8_t *weight_scales = panel + layout.scales, *codes = panel + layout.codes;
    const int8_t *x = a->tiles + row * a->padded;
    const float *scales = a->scales + row * groups;
    const int32_t *negated = a->sums + row * groups;
    memset(sums, 0, (size_t)panels * rows * PANEL_OUTPUTS * sizeof *sums);
    /* Headers of double quantization lie before all codes. If the same panel is prefetched, its codes go on after the
     * headers of the next panel, which are prefetched meanwhile. */
    const ptrdiff_t lead = ahead ? ahead - panel : 0, next_headers = lead < layout.bytes ? panels * layout.bytes : lead;
    for (int64_t g = 0; g < groups; g++, x += rows * group, scales += rows, negated += rows) {
        for (int p = 0; p < panels; p++) {
            const uint8_t *own = panel + p * layout.bytes, *own_scales = weight_scales + p * layout.bytes, *own_codes = codes + p * layout.bytes;
            ptrdiff_t jump = lead; /* from codes to what is prefetched meanwhile */
            if (lead) {
                const int is_apart = header == DOUBLE_QUANTIZED; /* the first header begins with the scales of outputs */
                ask(is_apart ? own + next_headers + (g ? layout.scales + g * layout.next_scales : 0) : own_scales + lead, asked_header(header, g));
                if (is_apart && lead < layout.bytes && own_codes + lead - own >= layout.bytes) jump += layout.codes;
            }
            if (panels > 1 && g == groups - 1) ask(own + panels * layout.bytes + layout.codes, STREAM_STARTS); /* of the thread's next task */
            for (int first = 0; first < 4; first += width) {
                __m256i acc[TILE_ROWS][PANEL_REGISTERS];
                sum_group(rows, width, bits, header, group, own_codes + first * 32, x, negated, first ? 0 : jump, acc);
                take_group(rows, width, header, first * 8, own_scales, scales, negated, acc, sums + p * rows * PANEL_OUTPUTS);
            }
        }
        weight_scales += layout.next_scales, codes += layout.next_codes;
    }
}

INLINE void multiply(int rows, int width, int panels, int bits, int header, const linear_int_arguments *a, const uint8_t *panel, int64_t row, const uint8_t *ahead, float *sums) {
    if (a->group == 32) multiply_groups(panels, rows, width, bits, header, 32, a, panel, row, ahead, sums);
    else multiply_groups(panels, rows, width, bits, header, a->group, a, panel, row, ahead, sums);
}

#ifdef PART_INTEGERS
void multiply_tile(const linear_int_arguments *a, const uint8_t *panel, int64_t row, int count, const uint8_t *ahead, float *sums) {
    switch (count) {
        CASE(1, 4, 1) CASE(2, 4, 1) CASE(3, 2, 1) CASE(4, 2, 1) CASE(5, 2, 1) CASE(6, 2, 1)
    }
}

#if STREAMS > 1
void multiply_streams(const linear_int_arguments *a, const uint8_t *panel, int count, float *sums) {
    const uint8_t *ahead = panel + STREAM_AHEAD;
    const int64_t row = 0;
    switch (count) {
        CASE(1, 4, STREAMS) CASE(2, 4, STREAMS)
    }
    for (int p = 0; p < STREAMS; p++) scale_outputs(a, panel + p * panel_bytes_int(a), count, sums + p * count * PANEL_OUTPUTS);
}
#endif
#endif

#endif
