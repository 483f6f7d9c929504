/* Tests of quantized rows and of their products with int4 and int8 panels. */
#include "weights.h"

static const int64_t INPUTS[] = {576, 896, 1024, 32, 8, 100, 129, 513}, GROUPS[] = {32, 64, 128};
static const struct {
    int64_t bits, header;
} FORMS[] = {{4, SCALES}, {4, SCALES_AND_MINIMUMS}, {8, SCALES}, {4, DOUBLE_QUANTIZED}};

#define KINDS_OF_WEIGHTS (int64_t)(sizeof FORMS / sizeof *FORMS)

#define PICK_ONE(LIST) LIST[below((int64_t)(sizeof LIST / sizeof *LIST))]

int64_t quantized_rows(void) {
    for (int i = 0; i < 40; i++) {
        activations a = new_activations(between(1, 40), PICK_ONE(INPUTS), PICK_ONE(GROUPS), (int)below(3));
        if (i % 4 == 0) a.x[below(a.rows) * a.stride + below(a.size)] = bf16_of_float(i % 8 ? NAN : -INFINITY);
        if (i == 1) memset(a.x, 0, (size_t)a.size * 2);
        if (i == 2) a.x[0] = bf16_of_float(3e38f), a.x[a.size - 1] = bf16_of_float(1e-38f);
        quantize_activations(&a);
        for (int64_t row = 0; row < a.rows; row++)
            for (int64_t g = 0; g < a.groups; g++) {
                const plain_group expected = plainly_quantized(&a, row, g), found = from_tiles(&a, row, g);
                if (!same(expected.scale, found.scale) || expected.negated != found.negated || memcmp(expected.codes, found.codes, (size_t)a.group) != 0)
                    failed("row %d of %d, group %d of %d inputs", (int)row, (int)a.rows, (int)g, (int)a.size);
            }
        free_activations(&a);
    }
    return 40;
}

/* The exact product, and the sum of all magnitudes in it. */
typedef struct {
    double value, size;
} number_of_size;

static void add_group(number_of_size *total, const plain_group *x, const weights *w, int64_t output, int64_t g) {
    int64_t sum = 0, sizes = 0;
    for (int64_t i = 0; i < w->group; i++) {
        const int64_t product = (int64_t)x->codes[i] * code_of(w, output, g * w->group + i);
        sum += product, sizes += llabs(product);
    }
    const double scale = x->scale, own = scale_of(w, output, g), low = (double)minimum_of(w, output, g) * -x->negated;
    total->value += scale * (own * (double)sum + low);
    total->size += fabs(scale) * (fabs(own) * (double)sizes + fabs(low));
}

/* [rows, outputs] */
static number_of_size *expected_of(const activations *a, const weights *w) {
    number_of_size *result = memset(room(a->rows * w->outputs * 16), 0, (size_t)(a->rows * w->outputs * 16));
    for (int64_t row = 0; row < a->rows; row++)
        for (int64_t g = 0; g < a->groups; g++) {
            const plain_group x = plainly_quantized(a, row, g);
            for (int64_t output = 0; output < w->outputs; output++) add_group(result + row * w->outputs + output, &x, w, output, g);
        }
    return result;
}

/* y [rows, outputs] fp32, by the library. */
static float *multiplied(const activations *a, const weights *w) {
    float *y = room(a->rows * w->outputs * 4);
    const linear_int_arguments arguments = {
        w->panels, NULL, a->tiles, a->scales, a->sums, y, w->outputs, a->rows, a->padded, w->outputs, a->group, a->height, w->bits, w->header, OUTPUT_FP32, .shared = a->shared,
    };
    run(OP_LINEAR_INT, &arguments);
    return y;
}

typedef struct {
    activations a;
    weights w;
} product;

static product new_product(int64_t i, int kind, int64_t most_rows) {
    const int64_t inputs = PICK_ONE(INPUTS), group = PICK_ONE(GROUPS), edge = between(1, armature_tiles(0) + 1);
    product p = {.a = new_activations(i % 3 ? between(1, most_rows) : edge < most_rows ? edge : most_rows, inputs, group, kind)};
    if (kind == POWERS && FORMS[i % KINDS_OF_WEIGHTS].bits == 8) /* larger products: one power for all */
        free_activations(&p.a), p.a = new_activations(between(1, most_rows), inputs, group, EXTREME);
    p.w = new_weights(between(1, 100), inputs, group, FORMS[i % KINDS_OF_WEIGHTS].bits, FORMS[i % KINDS_OF_WEIGHTS].header, kind);
    quantize_activations(&p.a);
    return p;
}

