/* LayerNorm of rows of the residual stream: written to the input of the next product and, if requested, in place as
 * well. fp32, two passes over a row in L1: the mean, then the squared deviations from it, since a plain sum of
 * squares would cancel. */
#ifndef ARMATURE_LAYER_NORM_H
#define ARMATURE_LAYER_NORM_H

#include "sink.h"

/* Sum of x - shift or, if `squared`, of its squares. Four independent sums hide the latency of additions. */
INLINE float sum_of(const float *x, int64_t size, float shift, int squared) {
    vf sums[4] = {vf_all(0), vf_all(0), vf_all(0), vf_all(0)};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const vf value = vf_load(x + i + k * LANES) - shift;
            sums[k] += squared ? value * value : value;
        }
    for (; i + LANES <= size; i += LANES) {
        const vf value = vf_load(x + i) - shift;
        sums[0] += squared ? value * value : value;
    }
    float rest = 0;
    for (; i < size; i++) rest += squared ? (x[i] - shift) * (x[i] - shift) : x[i] - shift;
    return vf_sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

static void layer_norm(const void *arguments) {
    const layer_norm_arguments *a = arguments;
    const int64_t parts = parts_of(&a->out, a->size);
    float values[MOST_GROUP] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->rows; row++) {
        float *hidden = a->hidden + row * a->stride;
        const float mean = sum_of(hidden, a->size, 0, 0) / (float)a->size;
        const float scale = 1.0f / float_sqrt(sum_of(hidden, a->size, mean, 1) / (float)a->size + (float)a->eps);
        for (int64_t k = 0; k < parts; k++) {
            const part p = nth_part(&a->out, a->size, row * parts + k);
            float *x = hidden + p.from;
            for (int64_t i = 0; i < p.count; i += LANES) {
                const int64_t left = p.count - i;
                vf y = (vf_load_part(x + i, left) - mean) * scale * vf_load_part(a->weight + p.from + i, left);
                if (a->bias) y += vf_load_part(a->bias + p.from + i, left);
                vf_store(values + i, y);
                if (a->in_place) vf_store_part(x + i, y, left);
            }
            emit(&a->out, a->rows, a->size, p, values);
        }
    }
}

#endif
