/* Activations: generated, quantized by plain loops and by the library, and read back from its tiles (layout in
 * csrc/ops.h). */
#include "activations.h"

static float value_of(int kind, float power, int64_t i) {
    if (kind == EXTREME) return power * (float)(below(2) ? 127 : -127);
    if (kind == POWERS) return power * (float)(i == 0 ? 127 : between(-127, 127));
    return number() * (below(50) == 0 ? 30.0f : 1.0f);
}

int64_t any_shared(int64_t group) { return group == 32 ? 1 << below(4) : 1; }

activations new_activations(int64_t rows, int64_t size, int64_t group, int kind) {
    activations a = {.rows = rows, .size = size, .stride = size + below(3), .group = group, .groups = (size + group - 1) / group, .shared = any_shared(group)};
    a.padded = a.groups * group;
    a.x = room(((rows - 1) * a.stride + size) * 2);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < a.groups; g++) {
            const float power = (float)(1 << below(2)); /* products of two such values, and their sums, stay below 2^24 */
            const int zero = kind == ANY && below(20) == 0;
            for (int64_t i = g * group; i < (g + 1) * group && i < size; i++)
                a.x[row * a.stride + i] = bf16_of_float(zero ? 0 : value_of(kind, kind == EXTREME ? 1 : power, i - g * group));
        }
    return a;
}

activations one_row(const activations *a, int64_t row) {
    activations one = *a;
    one.rows = 1, one.stride = a->size;
    one.x = room(a->size * 2);
    memcpy(one.x, a->x + row * a->stride, (size_t)a->size * 2);
    quantize_activations(&one);
    return one;
}

void free_activations(activations *a) {
    free(a->x), free(a->tiles), free(a->scales), free(a->sums), free(a->wide);
    *a = (activations){0};
}

static int64_t up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

void quantize_activations(activations *a) {
    const int64_t align = armature_tiles(2), tiles = (a->rows + armature_tiles(0) - 1) / armature_tiles(0), most = up(a->rows, align);
    a->height = up((a->rows + tiles - 1) / tiles, align);
    a->tiles = room(most * a->padded);
    a->scales = room(most * a->groups * 4);
    a->sums = room(most * a->groups * 4);
    const quantize_arguments arguments = {a->x, a->stride, a->rows, a->size, {NULL, a->tiles, a->scales, a->sums, a->group, a->height, NULL, a->shared}};
    run(OP_QUANTIZE, &arguments);
}

/* Inputs [from, to) have the scale of group g. */
typedef struct {
    int64_t from, to;
} part;

static part scaled_together(const activations *a, int64_t g) {
    const int64_t size = a->group * a->shared, from = g / a->shared * size;
    return (part){from, from + size < a->size ? from + size : a->size};
}

plain_group plainly_quantized(const activations *a, int64_t row, int64_t g) {
    plain_group result = {{0}, 0, 0};
    const uint16_t *x = a->x + row * a->stride + g * a->group;
    const int64_t count = a->size - g * a->group < a->group ? a->size - g * a->group : a->group;
    const part scaled = scaled_together(a, g);
    float largest = 0;
    for (int64_t i = scaled.from; i < scaled.to; i++) {
        const float size = fabsf(float_of_bf16(a->x[row * a->stride + i]));
        if (!isfinite(size)) result.scale = NAN;
        else if (size > largest) largest = size;
    }
    if (result.scale != result.scale || largest <= 1e-35f) return result;
    const float inverse = 127.0f / largest;
    result.scale = largest / 127.0f;
    for (int64_t i = 0; i < count; i++) {
        result.codes[i] = (int8_t)rintf(float_of_bf16(x[i]) * inverse);
        result.negated -= result.codes[i];
    }
    return result;
}

plain_group from_tiles(const activations *a, int64_t row, int64_t g) {
    plain_group result = {{0}, 0, 0};
    const int64_t block = armature_tiles(1), first = row / a->height * a->height, left = a->rows - first;
    const int64_t count = up(left < a->height ? left : a->height, armature_tiles(2)), at = first * a->groups + g * count + row - first;
    for (int64_t i = 0; i < a->group; i++) {
        const int64_t k = g * a->group + i;
        result.codes[i] = a->tiles[first * a->padded + k / block * count * block + (row - first) * block + k % block];
    }
    result.scale = a->scales[at], result.negated = a->sums[at];
    return result;
}

sink new_sink(activations *a, int64_t kind) {
    const int64_t align = armature_tiles(2), count = (a->rows + armature_tiles(0) - 1) / armature_tiles(0), most = (a->rows + align - 1) / align * align;
    a->height = ((a->rows + count - 1) / count + align - 1) / align * align;
    a->groups = (a->size + a->group - 1) / a->group, a->padded = a->groups * a->group;
    if (kind == 0) a->x = room(a->rows * a->size * 2);
    else if (kind == 1) a->wide = room(a->rows * a->size * 4);
    else a->tiles = room(most * a->padded), a->scales = room(most * a->groups * 4), a->sums = room(most * a->groups * 4);
    return (sink){a->x, a->tiles, a->scales, a->sums, a->group, a->height, a->wide, a->shared};
}

/* A scale below 1e-14 belongs to values that are almost zero: there an approximated GELU has no correct digit. */
static void check_group(const activations *a, int64_t row, int64_t g, const double *expected) {
    const plain_group found = from_tiles(a, row, g);
    double largest = 0;
    int32_t sum = 0;
    const part scaled = scaled_together(a, g);
    for (int64_t i = scaled.from - g * a->group; i < scaled.to - g * a->group; i++)
        largest = fabs(expected[i]) > largest || expected[i] != expected[i] ? fabs(expected[i]) : largest;
    if (!isfinite(largest) ? found.scale == found.scale : !close_to(found.scale, largest / 127, 1e-4 * largest / 127 + 1e-14)) {
        failed("row %d, group %d: the scale is %g for %g", (int)row, (int)g, found.scale, largest / 127);
        return;
    }
    for (int64_t i = 0; i < a->group; i++) {
        const double value = g * a->group + i < a->size ? expected[i] : 0;
        sum += found.codes[i];
        if (isfinite(largest) && fabs((double)found.scale * found.codes[i] - value) > 0.501 * found.scale + 1e-5)
            failed("row %d, input %d: code %d of %g for %g", (int)row, (int)(g * a->group + i), found.codes[i], found.scale, value);
    }
    if (found.negated != -sum) failed("row %d, group %d: the sum is %d for %d", (int)row, (int)g, found.negated, -sum);
}

void check_sink(const activations *a, const double *expected) {
    for (int64_t at = 0; a->x && at < a->rows * a->size; at++)
        if (!close_to(float_of_bf16(a->x[at]), expected[at], fabs(expected[at]) / 200 + 1e-5)) failed("value %d: %g for %g", (int)at, float_of_bf16(a->x[at]), expected[at]);
    for (int64_t at = 0; a->wide && at < a->rows * a->size; at++)
        if (!close_to(a->wide[at], expected[at], fabs(expected[at]) * 1e-4 + 2e-5)) failed("value %d: %g for %g", (int)at, a->wide[at], expected[at]);
    for (int64_t row = 0; a->tiles && row < a->rows; row++)
        for (int64_t g = 0; g < a->groups; g++) check_group(a, row, g, expected + row * a->size + g * a->group);
}
