/* Tests of the operations between products: norm, gate and gather, whose rows are written as bf16 or into tiles; and
 * of the start of a step. */
#include "activations.h"

static const int64_t SIZES[] = {576, 896, 1, 33, 64, 1500}, GROUPS[] = {32, 64, 128};

static activations some_rows(int64_t i) {
    const int64_t group = GROUPS[below(3)];
    return (activations){.rows = between(1, 20), .size = SIZES[i % 6], .group = group, .shared = any_shared(group)};
}

int64_t norms(void) {
    for (int64_t i = 0; i < 18; i++) {
        activations a = some_rows(i);
        const sink out = new_sink(&a, i / 2 % 4);
        const int64_t stride = a.size + below(3), count = (a.rows - 1) * stride + a.size, wide = i % 4 == 3;
        float *hidden = room(count * 4), *weight = room(a.size * 4);
        void *branch = i % 2 ? room(a.rows * a.size * (wide ? 4 : 2)) : NULL;
        double *expected = room(a.rows * a.size * 8);
        const double factor = i % 3 ? 1.0 : 0.625;
        for (int64_t at = 0; at < count; at++) hidden[at] = 4 * number();
        for (int64_t at = 0; at < a.size; at++) weight[at] = number();
        for (int64_t at = 0; branch && at < a.rows * a.size; at++) set_element(branch, wide, at, number());
        if (i % 5 == 4) hidden[below(a.rows) * stride] = NAN;
        float *sums = memcpy(room(count * 4), hidden, (size_t)count * 4);
        for (int64_t row = 0; row < a.rows; row++) {
            double squares = 0;
            for (int64_t k = 0; k < a.size; k++) {
                const double x = branch ? get_element(branch, wide, row * a.size + k) : hidden[row * stride + k];
                expected[row * a.size + k] = x, squares += x * x;
            }
            for (int64_t k = 0; k < a.size; k++) {
                double *x = expected + row * a.size + k;
                *x *= weight[k] / sqrt(squares / (double)a.size + 1e-5);
                if (branch) *x = (*x + hidden[row * stride + k]) * factor, sums[row * stride + k] = (float)*x;
            }
        }
        const norm_arguments arguments = {hidden, branch, weight, stride, a.rows, a.size, wide, 1e-5, out, factor};
        run(OP_NORM, &arguments);
        for (int64_t at = 0; at < count; at++)
            if (branch ? !close_to(hidden[at], sums[at], fabs(sums[at]) * 1e-5 + 1e-5) : !same(hidden[at], sums[at]))
                failed("hidden %d is %g for %g", (int)at, hidden[at], sums[at]);
        if (!branch) check_sink(&a, expected);
        free(hidden), free(weight), free(branch), free(expected), free(sums), free_activations(&a);
    }
    return 18;
}

int64_t layer_norms(void) {
    for (int64_t i = 0; i < 18; i++) {
        activations a = some_rows(i);
        const sink out = new_sink(&a, i % 4);
        const int64_t stride = a.size + below(3), count = (a.rows - 1) * stride + a.size, in_place = i % 2;
        float *hidden = room(count * 4), *weight = room(a.size * 4), *bias = i % 4 ? room(a.size * 4) : NULL;
        double *expected = room(a.rows * a.size * 8);
        for (int64_t at = 0; at < count; at++) hidden[at] = 4 * number() + 1;
        for (int64_t at = 0; at < a.size; at++) weight[at] = number();
        for (int64_t at = 0; bias && at < a.size; at++) bias[at] = number();
        if (i % 5 == 4) hidden[below(a.rows) * stride] = NAN;
        float *before = memcpy(room(count * 4), hidden, (size_t)count * 4);
        for (int64_t row = 0; row < a.rows; row++) {
            const float *x = hidden + row * stride;
            double mean = 0, squares = 0;
            for (int64_t k = 0; k < a.size; k++) mean += x[k] / (double)a.size;
            for (int64_t k = 0; k < a.size; k++) squares += (x[k] - mean) * (x[k] - mean);
            for (int64_t k = 0; k < a.size; k++) expected[row * a.size + k] = (x[k] - mean) / sqrt(squares / (double)a.size + 1e-3) * weight[k] + (bias ? bias[k] : 0);
        }
        const layer_norm_arguments arguments = {hidden, weight, bias, stride, a.rows, a.size, in_place, 1e-3, out};
        run(OP_LAYER_NORM, &arguments);
        for (int64_t at = 0; at < count; at++) {
            const int64_t row = at / stride, k = at % stride;
            if (in_place && k < a.size ? !close_to(hidden[at], expected[row * a.size + k], 2e-5) : !same(hidden[at], before[at]))
                failed("hidden %d is %g", (int)at, hidden[at]);
        }
        check_sink(&a, expected);
        free(hidden), free(weight), free(bias), free(expected), free(before), free_activations(&a);
    }
    return 18;
}

