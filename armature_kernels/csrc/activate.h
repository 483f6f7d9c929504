/* Activations: applied to the sums of a product, to rows that a product has written, and to gates. */
#ifndef ARMATURE_ACTIVATE_H
#define ARMATURE_ACTIVATE_H

#include "sink.h"

INLINE vf relu(vf x) { return vf_select(x < 0.0f, vf_all(0), x); } /* NaN stays */

INLINE vf silu(vf x) { return x / (1.0f + vf_exp(-x)); }

/* Hendrycks and Gimpel, arXiv 1606.08415, the tanh form: x / 2 (1 + tanh u) is x / (1 + e^-2u), which loses no
 * precision where tanh u is near -1. */
INLINE vf gelu_tanh(vf x) { return x / (1.0f + vf_exp(-1.5957691216057308f * (x + 0.044715f * (x * x * x)))); }

/* x times the share of a normal distribution below x. The logarithm of that share is nearly a parabola: a polynomial
 * of degree 7 (fitted for the smallest maximum error on |x| <= 7.25) has an error of 1.3e-5 and falls as it should
 * beyond. It avoids the division of the usual forms of erfc. */
INLINE vf gelu_erf(vf x) {
    const vf size = (vf)((vi)x & 0x7fffffff);
    vf y = size * -1.5047166925796773e-06f + 5.42067973583471e-05f;
    y = y * size + -0.0008654491975903511f;
    y = y * size + 0.008223076350986958f;
    y = y * size + -0.053316228091716766f;
    y = y * size + -0.45916762948036194f;
    y = y * size + -1.1509519815444946f;
    y = y * size + -1.0000193119049072f;
    const vf below = vf_exp2(y); /* the share below -|x| */
    return x * (vf)(((vi)below & ((vi)x >> 31)) | ((vi)(1.0f - below) & ~((vi)x >> 31)));
}

/* For small x, 1 - 2 / (e^2x + 1) loses all precision to cancellation: use the series there. */
INLINE vf tanh_of(vf x) {
    const vf square = x * x;
    vf y = square * (-17.0f / 315) + 2.0f / 15;
    y = y * square + -1.0f / 3;
    return vf_select((vf)((vi)x & 0x7fffffff) < 0.25f, x + x * square * y, vf_tanh(x));
}

INLINE vf relu_squared(vf x) {
    const vf above = relu(x);
    return above * above;
}

/* arXiv 2411.13010: positive x² + x / 2 above 0, negative (e^x - 1 - x) + x / 2 below. Near 0 the terms of the exponential
 * cancel: use its series there. */
INLINE vf xielu(vf x, float positive, float negative) {
    const vf below = vf_min(x, vf_all(0));
    vf y = below * (1.0f / 720) + 1.0f / 120;
    y = y * below + 1.0f / 24;
    y = y * below + 1.0f / 6;
    y = y * below + 0.5f;
    const vf curve = vf_select(below > -0.25f, y * below * below, vf_exp(below) - 1.0f - below);
    return vf_select(x > 0.0f, positive * (x * x), negative * curve) + 0.5f * x;
}

/* `activation` is a compile-time constant at every call. */
INLINE vf activated(int activation, vf x) {
    switch (activation) {
        case SILU: return silu(x);
        case GELU_TANH: return gelu_tanh(x);
        case GELU_ERF: return gelu_erf(x);
        case RELU: return relu(x);
        case TANH: return tanh_of(x);
        case RELU_SQUARED: return relu_squared(x);
        default: return x;
    }
}

#define FOR_ACTIVATION(WHICH, CALL)               \
    switch (WHICH) {                              \
        case SILU: CALL(SILU); break;             \
        case GELU_TANH: CALL(GELU_TANH); break;   \
        case GELU_ERF: CALL(GELU_ERF); break;     \
        case RELU: CALL(RELU); break;             \
        case TANH: CALL(TANH); break;             \
        case RELU_SQUARED: CALL(RELU_SQUARED); break; \
        default: CALL(IDENTITY); break;           \
    }

INLINE void activate_values(int activation, int64_t wide, const void *x, int64_t count, float *values) {
    for (int64_t i = 0; i < count; i += LANES) vf_store(values + i, activated(activation, row_load_part(wide, x, i, count - i)));
}

INLINE void xielu_values(const activate_arguments *a, const void *x, int64_t count, float *values) {
    for (int64_t i = 0; i < count; i += LANES)
        vf_store(values + i, xielu(row_load_part(a->wide, x, i, count - i), (float)a->positive, (float)a->negative));
}