static void free_product(product *p) { free_activations(&p->a), free_weights(&p->w); }

int64_t exact_products(void) {
    for (int64_t i = 0; i < 48; i++) {
        product p = new_product(i, i / KINDS_OF_WEIGHTS % 4 == 0 ? EXTREME : POWERS, 40);
        float *y = multiplied(&p.a, &p.w);
        number_of_size *expected = expected_of(&p.a, &p.w);
        for (int64_t at = 0; at < p.a.rows * p.w.outputs; at++)
            if (y[at] != expected[at].value)
                failed("int%d%s, %d inputs in groups of %d, row %d of %d, output %d of %d: %.9g for %.9g", (int)p.w.bits, p.w.header == SCALES_AND_MINIMUMS ? " with minimums" : p.w.header == DOUBLE_QUANTIZED ? " double quantized" : "",
                       (int)p.a.size, (int)p.a.group, (int)(at / p.w.outputs), (int)p.a.rows, (int)(at % p.w.outputs), (int)p.w.outputs, y[at], expected[at].value);
        free(y), free(expected), free_product(&p);
    }
    return 48;
}

/* Into a buffer with gaps between its rows, which must not change. */
static void check_output(const product *p, const float *bias, int64_t output) {
    const int64_t rows = p->a.rows, outputs = p->w.outputs, stride = outputs + below(3), bytes = output == OUTPUT_BF16 ? 2 : 4, count = (rows - 1) * stride + outputs;
    uint8_t *y = room(count * bytes), *before = room(count * bytes);
    for (int64_t i = 0; i < count && output == OUTPUT_ADD_FP32; i++) ((float *)y)[i] = number();
    memcpy(before, y, (size_t)(count * bytes));
    const linear_int_arguments arguments = {
        p->w.panels, bias, p->a.tiles, p->a.scales, p->a.sums, y, stride, rows, p->a.padded, outputs, p->a.group, p->a.height, p->w.bits, p->w.header, output,
    };
    run(OP_LINEAR_INT, &arguments);
    number_of_size *products = expected_of(&p->a, &p->w);
    for (int64_t i = 0; i < count; i++) {
        if (i % stride >= outputs) {
            if (memcmp(y + i * bytes, before + i * bytes, (size_t)bytes) != 0) failed("a byte between two rows was written");
            continue;
        }
        const number_of_size product = products[i / stride * outputs + i % stride];
        double expected = product.value + (bias ? bias[i % stride] : 0);
        if (output == OUTPUT_ADD_FP32) expected += ((float *)before)[i];
        const double found = output == OUTPUT_BF16 ? float_of_bf16(((uint16_t *)y)[i]) : ((float *)y)[i];
        const double tolerance = 1e-5 * (product.size + 2) + (output == OUTPUT_BF16 ? fabs(expected) / 256 : 0);
        if (!close_to(found, expected, tolerance)) failed("row %d, output %d: %.9g for %.9g", (int)(i / stride), (int)(i % stride), found, expected);
    }
    free(y), free(before), free(products);
}

int64_t near_products(void) {
    for (int64_t i = 0; i < 36; i++) {
        product p = new_product(i, ANY, 20);
        float *bias = i / KINDS_OF_WEIGHTS % 2 ? room(p.w.outputs * 4) : NULL;
        for (int64_t o = 0; bias && o < p.w.outputs; o++) bias[o] = number();
        check_output(&p, bias, i / 12);
        free(bias), free_product(&p);
    }
    return 36;
}