#define POSITIVE 0.75 /* factors of XIELU */
#define NEGATIVE 0.25

static double gated(int64_t activation, double x) {
    if (activation == GELU_ERF) return x / 2 * erfc(x * -0.7071067811865476); /* 1 + erf would lose all precision where erf is near -1 */
    if (activation == RELU) return x < 0 ? 0 : x;
    if (activation == TANH) return tanh(x);
    if (activation == RELU_SQUARED) return x < 0 ? 0 : x * x;
    if (activation == XIELU) return (x > 0 ? POSITIVE * x * x : NEGATIVE * (expm1(x) - x)) + x / 2;
    return x / (1 + exp(activation == SILU ? -x : -1.5957691216057308 * (x + 0.044715 * x * x * x)));
}

int64_t activated_rows(void) {
    for (int64_t i = 0; i < 20; i++) {
        activations a = some_rows(i);
        const sink out = new_sink(&a, i % 4);
        const int64_t stride = a.size + below(3), count = (a.rows - 1) * stride + a.size, activation = SILU + i % 7, wide = i / 2 % 2;
        void *x = room(count * (wide ? 4 : 2));
        double *expected = room(a.rows * a.size * 8);
        for (int64_t at = 0; at < count; at++) set_element(x, wide, at, (below(20) ? 5 : 90) * number());
        if (i % 5 == 4) set_element(x, wide, below(a.rows) * stride, NAN);
        for (int64_t at = 0; at < a.rows * a.size; at++) expected[at] = gated(activation, get_element(x, wide, at / a.size * stride + at % a.size));
        const activate_arguments arguments = {x, stride, a.rows, a.size, activation, wide, POSITIVE, NEGATIVE, out};
        run(OP_ACTIVATE, &arguments);
        check_sink(&a, expected);
        free(x), free(expected), free_activations(&a);
    }
    return 20;
}

static double expected_gate(int64_t kind, double gate, double up) {
    if (kind != SWIGLU_OAI) return gated(kind, gate) * up;
    const double x = gate > 7 ? 7 : gate; /* NaN stays */
    return x / (1 + exp(-(double)1.702f * x)) * ((up > 7 ? 7 : up < -7 ? -7 : up) + 1);
}

#define DEVIATIONS 0.75

/* The mean of a row's gates plus DEVIATIONS times their standard deviation. */
static double cutoff_of(const void *gates, int64_t wide, int64_t first, int64_t size) {
    double mean = 0, squares = 0;
    for (int64_t k = 0; k < size; k++) mean += get_element(gates, wide, first + k) / (double)size;
    for (int64_t k = 0; k < size; k++) squares += pow(get_element(gates, wide, first + k) - mean, 2);
    return mean + DEVIATIONS * sqrt(squares / (double)size);
}

