/* fp32 weights to panels (linear_fp32.h) and back, in plain C: any level may pack, and an embedding reads rows from the
 * packed output layer. */
#include <string.h>

#include <omp.h>

#include "level.h"

#define INPUTS_TOGETHER 16 /* a cache line of each row, and half a page of the panel */

/* Rows [outputs, inputs] to panels [ceil(outputs / 32)][inputs][32]. `first_output` is a multiple of 32 or the
 * continuation of a fused matrix: output n of this part becomes output first_output + n. Others keep their values. */
EXPORT void armature_pack_fp32(const float *weights, float *panels, int64_t outputs, int64_t inputs, int64_t first_output) {
    const int64_t last = first_output + outputs;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t panel = first_output / PANEL_OUTPUTS; panel < (last + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS; panel++) {
        const int64_t begin = panel * PANEL_OUTPUTS, from = begin > first_output ? begin : first_output, to = begin + PANEL_OUTPUTS < last ? begin + PANEL_OUTPUTS : last;
        for (int64_t k0 = 0; k0 < inputs; k0 += INPUTS_TOGETHER) {
            const int64_t stop = k0 + INPUTS_TOGETHER < inputs ? k0 + INPUTS_TOGETHER : inputs;
            for (int64_t n = from; n < to; n++) {
                const float *source = weights + (n - first_output) * inputs;
                float *target = panels + panel * inputs * PANEL_OUTPUTS + n - begin;
                for (int64_t k = k0; k < stop; k++) target[k * PANEL_OUTPUTS] = source[k];
            }
        }
    }
}

/* Read one packed row: part of `armature_rows`. */
void armature_row_fp32(const rows_arguments *a, int64_t id, int64_t from, int64_t count, float *out) {
    const float *source = (const float *)a->weight + id / PANEL_OUTPUTS * a->inputs * PANEL_OUTPUTS + id % PANEL_OUTPUTS;
    for (int64_t k = from; k < from + count; k++) out[k - from] = source[k * PANEL_OUTPUTS];
}
