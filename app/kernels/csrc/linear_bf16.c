/* y = x W^T (+ bias) in bf16 with fp32 sums, out of panels: the same packed weights serve one row and five hundred. */
#include "tile_bf16.h"

#include <omp.h>
#include <string.h>

/* Rows [N, K] as stored -> panels [ceil(N / 32)][ceil(K / 2)][32][2]; what is beyond N or K is zero. `panels` from `first_output` on, a multiple
 * of 32 or the continuation of a fused matrix: output n of this part becomes output first_output + n. */
EXPORT void armature_pack_bf16(const uint16_t *weights, uint16_t *panels, ptrdiff_t outputs, ptrdiff_t inputs, ptrdiff_t first_output) {
    const ptrdiff_t pairs = (inputs + 1) / 2, block = 16;
#pragma omp parallel for schedule(dynamic, 1)
    for (ptrdiff_t group = first_output / block; group < (first_output + outputs + block - 1) / block; group++) {
        for (ptrdiff_t p0 = 0; p0 < pairs; p0 += 16) {
            ptrdiff_t stop = p0 + 16 < pairs ? p0 + 16 : pairs;
            for (ptrdiff_t n = group * block; n < group * block + block; n++) {
                ptrdiff_t own = n - first_output;
                if (own < 0 || own >= outputs) continue;
                uint16_t *target = panels + (n / PANEL_WIDTH) * pairs * PANEL_WIDTH * 2 + (n % PANEL_WIDTH) * 2;
                const uint16_t *source = weights + own * inputs;
                for (ptrdiff_t p = p0; p < stop; p++) {
                    uint32_t pair;
                    if (2 * p + 1 < inputs) memcpy(&pair, source + 2 * p, 4);
                    else pair = source[2 * p];
                    memcpy(target + p * PANEL_WIDTH * 2, &pair, 4);
                }
            }
        }
    }
}

/* Rows of the packed matrix as they were, widened: out [count, inputs] fp32 is row ids[i] each. For an embedding that is the output layer too. */
EXPORT void armature_rows_bf16(const uint16_t *panels, const int64_t *ids, float *out, ptrdiff_t count, ptrdiff_t inputs) {
    const ptrdiff_t pairs = (inputs + 1) / 2;
#pragma omp parallel for schedule(static) if (count > 8)
    for (ptrdiff_t i = 0; i < count; i++) {
        const uint16_t *source = panels + (ids[i] / PANEL_WIDTH) * pairs * PANEL_WIDTH * 2 + ids[i] % PANEL_WIDTH * 2;
        for (ptrdiff_t k = 0; k < inputs; k++) out[i * inputs + k] = bf16_to_float(source[k / 2 * PANEL_WIDTH * 2 + (k & 1)]);
    }
}

#define AHEAD 2048 /* bytes asked for before their use: measured against 1024 and 4096 at 1 to 32 rows */

#ifdef ARMATURE_X86

/* Interleaves rows pair by pair, tile by tile, so that a tile is read from first to last byte. `stride` of x in elements. */
static void interleave(const uint16_t *x, ptrdiff_t stride, int rows, ptrdiff_t inputs, uint32_t *tiles) {
    const ptrdiff_t pairs = (inputs + 1) / 2;
#pragma omp for schedule(static)
    for (int tile = 0; tile < (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS; tile++) {
        int row = 0, count = tile_rows(0, rows);
        for (int i = 0; i < tile; i++) row += count, count = tile_rows(row, rows);
        uint32_t *target = tiles + row * pairs;
        for (int r = 0; r < count; r++) {
            const uint16_t *source = x + (row + r) * stride;
            for (ptrdiff_t p = 0; p < inputs / 2; p++) memcpy(target + p * count + r, source + 2 * p, 4);
            if (inputs & 1) target[(pairs - 1) * count + r] = source[inputs - 1];
        }
    }
}

static TARGET_BF16 void store(const float *sums, int count, const float *bias, uint16_t *y, ptrdiff_t stride, int outputs) {
    const __mmask32 mask = outputs >= 32 ? 0xffffffffu : (1u << outputs) - 1;
    for (int r = 0; r < count; r++) {
        __m512 low = _mm512_loadu_ps(sums + r * 32), high = _mm512_loadu_ps(sums + r * 32 + 16);
        if (bias) {
            low = _mm512_add_ps(low, _mm512_maskz_loadu_ps((__mmask16)mask, bias));
            high = _mm512_add_ps(high, _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), bias + 16));
        }
        _mm512_mask_storeu_epi16(y + r * stride, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

/* Panels that a thread takes at a time: about a megabyte, so that reading runs on, but at least eight turns for each thread. */
static int panels_together(ptrdiff_t num_panels, ptrdiff_t pairs) {
    ptrdiff_t chunk = (1 << 20) / (pairs * PANEL_WIDTH * 4), most = num_panels / (8 * omp_get_max_threads());
    if (chunk > most) chunk = most;
    return chunk < 1 ? 1 : (int)chunk;
}

/* x [rows, inputs] (row stride in elements), y [rows, outputs] (likewise), bias [outputs] fp32 or NULL, scratch rows * ceil(inputs / 2) words. */
EXPORT TARGET_BF16 void armature_linear_bf16(const uint16_t *x, ptrdiff_t x_stride, const uint8_t *panels, const float *bias, uint16_t *y,
                                             ptrdiff_t y_stride, int rows, ptrdiff_t inputs, ptrdiff_t outputs, uint32_t *scratch) {
    const ptrdiff_t pairs = (inputs + 1) / 2, num_panels = (outputs + PANEL_WIDTH - 1) / PANEL_WIDTH;
    const int lone = rows == 1 && inputs % 2 == 0; /* one row is its own tile */
    const uint32_t *tiles = lone ? (const uint32_t *)x : scratch;
    const int chunk = panels_together(num_panels, pairs);
#pragma omp parallel
    {
        float sums[MAX_TILE_ROWS * PANEL_WIDTH] __attribute__((aligned(64)));
        if (!lone) interleave(x, x_stride, rows, inputs, scratch);
#pragma omp for schedule(dynamic, chunk)
        for (ptrdiff_t panel = 0; panel < num_panels; panel++) {
            const uint8_t *weights = panels + panel * pairs * PANEL_WIDTH * 4;
            ptrdiff_t first = panel * PANEL_WIDTH;
            for (int row = 0, pass = 0, count; row < rows; row += count) {
                count = tile_rows(row, rows);
                /* One pass asks for its own panel a little ahead. Of several passes each of the first two asks for half of the next panel,
                 * so that memory is busy while they compute; the others find it there. */
                const ptrdiff_t bytes = pairs * PANEL_WIDTH * 4;
                const uint8_t *ahead = count == rows ? weights + AHEAD : pass < 2 ? weights + bytes + pass * bytes / 2 : weights;
                tile_product(count, tiles + row * pairs, weights, pairs, ahead, count == rows ? 128 : pass < 2 ? 64 : 0, sums);
                pass++;
                store(sums, count, bias ? bias + first : NULL, y + row * y_stride + first, y_stride, (int)(outputs - first));
            }
        }
    }
}

EXPORT int armature_has_bf16(void) {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#else
EXPORT int armature_has_bf16(void) { return 0; }
#endif
