/* The bf16 product: a tile of 1 to 12 rows times one panel of 32 outputs, bf16 in, fp32 out (AVX512-BF16).
 *
 * A *panel* holds PANEL_OUTPUTS outputs of a matrix: for each pair of inputs (k, k + 1) the pairs of all its outputs
 * are adjacent, so that one 64-byte line feeds one VDPBF16PS (two products per lane, summed in fp32) and a panel is
 * read from the first to the last byte. A *tile* holds up to BF16_ROWS rows of activations, interleaved pair by pair
 * in the same order. */
#ifndef ARMATURE_TILE_BF16_H
#define ARMATURE_TILE_BF16_H

#include <immintrin.h>

#include "level.h"
#include "simd.h"

#define BF16_ROWS 12 /* 12 rows x 2 accumulators leave 8 of 32 registers for weights and activations */

/* Rows of the tile that starts at `row` of `rows`: all tiles of a call are as equal as possible. */
static inline int tile_rows(int64_t row, int64_t rows) {
    int64_t left = rows - row, tiles = (left + BF16_ROWS - 1) / BF16_ROWS;
    return (int)((left + tiles - 1) / tiles);
}

INLINE __mmask16 first_lanes(ptrdiff_t count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }

INLINE void narrow(uint16_t *p, __m512 x, __mmask16 mask) { _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(x)); }

/* sums[row * 32 + output] = sum over k of tile * panel. `pairs` counts input pairs; MR is a compile-time constant at
 * every call. If `ahead` is given, `stride` bytes from it are prefetched for each pair. */
#define DEFINE_TILE(MR)                                                                                                                  \
    INLINE void tile_product_##MR(const uint32_t *tile, const uint8_t *panel, ptrdiff_t pairs, const uint8_t *ahead, ptrdiff_t stride,   \
                                  float *sums) {                                                                                         \
        __m512 low[MR], high[MR];                                                                                                        \
        for (int r = 0; r < MR; r++) low[r] = high[r] = _mm512_setzero_ps();                                                             \
        for (ptrdiff_t p = 0; p < pairs; p++) {                                                                                          \
            if (ahead) {                                                                                                                 \
                _mm_prefetch((const char *)ahead + p * stride, _MM_HINT_T0);                                                             \
                _mm_prefetch((const char *)ahead + p * stride + stride / 2, _MM_HINT_T0);                                                \
            }                                                                                                                            \
            __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel + p * 128), w1 = (__m512bh)_mm512_loadu_si512(panel + p * 128 + 64);        \
            for (int r = 0; r < MR; r++) {                                                                                               \
                __m512bh x = (__m512bh)_mm512_set1_epi32((int)tile[p * MR + r]);                                                         \
                low[r] = _mm512_dpbf16_ps(low[r], w0, x);                                                                                \
                high[r] = _mm512_dpbf16_ps(high[r], w1, x);                                                                              \
            }                                                                                                                            \
        }                                                                                                                                \
        for (int r = 0; r < MR; r++) {                                                                                                   \
            _mm512_storeu_ps(sums + r * 32, low[r]);                                                                                     \
            _mm512_storeu_ps(sums + r * 32 + 16, high[r]);                                                                               \
        }                                                                                                                                \
    }

DEFINE_TILE(1)
DEFINE_TILE(2)
DEFINE_TILE(3)
DEFINE_TILE(4)
DEFINE_TILE(5)
DEFINE_TILE(6)
DEFINE_TILE(7)
DEFINE_TILE(8)
DEFINE_TILE(9)
DEFINE_TILE(10)
DEFINE_TILE(11)
DEFINE_TILE(12)

/* One row is bound by memory: four pairs in flight hide the latency of the accumulators, and lines are prefetched.
 * Its sums differ slightly from those of `tile_product_1`, which adds in the order of all the others. */
INLINE void tile_product_alone(const uint32_t *tile, const uint8_t *panel, ptrdiff_t pairs, const uint8_t *ahead, ptrdiff_t stride, float *sums) {
    __m512 low[4], high[4];
    for (int i = 0; i < 4; i++) low[i] = high[i] = _mm512_setzero_ps();
    ptrdiff_t p = 0;
    for (; p + 4 <= pairs; p += 4)
        for (int i = 0; i < 4; i++) {
            const uint8_t *line = panel + (p + i) * 128;
            if (ahead) {
                _mm_prefetch((const char *)ahead + (p + i) * stride, _MM_HINT_T0);
                _mm_prefetch((const char *)ahead + (p + i) * stride + stride / 2, _MM_HINT_T0);
            }
            __m512bh x = (__m512bh)_mm512_set1_epi32((int)tile[p + i]);
            low[i] = _mm512_dpbf16_ps(low[i], (__m512bh)_mm512_loadu_si512(line), x);
            high[i] = _mm512_dpbf16_ps(high[i], (__m512bh)_mm512_loadu_si512(line + 64), x);
        }
    for (; p < pairs; p++) {
        __m512bh x = (__m512bh)_mm512_set1_epi32((int)tile[p]);
        low[0] = _mm512_dpbf16_ps(low[0], (__m512bh)_mm512_loadu_si512(panel + p * 128), x);
        high[0] = _mm512_dpbf16_ps(high[0], (__m512bh)_mm512_loadu_si512(panel + p * 128 + 64), x);
    }
    _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_add_ps(low[0], low[1]), _mm512_add_ps(low[2], low[3])));
    _mm512_storeu_ps(sums + 16, _mm512_add_ps(_mm512_add_ps(high[0], high[1]), _mm512_add_ps(high[2], high[3])));
}

#define TILE_CASE(MR) case MR: tile_product_##MR(tile, panel, pairs, ahead, stride, sums); break;

INLINE void tile_product(int rows, const uint32_t *tile, const uint8_t *panel, ptrdiff_t pairs, const uint8_t *ahead, ptrdiff_t stride,
                         float *sums) {
    switch (rows) {
        case 1: tile_product_alone(tile, panel, pairs, ahead, stride, sums); break;
        TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5) TILE_CASE(6)
        TILE_CASE(7) TILE_CASE(8) TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12)
    }
}

#endif
