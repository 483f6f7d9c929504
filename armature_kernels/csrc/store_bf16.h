/* What every product of bf16 rows shares: how its sums are stored, and how many panels a thread claims. */
#ifndef ARMATURE_STORE_BF16_H
#define ARMATURE_STORE_BF16_H

#include "activate.h"
#include "division.h"
#include "level.h"

/* Store the sums of `count` rows from `row` on, outputs from `first` on, as the arguments require. */
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

static void store_all(const linear_bf16_arguments *a, const float *sums, int64_t row, int count, int64_t first) {
#define STORE_BF16(WHICH) store_bf16(WHICH, a, sums, row, count, first)
    FOR_ACTIVATION(a->activation, STORE_BF16)
}

/* Panels that a thread claims at a time: about a megabyte, so that reading is continuous, but at least eight claims
 * per thread. */
INLINE int panels_together(int64_t num_panels, int64_t pairs) {
    int64_t chunk = (1 << 20) / (pairs * PANEL_OUTPUTS * 4), most = num_panels / (8 * omp_get_num_threads());
    if (chunk > most) chunk = most;
    return chunk < 1 ? 1 : (int)chunk;
}

#endif
