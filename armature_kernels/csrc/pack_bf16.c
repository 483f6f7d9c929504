/* bf16 weights to panels (tile_bf16.h) and back, in plain C: any level may pack, and an embedding reads rows from the
 * packed output layer. */
#include <string.h>

#include <omp.h>

#include "level.h"

/* Rows [N, K] as stored -> panels [ceil(N / 32)][ceil(K / 2)][32][2]; elements beyond N or K are zero. `first_output`
 * is a multiple of 32 or the continuation of a fused matrix: output n of this part becomes output first_output + n. */
EXPORT void armature_pack_bf16(const uint16_t *weights, uint16_t *panels, int64_t outputs, int64_t inputs, int64_t first_output) {
    const int64_t pairs = (inputs + 1) / 2, block = 16;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t group = first_output / block; group < (first_output + outputs + block - 1) / block; group++) {
        for (int64_t p0 = 0; p0 < pairs; p0 += 16) {
            int64_t stop = p0 + 16 < pairs ? p0 + 16 : pairs;
            for (int64_t n = group * block; n < group * block + block; n++) {
                int64_t own = n - first_output;
                if (own < 0 || own >= outputs) continue;
                uint16_t *target = panels + (n / PANEL_OUTPUTS) * pairs * PANEL_OUTPUTS * 2 + (n % PANEL_OUTPUTS) * 2;
                const uint16_t *source = weights + own * inputs;
                for (int64_t p = p0; p < stop; p++) {
                    uint32_t pair;
                    if (2 * p + 1 < inputs) memcpy(&pair, source + 2 * p, 4);
                    else pair = source[2 * p];
                    memcpy(target + p * PANEL_OUTPUTS * 2, &pair, 4);
                }
            }
        }
    }
}

/* Widen one packed row: part of `armature_rows`. */
void armature_row_bf16(const rows_arguments *a, int64_t id, int64_t from, int64_t count, float *out) {
    const int64_t pairs = (a->inputs + 1) / 2;
    const uint16_t *source = (const uint16_t *)a->weight + (id / PANEL_OUTPUTS) * pairs * PANEL_OUTPUTS * 2 + id % PANEL_OUTPUTS * 2;
    for (int64_t k = from; k < from + count; k++) {
        union { uint32_t bits; float number; } cast = {(uint32_t)source[k / 2 * PANEL_OUTPUTS * 2 + (k & 1)] << 16};
        out[k - from] = cast.number;
    }
}