int64_t bad_activations(void) {
    for (int64_t i = 0; i < 12; i++) {
        product p = new_product(i, ANY, 20);
        float *good = multiplied(&p.a, &p.w);
        const int64_t bad = below(p.a.rows);
        p.a.x[bad * p.a.stride + below(p.a.size)] = bf16_of_float(i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : -INFINITY);
        free(p.a.tiles), free(p.a.scales), free(p.a.sums);
        quantize_activations(&p.a);
        float *y = multiplied(&p.a, &p.w);
        for (int64_t at = 0; at < p.a.rows * p.w.outputs; at++)
            if (!same(y[at], at / p.w.outputs == bad ? NAN : good[at])) failed("row %d, where row %d is bad: %g", (int)(at / p.w.outputs), (int)bad, y[at]);
        free(good), free(y), free_product(&p);
    }
    return 12;
}

int64_t rows_alone(void) {
    for (int64_t i = 0; i < 12; i++) {
        product p = new_product(i, ANY, 30);
        float *together = multiplied(&p.a, &p.w);
        for (int64_t row = 0; row < p.a.rows; row++) {
            activations one = one_row(&p.a, row);
            float *alone = multiplied(&one, &p.w);
            if (memcmp(alone, together + row * p.w.outputs, (size_t)p.w.outputs * 4) != 0) failed("row %d of %d differs alone", (int)row, (int)p.a.rows);
            free(alone), free_activations(&one);
        }
        free(together), free_product(&p);
    }
    return 12;
}

int64_t widened_rows(void) {
    for (int64_t i = 0; i < 12; i++) {
        weights w = new_weights(between(1, 100), PICK_ONE(INPUTS), PICK_ONE(GROUPS), FORMS[i % KINDS_OF_WEIGHTS].bits, FORMS[i % KINDS_OF_WEIGHTS].header, ANY);
        const int64_t count = between(1, 20);
        int64_t *ids = room(count * 8);
        for (int64_t r = 0; r < count; r++) ids[r] = r == 0 ? w.outputs - 1 : below(w.outputs);
        float *out = room(count * w.inputs * 4);
        const rows_arguments arguments = {w.panels, ids, NULL, out, count, w.outputs, w.inputs, w.padded, w.group, w.bits, w.header, 0, i % 2 ? 1.0 : 8.5};
        run(OP_ROWS, &arguments);
        for (int64_t at = 0; at < count * w.inputs; at++) {
            const int64_t id = ids[at / w.inputs], k = at % w.inputs, g = k / w.group;
            const double product = (double)scale_of(&w, id, g) * code_of(&w, id, k), low = minimum_of(&w, id, g), factor = arguments.factor;
            const double tolerance = 1e-6 * factor * (fabs(product) + fabs(low) + 16 * fabs(scale_of(&w, id, g)));
            if (!close_to(out[at], factor * (product + low), tolerance)) failed("row %d, input %d: %g", (int)id, (int)k, out[at]);
        }
        free(ids), free(out), free_weights(&w);
    }
    return 12;
}

/* Rows of bf16 times integer weights that are widened to bf16: what a row has to be, and its bits alone. */
static void check_wide(const activations *a, const weights *w, const float *together, const uint16_t *y, const float *bias) {
    uint32_t *tiles = room((w->inputs + 31) / 32 * 64);
    float *alone = room(w->outputs * 4);
    for (int64_t row = 0; row < a->rows; row++) {
        const uint16_t *x = a->x + row * a->stride;
        for (int64_t o = 0; o < w->outputs; o++) {
            double expected = bias[o], size = fabs(bias[o]), rounding = 0, zero = 0;
            for (int64_t k = 0; k < w->inputs; k++) {
                const double own = (double)scale_of(w, o, k / w->group) * code_of(w, o, k) + minimum_of(w, o, k / w->group);
                expected += own * float_of_bf16(x[k]), size += fabs(own * float_of_bf16(x[k]));
                /* Scales of more bits than bf16 has: a group's zero is off by up to 1/512 of its step. */
                if (w->header == DOUBLE_QUANTIZED) zero += fabs(scale_of(w, o, k / w->group) * float_of_bf16(x[k])) / 512;
                rounding += pow(own * float_of_bf16(x[k]) / 512, 2); /* half a unit in the last place of a bf16 */
            }
            const float sum = together[row * w->outputs + o];
            if (!close_to(sum, expected, 6 * sqrt(rounding) + zero + 1e-5 * size))
                failed("int%d, header %d, %d inputs in groups of %d, row %d of %d, output %d of %d: %.9g for %.9g", (int)w->bits, (int)w->header, (int)w->inputs,
                       (int)w->group, (int)row, (int)a->rows, (int)o, (int)w->outputs, sum, expected);
            if (!close_to(float_of_bf16(y[row * w->outputs + o]), sum, fabs(sum) / 200)) failed("row %d, output %d as bf16", (int)row, (int)o);
        }
        const linear_bf16_arguments one = {x, w->panels, bias, tiles, alone, a->stride, w->outputs, 1, w->inputs, w->outputs, OUTPUT_FP32, 0, IDENTITY, w->bits, w->group, w->header};
        run(OP_LINEAR_BF16, &one);
        if (memcmp(alone, together + row * w->outputs, (size_t)w->outputs * 4) != 0) failed("row %d of %d differs alone", (int)row, (int)a->rows);
    }
    free(tiles), free(alone);
}

