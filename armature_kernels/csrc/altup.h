/* Several hidden states for each token (AltUp): how a layer's weights mix them, and how they get the magnitude of one of
 * them. fp32 throughout. A row's result does not depend on the number of rows. */
#ifndef ARMATURE_ALTUP_H
#define ARMATURE_ALTUP_H

#include "activate.h"
#include "rowwise.h"

/* `count` sums over j of weights[n, j] * tanh(logits[j]) of a row. */
INLINE void mix_factors(const altup_arguments *a, int64_t row, int64_t count, float *factors) {
    float m[MOST_STREAMS + LANES];
    for (int64_t i = 0; i < a->streams; i += LANES) vf_store(m + i, tanh_of(vf_load_part(a->logits + row * a->streams + i, a->streams - i)));
    for (int64_t n = 0; n < count; n++) {
        factors[n] = 0;
        for (int64_t j = 0; j < a->streams; j++) factors[n] += a->weights[n * a->streams + j] * m[j];
    }
}

static void predict_streams(const altup_arguments *a) {
    const int64_t parts = quotient(a->size + PART - 1, PART);
#pragma omp for schedule(static)
    for (int64_t index = 0; index < a->rows * parts; index++) {
        const int64_t row = quotient(index, parts), from = (index - row * parts) * PART, end = from + PART < a->size ? from + PART : a->size;
        float c[MOST_STREAMS * MOST_STREAMS], *x = a->x + row * a->stride;
        mix_factors(a, row, a->streams * a->streams, c);
        for (int64_t i = from; i < end; i += LANES) {
            vf old[MOST_STREAMS];
            for (int64_t k = 0; k < a->streams; k++) old[k] = vf_load_part(x + k * a->size + i, end - i);
            for (int64_t k = 0; k < a->streams; k++) {
                vf sum = old[k];
                for (int64_t j = 0; j < a->streams; j++) sum += c[k * a->streams + j] * old[j];
                vf_store_part(x + k * a->size + i, sum, end - i);
            }
        }
    }
}

static void correct_streams(const altup_arguments *a) {
    const float scale = (float)a->scale;
    float values[MOST_GROUP] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int64_t index = 0; index < a->rows * parts_of(&a->out, a->size); index++) {
        const part p = nth_part(&a->out, a->size, index);
        const float *activated = a->activated + p.row * a->size + p.from, *factors = a->factors + p.from;
        float c[MOST_STREAMS], *x = a->x + p.row * a->stride + p.from;
        mix_factors(a, p.row, a->streams, c);
        for (int64_t i = 0; i < p.count; i += LANES) {
            const int64_t left = p.count - i;
            const vf change = scale * vf_load_part(activated + i, left) - vf_load_part(x + i, left);
            for (int64_t k = 0; k < a->streams; k++) vf_store_part(x + k * a->size + i, vf_load_part(x + k * a->size + i, left) + (1.0f + c[k]) * change, left);
            vf_store(values + i, vf_load_part(x + i, left) * vf_load_part(factors + i, left));
        }
        emit(&a->out, a->rows, a->size, p, values);
    }
}

static void altup(const void *arguments) {
    const altup_arguments *a = arguments;
    if (a->activated) correct_streams(a);
    else predict_streams(a);
}

static void match(const void *arguments) {
    const match_arguments *a = arguments;
    const float most = 1.0f / float_sqrt((float)a->floor);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->rows; row++) {
        const void *x = element_of(a->wide, a->x, row * a->stride);
        float *out = a->out + row * a->out_stride;
        const float own = inverse_rms(a->wide ? (norm_row){x, NULL} : (norm_row){NULL, x}, a->size, 0);
        const float scale = (own < most ? own : most) / inverse_rms((norm_row){a->like + row * a->like_stride, NULL}, a->size, 0);
        for (int64_t i = 0; i < a->size; i += LANES) {
            const int64_t left = a->size - i;
            const vf value = row_load_part(a->wide, x, i, left) * scale;
            vf_store_part(out + i, a->add ? vf_load_part(out + i, left) + value : value, left);
        }
    }
}

#endif
