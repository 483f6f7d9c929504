/* y = x W^T (+ bias) in bf16 with fp32 sums, out of panels: the same packed weights serve one row and five hundred. */
#ifndef ARMATURE_LINEAR_BF16_H
#define ARMATURE_LINEAR_BF16_H

#include <omp.h>

#include "activate.h"
#include "tile_bf16.h"

#define AHEAD_BF16 2048 /* bytes asked for before their use: measured against 1024 and 4096 at 1 to 32 rows */

/* Interleaves rows pair by pair, tile by tile, so that a tile is read from first to last byte. */
static void interleave(const linear_bf16_arguments *a) {
    const int64_t pairs = (a->inputs + 1) / 2;
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < (a->rows + BF16_ROWS - 1) / BF16_ROWS; tile++) {
        int64_t row = 0, count = tile_rows(0, a->rows);
        for (int64_t i = 0; i < tile; i++) row += count, count = tile_rows(row, a->rows);
        uint32_t *target = a->tiles + row * pairs;
        for (int64_t r = 0; r < count; r++) {
            const uint16_t *source = a->x + (row + r) * a->x_stride;
            for (int64_t p = 0; p < a->inputs / 2; p++) memcpy(target + p * count + r, source + 2 * p, 4);
            if (a->inputs & 1) target[(pairs - 1) * count + r] = source[a->inputs - 1];
        }
    }
}

/* Sums of `count` rows from `row` on, outputs from `first` on, to where the arguments want them. */
INLINE void store_bf16(int activation, const linear_bf16_arguments *a, const float *sums, int64_t row, int count, int64_t first) {
    const int64_t outputs = a->outputs - first;
    const __mmask32 mask = outputs >= 32 ? 0xffffffffu : (1u << outputs) - 1;
    const __mmask16 masks[2] = {(__mmask16)mask, (__mmask16)(mask >> 16)};
    for (int r = 0; r < count; r++) {
        __m512 x[2] = {_mm512_loadu_ps(sums + r * 32), _mm512_loadu_ps(sums + r * 32 + 16)};
        if (a->bias)
            for (int i = 0; i < 2; i++) x[i] = _mm512_add_ps(x[i], _mm512_maskz_loadu_ps(masks[i], a->bias + first + i * 16));
        for (int i = 0; i < 2; i++) x[i] = (__m512)activated(activation, (vf)x[i]);
        if (a->output == OUTPUT_BF16) {
            _mm512_mask_storeu_epi16((uint16_t *)a->y + (row + r) * a->y_stride + first, mask, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
            continue;
        }
        float *y = (float *)a->y + (row + r) * a->y_stride + first;
        for (int i = 0; i < 2; i++) {
            if (a->output == OUTPUT_ADD_FP32) x[i] = _mm512_add_ps(x[i], _mm512_maskz_loadu_ps(masks[i], y + i * 16));
            _mm512_mask_storeu_ps(y + i * 16, masks[i], x[i]);
        }
    }
}

/* Panels that a thread takes at a time: about a megabyte, so that reading runs on, but at least eight turns for each thread. */
INLINE int panels_together(int64_t num_panels, int64_t pairs) {
    int64_t chunk = (1 << 20) / (pairs * PANEL_OUTPUTS * 4), most = num_panels / (8 * omp_get_num_threads());
    if (chunk > most) chunk = most;
    return chunk < 1 ? 1 : (int)chunk;
}

static void linear_bf16(const void *arguments) {
    const linear_bf16_arguments *a = arguments;
    const int64_t pairs = (a->inputs + 1) / 2, num_panels = (a->outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    const int lone = a->rows == 1 && a->inputs % 2 == 0; /* one row is its own tile */
    const uint32_t *tiles = lone ? (const uint32_t *)a->x : a->tiles;
    const int chunk = panels_together(num_panels, pairs);
    float sums[BF16_ROWS * PANEL_OUTPUTS] __attribute__((aligned(64)));
    if (!lone) interleave(a);
#pragma omp for schedule(dynamic, chunk)
    for (int64_t panel = 0; panel < num_panels; panel++) {
        const ptrdiff_t bytes = pairs * PANEL_OUTPUTS * 4;
        const uint8_t *weights = a->panels + panel * bytes;
        for (int64_t row = 0, pass = 0, count; row < a->rows; row += count, pass++) {
            count = tile_rows(row, a->rows);
            /* One pass asks for its own panel a little ahead. Of several passes each of the first two asks for half of the next panel, so that
             * memory is busy while they compute; the others find it there. */
            const uint8_t *ahead = count == a->rows ? weights + AHEAD_BF16 : pass < 2 ? weights + bytes + pass * bytes / 2 : weights;
            const ptrdiff_t stride = count == a->rows ? 128 : pass < 2 ? 64 : 0;
            if (a->fixed && count == 1) tile_product_1(tiles + row * pairs, weights, pairs, ahead, stride, sums);
            else tile_product((int)count, tiles + row * pairs, weights, pairs, ahead, stride, sums);
#define STORE_BF16(WHICH) store_bf16(WHICH, a, sums, row, (int)count, panel * PANEL_OUTPUTS)
            FOR_ACTIVATION(a->activation, STORE_BF16)
        }
    }
}

#endif
