/* Scales and codes of four-bit weights: the search and the loop of kernels/linear/quantization.py, which has the
 * references in torch. */
#ifndef ARMATURE_ROUND_INT4_H
#define ARMATURE_ROUND_INT4_H

#include "simd.h"

#define LEAST_MAGNITUDE 1e-35f /* MIN_MAGNITUDE */

INLINE vf vf_magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* To the nearest integer from `low` to `high`, ties to even. */
INLINE vf nearest_code(vf x, float low, float high) {
    return __builtin_convertvector(vf_round(vf_min(vf_max(x, vf_all(low)), vf_all(high))), vf);
}

/* 1 / scale, or 0 where the scale is too small. */
INLINE vf inverse_scale(vf scale) { return vf_select(vf_magnitude(scale) < LEAST_MAGNITUDE, vf_all(0.0f), 1.0f / scale); }

/* Each lane has a group: its `a->group` values lie at x[i * LANES + lane]. */
INLINE vf best_scale(const int4_scales_arguments *a, const float *x) {
    vf top = vf_all(0.0f), inverse, most = vf_all(-1.0f), best = vf_all(0.0f);
    for (int64_t i = 0; i < a->group; i++) {
        const vf value = vf_load(x + i * LANES);
        top = vf_select(vf_magnitude(value) > vf_magnitude(top), value, top);
    }
    inverse = inverse_scale(top);
    for (int64_t d = 0; d < a->candidates; d++) {
        const vf step = vf_all(a->divisors[d]);
        vf along = vf_all(0.0f), length = vf_all(0.0f);
        for (int64_t i = 0; i < a->group; i++) {
            const vf shape = vf_load(x + i * LANES) * inverse, code = nearest_code(shape * step, -8, 7);
            along += code * shape, length += code * code;
        }
        const vf scale = along / vf_max(length, vf_all(LEAST_MAGNITUDE)), gain = along * scale;
        best = vf_select(gain > most, scale, best);
        most = vf_max(gain, most);
    }
    return best * top;
}

static void int4_scales(const void *arguments) {
    const int4_scales_arguments *a = arguments;
    float x[MOST_INT4_GROUP * LANES] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int64_t first = 0; first < a->groups; first += LANES) {
        const int64_t count = a->groups - first < LANES ? a->groups - first : LANES;
        memset(x, 0, (size_t)(a->group * LANES) * 4);
        for (int64_t lane = 0; lane < count; lane++)
            for (int64_t i = 0; i < a->group; i++) x[i * LANES + lane] = a->values[(first + lane) * a->group + i];
        vf_store_part(a->scales + first, best_scale(a, x), count);
    }
}

#define GPTQ_OUTPUTS 64 /* outputs at a time, with a block of inputs: 16 KiB */

/* Round input `j` of x [inputs, GPTQ_OUTPUTS], and let the inputs after it absorb the errors. */
INLINE void round_input(const int4_gptq_arguments *a, int64_t j, const float *scales, float *x, float *codes) {
    const float *root = a->root + j * a->root_stride;
    float *own = x + j * GPTQ_OUTPUTS;
    vf errors[GPTQ_OUTPUTS / LANES];
    for (int i = 0; i < GPTQ_OUTPUTS / LANES; i++) {
        const vf scale = vf_load(scales + i * LANES), value = vf_load(own + i * LANES);
        const vf code = nearest_code(value * inverse_scale(scale), -8, 7);
        errors[i] = (value - code * scale) / root[j];
        vf_store(codes + i * LANES, code + 8.0f);
        vf_store(own + i * LANES, errors[i]);
    }
    for (int64_t k = j + 1; k < a->inputs; k++)
        for (int i = 0; i < GPTQ_OUTPUTS / LANES; i++) {
            float *later = x + k * GPTQ_OUTPUTS + i * LANES;
            vf_store(later, vf_load(later) - errors[i] * root[k]);
        }
}

/* Lanes are outputs. The inputs of a block are rounded one after the other. */
static void int4_gptq(const void *arguments) {
    const int4_gptq_arguments *a = arguments;
    float x[MOST_GPTQ_INPUTS * GPTQ_OUTPUTS] __attribute__((aligned(64))), scales[GPTQ_OUTPUTS], codes[GPTQ_OUTPUTS];
#pragma omp for schedule(static)
    for (int64_t first = 0; first < a->outputs; first += GPTQ_OUTPUTS) {
        const int64_t count = a->outputs - first < GPTQ_OUTPUTS ? a->outputs - first : GPTQ_OUTPUTS;
        memset(x, 0, sizeof x), memset(scales, 0, sizeof scales);
        for (int64_t o = 0; o < count; o++)
            for (int64_t j = 0; j < a->inputs; j++) x[j * GPTQ_OUTPUTS + o] = a->remaining[(first + o) * a->stride + j];
        for (int64_t j = 0; j < a->inputs; j++) {
            const int64_t input = a->order[j], group = input / a->group;
            for (int64_t o = 0; o < count; o++) scales[o] = a->scales[(first + o) * a->groups + group];
            round_input(a, j, scales, x, codes);
            for (int64_t o = 0; o < count; o++) a->codes[(first + o) * a->groups * a->group + input] = (uint8_t)codes[o];
        }
        for (int64_t o = 0; o < count; o++)
            for (int64_t j = 0; j < a->inputs; j++) a->errors[(first + o) * a->inputs + j] = x[j * GPTQ_OUTPUTS + o];
    }
}

#endif