static void activate(const void *arguments) {
    const activate_arguments *a = arguments;
    float values[MOST_GROUP] __attribute__((aligned(64)));
#pragma omp for schedule(static)
    for (int64_t index = 0; index < a->rows * parts_of(&a->out, a->size); index++) {
        const part p = nth_part(&a->out, a->size, index);
        const void *x = element_of(a->wide, a->x, p.row * a->stride + p.from);
#define ACTIVATE(WHICH) activate_values(WHICH, a->wide, x, p.count, values)
        if (a->activation == XIELU) xielu_values(a, x, p.count, values);
        else FOR_ACTIVATION(a->activation, ACTIVATE)
        emit(&a->out, a->rows, a->size, p, values);
    }
}

#define SWIGLU_ALPHA 1.702f
#define SWIGLU_LIMIT 7.0f

/* gpt-oss: x sigmoid(alpha x) (up + 1) with x = gate at most the limit, and up within the limit on both sides. NaN stays. */
INLINE vf swiglu_oai(vf gate, vf up) {
    const vf x = vf_min(vf_all(SWIGLU_LIMIT), gate), bounded = vf_max(vf_all(-SWIGLU_LIMIT), vf_min(vf_all(SWIGLU_LIMIT), up));
    return x / (1.0f + vf_exp(x * -SWIGLU_ALPHA)) * (bounded + 1.0f);
}

INLINE vf gated(int activation, vf gate, vf up) { return activation == SWIGLU_OAI ? swiglu_oai(gate, up) : activated(activation, gate) * up; }

#define FOR_GATE(WHICH, CALL)                       \
    if ((WHICH) == SWIGLU_OAI) { CALL(SWIGLU_OAI); } \
    else FOR_ACTIVATION(WHICH, CALL)

/* Gates and their factors, bf16 or, if `wide`, fp32. */
typedef struct {
    const void *gate, *up;
    int64_t wide, wide_up;
} gate_pair;

/* Write `count` values of act(gate) * up; `values` may be the gates. */
INLINE void gate_values(int activation, gate_pair x, int64_t count, float *values) {
    for (int64_t i = 0; i < count; i += LANES)
        vf_store(values + i, gated(activation, row_load_part(x.wide, x.gate, i, count - i), row_load_part(x.wide_up, x.up, i, count - i)));
}

/* Two passes: the difference of two large sums would lose the deviation. */
INLINE float row_cutoff(int64_t wide, const void *x, int64_t size, double deviations) {
    vf sum = vf_all(0), squares = vf_all(0);
    for (int64_t i = 0; i < size; i += LANES) sum += row_load_part(wide, x, i, size - i);
    const float mean = vf_sum(sum) / (float)size;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vf rest = row_load_part(wide, x, i, LANES) - mean;
        squares += rest * rest;
    }
    float all = vf_sum(squares);
    float tail[LANES];
    vf_store(tail, row_load_part(wide, x, i, size - i) - mean);
    for (int64_t k = 0; k < size - i; k++) all += tail[k] * tail[k];
    return mean + (float)deviations * float_sqrt(all / (float)size);
}

/* The first half of each row of gates, or the whole row. */
INLINE void row_cutoffs(const gate_arguments *a) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->rows; row++)
        a->cutoffs[row] = row_cutoff(a->wide, element_of(a->wide, a->gate_up, row * (a->up ? 1 : 2) * a->size), a->size, a->deviations);
}

INLINE void lower_gates(int64_t wide, const void *gate, float cutoff, int64_t count, float *values) {
    for (int64_t i = 0; i < count; i += LANES) vf_store(values + i, relu(row_load_part(wide, gate, i, count - i) - cutoff));
}

static void gate(const void *arguments) {
    const gate_arguments *a = arguments;
    float values[MOST_GROUP] __attribute__((aligned(64)));
    if (a->cutoffs) row_cutoffs(a);
#pragma omp for schedule(static)
    for (int64_t index = 0; index < a->rows * parts_of(&a->out, a->size); index++) {
        const part p = nth_part(&a->out, a->size, index);
        gate_pair x = {element_of(a->wide, a->gate_up, p.row * (a->up ? 1 : 2) * a->size + p.from), NULL, a->wide, a->wide};
        if (a->up) x.up = a->up + p.row * a->up_stride + p.from, x.wide_up = 1;
        else x.up = element_of(a->wide, x.gate, a->size);
        if (a->cutoffs) {
            lower_gates(a->wide, x.gate, a->cutoffs[p.row], p.count, values);
            x.gate = values, x.wide = 1;
        }
#define GATE_WITH(WHICH) gate_values(WHICH, x, p.count, values)
        FOR_GATE(a->activation, GATE_WITH)
        emit(&a->out, a->rows, a->size, p, values);
    }
}

#endif
