/* Scales and codes of four-bit weights: the search and the loop of armature_kernels/linear/quantization.py, which has the
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

#define SCALE_CANDIDATES 3 /* at a time, since the sums of one wait for each other */

/* Each lane has a group: its `a->group` values lie at x[i * LANES + lane], and are overwritten. */
INLINE vf best_scale(const int4_scales_arguments *a, float *x) {
    vf top = vf_all(0.0f), inverse, most = vf_all(-1.0f), best = vf_all(0.0f);
    for (int64_t i = 0; i < a->group; i++) {
        const vf value = vf_load(x + i * LANES);
        top = vf_select(vf_magnitude(value) > vf_magnitude(top), value, top);
    }
    inverse = inverse_scale(top);
    for (int64_t i = 0; i < a->group; i++) vf_store(x + i * LANES, vf_load(x + i * LANES) * inverse);
    for (int64_t d = 0; d < a->candidates; d += SCALE_CANDIDATES) {
        vf along[SCALE_CANDIDATES] = {{0}}, length[SCALE_CANDIDATES] = {{0}}, steps[SCALE_CANDIDATES];
        for (int c = 0; c < SCALE_CANDIDATES; c++) steps[c] = vf_all(a->divisors[d + c < a->candidates ? d + c : d]);
        for (int64_t i = 0; i < a->group; i++) {
            const vf shape = vf_load(x + i * LANES);
#pragma GCC unroll 4
            for (int c = 0; c < SCALE_CANDIDATES; c++) {
                const vf code = nearest_code(shape * steps[c], -8, 7);
                along[c] += code * shape, length[c] += code * code;
            }
        }
        for (int c = 0; c < SCALE_CANDIDATES; c++) { /* beyond the last, the first again: no gain is larger */
            const vf scale = along[c] / vf_max(length[c], vf_all(LEAST_MAGNITUDE)), gain = along[c] * scale;
            best = vf_select(gain > most, scale, best);
            most = vf_max(gain, most);
        }
    }
    return best * top;
}

static void int4_scales(const void *arguments) {
    const int4_scales_arguments *a = arguments;
    float x[MOST_INT4_GROUP * LANES] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int64_t first = 0; first < a->groups; first += LANES) {
        const int64_t count = a->groups - first < LANES ? a->groups - first : LANES;
        const float *values = a->values + first * a->group;
        const int64_t whole = count == LANES ? a->group / 4 * 4 : 0;
        if (count < LANES) memset(x, 0, (size_t)(a->group * LANES) * 4);
        for (int64_t lane = 0; lane < LANES; lane += 4)
            for (int64_t i = 0; i < whole; i += 4)
                turn_four(values + lane * a->group + i, a->group * 4, 4, (uint32_t *)x + i * LANES + lane, LANES);
        for (int64_t lane = 0; lane < count; lane++)
            for (int64_t i = whole; i < a->group; i++) x[i * LANES + lane] = values[lane * a->group + i];
        vf_store_part(a->scales + first, best_scale(a, x), count);
    }
}

#define GPTQ_OUTPUTS 32 /* outputs at a time: with all inputs 64 KiB */

/* Inputs that absorb the errors of those before them together: their sums of 2 * LANES outputs fill the registers. */
#if LANES == 8
#define GPTQ_STEP 6
#elif LANES == 16 || defined(__aarch64__)
#define GPTQ_STEP 12
#else
#define GPTQ_STEP 4
#endif

/* What one thread works on; inputs are in the order of rounding, except in `codes`. */
typedef struct {
    float x[MOST_GPTQ_INPUTS * GPTQ_OUTPUTS]; /* [inputs, outputs]: weights, then errors over the root's diagonal */
    float scales[MOST_GPTQ_INPUTS * GPTQ_OUTPUTS], inverses[MOST_GPTQ_INPUTS * GPTQ_OUTPUTS]; /* [groups, outputs] */
    uint8_t codes[GPTQ_OUTPUTS * MOST_GPTQ_INPUTS];                                           /* [outputs, inputs] */
} gptq_tile;

/* Read `count` outputs from `first` on, with their scales; the others are zero. */
static void read_gptq_tile(const int4_gptq_arguments *a, int64_t first, int64_t count, gptq_tile *t) {
    int64_t rank[MOST_GPTQ_INPUTS];
    for (int64_t j = 0; j < a->inputs; j++) rank[a->order[j]] = j;
    if (count < GPTQ_OUTPUTS) memset(t, 0, sizeof *t);
    for (int64_t o = 0; o < count; o += 4) {
        const float *rows = a->weight + (first + o) * a->stride;
        const int64_t whole = o + 4 <= count ? a->inputs / 4 * 4 : 0, several = count - o < 4 ? count - o : 4;
        for (int64_t k = 0; k < whole; k += 4) {
            uint32_t four[16];
            turn_four(rows + k, a->stride * 4, 4, four, 4);
            for (int u = 0; u < 4; u++) memcpy(t->x + rank[k + u] * GPTQ_OUTPUTS + o, four + u * 4, 16);
        }
        for (int64_t k = whole; k < a->inputs; k++)
            for (int64_t r = 0; r < several; r++) t->x[rank[k] * GPTQ_OUTPUTS + o + r] = rows[r * a->stride + k];
    }
    for (int64_t g = 0; g < a->groups; g++) {
        for (int64_t o = 0; o < count; o++) t->scales[g * GPTQ_OUTPUTS + o] = a->scales[(first + o) * a->groups + g];
        for (int64_t o = g * GPTQ_OUTPUTS; o < (g + 1) * GPTQ_OUTPUTS; o += LANES) vf_store(t->inverses + o, inverse_scale(vf_load(t->scales + o)));
    }
}

