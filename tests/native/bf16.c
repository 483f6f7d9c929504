/* Tests of bf16 products, and of rows of their packed weights. */
#include "proof.h"

void armature_pack_bf16(const uint16_t *weights, uint16_t *panels, int64_t outputs, int64_t inputs, int64_t first_output);

static const int64_t INPUTS[] = {64, 1, 33, 576, 7, 128};

static uint16_t *halves(int64_t count) {
    uint16_t *x = room(count * 2);
    for (int64_t i = 0; i < count; i++) x[i] = bf16_of_float(number());
    return x;
}

static uint8_t *packed(const uint16_t *weights, int64_t outputs, int64_t inputs) {
    const int64_t bytes = (outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS * ((inputs + 1) / 2) * PANEL_OUTPUTS * 4, first = below(outputs);
    uint8_t *panels = memset(room(bytes), 0, (size_t)bytes);
    armature_pack_bf16(weights, (uint16_t *)panels, first, inputs, 0);
    armature_pack_bf16(weights + first * inputs, (uint16_t *)panels, outputs - first, inputs, first);
    return panels;
}

/* The buffer of `tiles` in csrc/ops.h. */
static uint32_t *tiles_of(int64_t rows, int64_t inputs) { return room((rows > 16 ? (rows + 15) / 16 * 16 : (rows + 1) / 2 * 2) * ((inputs + 31) / 32) * 64); }

static void check_product(const linear_bf16_arguments *a, const uint16_t *weights, const float *before) {
    for (int64_t at = 0; at < a->rows * a->outputs; at++) {
        const int64_t row = at / a->outputs, output = at % a->outputs, place = row * a->y_stride + output;
        double expected = a->bias ? a->bias[output] : 0, size = 1;
        for (int64_t k = 0; k < a->inputs; k++) {
            const double product = (double)float_of_bf16(a->x[row * a->x_stride + k]) * float_of_bf16(weights[output * a->inputs + k]);
            expected += product, size += fabs(product);
        }
        if (a->output == OUTPUT_ADD_FP32) expected += before[place];
        const float found = a->output == OUTPUT_BF16 ? float_of_bf16(((const uint16_t *)a->y)[place]) : ((const float *)a->y)[place];
        if (!close_to(found, expected, 1e-5 * size + (a->output == OUTPUT_BF16 ? fabs(expected) / 200 : 0)))
            failed("row %d of %d, output %d of %d, %d inputs: %g for %g", (int)row, (int)a->rows, (int)output, (int)a->outputs, (int)a->inputs, found, expected);
    }
}

int64_t bf16_products(void) {
    for (int64_t i = 0; i < 18; i++) {
        const int64_t inputs = INPUTS[i % 6], rows = between(1, 40), outputs = between(1, 100), x_stride = inputs + below(3), y_stride = outputs + below(3);
        const int64_t count = (rows - 1) * y_stride + outputs, output = i % 3, bytes = output == OUTPUT_BF16 ? 2 : 4;
        uint16_t *x = halves((rows - 1) * x_stride + inputs), *weights = halves(outputs * inputs);
        uint8_t *panels = packed(weights, outputs, inputs), *y = room(count * bytes);
        uint32_t *tiles = tiles_of(rows, inputs);
        float *bias = i % 2 ? room(outputs * 4) : NULL;
        for (int64_t o = 0; bias && o < outputs; o++) bias[o] = number();
        for (int64_t at = 0; output == OUTPUT_ADD_FP32 && at < count; at++) ((float *)y)[at] = number();
        void *before = memcpy(room(count * bytes), y, (size_t)(count * bytes));
        const linear_bf16_arguments a = {x, panels, bias, tiles, y, x_stride, y_stride, rows, inputs, outputs, output, i / 6 % 2};
        run(OP_LINEAR_BF16, &a);
        check_product(&a, weights, before);
        free(x), free(weights), free(panels), free(y), free(tiles), free(bias), free(before);
    }
    return 18;
}

int64_t bf16_rows_alone(void) {
    for (int64_t i = 0; i < 6; i++) {
        const int64_t inputs = INPUTS[i], rows = between(2, 40), outputs = between(1, 100);
        uint16_t *x = halves(rows * inputs), *weights = halves(outputs * inputs);
        uint8_t *panels = packed(weights, outputs, inputs);
        uint32_t *tiles = tiles_of(rows, inputs);
        float *together = room(rows * outputs * 4), *alone = room(outputs * 4);
        linear_bf16_arguments a = {x, panels, NULL, tiles, together, inputs, outputs, rows, inputs, outputs, OUTPUT_FP32, 1};
        run(OP_LINEAR_BF16, &a);
        for (int64_t row = 0; row < rows; row++) {
            a.x = x + row * inputs, a.rows = 1, a.y = alone;
            run(OP_LINEAR_BF16, &a);
            if (memcmp(alone, together + row * outputs, (size_t)outputs * 4) != 0) failed("row %d of %d differs alone, of %d inputs", (int)row, (int)rows, (int)inputs);
        }
        free(x), free(weights), free(panels), free(tiles), free(together), free(alone);
    }
    return 6;
}

int64_t bf16_rows(void) {
    for (int64_t i = 0; i < 6; i++) {
        const int64_t inputs = INPUTS[i], outputs = between(1, 100), count = between(1, 9);
        uint16_t *weights = halves(outputs * inputs);
        uint8_t *panels = packed(weights, outputs, inputs);
        float *out = room(count * inputs * 4);
        int64_t *ids = room(count * 8);
        for (int64_t n = 0; n < count; n++) ids[n] = n ? below(outputs) : outputs - 1;
        const rows_arguments a = {panels, ids, NULL, out, count, outputs, inputs, inputs, 0, FORM_BF16_PANELS, 0, 0, 2.0};
        run(OP_ROWS, &a);
        for (int64_t at = 0; at < count * inputs; at++)
            if (out[at] != 2 * float_of_bf16(weights[ids[at / inputs] * inputs + at % inputs])) failed("row %d, input %d", (int)ids[at / inputs], (int)(at % inputs));
        free(weights), free(panels), free(out), free(ids);
    }
    return 6;
}
