/* Operations between the products of a layer, one row at a time: normalise, gather. They compute in fp32 and write
 * the form that the next product reads. A row's result does not depend on the number of rows. */
#ifndef ARMATURE_ROWWISE_H
#define ARMATURE_ROWWISE_H

#include "sink.h"

/* ---- normalise ---- */

/* A row: bf16 if `narrow` is given, else fp32. */
typedef struct {
    const float *wide;
    const uint16_t *narrow;
} norm_row;

INLINE vf norm_load(norm_row x, int64_t i, int64_t left) { return x.narrow ? bf16_load_part(x.narrow + i, left) : vf_load_part(x.wide + i, left); }

INLINE vf add_square(norm_row x, int64_t i, int64_t left, vf squares) {
    const vf value = norm_load(x, i, left);
    return squares + value * value;
}

/* 1 / rms(x). Four independent sums hide the latency of additions. */
INLINE float inverse_rms(norm_row x, int64_t size, double eps) {
    vf squares[4] = {vf_all(0), vf_all(0), vf_all(0), vf_all(0)};
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) squares[k] = add_square(x, i + k * LANES, LANES, squares[k]);
    for (; i < size; i += LANES) squares[0] = add_square(x, i, size - i, squares[0]);
    const float sum = vf_sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    return 1.0f / float_sqrt(sum / (float)size + (float)eps);
}

static void add_norms(const norm_arguments *a) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->rows; row++) {
        float *hidden = a->hidden + row * a->stride;
        const void *x = element_of(a->wide, a->branch, row * a->size);
        const float scale = inverse_rms(a->wide ? (norm_row){x, NULL} : (norm_row){NULL, x}, a->size, a->eps);
        for (int64_t i = 0; i < a->size; i += LANES) {
            const int64_t left = a->size - i;
            const vf normed = row_load_part(a->wide, x, i, left) * scale * vf_load_part(a->weight + i, left);
            vf_store_part(hidden + i, (vf_load_part(hidden + i, left) + normed) * (float)a->factor, left);
        }
    }
}

static void write_norms(const norm_arguments *a) {
    const int64_t parts = parts_of(&a->out, a->size);
    float values[MOST_GROUP] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->rows; row++) {
        const int64_t wide = a->hidden || a->wide;
        const void *x = element_of(wide, a->hidden ? a->hidden : a->branch, row * a->stride);
        const float scale = inverse_rms(wide ? (norm_row){x, NULL} : (norm_row){NULL, x}, a->size, a->eps);
        for (int64_t k = 0; k < parts; k++) {
            const part p = nth_part(&a->out, a->size, row * parts + k);
            const float *weight = a->weight + p.from;
            for (int64_t i = 0; i < p.count; i += LANES)
                vf_store(values + i, row_load_part(wide, x, p.from + i, p.count - i) * scale * vf_load_part(weight + i, p.count - i));
            emit(&a->out, a->rows, a->size, p, values);
        }
    }
}

static void norm(const void *arguments) {
    const norm_arguments *a = arguments;
    if (a->branch && a->hidden) add_norms(a);
    else write_norms(a);
}

/* ---- gather ---- */

static void gather(const void *arguments) {
    const gather_arguments *a = arguments;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->count; i++) memcpy(a->out + i * a->out_stride, a->x + (a->ids ? a->ids[i] : i) * a->stride, (size_t)a->size * sizeof *a->out);
}

#endif