/* Every third time gates are lowered; every fourth time `up` is apart. */
int64_t gates(void) {
    for (int64_t i = 0; i < 36; i++) {
        activations a = some_rows(i);
        const sink out = new_sink(&a, i % 4);
        const int64_t wide = i / 2 % 2, lowered = i % 3 == 1, apart = i / 3 % 4 == 1, kind = i % 4 == 3 && !lowered ? SWIGLU_OAI : SILU + i % 3;
        const int64_t halves = apart ? 1 : 2, stride = a.size + below(3);
        void *gate_up = room(a.rows * halves * a.size * (wide ? 4 : 2));
        double *expected = room(a.rows * a.size * 8);
        float *up = apart ? room(((a.rows - 1) * stride + a.size) * 4) : NULL, *cutoffs = lowered ? room(a.rows * 4) : NULL;
        for (int64_t at = 0; at < a.rows * halves * a.size; at++) set_element(gate_up, wide, at, (below(20) || lowered ? 5 : 90) * number());
        for (int64_t at = 0; up && at < (a.rows - 1) * stride + a.size; at++) up[at] = number();
        if (i % 5 == 4) set_element(gate_up, wide, below(a.rows) * halves * a.size, NAN);
        for (int64_t at = 0; at < a.rows * a.size; at++) {
            const int64_t row = at / a.size, first = row * halves * a.size, k = at % a.size;
            const double rest = get_element(gate_up, wide, first + k) - (lowered ? cutoff_of(gate_up, wide, first, a.size) : 0);
            expected[at] = expected_gate(kind, lowered && rest < 0 ? 0 : rest, apart ? up[row * stride + k] : get_element(gate_up, wide, first + a.size + k));
        }
        const gate_arguments arguments = {gate_up, a.rows, a.size, kind, wide, out, up, cutoffs, stride, DEVIATIONS};
        run(OP_GATE, &arguments);
        check_sink(&a, expected);
        free(gate_up), free(expected), free(up), free(cutoffs), free_activations(&a);
    }
    return 36;
}

int64_t gathers(void) {
    for (int64_t i = 0; i < 6; i++) {
        const int64_t size = SIZES[i], rows = between(1, 20), count = below(10), stride = size + below(3), values = (rows - 1) * stride + size;
        const int64_t apart = size + (i % 2 ? 3 : 0);
        float *x = room(values * 4), *out = room(count * apart * 4);
        int64_t *ids = room(count * 8);
        for (int64_t at = 0; at < values; at++) x[at] = number();
        for (int64_t n = 0; n < count; n++) ids[n] = n ? below(rows) : rows - 1;
        for (int64_t at = 0; at < count * apart; at++) out[at] = 9;
        const gather_arguments arguments = {x, ids, out, stride, count, size, apart};
        run(OP_GATHER, &arguments);
        for (int64_t n = 0; n < count; n++) {
            if (memcmp(out + n * apart, x + ids[n] * stride, (size_t)size * 4) != 0) failed("row %d is not row %d", (int)n, (int)ids[n]);
            for (int64_t k = size; k < apart; k++)
                if (out[n * apart + k] != 9) failed("a word after row %d was written", (int)n);
        }
        free(x), free(out), free(ids);
    }
    return 6;
}

/* Texts of which some have no row, or none that counts; every fourth time rows of unit length alone. */
int64_t pools(void) {
    for (int64_t i = 0; i < 24; i++) {
        const int64_t size = SIZES[i % 6], texts = 1 + below(5), alone = i % 4 == 3, mean = i % 2, unit = i % 3 == 0 || alone;
        int64_t *starts = room((texts + 1) * 8), *skipped = i % 5 == 4 ? room(texts * 8) : NULL;
        starts[0] = 0;
        for (int64_t t = 0; t < texts; t++) {
            const int64_t length = alone ? 1 : below(40);
            starts[t + 1] = starts[t] + length;
            if (skipped) skipped[t] = alone ? 0 : below(length + 1);
        }
        const int64_t rows = starts[texts], stride = size + below(3), values = rows ? (rows - 1) * stride + size : 0;
        float *x = room(values * 4), *out = room(texts * size * 4);
        for (int64_t at = 0; at < values; at++) x[at] = number();
        const pool_arguments a = {x, alone ? NULL : starts, alone ? NULL : skipped, out, texts, stride, size, mean, unit};
        run(OP_POOL, &a);
        for (int64_t t = 0; t < texts; t++) {
            const int64_t from = starts[t] + (skipped ? skipped[t] : 0), end = starts[t + 1];
            double *sums = room(size * 8), squares = 0;
            for (int64_t k = 0; k < size; k++) {
                sums[k] = 0;
                for (int64_t row = from; row < end; row++) sums[k] += x[row * stride + k];
                if (mean && end > from) sums[k] /= (double)(end - from);
                squares += sums[k] * sums[k];
            }
            for (int64_t k = 0; k < size; k++)
                if (!close_to(out[t * size + k], unit && squares > 0 ? sums[k] / sqrt(squares) : sums[k], 2e-5)) failed("text %d: %g", (int)t, out[t * size + k]);
            free(sums);
        }
        free(starts), free(skipped), free(x), free(out);
    }
    return 24;
}