/* Round input `j`, and let the inputs after it up to `end` absorb the errors. */
INLINE void round_input(const int4_gptq_arguments *a, int64_t j, int64_t end, gptq_tile *t) {
    const float *root = a->root + j * a->root_stride + j;
    const int64_t group = a->order[j] / a->group * GPTQ_OUTPUTS;
    float *own = t->x + j * GPTQ_OUTPUTS;
    int32_t codes[GPTQ_OUTPUTS];
    vf errors[GPTQ_OUTPUTS / LANES];
    for (int i = 0; i < GPTQ_OUTPUTS / LANES; i++) {
        const vf scale = vf_load(t->scales + group + i * LANES), value = vf_load(own + i * LANES);
        const vf code = nearest_code(value * vf_load(t->inverses + group + i * LANES), -8, 7);
        errors[i] = (value - code * scale) / *root;
        const vi above = __builtin_convertvector(code + 8.0f, vi);
        memcpy(codes + i * LANES, &above, sizeof above);
        vf_store(own + i * LANES, errors[i]);
    }
    for (int o = 0; o < GPTQ_OUTPUTS; o++) t->codes[o * MOST_GPTQ_INPUTS + a->order[j]] = (uint8_t)codes[o];
    for (int64_t k = j + 1; k < end; k++)
        for (int i = 0; i < GPTQ_OUTPUTS / LANES; i++) {
            float *later = t->x + k * GPTQ_OUTPUTS + i * LANES;
            vf_store(later, vf_load(later) - errors[i] * root[(k - j) * a->root_stride]);
        }
}

/* Let `count` inputs from `k` on absorb the errors of all inputs before `end`, for 2 * LANES outputs at `x`. */
INLINE void absorb_errors(const int4_gptq_arguments *a, int64_t end, int64_t k, const int count, float *x) {
    const float *root = a->root + k * a->root_stride;
    vf sums[GPTQ_STEP][2];
#pragma GCC unroll 12
    for (int q = 0; q < count; q++)
        for (int i = 0; i < 2; i++) sums[q][i] = vf_load(x + (k + q) * GPTQ_OUTPUTS + i * LANES);
    for (int64_t j = 0; j < end; j++) {
        const vf errors[2] = {vf_load(x + j * GPTQ_OUTPUTS), vf_load(x + j * GPTQ_OUTPUTS + LANES)};
#pragma GCC unroll 12
        for (int q = 0; q < count; q++)
            for (int i = 0; i < 2; i++) sums[q][i] -= errors[i] * root[q * a->root_stride + j];
    }
#pragma GCC unroll 12
    for (int q = 0; q < count; q++)
        for (int i = 0; i < 2; i++) vf_store(x + (k + q) * GPTQ_OUTPUTS + i * LANES, sums[q][i]);
}

/* Let the inputs [begin, end) absorb the errors of all before. Not inlined: constants of the caller would take registers. */
static __attribute__((noinline)) void absorb_all(const int4_gptq_arguments *a, int64_t begin, int64_t end, float *x) {
    if (end - begin == GPTQ_STEP) absorb_errors(a, begin, begin, GPTQ_STEP, x);
    else
        for (int64_t k = begin; k < end; k++) absorb_errors(a, begin, k, 1, x);
}

/* Lanes are outputs. The inputs are rounded one after the other; before some are rounded, they absorb all errors so far,
 * so that each sum is read and written once. */
static void int4_gptq(const void *arguments) {
    const int4_gptq_arguments *a = arguments;
    gptq_tile tile __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int64_t first = 0; first < a->outputs; first += GPTQ_OUTPUTS) {
        const int64_t count = a->outputs - first < GPTQ_OUTPUTS ? a->outputs - first : GPTQ_OUTPUTS;
        read_gptq_tile(a, first, count, &tile);
        for (int64_t begin = 0; begin < a->inputs; begin += GPTQ_STEP) {
            const int64_t end = begin + GPTQ_STEP < a->inputs ? begin + GPTQ_STEP : a->inputs;
            for (int64_t pair = 0; pair < GPTQ_OUTPUTS; pair += 2 * LANES) absorb_all(a, begin, end, tile.x + pair);
            for (int64_t j = begin; j < end; j++) round_input(a, j, end, &tile);
        }
        for (int64_t o = 0; o < count; o++)
            memcpy(a->codes + (first + o) * a->code_stride, tile.codes + o * MOST_GPTQ_INPUTS, (size_t)a->inputs);
    }
}

#endif