int64_t wide_products(void) {
    static const int64_t rows[] = {1, 33, 16, 7, 300, 17, 48, 64}, groups[] = {32, 64, 128, 0};
    if (!armature_tiles(3)) return 0;
    for (int64_t i = 0; i < 24; i++) {
        const int64_t inputs = PICK_ONE(INPUTS), group = groups[i / KINDS_OF_WEIGHTS % 4] ? groups[i / KINDS_OF_WEIGHTS % 4] : (inputs + 31) / 32 * 32;
        if (FORMS[i % KINDS_OF_WEIGHTS].header == DOUBLE_QUANTIZED && group > 128) continue;
        activations a = new_activations(rows[i % 8], inputs, group, ANY);
        weights w = new_weights(between(1, 100), inputs, group, FORMS[i % KINDS_OF_WEIGHTS].bits, FORMS[i % KINDS_OF_WEIGHTS].header, ANY);
        uint32_t *tiles = room((a.rows > 16 ? (a.rows + 15) / 16 * 16 : a.rows) * ((inputs + 31) / 32) * 64);
        float *together = room(a.rows * w.outputs * 4), *bias = room(w.outputs * 4);
        uint16_t *y = room(a.rows * w.outputs * 2);
        for (int64_t o = 0; o < w.outputs; o++) bias[o] = number();
        linear_bf16_arguments all = {a.x, w.panels, bias, tiles, together, a.stride, w.outputs, a.rows, inputs, w.outputs, OUTPUT_FP32, 0, IDENTITY, w.bits, w.group, w.header};
        run(OP_LINEAR_BF16, &all);
        all.y = y, all.output = OUTPUT_BF16;
        run(OP_LINEAR_BF16, &all);
        check_wide(&a, &w, together, y, bias);
        free(tiles), free(together), free(bias), free(y), free_activations(&a), free_weights(&w);
    }
    return 24;
}

int64_t odd_calls(void) {
    if (armature_run(NULL, 0, threads) != 0) failed("no operations at all are a failure");
    const operation wrong[] = {{OP_COUNT, NULL}, {-1, NULL}};
    for (int i = 0; i < 2; i++)
        if (armature_run(wrong + i, 1, threads) != -1) failed("an operation that does not exist was run");
    const int64_t chosen = threads;
    product p = new_product(0, ANY, 20);
    const quantize_arguments again = {p.a.x, p.a.stride, p.a.rows, p.a.size, {NULL, p.a.tiles, p.a.scales, p.a.sums, p.a.group, p.a.height}};
    const operation both[] = {{OP_QUANTIZE, &again}, {OP_COUNT, NULL}};
    p.a.scales[0] = 77;
    if (armature_run(both, 2, threads) != -2 || p.a.scales[0] != 77) failed("a list whose second operation has no kernel was run");
    if (armature_run(both, 1, threads) != 0 || p.a.scales[0] == 77) failed("its first alone was not");
    float *few = multiplied(&p.a, &p.w);
    threads = 9; /* more than the cores of most test machines, and more than the panels */
    float *many = multiplied(&p.a, &p.w);
    if (memcmp(few, many, (size_t)(p.a.rows * p.w.outputs) * 4) != 0) failed("more threads, other bits");
    free(few), free(many), free_product(&p);
    threads = chosen;
    return 6;
}
