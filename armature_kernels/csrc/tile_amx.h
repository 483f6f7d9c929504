/* Tile registers of AMX (Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3): eight
 * registers of up to 16 rows of 64 bytes. TDPBF16PS multiplies 16 rows of 32 bf16 with 16 columns of 32 and adds to 16
 * x 16 fp32 in 16 cycles, seven times the rate of VDPBF16PS on a Sapphire Rapids.
 *
 * With ARMATURE_EMULATE_AMX the same operations are plain C, so that a processor without AMX can test what is built
 * on them. */
#ifndef ARMATURE_TILE_AMX_H
#define ARMATURE_TILE_AMX_H

#include <immintrin.h>

#include "level.h"
#include "simd.h"

#define AMX_ROWS 16   /* rows of a register */
#define AMX_INPUTS 32 /* bf16 in a row */

/* The operand of LDTILECFG: palette 1 has eight registers. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) tile_shapes;

#ifdef ARMATURE_EMULATE_AMX
static __thread struct {
    tile_shapes shapes;
    uint8_t bytes[8][AMX_ROWS][64];
} amx;

INLINE void use_shapes(const tile_shapes *shapes) { memset(&amx, 0, sizeof amx), amx.shapes = *shapes; }
INLINE void tile_release(void) { memset(&amx, 0, sizeof amx); }
INLINE void tile_zero(int to) { memset(amx.bytes[to], 0, sizeof amx.bytes[to]); }
INLINE void tile_load(int to, const void *p, ptrdiff_t stride) {
    for (int r = 0; r < amx.shapes.rows[to]; r++) memcpy(amx.bytes[to][r], (const uint8_t *)p + r * stride, amx.shapes.row_bytes[to]);
}
INLINE void tile_store(int from, void *p, ptrdiff_t stride) {
    for (int r = 0; r < amx.shapes.rows[from]; r++) memcpy((uint8_t *)p + r * stride, amx.bytes[from][r], amx.shapes.row_bytes[from]);
}
INLINE float amx_number(const uint8_t *p) {
    uint32_t bits = (uint32_t)p[1] << 24 | (uint32_t)p[0] << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}
/* Even and odd inputs have sums of their own, which are added at the end. */
INLINE void tile_multiply_bf16(int sum, int x, int weights) {
    for (int r = 0; r < amx.shapes.rows[sum]; r++)
        for (int n = 0; n < 16; n++) {
            float parts[2] = {0, 0}, total;
            for (int k = 0; k < AMX_INPUTS; k++)
                parts[k % 2] += amx_number(amx.bytes[x][r] + k * 2) * amx_number(amx.bytes[weights][k / 2] + n * 4 + k % 2 * 2);
            memcpy(&total, amx.bytes[sum][r] + n * 4, 4);
            total += parts[0] + parts[1];
            memcpy(amx.bytes[sum][r] + n * 4, &total, 4);
        }
}
#else
/* Assembly, because GCC 12's intrinsic claims to read eight bytes of the operand, and the others may not be written. */
INLINE void use_shapes(const tile_shapes *shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(*shapes)); }
#define tile_release() _tile_release()
#define tile_zero(TO) _tile_zero(TO)
#define tile_load(TO, P, STRIDE) _tile_loadd(TO, P, STRIDE)
#define tile_store(FROM, P, STRIDE) _tile_stored(FROM, P, STRIDE)
#define tile_multiply_bf16(SUM, X, WEIGHTS) _tile_dpbf16ps(SUM, X, WEIGHTS)
#endif

/* Registers 0 to 3 hold sums, 4 and 5 `rows` rows of activations, 6 and 7 weights: 16 pairs of inputs of 16 outputs. */
INLINE void use_rows(int rows) {
    tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = (uint8_t)(i < 6 ? rows : AMX_INPUTS / 2);
    use_shapes(&shapes);
}

#define SUM_STRIDE (PANEL_OUTPUTS * 4)

