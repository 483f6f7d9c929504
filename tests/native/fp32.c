/* Tests of products in fp32, of fp32 weights and of bf16 weights that are widened, of rows of their packed weights, and
 * of the top elements of rows. */
#include "proof.h"

void armature_pack_bf16(const uint16_t *weights, uint16_t *panels, int64_t outputs, int64_t inputs, int64_t first_output);
void armature_pack_fp32(const float *weights, float *panels, int64_t outputs, int64_t inputs, int64_t first_output);

static const int64_t INPUTS[] = {64, 1, 33, 576, 7, 130, 800};

/* Numbers that bf16 has too, so that the same are weights of both kinds. */
static float *numbers(int64_t count) {
    float *x = room(count * 4);
    for (int64_t i = 0; i < count; i++) x[i] = float_of_bf16(bf16_of_float(number()));
    return x;
}

static void *rows_of(const float *x, int64_t wide, int64_t count) {
    void *rows = room(count * (wide ? 4 : 2));
    for (int64_t i = 0; i < count; i++) set_element(rows, wide, i, x[i]);
    return rows;
}

/* In two parts, as a fused weight is. */
static uint8_t *packed(const float *weights, int64_t wide, int64_t outputs, int64_t inputs) {
    const int64_t padded = wide ? inputs : (inputs + 1) / 2 * 2, bytes = (outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS * padded * PANEL_OUTPUTS * (wide ? 4 : 2);
    const int64_t first = below(outputs);
    uint8_t *panels = memset(room(bytes), 0, (size_t)bytes), *rows = rows_of(weights, wide, outputs * inputs);
    if (wide) {
        armature_pack_fp32((const float *)rows, (float *)panels, first, inputs, 0);
        armature_pack_fp32((const float *)rows + first * inputs, (float *)panels, outputs - first, inputs, first);
    } else {
        armature_pack_bf16((const uint16_t *)rows, (uint16_t *)panels, first, inputs, 0);
        armature_pack_bf16((const uint16_t *)rows + first * inputs, (uint16_t *)panels, outputs - first, inputs, first);
    }
    free(rows);
    return panels;
}

static void check_product(const linear_fp32_arguments *a, const float *weights, const void *before) {
    const int64_t wide = a->output != OUTPUT_BF16;
    for (int64_t at = 0; at < (a->rows - 1) * a->y_stride + a->outputs; at++) {
        const int64_t row = at / a->y_stride, output = at % a->y_stride;
        const float found = get_element(a->y, wide, at);
        if (output >= a->outputs) {
            if (!same(found, get_element(before, wide, at))) failed("an element between two rows was written");
            continue;
        }
        double expected = a->bias ? a->bias[output] : 0, size = 1;
        for (int64_t k = 0; k < a->inputs; k++) {
            const double product = (double)get_element(a->x, !a->narrow_x, row * a->x_stride + k) * weights[output * a->inputs + k];
            expected += product, size += fabs(product);
        }
        if (a->output == OUTPUT_ADD_FP32) expected += get_element(before, 1, at);
        if (!close_to(found, expected, 1e-5 * size + (wide ? 0 : fabs(expected) / 200)))
            failed("row %d of %d, output %d of %d, %d inputs: %g for %g", (int)row, (int)a->rows, (int)output, (int)a->outputs, (int)a->inputs, found, expected);
    }
}

int64_t fp32_products(void) {
    for (int64_t i = 0; i < 28; i++) {
        const int64_t inputs = INPUTS[i % 7], rows = i % 4 == 3 ? 1 : i == 6 ? 300 : between(2, 40), outputs = between(1, 100), x_stride = inputs + below(3), y_stride = outputs + below(3);
        const int64_t narrow_x = i & 1, narrow_panels = i >> 1 & 1, output = i % 3, bytes = output == OUTPUT_BF16 ? 2 : 4, count = (rows - 1) * y_stride + outputs;
        float *given = numbers((rows - 1) * x_stride + inputs), *weights = numbers(outputs * inputs), *bias = i % 5 ? numbers(outputs) : NULL;
        void *x = rows_of(given, !narrow_x, (rows - 1) * x_stride + inputs);
        uint8_t *panels = packed(weights, !narrow_panels, outputs, inputs), *y = room(count * bytes);
        for (int64_t at = 0; output == OUTPUT_ADD_FP32 && at < count; at++) ((float *)y)[at] = number();
        float *tiles = room(rows * ((inputs + 1) / 2 * 2) * 4);
        void *before = memcpy(room(count * bytes), y, (size_t)(count * bytes));
        const linear_fp32_arguments a = {x, panels, bias, tiles, y, x_stride, y_stride, rows, inputs, outputs, output, IDENTITY, narrow_x, narrow_panels};
        run(OP_LINEAR_FP32, &a);
        check_product(&a, weights, before);
        free(given), free(x), free(weights), free(panels), free(y), free(tiles), free(bias), free(before);
    }
    return 28;
}

int64_t fp32_rows_alone(void) {
    for (int64_t i = 0; i < 14; i++) {
        const int64_t inputs = INPUTS[i % 7], rows = between(2, 40), outputs = between(1, 100), narrow = i / 7;
        float *given = numbers(rows * inputs), *weights = numbers(outputs * inputs), *together = room(rows * outputs * 4), *alone = room(outputs * 4);
        void *x = rows_of(given, !narrow, rows * inputs);
        uint8_t *panels = packed(weights, !narrow, outputs, inputs);
        float *tiles = room(rows * ((inputs + 1) / 2 * 2) * 4);
        linear_fp32_arguments a = {x, panels, NULL, tiles, together, inputs, outputs, rows, inputs, outputs, OUTPUT_FP32, GELU_ERF, narrow, narrow};
        run(OP_LINEAR_FP32, &a);
        for (int64_t row = 0; row < rows; row++) {
            a.x = (const char *)x + row * inputs * (narrow ? 2 : 4), a.rows = 1, a.y = alone;
            run(OP_LINEAR_FP32, &a);
            if (memcmp(alone, together + row * outputs, (size_t)outputs * 4) != 0) failed("row %d of %d differs alone, of %d inputs", (int)row, (int)rows, (int)inputs);
        }
        free(given), free(x), free(weights), free(panels), free(tiles), free(together), free(alone);
    }
    return 14;
}

int64_t fp32_rows(void) {
    for (int64_t i = 0; i < 7; i++) {
        const int64_t inputs = INPUTS[i], outputs = between(1, 100), count = between(1, 9);
        float *weights = numbers(outputs * inputs), *out = room(count * inputs * 4);
        uint8_t *panels = packed(weights, 1, outputs, inputs);
        int64_t *ids = room(count * 8);
        for (int64_t n = 0; n < count; n++) ids[n] = n ? below(outputs) : outputs - 1;
        const rows_arguments a = {panels, ids, NULL, out, count, outputs, inputs, inputs, 0, FORM_FP32_PANELS, 0, 0, 2.0};
        run(OP_ROWS, &a);
        for (int64_t at = 0; at < count * inputs; at++)
            if (out[at] != 2 * weights[ids[at / inputs] * inputs + at % inputs]) failed("row %d, input %d", (int)ids[at / inputs], (int)(at % inputs));
        free(weights), free(panels), free(out), free(ids);
    }
    return 7;
}

/* Without a cap: the best by value, then by id, bit for bit. */
static void check_top(const top_arguments *a, int64_t row) {
    const float *logits = a->logits + row * a->stride;
    float *left = memcpy(room(a->outputs * 4), logits, (size_t)a->outputs * 4);
    double sum = 0, largest = -INFINITY;
    for (int64_t o = 0; o < a->outputs; o++) largest = fmax(largest, logits[o]);
    for (int64_t o = 0; o < a->outputs; o++) sum += exp(logits[o] - largest);
    if (a->logsumexp && !close_to(a->logsumexp[row], largest + log(sum), 1e-4)) failed("row %d: logsumexp is %g", (int)row, a->logsumexp[row]);
    for (int64_t i = 0; i < a->k; i++) {
        int64_t best = 0;
        for (int64_t o = 0; o < a->outputs; o++) best = left[o] > left[best] ? o : best;
        if (a->ids[row * a->k + i] != best || !same(a->values[row * a->k + i], logits[best]))
            failed("row %d of %d, place %d: output %d for %d", (int)row, (int)a->rows, (int)i, (int)a->ids[row * a->k + i], (int)best);
        left[best] = -INFINITY;
    }
    free(left);
}

int64_t top_elements(void) {
    for (int64_t i = 0; i < 16; i++) {
        const int64_t outputs = i % 4 ? between(1, 300) : between(2048, 4500), rows = between(1, 20), k = i % 3 ? between(1, outputs < 64 ? outputs : 64) : 1, stride = outputs + below(3);
        float *logits = room(((rows - 1) * stride + outputs) * 4), *values = room(rows * k * 4), *sums = i % 2 ? NULL : room(rows * 4);
        int64_t *ids = room(rows * k * 8), bad = i % 8 == 5 ? below(rows) : -1;
        void *scratch = room(PICK_TASKS * rows * (8 * k + 16));
        for (int64_t at = 0; at < (rows - 1) * stride + outputs; at++) logits[at] = i % 5 ? 4 * number() : (float)below(3);
        if (bad >= 0) logits[bad * stride + below(outputs)] = NAN;
        const top_arguments a = {logits, values, ids, sums, scratch, NULL, stride, rows, outputs, k, 0, 0};
        run(OP_TOP, &a);
        for (int64_t row = 0; row < rows; row++)
            if (row != bad) check_top(&a, row);
            else if (values[row * k] == values[row * k]) failed("row %d has NaN and %g as its best", (int)row, values[row * k]);
        free(logits), free(values), free(sums), free(ids), free(scratch);
    }
    return 16;
}