/* Halves with distinct bits: 1.5, -2^-14 (the smallest normal), 2^-24 (the smallest), 65504, -0. */
static const struct {
    uint16_t bits;
    float number;
} HALVES[] = {{0x3e00, 1.5f}, {0x8400, -0x1p-14f}, {0x0001, 0x1p-24f}, {0x7bff, 65504.0f}, {0x8000, -0.0f}};

static const int64_t STORED[] = {FORM_STORED_BF16, FORM_STORED_FP16, FORM_STORED_FP32};

int64_t stored_rows(void) {
    for (int64_t i = 0; i < 18; i++) {
        const int64_t inputs = SIZES[i % 6], outputs = between(1, 40), count = between(1, 9), form = STORED[i / 6], bytes = form == FORM_STORED_FP32 ? 4 : 2;
        float *numbers = room(outputs * inputs * 4), *out = room(count * inputs * 4), *factors = i % 2 ? room(inputs * 4) : NULL;
        uint8_t *table = room(outputs * inputs * bytes);
        int64_t *ids = room(count * 8);
        for (int64_t at = 0; at < outputs * inputs; at++) {
            const int64_t k = below(5);
            const uint16_t half = form == FORM_STORED_FP16 ? HALVES[k].bits : bf16_of_float(number());
            numbers[at] = form == FORM_STORED_FP32 ? number() : form == FORM_STORED_FP16 ? HALVES[k].number : float_of_bf16(half);
            memcpy(table + at * bytes, form == FORM_STORED_FP32 ? (const void *)(numbers + at) : &half, (size_t)bytes);
        }
        for (int64_t k = 0; factors && k < inputs; k++) factors[k] = number();
        for (int64_t n = 0; n < count; n++) ids[n] = n == 1 ? outputs : n == 2 ? -1 : n ? below(outputs) : outputs - 1;
        const rows_arguments arguments = {table, ids, factors, out, count, outputs, inputs, 0, 0, form, 0, i % 4 == 3, 4.0, i % 3 == 2};
        for (int64_t at = 0; at < count * inputs; at++) out[at] = -0.0f; /* changes nothing, not even -0 */
        run(OP_ROWS, &arguments);
        for (int64_t at = 0; at < count * inputs; at++) {
            const int64_t stored = ids[at / inputs], k = at % inputs, id = i % 3 == 2 && (stored < 0 || stored >= outputs) ? 0 : stored;
            const float expected = id < 0 || id >= outputs ? NAN : numbers[id * inputs + k] * (factors ? factors[k] : 1.0f) * 4.0f;
            if (!same(out[at], expected)) failed("row %d, input %d: %g for %g", (int)id, (int)k, out[at], expected);
        }
        free(numbers), free(out), free(factors), free(table), free(ids);
    }
    return 18;
}

int64_t turning_angles(void) {
    static const int64_t HALVES_OF_HEADS[] = {32, 64, 1, 13, 4, 40};
    for (int64_t i = 0; i < 6; i++) {
        const int64_t half = HALVES_OF_HEADS[i], count = between(1, 9);
        float *frequencies = room(half * 4), *cosine = room(count * half * 8), *sine = room(count * half * 8);
        int64_t *positions = room(count * 8);
        for (int64_t k = 0; k < half; k++) frequencies[k] = (float)pow(5e5, -(double)k / (double)half);
        for (int64_t n = 0; n < count; n++) positions[n] = n ? below(1 << (2 * n + 2)) : 0;
        const angles_arguments arguments = {positions, frequencies, cosine, sine, count, half, i % 2 ? 1.25 : 1.0};
        run(OP_ANGLES, &arguments);
        for (int64_t at = 0; at < count * 2 * half; at++) {
            const float angle = (float)positions[at / (2 * half)] * frequencies[at % half];
            const double sign = at % (2 * half) < half ? -1 : 1, scale = arguments.scale;
            if (!close_to(cosine[at], scale * cos(angle), 1.5e-7) || !close_to(sine[at], sign * scale * sin(angle), 1.5e-7))
                failed("an angle of %g: %g, %g", angle, cosine[at], sine[at]);
        }
        free(frequencies), free(cosine), free(sine), free(positions);
    }
    return 6;
}