/* What is prefetched to L2 for each block of inputs: `lines` cache lines of weights, and `x_lines` of rows. */
typedef struct {
    const uint8_t *weights, *x;
    int64_t lines, x_lines;
} prefetching;

/* sums [32 rows if `two`, else `rows`; 32 outputs] (+)= x times weights. x, and then the second 16 rows, are blocks of
 * `rows` rows of AMX_INPUTS inputs, one after the other, and `weights` is part of a bf16 panel (tile_bf16.h). `two` is a
 * compile-time constant at every call. */
INLINE void multiply_blocks(int two, int rows, const uint8_t *x, const uint8_t *weights, int64_t blocks, int first, float *sums, prefetching ahead) {
    float *high = sums + AMX_ROWS * PANEL_OUTPUTS;
    const uint8_t *x1 = x + blocks * rows * 64;
    if (first) {
        tile_zero(0);
        tile_zero(1);
        if (two) {
            tile_zero(2);
            tile_zero(3);
        }
    } else {
        tile_load(0, sums, SUM_STRIDE);
        tile_load(1, sums + 16, SUM_STRIDE);
        if (two) {
            tile_load(2, high, SUM_STRIDE);
            tile_load(3, high + 16, SUM_STRIDE);
        }
    }
    for (int64_t k = 0; k < blocks; k++, x += rows * 64, x1 += rows * 64, weights += AMX_INPUTS / 2 * SUM_STRIDE) {
        for (int64_t i = 0; i < ahead.lines; i++, ahead.weights += 64) _mm_prefetch((const char *)ahead.weights, _MM_HINT_T1);
        for (int64_t i = 0; i < ahead.x_lines; i++, ahead.x += 64) _mm_prefetch((const char *)ahead.x, _MM_HINT_T1);
        tile_load(4, x, 64);
        tile_load(6, weights, SUM_STRIDE);
        tile_multiply_bf16(0, 4, 6);
        tile_load(7, weights + 64, SUM_STRIDE);
        tile_multiply_bf16(1, 4, 7);
        if (two) {
            tile_load(5, x1, 64);
            tile_multiply_bf16(2, 5, 6);
            tile_multiply_bf16(3, 5, 7);
        }
    }
    tile_store(0, sums, SUM_STRIDE);
    tile_store(1, sums + 16, SUM_STRIDE);
    if (two) {
        tile_store(2, high, SUM_STRIDE);
        tile_store(3, high + 16, SUM_STRIDE);
    }
}

/* ---- integer weights to bf16 ---- */

/* Each of 16 lanes holds codes of one output. A code whose bits are in a mantissa needs no conversion: with the
 * exponent of 2^23, code << at is 2^23 + code * 2^at, and one multiply-add makes that the weight. From bit 8 on its
 * constants are exact, or as good as bf16 needs. */
typedef struct {
    __m512 scale, zero;
} widening;

INLINE widening widening_at(int at, __m512 scale, __m512 zero_code, __m512 minimum) {
    const __m512 step = _mm512_mul_ps(scale, _mm512_set1_ps(1.0f / (float)(1 << at)));
    const __m512 base = _mm512_add_ps(_mm512_set1_ps((float)(1 << (23 - at))), zero_code);
    return (widening){step, _mm512_fnmadd_ps(scale, base, minimum)};
}

INLINE __m512 widen_codes(__m512i codes, int mask, int flipped, widening w) {
    const __m512i exponent = _mm512_set1_epi32(0x4b000000 ^ flipped); /* `flipped`: a bit of the code to invert */
    return _mm512_fmadd_ps((__m512)_mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(mask), exponent, 0x6a), w.scale, w.zero);
}

/* Two inputs of 16 outputs, rounded to bf16 (ties away from zero), as a line of a panel. VCVTNE2PS2BF16 takes longer. */
INLINE void store_pair(uint8_t *to, __m512 even, __m512 odd) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)even, half), 16), high = _mm512_add_epi32((__m512i)odd, half);
    _mm512_store_si512(to, _mm512_ternarylogic_epi32(high, _mm512_set1_epi32((int)0xffff0000), low, 0xea));
}

/* `inputs` inputs (a multiple of 32) of a group, for outputs 16 * half to 16 * half + 15. */
INLINE void widen_int4(int half, __m512 scale, __m512 zero_code, __m512 minimum, const uint8_t *codes, int64_t inputs, uint8_t *to) {
    const widening at8 = widening_at(8, scale, zero_code, minimum), at12 = widening_at(12, scale, zero_code, minimum), at16 = widening_at(16, scale, zero_code, minimum);
    for (int64_t k = 0; k < inputs; k += 8, to += 4 * SUM_STRIDE) {
        /* Inputs 0 to 3 are at bits 0, 8, 16 and 24, inputs 4 to 7 four bits higher. */
        const __m512i line = _mm512_loadu_si512(codes + k * 16 + half * 64), left = _mm512_slli_epi32(line, 12), right = _mm512_srli_epi32(line, 12);
        store_pair(to + half * 64, widen_codes(left, 15 << 12, 0, at12), widen_codes(line, 15 << 8, 0, at8));
        store_pair(to + SUM_STRIDE + half * 64, widen_codes(line, 15 << 16, 0, at16), widen_codes(right, 15 << 12, 0, at12));
        store_pair(to + 2 * SUM_STRIDE + half * 64, widen_codes(left, 15 << 16, 0, at16), widen_codes(line, 15 << 12, 0, at12));
        store_pair(to + 3 * SUM_STRIDE + half * 64, widen_codes(right, 15 << 8, 0, at8), widen_codes(right, 15 << 16, 0, at16));
    }
}

INLINE void widen_int8(int half, __m512 scale, const uint8_t *codes, int64_t inputs, uint8_t *to) {
    const widening at = widening_at(8, scale, _mm512_set1_ps(128), _mm512_setzero_ps());
    for (int64_t k = 0; k < inputs; k += 4, to += 2 * SUM_STRIDE) {
        const __m512i line = _mm512_loadu_si512(codes + k * 32 + half * 64);
        store_pair(to + half * 64, widen_codes(_mm512_slli_epi32(line, 8), 255 << 8, 128 << 8, at), widen_codes(line, 255 << 8, 128 << 8, at));
        store_pair(to + SUM_STRIDE + half * 64, widen_codes(_mm512_srli_epi32(line, 8), 255 << 8, 128 << 8, at), widen_codes(_mm512_srli_epi32(line, 16), 255 << 8, 128 << 8, at));
    }
}

/* Inputs [from, from + count) of an integer panel, both multiples of 32, as a bf16 panel. A weight is rounded once. */
INLINE void widen_panel(int bits, int header, const uint8_t *panel, int64_t group, int64_t groups, int64_t from, int64_t count, uint8_t *to) {
    const panel_layout layout = layout_of(bits, header, group, groups);
    int64_t g = from / group, within = from % group; /* not in the loop, since a division takes as long as 60 weights */
    for (int64_t k = 0, inputs; k < count; k += inputs, g++, within = 0) {
        inputs = group - within < count - k ? group - within : count - k;
        const uint8_t *scales = panel + layout.scales + g * layout.next_scales, *codes = panel + layout.codes + g * layout.next_codes + within * PANEL_OUTPUTS * bits / 8;
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m512 scale = group_scales(header, scales, half);
            if (header == DOUBLE_QUANTIZED) scale = _mm512_mul_ps(scale, scales16(panel + half * 32));
            const __m512 minimum = header == SCALES_AND_MINIMUMS ? scales16(scales + 64 + half * 32) : _mm512_setzero_ps();
            const __m512 zero_code = _mm512_set1_ps(header == SCALES_AND_MINIMUMS ? 0 : 8);
            if (bits == 4) widen_int4(half, scale, zero_code, minimum, codes, inputs, to + k / 2 * SUM_STRIDE);
            else widen_int8(half, scale, codes, inputs, to + k / 2 * SUM_STRIDE);
        }
    }
}

#endif
